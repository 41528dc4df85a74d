"""The command that draws a report of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipes.translation.commands.arguments import PROGRAM, parser_of, path, require

MOST_RUNS = 8
"""Runs that can be compared on a page: as many as there are colors that can be told apart."""


def report(argv: Sequence[str]) -> int:
    """Draw the report of a run, or the comparison of several, as one HTML file that needs nothing else.

    It has the curves of training, samples, attention maps, the worst sentences, scores, settings and the machine.
    Training draws it, too, after validations and at its end. See docs/report.md.
    """
    parser = parser_of(
        report, f"{PROGRAM} report runs/demo\n{PROGRAM} report runs/baseline runs/larger --output comparison.html"
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", type=path, help="a run's folder; several are compared")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=path,
        help="where to write (default: report.html in the run, or comparison.html beside the first run)",
    )
    options = parser.parse(argv)
    if not 1 <= len(options.runs) <= MOST_RUNS:
        parser.error(f"name from 1 to {MOST_RUNS} runs; got {len(options.runs)}")
    require("matplotlib")

    from recipes.translation.report.draw import write_page
    from recipes.translation.report.earlier import with_samples
    from recipes.translation.report.records import read_run

    folders = [Path(each) for each in options.runs]
    output = folders[0] / "report.html"
    if len(folders) > 1:
        output = folders[0].parent / "comparison.html"
    if options.output:
        output = Path(options.output)
    runs = [with_samples(read_run(folder), folder) for folder in folders]
    size = write_page(runs, output)
    print(f"[report] {output}: {size / 1e3:.0f} kB")
    return 0

"""The command that draws a report of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipes.translation.commands.arguments import add_runs, parser_of, path, require, runs_of
from recipes.translation.files.writing import check_no_link
from recipes.translation.run_folder.outputs import check_output_file

MOST_RUNS = 8
"""Runs that can be compared on a page: as many as there are colors that can be told apart."""


def report(argv: Sequence[str]) -> int:
    """Draw the report of a run, or the comparison of several, as one HTML file that needs nothing else.

    It has the curves of training, samples, attention maps, the worst sentences, scores, settings and the machine.
    Training draws it, too, after validations and at its end. See docs/report.md.

    example:
    python -m recipes.translation report runs/demo
    python -m recipes.translation report runs/baseline runs/larger --output comparison.html
    """
    parser = parser_of(report)
    add_runs(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=path,
        help="where to write (default: report.html in the run, or comparison.html beside the first run)",
    )
    options = parser.parse(argv)
    folders = [Path(each) for each in runs_of(parser, options)]
    if len(folders) > MOST_RUNS:
        parser.error(f"name at most {MOST_RUNS} runs; got {len(folders)}")
    if options.output:
        own = folders[0] / "report.html" if len(folders) == 1 else None
        check_output_file(Path(options.output), "--output", own=own)
    require("matplotlib")

    from recipes.translation.report.draw import write_report

    output = folders[0] / "report.html"
    if len(folders) > 1:
        first = folders[0]
        if first.name in ("", ".."):  # which have no parent by name
            first = first.resolve()
        output = first.parent / "comparison.html"
        check_no_link(output)  # which nobody has named
    if options.output:
        output = Path(options.output)
    size = write_report(folders, output)
    print(f"[report] {output}: {size / 1e3:.0f} kB")
    return 0

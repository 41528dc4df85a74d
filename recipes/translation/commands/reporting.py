"""The command that draws the report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipes.translation.commands.arguments import add, parser_of, path, require, runs_of
from recipes.translation.run_folder.outputs import check_output_file


def report(argv: Sequence[str]) -> int:
    """Draw the report of a run, as one HTML file that needs nothing else.

    It has the curves of training, samples, the worst sentences, scores, settings and the machine. Training draws it,
    too, after validations and at its end. See docs/report.md; the command compare sets runs side by side.

    example:
    python -m recipes.translation report runs/demo
    python -m recipes.translation report runs/demo --output demo.html
    """
    parser = parser_of(report)
    parser.add_argument("runs", nargs="*", metavar="RUN", type=path, help="the run's folder")
    add(parser, "--run")
    parser.add_argument("--output", metavar="FILE", type=path, help="where to write (default: report.html in the run)")
    options = parser.parse(argv)
    named, *others = runs_of(parser, options)
    if others:
        parser.error(f"name one run; got {1 + len(others)}; the command compare has the scores of several")
    run = Path(named)
    output = run / "report.html"
    if options.output:
        check_output_file(Path(options.output), "--output", own=output)
        output = Path(options.output)
    require("matplotlib")

    from recipes.translation.report.draw import write_report

    size = write_report(run, output)
    print(f"[report] {output}: {size / 1e3:.0f} kB")
    return 0

"""Measure speed and memory of the loss over a vocabulary, forward and backward, beside its peers in the same run.

    python -m benchmarks.loss                           # every part, on the CPU or the GPU where there is one
    python -m benchmarks.loss shapes --only V=32000     # one part, the problems with that in their name
    python -m benchmarks.loss --render                  # every table, and page and plots again, from the newest file

Times are medians of interleaved runs, shown as ratios to the three matrix products that any exact implementation needs
(logits, hidden gradient, weight gradient, over the rows that are not padding). Memory is an implementation's peak above
its inputs, in a process of its own. A run continues the day's file: problems that are in it are not measured again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.loss import gpu, report, results
from benchmarks.loss.parts import PARTS, Run


def main() -> None:
    """Measure the parts that were asked for, print a table of each, and write tables and plots."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; default is all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to measure")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--repeats", type=int, help="rounds of every problem; default depends on a round's cost")
    parser.add_argument("--only", default="", metavar="TEXT", help="only problems with this text in their name")
    parser.add_argument("--again", action="store_true", help="measure again what the file already has")
    parser.add_argument("--out", type=Path, help=f"the file; default is {results.default_path('cpu')}, by date")
    parser.add_argument("--dry-run", action="store_true", help="try the part gpu on the CPU, on one small problem")
    parser.add_argument(
        "--render", action="store_true", help="print every table, write page and plots; measure nothing"
    )
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.render:
        path = options.out or results.newest_path(options.device)
        print("\n".join(report.tables(path)))
        report.write(path)
        return
    if options.dry_run:
        print("\n".join(gpu.tried_on_the_cpu()))
        return
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # the peers warn of what the tables already state
    path = options.out or results.default_path(options.device)
    measured = results.load(path, options.device, shlex.join(["python", "-m", "benchmarks.loss", *sys.argv[1:]]))
    run = Run(measured, path, options.device, options.repeats, options.only, options.again, set())
    for name in options.parts or PARTS:
        PARTS[name](run)
        print("\n".join(report.part_table(measured, name)), flush=True)
    report.write(path)


if __name__ == "__main__":
    main()

"""Measure per-token log-probabilities and entropies, forward and backward, beside TRL's and plain torch's.

    python -m benchmarks.scores                                # everything, on the CPU or the GPU where there is one
    python -m benchmarks.scores --only V=32000 --cases nothing  # some problems, some cases
    python -m benchmarks.scores --render                       # every table, and the page again, from the newest file

Times are the fastest of interleaved runs (and medians), shown as ratios to the bare matrix products that the case
needs: 4 if the projection is trained, 2 or 3 (entropy) if it is frozen, 1 without gradients. Memory is the peak above
inputs and gradients, in a process of its own. A run continues the day's file: cases that are in it are not measured
again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.loss import results
from benchmarks.scores import page
from benchmarks.scores.measure import PROBLEMS, ROUNDS, Run, measure
from benchmarks.scores.ways import CASES

PEERS = ["trl", "transformers"]


def main() -> None:
    """Measure what is asked for and missing, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scores",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to measure")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of every problem")
    parser.add_argument("--only", default="", metavar="TEXT", help="only problems with this text in their name")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases with this text in their name")
    parser.add_argument("--again", action="store_true", help="measure again what the file already has")
    parser.add_argument("--out", type=Path, help="the file; default is by date, in docs/results")
    parser.add_argument("--render", action="store_true", help="print every table, write the page; measure nothing")
    options = parser.parse_args()
    if options.render:
        path = options.out or results.newest_path(options.device, "scores")
        print("\n".join(page.tables(json.loads(path.read_text()), CASES)))
        page.write(path)
        return
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # of peers, about what is not installed
    path = options.out or results.default_path(options.device, "scores")
    command = shlex.join(["python", "-m", "benchmarks.scores", *sys.argv[1:]])
    measured = results.load(path, options.device, command, PEERS)
    run = Run(measured, path, options.device, options.rounds, options.only, options.cases, options.again)
    for problem in PROBLEMS:
        cases = run.wanted(problem)
        if cases:
            measure(run, problem, cases)
            page.write(path)


if __name__ == "__main__":
    main()

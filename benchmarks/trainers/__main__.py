"""Measure the peak memory of a training step in each trainer, as it comes and with this library's loss.

    python -m benchmarks.trainers                                # the table in docs/scaling.md
    python -m benchmarks.trainers --only TRL Fabric --tokens 512 --vocab 5000

The model is a Llama of one layer in float32, with output embeddings of their own. A step is one forward and one
backward by the trainer's own code, on a CPU; its memory is the most that the process has resident, less what it had
before the step: the gradients count. Each figure is that of a process of its own, in which a tiny step goes first. A
trainer that is not installed is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec

import torch

from benchmarks.loss.memory import in_fresh_process
from benchmarks.loss.results import MIB, hardware
from benchmarks.trainers.steps import KINDS, Size, step_peak
from seqpar.markdown_table import markdown_row, markdown_table

HEADER = ("trainer", "as it comes, MiB", "seqpar, MiB", "times less")


def rows(size: Size, only: list[str] | None = None) -> Iterator[list[str]]:
    """Measure each trainer that is installed and yield its row of the table."""
    for name, kind in KINDS.items():
        if not find_spec(kind.package) or (only and not any(part in name for part in only)):
            continue
        stock, own = (
            in_fresh_process(["benchmarks.trainers.steps"], step_peak, name, size, ours) for ours in (False, True)
        )
        figures = [f"{each / MIB:,.0f}" if isinstance(each, int) else each for each in (stock, own)]
        less = f"{stock / own:.1f}" if isinstance(stock, int) and isinstance(own, int) else "-"
        yield [f"{name} ({kind.package} {version(kind.package)})", *figures, less]


def main() -> None:
    """Print the table, and below it what was measured where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, in rows of 256 (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=30_000, help="classes (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the hidden states (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="trainers whose name contains one of these")
    options = parser.parse_args()
    size = Size(options.tokens // 256, 256, options.width, options.vocab)
    logits = options.tokens * options.vocab * 4 / MIB
    weights = 2 * options.vocab * options.width * 4 / MIB
    print(markdown_table(HEADER, []), flush=True)
    for row in rows(size, options.only):
        print(markdown_row(row), flush=True)
    print(f"\n{date.today()}, torch {torch.__version__}, {hardware('cpu')}, float32; {options.tokens:,} tokens x")
    print(f"{options.vocab:,} classes, width {options.width}: the logits take {logits:,.0f} MiB, the gradients of both")
    print(f"embeddings {weights:,.0f} MiB")


if __name__ == "__main__":
    main()

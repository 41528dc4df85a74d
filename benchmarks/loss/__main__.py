"""Measure speed and memory of the loss over a vocabulary, forward and backward, beside its peers in the same run.

    python -m benchmarks.loss                           # every part, on the CPU or the GPU where there is one
    python -m benchmarks.loss shapes --only V=32000     # the parts and the problems with that in their names
    python -m benchmarks.loss --render                  # every table, and page and picture again, from the newest file

Times are medians of interleaved runs, shown as ratios to the plain loss, beside the three matrix products that any
exact implementation needs (logits, hidden gradient, weight gradient, over the rows that are not padding). Memory is an
implementation's peak above its inputs, in a process of its own. A run continues the day's file and skips what it has.
"""

from __future__ import annotations

from benchmarks.loss import engine
from benchmarks.loss.parts import Loss


def main() -> None:
    """Measure the parts that were asked for, print a table of each, and write the pages."""
    engine.main(Loss(), str(__doc__))


if __name__ == "__main__":
    main()

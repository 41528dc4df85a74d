"""Measure per-token log-probabilities and entropies, forward and backward, beside TRL's and plain torch's.

    python -m benchmarks.scores                                # everything, on the CPU or the GPU where there is one
    python -m benchmarks.scores nothing --only V=32000         # the cases and the problems with that in their names
    python -m benchmarks.scores --render                       # every table, and the page again, from the newest file

Times are the fastest of interleaved runs (and medians), shown as ratios to the bare matrix products that the case
needs: 4 if the projection is trained, 2 or 3 (entropy) if it is frozen, 1 without gradients. Memory is the peak above
inputs and gradients, in a process of its own. A run continues the day's file, and skips what is in it.
"""

from __future__ import annotations

from benchmarks.loss import engine
from benchmarks.scores.parts import Scores


def main() -> None:
    """Measure what is asked for and missing, and write the page."""
    engine.main(Scores(), str(__doc__))


if __name__ == "__main__":
    main()

"""Measure how the peak memory of one forward and backward grows with the rows, each in a process of its own.

`python -m seqpar.testing.conformance.memory NAME ROWS` prints one peak in bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from seqpar.testing.conformance.adapter import Adapter, Options, quietly
from seqpar.testing.conformance.inputs import Inputs, answer
from seqpar.testing.peak_memory import can_measure_cpu, peak_bytes, run_in_fresh_process

TIMES = 4


@dataclass(frozen=True)
class Growth:
    """Two peaks in bytes, above the inputs."""

    small: int
    large: int
    ROWS: ClassVar[int] = 1024
    WIDTH: ClassVar[int] = 64
    VOCAB: ClassVar[int] = 8192
    ALLOWED: ClassVar[float] = 0.25

    @property
    def of_logits(self) -> float:
        """Return the growth of the peak, less hidden's gradient, relative to that of one float32 copy of the logits."""
        # Of one float32 column of the rows added: growth / (3 x ROWS x V x 4 bytes), without hidden's gradient
        more_bytes = (TIMES - 1) * self.ROWS * 4
        return (self.large - self.small - more_bytes * self.WIDTH) / (more_bytes * self.VOCAB)


def growth(adapter: Adapter) -> Growth | str:
    """Return the two peaks, or why they could not be measured."""
    if not can_measure_cpu():
        return "needs Linux's /proc"
    peaks = []
    for rows in (Growth.ROWS, TIMES * Growth.ROWS):
        peak = _peak(adapter.spec, rows)
        if isinstance(peak, str):
            return peak
        peaks.append(peak)
    return Growth(*peaks)


def _peak(name: str, rows: int) -> int | str:
    """Return the peak in a process of its own, or how that process ended."""
    done = run_in_fresh_process("-m", __name__, name, str(rows))
    if done.returncode:
        return f"its process ended with {done.returncode}"
    return int(done.stdout)


def own_peak(adapter: Adapter, rows: int) -> int:
    """Return this process's peak in the second of two runs; code loaded or compiled in the first does not count."""
    x = Inputs(adapter, rows, Growth.WIDTH, Growth.VOCAB, Options(reduction=adapter.reduction))
    quietly(lambda: answer(x))
    return peak_bytes(lambda: quietly(lambda: answer(x)))


if __name__ == "__main__":
    from seqpar.testing.conformance.adapters import adapter_of

    print(own_peak(adapter_of(sys.argv[1]), int(sys.argv[2])))

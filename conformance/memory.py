"""Measure how the peak memory of one forward and backward grows with the rows; each peak is from a new process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from conformance.adapter import DEVICE, quietly
from conformance.apart import EndedError, apart
from conformance.finding import Finding
from conformance.peak_memory import can_measure_cpu, peak_bytes
from conformance.problem import Problem

TIMES = 4


@dataclass(frozen=True)
class Growth:
    """Two peaks in bytes, above the inputs."""

    small: int
    large: int
    # More rows than one of seqpar's chunks has at VOCAB classes
    ROWS: ClassVar[int] = 1024 if DEVICE == "cpu" else 16_384
    WIDTH: ClassVar[int] = 64
    VOCAB: ClassVar[int] = 8192
    ALLOWED: ClassVar[float] = 0.25

    @property
    def of_logits(self) -> float:
        """Return the peak's growth, minus hidden's gradient, relative to the growth of a float32 copy of the logits."""
        # The bytes of one float32 column of the added rows; logits have V of them, and hidden's gradient WIDTH
        more_bytes = (TIMES - 1) * self.ROWS * 4
        return (self.large - self.small - more_bytes * self.WIDTH) / (more_bytes * self.VOCAB)


def growth(x: Problem) -> Growth | str:
    """Return the peaks of a problem at `Growth.ROWS` rows and at four times as many, or why there are none."""
    if DEVICE == "cpu" and not can_measure_cpu():
        return "needs Linux's /proc"
    try:
        return Growth(*(apart(_peak, replace(x, rows=rows)) for rows in (Growth.ROWS, TIMES * Growth.ROWS)))
    except EndedError as ended:
        return f"its process {ended}"


def _peak(x: Problem) -> int:
    """Return this process's peak in the second of two runs; code loaded or compiled in the first does not count."""
    quietly(x.answer)
    return peak_bytes(lambda: quietly(x.answer), DEVICE)


def memory_growth(x: Problem) -> Finding:
    """Check, by new processes' peaks with few rows and with 4 x as many, that all rows' logits never exist at once."""
    found = growth(x)
    if isinstance(found, str):
        return Finding("not measured", found)
    grows = f"{found.small / 2**20:,.0f} to {found.large / 2**20:,.0f} MiB for 4 x the rows"
    return Finding("pass" if found.of_logits <= found.ALLOWED else "fail", grows)

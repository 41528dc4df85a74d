"""How the peak memory of one forward and backward grows with the rows, each in a process of its own.

`python -m seqpar.testing.conformance.memory NAME ROWS` prints one peak in bytes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from seqpar.testing.conformance.adapter import Adapter, Options, quietly
from seqpar.testing.conformance.inputs import Inputs, answer

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
    def share(self) -> float:
        """Of what one float32 copy of the logits grows by, how much the peak does, the gradient of hidden aside."""
        more = (TIMES - 1) * self.ROWS * 4
        return (self.large - self.small - more * self.WIDTH) / (more * self.VOCAB)


def growth(adapter: Adapter) -> Growth | str:
    """The two peaks, or why there are none."""
    if not Path("/proc/self/clear_refs").exists():
        return "needs Linux's /proc"
    peaks = [_peak(adapter.spec, rows) for rows in (Growth.ROWS, TIMES * Growth.ROWS)]
    words = [peak for peak in peaks if isinstance(peak, str)]
    return words[0] if words else Growth(*map(int, peaks))


def _peak(name: str, rows: int) -> int | str:
    """In a process whose large blocks go back to the system at once, so that what is resident is what is live."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    command = [sys.executable, "-m", __name__, name, str(rows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else f"its process ended with {done.returncode}"


def own_peak(adapter: Adapter, rows: int) -> int:
    """This process's peak in the second of two runs: what is compiled or loaded at first use is not the loss's."""
    x = Inputs(adapter, rows, Growth.WIDTH, Growth.VOCAB, Options(reduction=adapter.reduction))
    quietly(lambda: answer(x))
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it: freed memory goes back, so that it is counted again
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, as Linux has it
    before = _resident()
    quietly(lambda: answer(x))
    return _resident() - before


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    from seqpar.testing.conformance.adapters import adapter_of

    print(own_peak(adapter_of(sys.argv[1]), int(sys.argv[2])))

"""Measure the peak memory of a call, above the memory in use before it.

On a CPU the figure is the resident memory that Linux counts for this process, without file pages, such as code that a
busy system had dropped and the call reads again; on an accelerator, the memory allocated through torch. Whatever is
compiled at first use also counts, so run the call once before measuring it.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

RESET = Path("/proc/self/clear_refs")
"""Linux forgets a process's peak when "5" is written here."""
STATUS = Path("/proc/self/status")
FORGET_PEAK = "5"
M_MMAP_THRESHOLD = -3
"""glibc's number for the mallopt option with the size from which freed blocks are returned to the system."""
RELEASE_FROM = 2**20


def can_measure_cpu() -> bool:
    """Return whether this system reports a process's peak memory and lets it be reset, as Linux does."""
    return RESET.exists()


def peak_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """Return the peak of one call in bytes, above the memory in use by this process (or on the device) before it."""
    # A reference cycle that is freed during the call would hide as much of the peak
    gc.collect()
    if device != "cpu":
        return _allocated_peak(call)
    # Return freed memory to the system, now and during the call: otherwise its reuse would not raise the peak, and
    # memory freed during the call would still count. Only glibc can do this
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, RELEASE_FROM)
        ctypes.CDLL(None).malloc_trim(0)
    RESET.write_text(FORGET_PEAK)
    before, files_before = process_peak_bytes(), _status_bytes("RssFile")
    call()
    read = _status_bytes("RssFile") - files_before
    return process_peak_bytes() - before - max(0, read)


def process_peak_bytes() -> int:
    """Return the most bytes this process has had resident since it began, or since the peak was last reset."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    """Return the bytes that Linux reports for this process under a name."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _allocated_peak(call: Callable[[], object]) -> int:
    """Return the peak of the memory allocated through torch on the current CUDA device."""
    # Kernels run later than the host's code, and the memory they use may be freed only then
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before

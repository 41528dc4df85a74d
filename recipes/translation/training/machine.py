"""The machine that a run is on: the devices it uses, and what `resources.jsonl` says of hardware, software and memory.

These numbers differ between two runs that are otherwise identical, which is why they are not in `metrics.jsonl`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from recipes.translation.errors import ConfigError
from recipes.translation.processes.ranks import Ranks
from recipes.translation.settings.config import TrainingConfig
from seqpar.multi_device.devices import check_devices

PACKAGES = ("seqpar", "torch", "numpy", "sentencepiece", "sacrebleu")


def device_of(ranks: Ranks) -> torch.device:
    """Return this process's own GPU or, without one, the CPU."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank % gpus)


def devices_of(settings: TrainingConfig, ranks: Ranks) -> list[torch.device]:
    """Return this process's devices: all GPUs, or two replicas on the CPU; one device if there are several ranks."""
    if settings.devices == "auto":
        if ranks.world > 1:
            return [device_of(ranks)]
        gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return gpus or [torch.device("cpu")] * 2
    given = settings.devices
    if isinstance(given, str):
        given = (given,)
    try:
        devices = list(check_devices(given))
    except ValueError as error:
        raise ConfigError(f"training.devices: {error}") from error
    if ranks.world == 1:
        return devices
    if len(devices) != ranks.local_world:
        raise ConfigError(
            f"training.devices names {len(devices)}, but {ranks.local_world} processes run on this machine: name one "
            "for each, or auto"
        )
    return [devices[ranks.local_rank]]


def hardware(devices: Sequence[torch.device], processes: int) -> dict[str, object]:
    """Return the system, processor, cores and memory, this process's accelerators and the number of processes."""
    names = [torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"]
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory (GiB)": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerators": ", ".join(names) or "none",
        "processes": processes,
    }


def software() -> dict[str, str]:
    """Return the versions of Python and of the packages that determine a run's numbers."""
    return {"python": platform.python_version()} | {name: import_module(name).__version__ for name in PACKAGES}


def peak_memory(devices: Sequence[torch.device]) -> dict[str, int]:
    """Return the peak bytes so far for each device: allocated tensors on CUDA, the resident set on the CPU."""
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    found = {"cpu": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    for device in devices:
        if device.type == "cuda":
            found[str(device)] = torch.cuda.max_memory_allocated(device)
    return found


def forget_peak(devices: Sequence[torch.device]) -> None:
    """Make `peak_memory` count from now on; on the CPU this works only on Linux."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")  # resets the peak of the resident set, see proc(5)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def return_free_memory() -> None:
    """Return to the system the memory that this process has freed but glibc's allocator keeps; otherwise do nothing.

    Batches have tensors of many sizes, and the gaps between those that live longer stay in the heap: in a thousand
    steps of a small model on the CPU the resident set grew from 3 to 8 GB, of which 0.5 GB were in use.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def processor() -> str:
    """Return the name of the processor; on Linux `platform` does not know it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

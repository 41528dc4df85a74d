"""An accelerator of two devices in the CPU's memory, so that code for accelerators runs where there is none.

It is compiled on first use, which takes half a minute. Its memory is the CPU's, its operations are the CPU's, and like
a real one it refuses tensors on different devices. Its journal tells what each stream uses (`races`).
"""

from __future__ import annotations

import functools
import os
import sys
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import get_default_build_root, load

from tests.emulated.races import Happened

NAME = "emulated"
DEVICES = 2
"""As in accelerator.cpp."""
COMPILED_WITHIN = 900.0
"""Seconds that compiling takes at most, on a busy machine."""

CAPTURING: set[int] = set()
"""Devices whose stream is said to be captured."""


@functools.cache
def _extension() -> Any:
    """Return the compiled accelerator."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    folder = Path(root, f"emulated_accelerator-{sys.implementation.cache_tag}-{torch.__version__}")
    folder.mkdir(parents=True, exist_ok=True)
    forget_killed_build(folder)
    source = str(Path(__file__).with_name("accelerator.cpp"))
    return load("emulated_accelerator", [source], extra_cflags=["-O0"], build_directory=str(folder))


def forget_killed_build(folder: Path) -> None:
    """Remove the lock of a process that was killed while it compiled: torch would wait for it for ever."""
    lock = folder / "lock"
    with suppress(FileNotFoundError):
        if time.time() - lock.stat().st_mtime > COMPILED_WITHIN:
            lock.unlink()


def take_journal() -> list[Happened]:
    """Return what happened to the streams and the memory of both devices since the last call."""
    found: list[Happened] = _extension().take_journal()
    return found


def register() -> None:
    """Make `torch.device("emulated", 0)` and `("emulated", 1)` work in this process."""
    extension = _extension()
    extension.register_hooks()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()


def _module() -> Any:
    """Return what torch looks for under `torch.emulated`; random numbers are the CPU's."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.device_count = lambda: DEVICES
    module.current_device = torch._C._accelerator_getDeviceIndex
    module._is_in_bad_fork = lambda: False
    module.device = lambda device: torch.accelerator.device_index(device.index)
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.is_current_stream_capturing = lambda: module.current_device() in CAPTURING
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    return module

"""An accelerator of two devices in the CPU's memory, so that code for accelerators runs where there is none.

It is compiled on first use, which takes half a minute. Its memory is the CPU's, its operations are the CPU's, and like
a real one it refuses tensors on different devices.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import load

NAME = "emulated"
DEVICES = 2
"""As in accelerator.cpp."""


def register() -> None:
    """Make `torch.device("emulated", 0)` and `("emulated", 1)` work in this process."""
    extension = load("emulated_accelerator", [str(Path(__file__).with_name("accelerator.cpp"))], extra_cflags=["-O0"])
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
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    return module

"""Run the tests' own tensors on an accelerator: one switch, `SEQPAR_TEST_DEVICE`, in place of a copy of the tests.

With `SEQPAR_TEST_DEVICE=cuda` every tensor that a test makes without naming a device is made on the CPU and moved to
`cuda:0`, parameters of its modules included, and each "cpu" in a list of devices stands for one of the GPUs in turn.
What the library makes stays where the library makes it: one that it forgets to put on the right device is found.

With `SEQPAR_TEST_DEVICE=emulated` the accelerator is one of two devices in the CPU's memory (`tests.emulated`). That is
a stand-in for machines without a GPU: it finds tensors on different devices, devices that are not the current one,
threads that get the wrong one, and what two streams would do at the same time though one needs the other (its journal
tells, `races_since`). It has no kernels, and nothing happens later than it is called.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import seqpar.multi_device.devices as devices
import seqpar.multi_device.parallel_apply as parallel_apply

LACKING = {
    "'Sparseemulated'": "the emulated accelerator has no sparse tensors",
    "'Quantizedemulated'": "the emulated accelerator has no quantised tensors",
    "aten::view_as_": "the emulated accelerator has no views of complex tensors",
    "___get_torch_function_mode_stack_at": "torch.compile does not trace the switch's mode; test_gpu.py compiles",
    "No backend type associated with device type emulated": "gloo does not know the emulated accelerator",
}
"""What an error says that is not about the code under test, and the reason to skip that test under the switch."""
MAKERS = ("tests.", "seqpar.testing.strategies")
"""The modules whose tensors are moved."""
BETWEEN = ("torch.", "hypothesis.", "tests.on_device")
"""Modules that make tensors for whoever called them."""


def seeds(count: int) -> range:
    """Return the seeds of a test that draws so often; one under the switch, which changes nothing that is drawn."""
    return range(1 if os.environ.get("SEQPAR_TEST_DEVICE") else count)


class OnDevice(TorchFunctionMode):
    """While it is entered, tensors that a test makes are on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.makers = _device_constructors()

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the tensor on the CPU, so that it has the numbers it has there, and move it."""
        kwargs = kwargs or {}
        if function not in self.makers or kwargs.get("device") is not None or not asked_by(MAKERS):
            return function(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        made = function(*args, **kwargs)
        if not isinstance(made, Tensor) or made.device.type != "cpu":
            return made
        return made.to(self.device).requires_grad_(requires_grad)


class Nowhere(TorchFunctionMode):
    """While it is entered, what the library makes without naming a device is on "meta", and has no numbers.

    So a tensor is noticed that would be on the default device, wherever the inputs are.
    """

    of_the_host = ("seqpar.distributed.collectives.", "seqpar.distributed.sequence.", "seqpar.testing.")
    """Modules that make tensors on the CPU: numbers that ranks tell each other, the places of time steps, and tests."""

    def __init__(self) -> None:
        super().__init__()
        self.makers = _device_constructors()

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the tensor on "meta" if a module of the library asks for it."""
        kwargs = dict(kwargs or {})
        unnamed = function in self.makers and kwargs.get("device") is None
        if unnamed and asked_by(("seqpar.",)) and not asked_by(self.of_the_host):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def asked_by(modules: tuple[str, ...]) -> bool:
    """Return whether the innermost frame that is neither torch's nor hypothesis' nor the caller's is one of theirs."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "") + "."
        if not name.startswith(BETWEEN):
            return name.startswith(modules)
        frame = frame.f_back
    return False


def take_turns(kind: str) -> None:
    """Let each "cpu" in a list of devices stand for one of the accelerators, in turn."""
    check_one = devices._check_one

    def in_turn(device: object, name: str) -> torch.device:
        found = check_one(device, name)
        if found.type != "cpu":
            return found
        position = re.search(r"\[(\d+)\]", name)
        index = int(position[1]) if position else 0
        return torch.device(kind, index % torch.accelerator.device_count())

    devices._check_one = in_turn


def autocast_there(kind: str) -> None:
    """Let `torch.autocast("cpu", ...)` in a test stand for autocast on the accelerator."""
    begin = torch.autocast.__init__

    def begun(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cpu" and asked_by(MAKERS):
            device_type = kind
        begin(self, device_type, *args, **kwargs)

    torch.autocast.__init__ = begun


def thread_all_the_same() -> None:
    """Let the modes of the switch be no reason to run jobs one after another: threads are what it is for."""
    modes_around = parallel_apply._get_current_function_mode_stack

    def without_the_switch() -> list[TorchFunctionMode]:
        return [mode for mode in modes_around() if not isinstance(mode, (OnDevice, Nowhere))]

    parallel_apply._get_current_function_mode_stack = without_the_switch


def reason_to_skip(error: BaseException) -> str:
    """Return why the test cannot run under the switch; empty if the error is about the code under test."""
    return next((reason for text, reason in LACKING.items() if text in str(error)), "")


def races_since(kind: str) -> list[str]:
    """Return the races between streams since the last call, in words; a real accelerator does not tell."""
    if kind != "emulated":
        return []
    from tests.emulated import take_journal
    from tests.emulated.races import Judge

    return Judge().read(take_journal())


def switch(kind: str) -> None:
    """Run everything that follows on that kind of accelerator."""
    if kind == "emulated":
        from tests.emulated import register

        register()
    OnDevice(torch.device(kind, 0)).__enter__()
    take_turns(kind)
    autocast_there(kind)
    thread_all_the_same()

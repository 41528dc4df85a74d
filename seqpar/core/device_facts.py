"""State what each kind of device can do, and what a device is doing: no other module compares the type of a device.

A backend is a row of `FACTS`. One without a row is treated as an accelerator about which nothing else is known.

A thread has a stream on each accelerator, and autograd's threads have others. Autograd runs a backward on the forward's
stream on one device, that of the node's thread. A backward that computes or copies on further devices must select the
forward's streams there: on another stream it would not wait for the gradients, and their memory could be given out
again while it reads them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class DeviceFacts(NamedTuple):
    """What a kind of device can do."""

    is_host: bool = False
    """Whether the host itself computes. Then a number can be read at once, whereas the host would wait for everything
    that it has launched on an accelerator; and it has no streams, no current device and no random state of its own."""
    has_kernels: bool = False
    """Whether Triton compiles for it."""
    has_events: bool = False
    """Whether a copy to the host's memory can be waited for by itself."""
    widens_products: bool = False
    """Whether it adds a bfloat16 product to a float32 sum without rounding it to bfloat16 first."""
    adds_wider_at_once: bool = True
    """Whether it adds bfloat16 to a float32 sum as fast as it moves the numbers; a CPU takes longer than the product
    took, except for blocks that stay in its cache."""
    has_softmax_in_place: bool = False
    """Whether a softmax is known to work in place; elsewhere the allocator reuses the memory anyway."""
    has_float64: bool = True


class _Facts(dict[str, DeviceFacts]):
    def __missing__(self, kind: str) -> DeviceFacts:
        return DeviceFacts()


FACTS = _Facts(
    cpu=DeviceFacts(is_host=True, adds_wider_at_once=False, has_softmax_in_place=True),
    cuda=DeviceFacts(has_kernels=True, has_events=True, widens_products=torch.version.hip is None),
    xpu=DeviceFacts(has_kernels=True),
    mps=DeviceFacts(has_float64=False),
)


def accelerators_among(devices: Iterable[torch.device]) -> list[torch.device]:
    """Return the accelerators among some devices, each once."""
    return [device for device in dict.fromkeys(devices) if not FACTS[device.type].is_host]


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers can be read at once."""
    return FACTS[tensor.device.type].is_host


def may_read(tensor: Tensor) -> bool:
    """Return whether a check may read a tensor's numbers: not where the host would wait for them, nor in a compiler."""
    return FACTS[tensor.device.type].is_host and not torch.compiler.is_compiling()


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the device is the current one, as "cuda" without an index means; empty for a CPU."""
    if FACTS[device.type].is_host:
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the device.

    During a capture no number can be read, and shapes must be the same in every replay, so every row is computed.
    """
    if FACTS[device.type].is_host:
        return False
    is_capturing = getattr(torch.get_device_module(device.type), "is_current_stream_capturing", None)
    if is_capturing is None:
        return False
    # It asks the current device, which need not be this one
    with current(device):
        return bool(is_capturing())


class LateNumber:
    """An int64 on its way from the device; on a GPU, only reading it waits, and for nothing launched after it."""

    def __init__(self, number: Tensor) -> None:
        self.on_device = number
        # To pinned memory, after what has been launched so far
        has_events = FACTS[number.device.type].has_events
        self.here = number.to("cpu", non_blocking=has_events)
        self.arrived: torch.cuda.Event | None = None
        if has_events:
            self.arrived = torch.cuda.current_stream(number.device).record_event()

    def read(self) -> int:
        """Return the number as soon as it has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        # Not by `item`, which goes through torch's dispatcher
        return ctypes.c_int64.from_address(self.here.data_ptr()).value


def why_no_kernel(device_type: str) -> str:
    """Return why the kernels are not used on this kind of device; an empty string if they are."""
    if FACTS[device_type].is_host:
        if os.environ.get("TRITON_INTERPRET") == "1" and _is_installed():
            return ""
        return "Triton has none for the CPU"
    if not FACTS[device_type].has_kernels:
        return f"Triton has none for {device_type}"
    if not _is_installed():
        return "Triton is not installed"
    return ""


@functools.cache
def _is_installed() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def current_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """Return this thread's stream on each accelerator among the devices."""
    return [torch.accelerator.current_stream(device.index) for device in accelerators_among(devices)]


def select_streams(streams: Sequence[torch.Stream]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which these are this thread's streams on their devices; the current device stays the same."""
    return _on(streams) if streams else contextlib.nullcontext()


@contextlib.contextmanager
def _on(streams: Sequence[torch.Stream]) -> Iterator[None]:
    device = torch.accelerator.current_device_index()
    before = current_streams([stream.device for stream in streams])
    try:
        _select(streams, device)
        yield
    finally:
        _select(before, device)


def _select(streams: Sequence[torch.Stream], device: int) -> None:
    for stream in streams:
        torch.accelerator.set_stream(stream)  # selects its device as well
    torch.accelerator.set_device_index(device)

"""State what each kind of device can do: no other module compares the type of a device.

A backend is a row of `FACTS`. One without a row is treated as an accelerator about which nothing else is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
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

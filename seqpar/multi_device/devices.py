"""Check a list of devices, once, where the user passes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.core.device_facts import FACTS, accelerators_among, is_capturing

Device = int | str | torch.device


def accelerator() -> str | None:
    """Return the kind of accelerator this machine has ("cuda", "mps", ...), or None."""
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return None
    return current.type


def available() -> list[torch.device]:
    """Return every accelerator device of this machine, or the CPU if there is none."""
    kind = accelerator()
    if kind is None:
        return [torch.device("cpu")]
    return [torch.device(kind, i) for i in range(torch.accelerator.device_count())]


def _what_exists() -> str:
    """Return what devices this machine has, for the end of an error message."""
    return "this machine has " + ", ".join(["cpu", *map(str, accelerators_among(available()))])


def _check_one(device: object, name: str) -> torch.device:
    """Return the device with its index; raise TypeError or ValueError, as `check_devices` says."""
    # True is an int, and would be the device 1
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(f"{name}: {device!r} is a {type(device).__name__}, not a device; {_what_exists()}")
    kind = accelerator()
    try:
        if not isinstance(device, int):
            found = torch.device(device)
        elif kind is not None:
            found = torch.device(kind, device)
        else:
            raise ValueError(f"{name}: device {device} is an accelerator's index, and there is none; {_what_exists()}")
    except RuntimeError:
        raise ValueError(f"{name}: {device!r} is not a device; {_what_exists()}") from None
    if FACTS[found.type].is_host:
        if found.index not in (None, 0):
            raise ValueError(f"{name}: {found} does not exist, because the CPU is one device; {_what_exists()}")
        # "cpu" and "cpu:0" are unequal in torch, and two names of one device must compare equal
        return torch.device("cpu")
    if found.type != kind:
        raise ValueError(f"{name}: {found} does not exist or cannot compute; {_what_exists()}")
    # "cuda" alone is the current device, which may be a different one by the time the loss is computed
    index = torch.accelerator.current_device_index() if found.index is None else found.index
    count = torch.accelerator.device_count()
    if not 0 <= index < count:
        raise ValueError(f"{name}: index {index} of {found} is not below {count}; {_what_exists()}")
    return torch.device(found.type, index)


def check_devices(devices: Sequence[Device], name: str = "devices") -> tuple[torch.device, ...]:
    """Return the list as `torch.device`s, each accelerator with its index.

    A device may be repeated, and the CPU may be combined with one kind of accelerator.

    Raises:
        TypeError: a string or a single device instead of a list; a bool or another type inside it.
        ValueError: an empty list; a device that does not exist (the message lists what does).
    """
    if isinstance(devices, (str, int, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(f"{name}: {devices!r} is a {type(devices).__name__}; pass a list, such as [{devices!r}]")
    if not devices:
        raise ValueError(f"{name} is empty; {_what_exists()}")
    return tuple(_check_one(device, f"{name}[{i}]") for i, device in enumerate(devices))


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device."""
    # A copy to the CPU must be synchronous: the next operation there does not wait for the accelerator's stream
    return tensor.to(device, non_blocking=not FACTS[device.type].is_host)


def refuse_capturing(devices: Sequence[torch.device]) -> None:
    """Raise RuntimeError while a CUDA graph is captured on one of several accelerators: it has only that one's work."""
    distinct = accelerators_among(devices)
    if len(distinct) > 1 and any(map(is_capturing, distinct)):
        names = ", ".join(map(str, distinct))
        raise RuntimeError(
            f"a CUDA graph is being captured, and this call computes on {len(distinct)} devices ({names}); a graph is "
            "that of one device: capture with a list of one, such as "
            f"[{str(distinct[0])!r}], or do not capture this call"
        )

"""Select the streams of accelerators: a thread has one on each device, and autograd's threads have others.

Autograd runs a backward on the forward's stream on one device, that of the node's thread. A backward that computes or
copies on further devices must select the forward's streams there: on another stream it would not wait for the
gradients, and their memory could be given out again while it reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from seqpar.core.device_facts import accelerators_among


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

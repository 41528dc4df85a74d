"""Send weights to other devices while something else computes, on streams of their own.

`send` begins the copies and returns at once; whoever needs a weight on a device asks for it by `on_device`, and waits
for the copy there. So a weight that a model and its loss share is sent once for both. A weight that has changed since
is sent again by whoever asks, as one that has not been sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from seqpar.core.device_facts import accelerators_among
from seqpar.core.graphs import version_of
from seqpar.core.streams import current_streams, select_streams


class _Sent(NamedTuple):
    """Copies of a weight, finished or not."""

    on: dict[torch.device, Tensor]
    done: dict[torch.device, torch.Event]
    """What the stream of each device waits for before it uses the copy there, or changes the weight here."""
    state: tuple[int, int]
    """That of the weight which was copied."""


_underway: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What has been sent of each weight, until `forget`."""


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    """Return the stream of a device on which weights are sent to it and from it."""
    return torch.Stream(device=device)


def send(weights: Iterable[Tensor], devices: Sequence[torch.device]) -> None:
    """Begin to copy weights to those of the devices that are accelerators and on which they are not."""
    weights = list(weights)
    receivers = accelerators_among(devices)
    involved = accelerators_among([*receivers, *(w.device for w in weights)])
    streams = [_side_stream(device) for device in involved]
    for stream, current in zip(streams, current_streams(involved), strict=True):
        # After what has written the weights, and what still uses the memory of the copies
        stream.wait_stream(current)
    with torch.no_grad(), select_streams(streams):
        copies = [{d: w.detach().to(d) for d in receivers if d != w.device} for w in weights]
    for weight in weights:
        # Nor may its memory be given out again while it is read
        for device in accelerators_among([weight.device]):
            weight.record_stream(_side_stream(device))
    done = {device: stream.record_event() for device, stream in zip(involved, streams, strict=True)}
    for weight, on in zip(weights, copies, strict=True):
        _underway[weight] = _Sent(on, done, _state(weight))


def on_device(weight: Tensor, device: torch.device) -> Tensor:
    """Return a weight on a device, as `weight.detach().to(device)` does; by the copy that is underway, if one is."""
    sent: _Sent | None = _underway.get(weight)
    if sent is None or device not in sent.on or sent.state != _state(weight):
        return weight.detach().to(device)
    copy = sent.on[device]
    (current,) = current_streams([device])
    current.wait_event(sent.done[device])
    # Its memory is of the side stream, which must not have it back before this one is done with it
    copy.record_stream(current)
    return copy.detach()


def forget(weights: Iterable[Tensor]) -> None:
    """Let go of the copies of weights; what the caller does next with the weights comes after they have been made."""
    for weight in weights:
        sent = _underway.pop(weight, None)
        if sent is None:
            continue
        for stream in current_streams([weight.device]):
            stream.wait_event(sent.done[weight.device])


def _state(weight: Tensor) -> tuple[int, int]:
    """Return what changes with a weight: where it is, and how often it has been changed in place."""
    return weight.data_ptr(), version_of(weight)

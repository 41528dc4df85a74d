"""Send weights to other devices, on separate streams, while something else computes.

`send` starts the copies and returns at once; code that needs a weight on a device calls `on_device`, which waits for
the copy there. So a weight that a model and its loss share is sent once for both. A weight that was never sent, or has
changed since, is copied by `on_device` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from seqpar.core.device_facts import accelerators_among, current_streams, select_streams
from seqpar.core.graphs import version_of


class _Sent(NamedTuple):
    """Copies of a weight, finished or not."""

    on: dict[torch.device, Tensor]
    done: dict[torch.device, torch.Event]
    """What each device's stream waits for before it uses the copy there, or changes the weight here."""
    state: tuple[int, int]
    """The weight's state (`_state`) when it was copied."""


_underway: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What has been sent for each weight, until `forget`."""


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    """Return the stream of a device that copies weights to it and from it."""
    return torch.Stream(device=device)


def send(weights: Iterable[Tensor], devices: Sequence[torch.device]) -> None:
    """Start to copy weights to the accelerators among the devices, except to the one where a weight already is."""
    weights = list(weights)
    receivers = accelerators_among(devices)
    involved = accelerators_among([*receivers, *(w.device for w in weights)])
    streams = [_side_stream(device) for device in involved]
    for stream, current in zip(streams, current_streams(involved), strict=True):
        # The copies must wait for what writes the weights, and for what still uses the copies' memory
        stream.wait_stream(current)
    with torch.no_grad(), select_streams(streams):
        copies = [{d: w.detach().to(d) for d in receivers if d != w.device} for w in weights]
    for weight in weights:
        # Its memory must not be reused while it is read
        for device in accelerators_among([weight.device]):
            weight.record_stream(_side_stream(device))
    done = {device: stream.record_event() for device, stream in zip(involved, streams, strict=True)}
    for weight, on in zip(weights, copies, strict=True):
        _underway[weight] = _Sent(on, done, _state(weight))


def on_device(weight: Tensor, device: torch.device) -> Tensor:
    """Return `weight.detach().to(device)`, or the copy that is underway, if there is one."""
    sent: _Sent | None = _underway.get(weight)
    if sent is None or device not in sent.on or sent.state != _state(weight):
        return weight.detach().to(device)
    copy = sent.on[device]
    (current,) = current_streams([device])
    current.wait_event(sent.done[device])
    # Its memory belongs to the side stream, which must not get it back before the current one is done with it
    copy.record_stream(current)
    return copy.detach()


def forget(weights: Iterable[Tensor]) -> None:
    """Drop the copies of weights; whatever the caller does to the weights next waits until the copies are finished."""
    for weight in weights:
        sent = _underway.pop(weight, None)
        if sent is None:
            continue
        for stream in current_streams([weight.device]):
            stream.wait_event(sent.done[weight.device])


def _state(weight: Tensor) -> tuple[int, int]:
    """Return what shows that a weight has changed: where it is, and how often it has been changed in place."""
    return weight.data_ptr(), version_of(weight)

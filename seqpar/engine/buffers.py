"""Refuse a generator or criterion whose buffers change in a way that depends on how the rows are cut into chunks.

A call may add up in place what its rows contribute: chunk by chunk that gives the same as one call of all rows (a
number of rows, a histogram of predictions). Anything else would differ from the plain loss: a buffer that is replaced
is lost with the copy that computed the chunk, a moving average or the power iteration of spectral normalisation would
run once for each chunk, and scores that depend on what a call has changed would depend on the chunks before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

CLOSE = 1e-3
"""The relative difference of a sum that rounding may make, in any dtype."""


class Buffer(NamedTuple):
    """A buffer of a module, and a copy of its numbers."""

    tensor: Tensor
    numbers: Tensor


def buffers_of(head: nn.Module) -> dict[str, Buffer]:
    """Return all buffers but those of batch normalisation, whose fault in training mode is that it mixes rows."""
    owners = ((name, module) for name, module in head.named_modules() if not isinstance(module, _BatchNorm))
    named = ((f"{owner}.{name}", b) for owner, module in owners for name, b in module.named_buffers(recurse=False))
    return {name: Buffer(b, b.clone()) for name, b in named}


def changed(before: dict[str, Buffer], head: nn.Module) -> list[str]:
    """Return the names of the buffers that are other tensors than before, or have other numbers."""
    after = buffers_of(head)
    return [
        name
        for name, old in before.items()
        if name not in after or after[name].tensor is not old.tensor or not _same(after[name].numbers, old.numbers)
    ]


def refuse_changing_buffers(
    names: list[str], fresh: Callable[[], nn.ModuleDict], call: Callable[[nn.ModuleDict, slice], Tensor], rows: int
) -> None:
    """Raise ValueError unless all that calls change are sums over rows, which the scores do not depend on.

    Args:
        names: the buffers that some calls have changed.
        fresh: returns a copy of generator and criterion with the buffers as they were before any call.
        call: calls both with some rows, always with the same random numbers; returns the scores.
        rows: the number of rows that there are.
    """
    whole = fresh()
    tensors = buffers_of(whole)
    scores = call(whole, slice(0, rows))
    at_once = buffers_of(whole)
    again = call(whole, slice(0, rows))
    halves = fresh()
    call(halves, slice(0, rows // 2))
    call(halves, slice(rows // 2, rows))
    in_halves = buffers_of(halves)
    for name in names:
        kept = name in at_once and at_once[name].tensor is tensors[name].tensor
        if kept and _close(at_once[name].numbers, in_halves[name].numbers) and _close(scores, again):
            continue
        raise ValueError(
            f"the buffer {name} changes when the {name.split('.')[0]} is called, which happens once for each chunk and "
            "on copies, so that it would depend on the chunks: set the module to evaluation mode (.eval()), or compute "
            "what changes before the engine"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and numbers; nan is the same as nan."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and, up to rounding, the same numbers."""
    if a.shape != b.shape:
        return False
    return torch.allclose(a.double(), b.double(), rtol=CLOSE, atol=0, equal_nan=True)

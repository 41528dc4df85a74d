"""Recognise the situation of a call: what decides which code runs and on what, as far as it can be compared."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from seqpar.engine.module_calls import Parts, calls_of
from seqpar.engine.shards import Shard
from seqpar.linear.projection import product_dtype


class BufferChanges(NamedTuple):
    """How calls change buffers, as found with a few rows."""

    adds_up: bool = False
    """Whether calls add to buffers, so that what the replicas add must be summed."""
    not_added_to: str = ""
    """A buffer that is changed other than by adding, such as the largest score so far: right on one device only."""
    unproven: frozenset[str] = frozenset()
    """Buffers that are written other than by adding, but were not changed by these rows."""


class LogitFacts(NamedTuple):
    """What a probe has found about the logits."""

    vocab_size: int
    dtype: torch.dtype
    criterion_is_checked: bool
    """False if the probed rows could not show it, for example because their loss is 0; the next call probes again."""
    keeps_nothing: bool = False
    """Whether calls set no attribute of a module; such an attribute might be as large as a chunk's logits."""
    buffers: BufferChanges = BufferChanges()
    written: frozenset[tuple[int, str]] = frozenset()
    """Attributes that calls change but do not read again, such as attention that is kept for a plot: the position of
    their module among all modules, and their names."""
    is_linear: bool = True
    """Whether the gradient of a multiple of the loss is that multiple of its gradient."""


class Situation(NamedTuple):
    """Everything that the facts depend on, as far as it can be compared."""

    shapes: tuple[object, ...]
    """The class, shape and device of each parameter and buffer."""
    calls: tuple[object, ...]
    """What a call of each module runs, from hooks of all modules to the mode (`calls_of`)."""
    dtypes: tuple[torch.dtype, ...]
    """The dtypes of the products and of the parameters."""
    wants_gradients: bool
    trained: tuple[bool, ...]
    """Which parameters get a gradient, if any is wanted: nothing was found out about the gradients of the others."""
    leading: int
    """The number of leading dimensions: a softmax over dimension 1 is over the classes of (N, V), or over time."""
    per_token: tuple[tuple[str, torch.dtype, torch.Size], ...]
    """The name, dtype and shape per token of hidden and of each per-token tensor: it may have a column for each class,
    and a mask of flags may be used differently from one of numbers."""


def situation_of(parts: Parts, shard: Shard) -> Situation:
    """Return the situation of a call; it is looked up in every call."""
    leading = shard.target.dim()
    columns = {"hidden": shard.hidden, **shard.per_token, **shard.of_criterion}
    tensors = [*parts.parameters, *parts.buffers]
    trained = tuple([p.requires_grad for p in parts.parameters])
    wanted = torch.is_grad_enabled() and (any(trained) or any(t.requires_grad for t in columns.values()))
    return Situation(
        # A lazy parameter has no shape yet, and is refused later
        tuple([(type(t), None if is_lazy(t) else t.shape, t.device) for t in tensors]),
        calls_of(parts.modules),
        (product_dtype(shard.hidden), *[p.dtype for p in parts.parameters]),
        wanted,
        trained if wanted else (),
        leading,
        tuple([(name, t.dtype, t.shape[leading:]) for name, t in columns.items()]),
    )


def facts_in(known: dict[Situation, LogitFacts], situation: Situation) -> LogitFacts | None:
    """Return the facts that an earlier call found in this situation, and move them to the end; None if none did."""
    # Comparing takes a quarter of the time of a lookup, which hashes everything that it compares
    latest = next(reversed(known.items()), None)
    if latest is not None and latest[0] == situation:
        return latest[1]
    found = known.pop(situation, None)
    if found is not None:
        known[situation] = found
    return found

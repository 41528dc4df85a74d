"""What the engine is given for a batch: checked, and shared out over the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.core.tensor_checks import check_dense, check_floating
from seqpar.losses.criteria import ignored_target
from seqpar.losses.target_checks import check_range, check_target
from seqpar.multi_device.replicas import scatter


class Shard(NamedTuple):
    """One device's part of the batch."""

    hidden: Tensor
    target: Tensor
    per_token: dict[str, Tensor]


def scattered(
    hidden: Any,
    target: Any,
    per_token: dict[str, Any],
    devices: Sequence[torch.device] | None,
    time_steps: int | None,
) -> list[Shard]:
    """One shard for each device; what is scattered already stays where it is.

    Args:
        hidden, target, per_token, devices: as `LossCompute` takes them, without the per-token tensors that are None.
        time_steps: `LossCompute`'s chunk_size.

    Raises:
        TypeError, ValueError: as `LossCompute` says.
    """
    if not isinstance(hidden, (list, tuple)):
        _check_batch(hidden, target, per_token, time_steps)
        return [Shard(*s) for s in scatter((hidden, target.long(), per_token), devices or [hidden.device])]
    _check_scattered(hidden)
    places, sizes = [h.device for h in hidden], [len(h) for h in hidden]
    targets = _shared_out(target, "target", places, sizes)
    columns = {name: _shared_out(value, name, places, sizes) for name, value in per_token.items()}
    shards = [Shard(h, targets[i], {n: c[i] for n, c in columns.items()}) for i, h in enumerate(hidden)]
    for shard in shards:
        _check_batch(*shard, time_steps)
    return [shard._replace(target=shard.target.long()) for shard in shards]


def _check_scattered(hidden: Sequence[Any]) -> None:
    """Raises unless it is one tensor for each device; a tuple with a tuple inside is what an LSTM returns."""
    if not hidden:
        raise ValueError("hidden is an empty list; it must be a tensor, or one tensor for each device")
    for i, part in enumerate(hidden):
        if isinstance(part, (list, tuple)):
            raise TypeError(
                f"hidden[{i}] is a {type(part).__name__}; hidden must be a tensor, or one tensor for each device (of "
                "what an LSTM returns, the first: hidden, _ = lstm(inputs))"
            )
        check_floating(part, f"hidden[{i}]")
        if part.dim() < 2:
            raise ValueError(f"hidden[{i}] has shape {tuple(part.shape)}; it must be (N, D) or (batch, time, D)")


def _shared_out(value: Any, name: str, devices: list[torch.device], sizes: list[int]) -> Sequence[Any]:
    """A tensor of all rows cut as hidden is, or what is scattered like hidden brought to its devices."""
    if not isinstance(value, (list, tuple)):
        check_dense(value, name)
        rows = len(value) if value.dim() else 0
        if rows != sum(sizes):
            raise ValueError(f"{name} has {rows} rows and the scattered hidden {sizes}, {sum(sizes)} rows")
        return scatter(value, devices, sizes=sizes)
    if len(value) != len(devices):
        raise ValueError(f"{name} is scattered over {len(value)} devices and hidden over {len(devices)}")
    for i, part in enumerate(value):
        check_dense(part, f"{name}[{i}]")
    return [part.to(device) for part, device in zip(value, devices, strict=True)]


def _check_batch(hidden: Any, target: Any, per_token: dict[str, Any], time_steps: int | None) -> None:
    """Raises TypeError or ValueError unless dtypes and shapes fit each other, and the way they are to be cut."""
    check_floating(hidden, "hidden")
    if isinstance(target, (list, tuple)):
        raise TypeError(f"hidden is one tensor and target a {type(target).__name__}; scatter both or neither")
    check_target(hidden, target)
    for name, value in per_token.items():
        check_dense(value, name)
        if value.shape[: target.dim()] != target.shape:
            raise ValueError(
                f"{name} is {tuple(value.shape)}; a per-token tensor must have target's shape {tuple(target.shape)} "
                "first"
            )
    if time_steps is not None and hidden.dim() != 3:
        raise ValueError(
            f"chunk_size={time_steps} cuts time steps and hidden has shape {tuple(hidden.shape)}; pass "
            "(batch, time, D), or use chunk_tokens"
        )


def check_width(shards: Sequence[Shard], width: int) -> None:
    """Raises ValueError unless hidden has the width that the generator takes."""
    for shard in shards:
        if shard.hidden.size(-1) != width:
            raise ValueError(
                f"hidden has shape {tuple(shard.hidden.shape)} and the generator takes a last size of {width}"
            )


def check_targets(shards: Sequence[Shard], kept: Sequence[Tensor], vocab_size: int) -> None:
    """Raises IndexError for a kept target outside the vocabulary, at its position in the whole batch."""
    above = 0
    for shard, keep in zip(shards, kept, strict=True):
        check_range(shard.target, keep, vocab_size, above)
        above += len(shard.target)


def kept_tokens(criterion: nn.Module, target: Tensor) -> Tensor:
    """Return which tokens the criterion does not ignore, a mask of target's shape."""
    ignored = ignored_target(criterion)
    if ignored is None:
        return torch.ones_like(target, dtype=torch.bool)
    return target != ignored


def rows_of(shard: Shard) -> tuple[Tensor, ...]:
    """Hidden and the per-token tensors with one row per token."""
    lead = shard.target.dim()
    return tuple(t.flatten(0, lead - 1) for t in (shard.hidden, *shard.per_token.values()))


def one_for_each_device(shards: list[Shard]) -> list[Shard]:
    """Shards of one device side by side: to the formula a replica is nothing but one more gradient to add up."""
    together: dict[torch.device, list[Shard]] = {}
    for shard in shards:
        together.setdefault(shard.hidden.device, []).append(shard)
    return [
        Shard(torch.cat([s.hidden.flatten(0, -2) for s in same]), torch.cat([s.target.flatten() for s in same]), {})
        if len(same) > 1
        else same[0]
        for same in together.values()
    ]

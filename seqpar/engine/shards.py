"""Check the engine's batch and scatter it over the devices."""

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
    """The rows of the batch that one device computes."""

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
    """Return one shard per device; tensors that are already scattered are not moved.

    Args:
        hidden, target, per_token, devices: as those of `LossCompute`, without per-token tensors that are None.
        time_steps: the chunk_size of `LossCompute`.

    Raises:
        TypeError, ValueError: as `LossCompute`.
    """
    if not isinstance(hidden, (list, tuple)):
        _check_batch(hidden, target, per_token, time_steps)
        return [Shard(*s) for s in scatter((hidden, target.long(), per_token), devices or [hidden.device])]
    _check_scattered(hidden)
    hidden_devices = [h.device for h in hidden]
    sizes = [len(h) for h in hidden]
    targets = _scattered_like_hidden(target, "target", hidden_devices, sizes)
    columns = {name: _scattered_like_hidden(value, name, hidden_devices, sizes) for name, value in per_token.items()}
    shards = []
    for i, h in enumerate(hidden):
        shards.append(Shard(h, targets[i], {name: column[i] for name, column in columns.items()}))
    for shard in shards:
        _check_batch(*shard, time_steps)
    return [shard._replace(target=shard.target.long()) for shard in shards]


def _check_scattered(hidden: Sequence[Any]) -> None:
    """Raise unless it is one tensor per device; an LSTM's return value, a tuple with a tuple in it, is not."""
    if not hidden:
        raise ValueError("hidden is an empty list; it must be a tensor, or one tensor for each device")
    for i, tensor in enumerate(hidden):
        if isinstance(tensor, (list, tuple)):
            raise TypeError(
                f"hidden[{i}] is a {type(tensor).__name__}; hidden must be a tensor, or one tensor for each device (an "
                "LSTM returns a tuple: hidden, _ = lstm(inputs))"
            )
        check_floating(tensor, f"hidden[{i}]")
        if tensor.dim() < 2:
            raise ValueError(f"hidden[{i}] has shape {tuple(tensor.shape)}; it must be (N, D) or (batch, time, D)")


def _scattered_like_hidden(
    value: Any, name: str, devices: Sequence[torch.device], sizes: Sequence[int]
) -> Sequence[Tensor]:
    """Return one tensor per device, from one tensor of all rows or from a list with one per device."""
    if not isinstance(value, (list, tuple)):
        check_dense(value, name)
        rows = len(value) if value.dim() else 0
        if rows != sum(sizes):
            raise ValueError(f"{name} has {rows} rows and the scattered hidden {sizes}, {sum(sizes)} rows")
        return scatter(value, devices, sizes=sizes)
    if len(value) != len(devices):
        raise ValueError(f"{name} is scattered over {len(value)} devices and hidden over {len(devices)}")
    for i, tensor in enumerate(value):
        check_dense(tensor, f"{name}[{i}]")
    return [tensor.to(device) for tensor, device in zip(value, devices, strict=True)]


def _check_batch(hidden: Any, target: Any, per_token: dict[str, Any], time_steps: int | None) -> None:
    """Raise TypeError or ValueError unless dtypes and shapes fit each other, and `time_steps`."""
    check_floating(hidden, "hidden")
    if isinstance(target, (list, tuple)):
        raise TypeError(f"hidden is one tensor and target a {type(target).__name__}; scatter both or neither")
    check_target(hidden, target)
    for name, value in per_token.items():
        check_dense(value, name)
        if value.shape[: target.dim()] != target.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; the first dimensions of a per-token tensor must be target's "
                f"shape {tuple(target.shape)}"
            )
    if time_steps is not None and hidden.dim() != 3:
        raise ValueError(
            f"chunk_size={time_steps} cuts time steps and hidden has shape {tuple(hidden.shape)}; pass "
            "(batch, time, D), or use chunk_tokens"
        )


def check_width(shards: Sequence[Shard], width: int) -> None:
    """Raise ValueError unless hidden has the width that the generator takes."""
    for shard in shards:
        if shard.hidden.size(-1) != width:
            raise ValueError(
                f"hidden has shape {tuple(shard.hidden.shape)} and the generator takes a last size of {width}"
            )


def check_targets(shards: Sequence[Shard], kept: Sequence[Tensor], vocab_size: int) -> None:
    """Raise IndexError for a target outside the vocabulary that is not ignored; count positions in the whole batch."""
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
    """Return hidden and the per-token tensors with one row per token."""
    lead = shard.target.dim()
    return tuple(t.flatten(0, lead - 1) for t in (shard.hidden, *shard.per_token.values()))


def one_for_each_device(shards: list[Shard]) -> list[Shard]:
    """Return the shards with those of the same device joined into one.

    In closed form a second replica on a device would only be a second weight gradient to add.
    """
    by_device: dict[torch.device, list[Shard]] = {}
    for shard in shards:
        by_device.setdefault(shard.hidden.device, []).append(shard)
    joined = []
    for same_device in by_device.values():
        if len(same_device) == 1:
            joined.append(same_device[0])
        else:
            hidden_ND = torch.cat([shard.hidden.flatten(0, -2) for shard in same_device])
            target_N = torch.cat([shard.target.flatten() for shard in same_device])
            joined.append(Shard(hidden_ND, target_N, {}))
    return joined

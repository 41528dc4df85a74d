"""Check the engine's batch and scatter it over the devices.

Shape suffixes: N rows (batch x time), D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from seqpar.core.checks import (
    check_dense,
    check_floating,
    check_per_token,
    check_range,
    check_shapes,
    check_target,
    check_type,
    kind_of,
)
from seqpar.linear.projection import product_dtype
from seqpar.multi_device.devices import refuse_capturing
from seqpar.multi_device.replicas import detached_replicas, needs_no_replica, scatter

OneOrScattered = Tensor | Sequence[Tensor]
"""One tensor of all rows, or one tensor for each device."""


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of the batch that one device computes."""

    hidden: Tensor
    """(N, D) or (B, T, D)."""
    target: Tensor
    """int64, hidden's leading shape."""
    ignored: int | None
    """The target that the criterion ignores; None if it ignores none."""
    per_token: dict[str, Tensor]
    """What the generator takes besides hidden."""
    of_criterion: Mapping[str, Tensor] = field(default_factory=dict)
    """What the criterion takes besides scores and target."""

    @cached_property
    def counted(self) -> Tensor:
        """Return the mask of the targets that are not ignored, of target's shape."""
        if self.ignored is None:
            return torch.ones_like(self.target, dtype=torch.bool)
        return self.target != self.ignored


def scatter_batch(
    hidden: OneOrScattered,
    target: OneOrScattered,
    per_token: dict[str, OneOrScattered],
    devices: Sequence[torch.device] | None,
    time_steps: int | None,
    ignored: int | None,
) -> list[Shard]:
    """Return one shard per device; tensors that are already scattered are not moved.

    Args:
        hidden, target, per_token, devices: as in `LossCompute`, without per-token tensors that are None.
        time_steps: the chunk_size of `LossCompute`.
        ignored: the target that the criterion ignores, if there is one.

    Raises:
        TypeError, ValueError: as in `LossCompute`.
    """
    _refuse_of_recurrent(hidden, target, devices)
    if not isinstance(hidden, (list, tuple)):
        _check_batch(hidden, target, per_token, time_steps)
        assert isinstance(hidden, Tensor)
        whole: Any = (hidden, target, per_token)
        pieces = [whole] if devices is None else scatter(whole, devices)
        return [_shard(h, t, extra, ignored) for h, t, extra in pieces]
    _check_scattered(hidden)
    hidden_devices = [h.device for h in hidden]
    refuse_capturing(hidden_devices)
    sizes = [len(h) for h in hidden]
    targets = _scatter_like_hidden(target, "target", hidden_devices, sizes)
    columns = {name: _scatter_like_hidden(value, name, hidden_devices, sizes) for name, value in per_token.items()}
    shards = []
    for i, h in enumerate(hidden):
        mine = {name: column[i] for name, column in columns.items()}
        _check_batch(h, targets[i], mine, time_steps)
        shards.append(_shard(h, targets[i], mine, ignored))
    return shards


def _refuse_of_recurrent(hidden: object, target: object, devices: Sequence[torch.device] | None) -> None:
    """Raise TypeError for a PackedSequence, or for a recurrent layer's tuple, which is not one tensor per device."""
    for name, value in (("hidden", hidden), ("target", target)):
        if isinstance(value, PackedSequence):
            raise TypeError(
                f"{name} is a PackedSequence; pass the rows of both, hidden.data and those of the target packed alike: "
                "pack_padded_sequence(target, lengths, batch_first=True).data"
            )
    # `hidden.chunk(2)` is a tuple as well, but then the target is split in the same way
    if isinstance(hidden, tuple) and devices is None and not isinstance(target, (list, tuple)):
        raise TypeError(
            f"hidden is a tuple of {len(hidden)} and the engine has no device list; pass the tensor of hidden states "
            "(of a GRU or LSTM: hidden, _ = gru(inputs)), or a list of one tensor for each device"
        )


def _shard(hidden: Tensor, target: Tensor, per_token: dict[str, Tensor], ignored: int | None) -> Shard:
    """Return the shard of one device."""
    # In uint8 an ignored -100 would be compared as 156
    target = target.long()
    # One number per sentence applies to each of its tokens
    for_tokens = {
        name: t.unsqueeze(1).expand(target.shape) if t.dim() < target.dim() else t for name, t in per_token.items()
    }
    return Shard(hidden, target, ignored, for_tokens)


def _check_scattered(hidden: Sequence[object]) -> None:
    """Raise unless hidden is one tensor per device; what an LSTM returns, a tuple with a tuple in it, is not."""
    if not hidden:
        raise ValueError("hidden is an empty list; it must be a tensor, or one tensor for each device")
    first = None
    for i, tensor in enumerate(hidden):
        if isinstance(tensor, (list, tuple)):
            kind = f"hidden[{i}] is {kind_of(tensor)}; hidden must be a tensor, or one tensor for each device"
            raise TypeError(f"{kind} (of an LSTM: hidden, _ = lstm(inputs))")
        tensor = check_floating(tensor, f"hidden[{i}]")
        check_shapes(tensor.dim() >= 2, "(N, D) or (batch, time, D)", **{f"hidden[{i}]": tensor})
        here = product_dtype(tensor)
        first = first or here
        if here != first:
            raise ValueError(f"hidden[0] has dtype {first} and hidden[{i}] {here}; cast one")


def _scatter_like_hidden(
    value: OneOrScattered, name: str, devices: Sequence[torch.device], sizes: Sequence[int]
) -> Sequence[Tensor]:
    """Return one tensor per device, from one tensor of all rows or from a list with one per device."""
    if not isinstance(value, (list, tuple)):
        value = check_dense(value, name)
        # A tensor without dimensions has no rows to scatter
        rows = 0
        if value.dim():
            rows = len(value)
        if rows != sum(sizes):
            raise ValueError(f"{name} has {rows} rows and the scattered hidden {sizes}, {sum(sizes)} rows")
        return scatter(value, devices, sizes=sizes)
    if len(value) != len(devices):
        raise ValueError(f"{name} is scattered over {len(value)} devices and hidden over {len(devices)}")
    for i, tensor in enumerate(value):
        check_dense(tensor, f"{name}[{i}]")
    return [tensor.to(device) for tensor, device in zip(value, devices, strict=True)]


def _check_batch(
    hidden: OneOrScattered, target: OneOrScattered, per_token: Mapping[str, OneOrScattered], time_steps: int | None
) -> None:
    """Raise TypeError or ValueError unless all are dense tensors whose dtypes and shapes fit each other and the cut."""
    hidden = check_floating(hidden, "hidden")
    target = check_type(target, "target", Tensor, "a tensor, as hidden is: scatter both or neither")
    check_target(target, hidden=hidden)
    check_per_token(per_token, target)
    wanted = f"(batch, time, D), whose time steps chunk_size={time_steps} cuts; for rows use chunk_tokens"
    check_shapes(time_steps is None or hidden.dim() == 3, wanted, hidden=hidden)


def check_width(shards: Sequence[Shard], width: int) -> None:
    """Raise ValueError unless hidden has the width that the generator takes."""
    for shard in shards:
        check_shapes(shard.hidden.size(-1) == width, f"(..., {width}), which the generator takes", hidden=shard.hidden)


def check_targets(shards: Sequence[Shard], vocab_size: int) -> None:
    """Raise IndexError for a target that is not ignored and is outside the vocabulary."""
    # Errors name positions in the whole batch, because the caller does not know those in a shard
    above = 0
    for shard in shards:
        check_range(shard.target, shard.counted, vocab_size, above)
        above += len(shard.target)


def rows_of(shard: Shard) -> tuple[Tensor, ...]:
    """Return hidden and the per-token tensors of the generator, then of the criterion, with one row per token."""
    columns = (shard.hidden, *shard.per_token.values(), *shard.of_criterion.values())
    return tuple(t.flatten(0, shard.target.dim() - 1) for t in columns)


def one_for_each_device(shards: list[Shard]) -> list[Shard]:
    """Return the shards with those of the same device joined into one.

    In closed form, a second replica on a device would only mean a second weight gradient to add.
    """
    # In the order of the device list: its first device is where the losses are added
    by_device: dict[torch.device, list[Shard]] = {}
    for shard in shards:
        by_device.setdefault(shard.hidden.device, []).append(shard)
    joined = []
    for same_device in by_device.values():
        if len(same_device) == 1:
            # As it is: joining would copy hidden
            joined.append(same_device[0])
        else:
            hidden_ND = torch.cat([shard.hidden.flatten(0, -2) for shard in same_device])
            target_N = torch.cat([shard.target.flatten() for shard in same_device])
            # A pair with a closed form takes no per-token tensors
            joined.append(Shard(hidden_ND, target_N, same_device[0].ignored, {}))
    return joined


def heads_on(head: nn.ModuleDict, parameters: Sequence[nn.Parameter], shards: Sequence[Shard]) -> list[nn.ModuleDict]:
    """Return generator and criterion on each shard's device: the originals if they are already there, or replicas.

    A replica's parameters are detached: the loss over devices hands out the gradients of the originals itself.
    """
    devices = [shard.hidden.device for shard in shards]
    if needs_no_replica(parameters, devices):
        return [head]
    return detached_replicas(head, devices)

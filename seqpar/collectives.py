"""Each process-group sum beside its adjoint: the one file that calls `torch.distributed` collectives.

A `group` of None is this process alone: nothing is communicated. (`torch.distributed.group.WORLD` is all ranks.)

| forward | backward | name |
|---|---|---|
| identity | sum over the group | `copy_to_group`: a value every rank has, used differently on each |
| sum over the group | identity | `sum_from_group`: partial results that every rank needs whole |
| sum or maximum, no gradient | - | `group_sum`, `group_max` |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def world_size(group: ProcessGroup | None) -> int:
    """The number of ranks in the group; 1 for None."""
    return 1 if group is None else group.size()


def rank_in(group: ProcessGroup | None) -> int:
    """This process's rank in the group; 0 for None."""
    return 0 if group is None else group.rank()


def group_sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """A new tensor, the sum over the group, without a gradient."""
    return _reduced(tensor, group, dist.ReduceOp.SUM)


def group_max(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """A new tensor, the maximum over the group, without a gradient."""
    return _reduced(tensor, group, dist.ReduceOp.MAX)


def _reduced(tensor: Tensor, group: ProcessGroup | None, operation: Any) -> Tensor:
    result = tensor.detach().clone()
    if group is not None and group.size() > 1:
        dist.all_reduce(result, operation, group=group)
    return result


def copy_to_group(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The tensor itself; its gradient is the sum of all ranks' gradients."""
    return tensor if world_size(group) == 1 else _CopyToGroup.apply(tensor, group)


def sum_from_group(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the group; each rank's gradient is that of the sum, which all ranks must use alike."""
    return tensor if world_size(group) == 1 else _SumFromGroup.apply(tensor, group)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return group_sum(upstream.contiguous(), ctx.group), None


class _SumFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return group_sum(tensor.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None


def check_agreement(facts: Mapping[str, object], group: ProcessGroup | None) -> None:
    """Raises RuntimeError on every rank, naming the ranks, unless all of them have the same facts.

    Call it at start and where sizes may change: ranks that disagree would otherwise wait for each other, or add up
    what does not belong together.
    """
    if world_size(group) == 1:
        return
    everyone: list[Any] = [None] * world_size(group)
    dist.all_gather_object(everyone, dict(facts), group=group)
    for name in facts:
        values: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            values.setdefault(repr(theirs.get(name, "nothing")), []).append(rank)
        if len(values) > 1:
            said = "; ".join(f"{value} on ranks {ranks}" for value, ranks in values.items())
            raise RuntimeError(f"ranks disagree on {name}: {said}; start all of them with the same settings and data")

"""Train one step over several ranks with the known implementations, as their projects document it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from conformance.adapter import Package
from conformance.layout_adapter import Work
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.accumulate import accumulate_gradients
from seqpar.distributed.collectives import (
    THIS_PROCESS,
    group_gather,
    group_sum,
    join_from_group,
    rank_in,
    world_size,
)
from seqpar.distributed.model_with_loss import ModelWithLoss
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.cross_entropy import linear_cross_entropy

# Importing these takes as long as the rest of the suite
fsdp = Package("torch.distributed.fsdp")
dtensor = Package("torch.distributed.tensor")
pipelining = Package("torch.distributed.pipelining")
tensor_parallel = Package("torch.distributed.tensor.parallel")


def wrapped(both: nn.Module, work: Work) -> nn.Module:
    """Return the module wrapped so that the gradients of ranks with different tokens are reduced, if there are any."""
    group = work.token_group
    if group is None or not work.row.wrap:
        return both
    if work.row.wrap == "zero3":
        return FlatShards(both, group)
    if work.row.wrap == "ddp":
        return DistributedDataParallel(both, process_group=group)
    fsdp.fully_shard(both, mesh=work.token_mesh if work.row.wrap == "hsdp" else DeviceMesh.from_group(group, "cpu"))
    return both


class FlatShards(nn.Module):
    """A module whose parameters are one flat tensor, of which each rank has a part, gathered for the forward (ZeRO-3).

    Backward leaves each rank its part of the gradient's mean over the ranks, which is then gathered for inspection.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        # In a dict, so that its parameters are not this module's
        self.whole, self.group = {"module": module}, group
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        flat = torch.cat([p.detach().flatten() for p in self.trained.values()])
        self.part = nn.Parameter(flat.tensor_split(world_size(group))[rank_in(group)].clone())
        self.sizes = [len(part) for part in flat.tensor_split(world_size(group))]
        self.part.register_post_accumulate_grad_hook(self.look)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Split a flat tensor into the parameters, or their gradients, by name."""
        parts = flat.split([p.numel() for p in self.trained.values()])
        return {name: part.view_as(p) for part, (name, p) in zip(parts, self.trained.items(), strict=True)}

    def look(self, part: Tensor) -> None:
        """Give every parameter its whole gradient."""
        assert part.grad is not None
        whole = join_from_group(part.grad, self.sizes, 0, self.group) / world_size(self.group)
        for name, gradient in self.named(whole).items():
            self.trained[name].grad = gradient

    def forward(self, *given: Tensor, **more: Tensor) -> Any:
        parameters = self.named(join_from_group(self.part, self.sizes, 0, self.group))
        return torch.func.functional_call(self.whole["module"], parameters, given, more)


class OwnTime(nn.Module):
    """A model that runs on this rank's time steps, and returns the hidden states of all ranks."""

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.model, self.group = model, group

    def forward(self, tokens: Tensor) -> Tensor:
        parts = tokens.tensor_split(world_size(self.group), 1)
        own = self.model(parts[rank_in(self.group)])
        most = parts[0].size(1)
        padded = F.pad(own.detach(), (0, 0, 0, most - own.size(1)))
        all_ranks = [t[:, : part.size(1)] for t, part in zip(group_gather(padded, self.group), parts, strict=True)]
        # The loss sums the hidden gradient over the ranks, and each rank uses that of its own time steps
        all_ranks[rank_in(self.group)] = own
        return torch.cat(all_ranks, 1)


def as_dtensor(tensor: Tensor, group: ProcessGroup | None, rows: int | None = None) -> Any:
    """Return a tensor as a DTensor: whole on every rank, or as this rank's part of `rows` rows."""
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    if rows is None:
        return dtensor.DTensor.from_local(tensor, mesh, [dtensor.Replicate()])
    shape = torch.Size([rows, tensor.size(1)])
    return dtensor.DTensor.from_local(tensor, mesh, [dtensor.Shard(0)], shape=shape, stride=(tensor.size(1), 1))


class AsDTensor(nn.Module):
    """A model whose parameters are DTensors: the generator's rows are sharded, all others replicated."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.model, self.group = work.model, work.vocab_group
        for module in work.model.modules():
            rows = work.vocab_size if module is work.model.head else None
            for name, parameter in [*module.named_parameters(recurse=False)]:
                placed = as_dtensor(parameter.detach(), self.group, rows)
                module.register_parameter(name, nn.Parameter(placed, parameter.requires_grad))

    def forward(self, tokens: Tensor) -> Any:
        return self.model(as_dtensor(tokens, self.group)).to_local()


def trunk(work: Work) -> Any:
    """Return the module that computes the hidden states of a rank's targets."""
    if work.row.inner == "time and classes":
        assert work.vocab_group is not None
        return OwnTime(work.model, work.vocab_group)
    if work.row.inner == "DTensor classes":
        return AsDTensor(work)
    return work.model


def sum_over_time(work: Work) -> None:
    """Sum over the ranks what their own time steps contribute to the gradients below the generator."""
    if work.row.inner == "time and classes":
        for parameter in work.model.parameters():
            if parameter.grad is not None and parameter is not work.model.head.weight:
                parameter.grad = group_sum(parameter.grad, work.vocab_group)


def over_survivors(work: Work, total: Tensor, count: Tensor) -> Tensor:
    """Return the mean loss over the ranks that are still there, and turn gradients of sums into its gradient."""
    assert work.survivors is not None
    group = work.survivors()
    count = group_sum(count, group).clamp(min=1)
    for parameter in work.model.parameters():
        if parameter.grad is not None:
            parameter.grad = group_sum(parameter.grad, group) / count
    return group_sum(total, group) / count


class Loss(nn.Module):
    """The summed loss of a model's generator, as a function of the work, the hidden states and the target."""

    def __init__(self, work: Work, function: Callable[..., Any]) -> None:
        super().__init__()
        self.work, self.function = work, function

    def forward(self, hidden: Tensor, target: Tensor) -> Any:
        return self.function(self.work, hidden, target)


def seqpar_loss(work: Work, hidden: Tensor, target: Tensor) -> TokenLoss:
    """Return the `linear_cross_entropy` of a model's generator."""
    weight, vocab = work.model.head.weight, None
    # A DTensor itself knows which rows a rank has
    if work.vocab_group is not None and work.row.inner != "DTensor classes":
        vocab = VocabShard(work.vocab_group, work.start, work.vocab_size)
    how: dict[str, Any] = {"label_smoothing": work.label_smoothing, "vocab": vocab}
    return linear_cross_entropy(hidden, weight, target, chunk_tokens=3, **how)


def seqpar_step(work: Work) -> Tensor | float | None:
    """Train by `accumulate_gradients` and `ModelWithLoss`, or by a schedule of `torch.distributed.pipelining`."""
    if work.pipeline_group is not None:
        return pipelined(work, lambda hidden, target: seqpar_loss(work, hidden, target).total)
    both = wrapped(ModelWithLoss(trunk(work), Loss(work, seqpar_loss)), work)
    if work.row.inner == "experts":
        return with_experts(work, lambda tokens, target: both(tokens, target=target).total)
    if work.reduction == "mean":
        tokens, target = work.micro_batches[0]
        both(tokens, target=target).mean.backward()
        return None
    # Undo the division if the divisor is known only later, or if ZeRO-3 takes a mean over the ranks
    factor: Tensor | int = 1
    if work.row.loses_one:
        factor = counted(work)
    if work.row.wrap == "zero3":
        factor = world_size(work.token_group)
    is_reduced = isinstance(both, DistributedDataParallel) or "fsdp" in work.row.wrap or work.row.wrap == "hsdp"
    done = accumulate_gradients(
        work.micro_batches,
        lambda batch: both(batch[0], target=batch[1]),
        lambda batch: (batch[1] != work.ignore_index).sum(),
        model=both if is_reduced else None,
        group=(None if work.row.loses_one else work.token_group) or THIS_PROCESS,
        backward=lambda loss: (loss * work.loss_scale * factor).backward(),
    )
    sum_over_time(work)
    if work.row.loses_one:
        return over_survivors(work, done.total, done.tokens)
    return done.mean


def torch_loss(work: Work, hidden: Tensor, target: Tensor) -> Tensor:
    """Return the `F.cross_entropy` of a model's generator."""
    logits, eps = work.model.head(hidden).flatten(0, -2), work.label_smoothing
    return F.cross_entropy(logits, target.flatten(), label_smoothing=eps, reduction=work.reduction)


def torch_step(work: Work) -> Tensor | float | None:
    """Divide `F.cross_entropy`, summed, once by the step's tokens, under DDP, FSDP2 and GPipe or ZBV."""
    if work.pipeline_group is not None:
        return pipelined(work, partial(torch_loss, work))
    both = wrapped(Both(trunk(work), Loss(work, torch_loss)), work)
    if work.row.inner == "experts":
        return with_experts(work, both)
    if work.reduction == "mean":
        both(*work.micro_batches[0]).backward()
        return None
    if work.row.loses_one:
        return over_survivors(work, run_micro_batches(work, both), counted(work))
    return accumulated(work, both)


def with_experts(work: Work, summed: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the sum of the step's mean loss and the router's loss, and leave its gradient.

    An expert's gradient already includes the tokens of all ranks that sent it some, so it is summed only over
    `data_group`.
    """
    ((tokens, target),) = work.micro_batches
    count = group_sum(counted(work), work.token_group).clamp(min=1).double()
    rows = int(group_sum(torch.tensor(target.numel()), work.token_group))
    loss = summed(tokens, target) / count
    loss = loss + work.model.experts.auxiliary(rows, work.token_group)
    (loss * work.loss_scale).backward()
    for name, parameter in work.model.named_parameters():
        group = work.data_group if ".experts." in name else work.token_group
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = group_sum(gradient, group)
    return group_sum(loss.detach(), work.token_group)


class Both(nn.Module):
    """A model and its loss, for DDP or FSDP2 to wrap."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens: Tensor, target: Tensor) -> Any:
        return self.loss(self.model(tokens), target)


def counted(work: Work) -> Tensor:
    """Return the number of this rank's targets that count."""
    return torch.stack([(target != work.ignore_index).sum() for _, target in work.micro_batches]).sum()


def train(work: Work, loss: Callable[..., Any]) -> Tensor:
    """Return the step's mean loss, and leave its gradients, for a function of work, hidden states and target."""
    return accumulated(work, wrapped(Both(trunk(work), Loss(work, loss)), work))


def accumulated(work: Work, both: nn.Module) -> Tensor:
    """Return the step's mean loss, and leave its gradients: sums of micro-batches, divided by all ranks' tokens."""
    group = work.token_group
    count = group_sum(counted(work), group).clamp(min=1)
    # DDP and FSDP2 take the mean over the ranks, so the sum is multiplied by their number
    # In double, since the quotient of two integers would be in float32
    total = run_micro_batches(work, both, world_size(group) / count.double())
    sum_over_time(work)
    return group_sum(total, group) / count


def run_micro_batches(work: Work, both: nn.Module, factor: Tensor | float = 1.0) -> Tensor:
    """Return the sum of this rank's losses, and leave the gradients of `factor` times it, reduced once."""
    total = torch.zeros((), dtype=torch.float64)
    for number, batch in enumerate(work.micro_batches):
        is_last = number == len(work.micro_batches) - 1
        with contextlib.nullcontext() if is_last or not isinstance(both, DistributedDataParallel) else both.no_sync():
            loss = both(*batch)
            (loss * factor * work.loss_scale).backward()
        total += loss.detach()
    return total


def pipelined(work: Work, summed: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    """Return the step's mean loss on the rank with the last stage, whose loss is divided by the step's tokens.

    The schedule is GPipe or, with two stages per rank, down the ranks and up again, ZBV, which splits backward in two.
    """
    group, last = work.pipeline_group, work.stage_count - 1
    assert group is not None
    tokens, target = (torch.cat(parts) for parts in zip(*work.micro_batches, strict=True))
    count = counted(work)
    stages = [
        pipelining.PipelineStage(s, n, last + 1, torch.device("cpu"), group=group) for n, s in work.stages.items()
    ]
    is_halved = len(stages) > 1
    schedule = (pipelining.ScheduleZBVZeroBubble if is_halved else pipelining.ScheduleGPipe)(
        stages if is_halved else stages[0],
        len(work.micro_batches),
        loss_fn=lambda hidden, target: summed(hidden, target) / count * work.loss_scale,
        scale_grads=False,
    )
    losses: list[Tensor] = []
    given: dict[str, Any] = {"target": target, "losses": losses} if last in work.stages else {}
    schedule.step(*[tokens][: 0 in work.stages], **given)
    if not losses:
        return None
    return torch.stack(losses).sum().detach() / work.loss_scale


def parallel_loss(work: Work, hidden: Tensor, target: Tensor) -> Any:
    """Return the summed `F.cross_entropy` of DTensor logits, from a generator whose rows are a DTensor."""
    weight = as_dtensor(work.model.head.weight, work.vocab_group, work.vocab_size)
    logits = F.linear(as_dtensor(hidden.flatten(0, -2), work.vocab_group), weight)
    return F.cross_entropy(logits, target.flatten(), reduction="sum").to_local()  # type: ignore[attr-defined]


def loss_parallel_step(work: Work) -> Tensor:
    """Sum `F.cross_entropy` of DTensor logits under `loss_parallel`, under DDP where there are data ranks."""
    # Around both forward and backward, since the context changes what both do
    with tensor_parallel.loss_parallel():
        return train(work, parallel_loss)

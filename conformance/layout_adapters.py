"""Train one step over several ranks with the known implementations, as their projects document it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from conformance.layout_adapter import Work
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.accumulate import accumulate_gradients
from seqpar.distributed.collectives import THIS_PROCESS, group_sum, rank_in, world_size
from seqpar.distributed.model_with_loss import ModelWithLoss
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.cross_entropy import linear_cross_entropy


def wrapped(both: nn.Module, work: Work) -> nn.Module:
    """Return the module whose call reduces the gradients of the ranks that have other tokens; itself without any."""
    group = work.token_group
    if group is None:
        return both
    if work.layout == "FSDP2":
        # Importing it takes as long as all the rest of the suite
        from torch.distributed.fsdp import fully_shard

        fully_shard(both, mesh=DeviceMesh.from_group(group, "cpu"))
        return both
    return DistributedDataParallel(both, process_group=group)


class SeqparLoss(nn.Module):
    """`linear_cross_entropy` of a model's generator."""

    def __init__(self, head: nn.Linear, work: Work) -> None:
        super().__init__()
        self.head, self.eps = head, work.label_smoothing
        self.vocab = None
        if work.vocab_group is not None:
            self.vocab = VocabShard(work.vocab_group, work.start, work.vocab_size)

    def forward(self, hidden: Tensor, target: Tensor) -> TokenLoss:
        return linear_cross_entropy(
            hidden, self.head.weight, target, label_smoothing=self.eps, vocab=self.vocab, chunk_tokens=3
        )


def seqpar_step(work: Work) -> Tensor | float | None:
    """Train by `accumulate_gradients`, or by a schedule of `torch.distributed.pipelining`."""
    loss = SeqparLoss(work.model.head, work)
    if work.pipeline_group is not None:
        return pipelined(work, lambda hidden, target: loss(hidden, target).total)
    both = wrapped(ModelWithLoss(work.model, loss), work)
    if work.reduction == "mean":
        tokens, target = work.micro_batches[0]
        both(tokens, target=target).mean.backward()
        return None
    done = accumulate_gradients(
        work.micro_batches,
        lambda batch: both(batch[0], target=batch[1]),
        lambda batch: (batch[1] != work.ignore_index).sum(),
        model=both if work.token_group else None,
        group=work.token_group or THIS_PROCESS,
        backward=lambda loss: (loss * work.loss_scale).backward(),
    )
    return done.mean


class TorchLoss(nn.Module):
    """`F.cross_entropy` of a model's generator, summed; with a split vocabulary under `loss_parallel`."""

    def __init__(self, head: nn.Linear, work: Work) -> None:
        super().__init__()
        self.head, self.work = head, work

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        logits = self.head(hidden).flatten(0, -2)
        eps = self.work.label_smoothing
        return F.cross_entropy(logits, target.flatten(), label_smoothing=eps, reduction=self.work.reduction)


def torch_step(work: Work) -> Tensor | float | None:
    """Train with summed losses, divided once by the tokens of all ranks and micro-batches."""
    loss = TorchLoss(work.model.head, work)
    if work.pipeline_group is not None:
        return pipelined(work, loss)
    both = wrapped(Both(work.model, loss), work)
    if work.reduction == "mean":
        both(*work.micro_batches[0]).backward()
        return None
    return accumulated(work, both)


class Both(nn.Module):
    """A model and its loss, for DDP or FSDP2 to wrap."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.model(tokens), target)
        return loss


def counted(work: Work) -> Tensor:
    """Return the number of this rank's targets that count."""
    return torch.stack([(target != work.ignore_index).sum() for _, target in work.micro_batches]).sum()


def accumulated(work: Work, both: nn.Module) -> Tensor:
    """Return the step's mean loss, and leave its gradients: sums of micro-batches, divided by all ranks' tokens."""
    group = work.token_group
    count = group_sum(counted(work), group).clamp(min=1)
    # DDP and FSDP2 take the mean over the ranks, so that of `ranks` times the sum is the sum
    # The quotient of two whole numbers would be in float32
    return group_sum(run_micro_batches(work, both, world_size(group) / count.double()), group) / count


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
    """Return the step's mean loss on the last rank of a GPipe schedule, whose loss is divided by the step's tokens."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    group = work.pipeline_group
    assert group is not None
    assert work.stage is not None
    rank, last = rank_in(group), world_size(group) - 1
    tokens, target = (torch.cat(parts) for parts in zip(*work.micro_batches, strict=True))
    count = counted(work)
    stage = PipelineStage(work.stage, rank, last + 1, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(
        stage,
        len(work.micro_batches),
        loss_fn=lambda hidden, target: summed(hidden, target) / count * work.loss_scale,
        scale_grads=False,
    )
    losses: list[Tensor] = []
    if rank < last:
        schedule.step(*[tokens][: rank == 0])
        return None
    schedule.step(target=target, losses=losses)
    return torch.stack(losses).sum().detach() / work.loss_scale


class LossParallel(TorchLoss):
    """The same with the generator's rows as a DTensor and the loss under `loss_parallel`."""

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        assert self.work.vocab_group is not None
        mesh = DeviceMesh.from_group(self.work.vocab_group, "cpu")
        whole = torch.Size([self.work.vocab_size, hidden.size(-1)])
        weight = DTensor.from_local(self.head.weight, mesh, [Shard(0)], shape=whole, stride=(hidden.size(-1), 1))
        logits = F.linear(DTensor.from_local(hidden.flatten(0, -2), mesh, [Replicate()]), weight)
        loss = F.cross_entropy(logits, target.flatten(), reduction="sum")
        assert isinstance(loss, DTensor)
        return loss.to_local()


def loss_parallel_step(work: Work) -> Tensor:
    """Train with a split vocabulary, under DDP where there are data ranks."""
    from torch.distributed.tensor.parallel import loss_parallel

    # Around forward and backward: its context changes what both of them do
    with loss_parallel():
        return accumulated(work, wrapped(Both(work.model, LossParallel(work.model.head, work)), work))

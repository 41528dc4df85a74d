"""Take a step with Accelerate, Lightning Fabric or Lightning's Trainer, with the gradient of one batch on one device.

These divide a loss by the number of accumulation steps, and DDP and FSDP2 take the mean over ranks; if token counts
differ, that mean of means is not the gradient of the batch. Here the step's tokens are counted first:

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # or fabric.setup(model, optimizer)
    for micro_batches in itertools.batched(loader, 8):
        loss = accumulate_step(
            accelerator,                                # or fabric
            model,                                      # returns a TokenLoss: a ModelWithLoss
            micro_batches,
            lambda m: model(m["source"], m["target_in"], target=m["target"]),
            tokens_of=lambda m: (m["target"] != PAD).sum(),
        )
        optimizer.step()
        optimizer.zero_grad()

With Lightning's Trainer it is called in `training_step`, as `accumulate_step(self.trainer, self, ...)`, with manual
optimisation and a loader whose batches are lists of micro-batches. With `ModelParallelStrategy`, `parallelize_fn` or
`configure_model` calls `fully_shard(..., mesh=mesh["data_parallel"])` on one module that holds the model and its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from seqpar.core.checks import kind_of
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.accumulate import accumulate_gradients
from seqpar.distributed.reducers import reducer_over

MicroBatch = TypeVar("MicroBatch")


class _Step(NamedTuple):
    """What a trainer does with gradients."""

    ranks: int
    wrapped: nn.Module
    """The model as the trainer wrapped it."""
    way_out: str
    """What to do if it is not wrapped."""
    group: dist.ProcessGroup | None
    """The ranks that gradients are reduced over; None means DDP's own group."""
    backward: Callable[[Tensor], object]


def accumulate_step(
    trainer: Any,
    model: nn.Module,
    micro_batches: Iterable[MicroBatch],
    loss_of: Callable[[MicroBatch], TokenLoss],
    tokens_of: Callable[[MicroBatch], int | Tensor],
) -> TokenLoss:
    """Add to `.grad` the gradient of (summed loss) / (tokens) over the micro-batches of all ranks, as if one batch.

    Plain equivalent, with every rank's micro-batches on one device:
    `loss = sum(loss_of(m) for m in all_micro_batches); (loss.total / loss.tokens).backward()`.

    Args:
        trainer: an `accelerate.Accelerator`, a `lightning.fabric.Fabric` or a `lightning.pytorch.Trainer`. Its own
            backward is used, and with it its gradient scaler or precision plugin.
        model: what `accelerator.prepare` or `fabric.setup` returned, with DDP or FSDP2; for a Trainer its
            LightningModule, with `automatic_optimization = False`. `loss_of` calls it, or a submodule of the latter.
        micro_batches, loss_of, tokens_of: as in `seqpar.accumulate_gradients`.

    Returns:
        `TokenLoss` of the whole step, detached, the same on every rank.

    Raises:
        TypeError: any other trainer; several ranks but no wrapper that reduces the model over them; FSDP1; DeepSpeed.
        ValueError: an accelerator that divides by accumulation steps itself; a LightningModule with automatic
            optimisation.
        Exception: whatever `seqpar.accumulate_gradients` raises. If a model is also split in some way other than FSDP2,
            such as tensor parallelism, call that function, with the group of the ranks that have different tokens.

    Example:
        >>> from accelerate import Accelerator
        >>> from seqpar.integrations.accumulate import accumulate_step
        >>> loss = seqpar.LossCompute(nn.Linear(8, 50), seqpar.CrossEntropy())
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(seqpar.ModelWithLoss(nn.Embedding(50, 8), loss))
        >>> micro_batches = torch.randint(50, (4, 2, 7))
        >>> loss_of, tokens_of = lambda m: model(m[:, :-1], target=m[:, 1:]), lambda m: m[:, 1:].numel()
        >>> accumulate_step(accelerator, model, micro_batches, loss_of, tokens_of).tokens
        tensor(48)
    """
    step = _read_trainer(trainer, model)
    reducer = reducer_over(step.ranks, step.wrapped, step.way_out)
    group = None
    if reducer is not None:
        group = step.group
    return accumulate_gradients(micro_batches, loss_of, tokens_of, model=reducer, group=group, backward=step.backward)


def _read_trainer(trainer: Any, model: nn.Module) -> _Step:
    """Read from a trainer what it does with gradients; raise TypeError for one that is not in `READERS`."""
    for kind in type(trainer).__mro__:
        reader = READERS.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")
        if reader is not None:
            return reader(trainer, model)
    raise TypeError(
        f"trainer is {kind_of(trainer)}; it must be an Accelerator, a Fabric or Lightning's Trainer "
        "(self.trainer in training_step); without one of them call seqpar.accumulate_gradients"
    )


def _read_accelerator(accelerator: Any, model: nn.Module) -> _Step:
    # `accelerator.backward` divides by this number a loss that is already divided by the step's tokens
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        divides = f"the accelerator has gradient_accumulation_steps={steps} and would divide every loss by it"
        raise ValueError(f"{divides}; leave it at 1: the micro-batches passed here are the accumulation")
    ranks = accelerator.num_processes
    group = dist.group.WORLD if ranks > 1 else None
    return _Step(ranks, model, "pass what accelerator.prepare returned", group, accelerator.backward)


def _read_fabric(fabric: Any, model: nn.Module) -> _Step:
    group = _group_of(fabric.strategy)
    return _Step(fabric.world_size, model, "pass what fabric.setup returned", group, fabric.backward)


def _read_lightning(trainer: Any, model: nn.Module) -> _Step:
    module = trainer.lightning_module
    if model is not module:
        raise TypeError(
            f"model is {kind_of(model)}; with Lightning's Trainer it is the {type(module).__name__}, self in "
            "training_step"
        )
    if module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} is optimised automatically, so Lightning would run a backward of its own; set "
            "self.automatic_optimization = False in __init__"
        )
    strategy = trainer.strategy
    way_out = 'call fully_shard(..., mesh=self.device_mesh["data_parallel"]) in configure_model'
    # The strategy may have wrapped the module, and the wrapper's reduction must wait for the last micro-batch
    backward = trainer.lightning_module.manual_backward
    return _Step(trainer.world_size, strategy.model, way_out, _group_of(strategy), backward)


def _group_of(strategy: Any) -> dist.ProcessGroup | None:
    """Return the data ranks of Lightning's `ModelParallelStrategy`; None for any other, where DDP has its own group."""
    mesh = getattr(strategy, "device_mesh", None)
    return None if mesh is None else mesh["data_parallel"].get_group()


READERS: dict[str, Callable[[Any, nn.Module], _Step]] = {
    "accelerate.Accelerator": _read_accelerator,
    "lightning.Fabric": _read_fabric,
    "lightning.Trainer": _read_lightning,
    "lightning_fabric.Fabric": _read_fabric,
    "pytorch_lightning.Trainer": _read_lightning,
}
"""How to read each trainer, by package and class; the last two packages are parts of `lightning` on their own."""

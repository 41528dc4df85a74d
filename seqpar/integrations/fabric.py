"""Take a step with Lightning Fabric over micro-batches and ranks, with the gradient of one batch on one device.

DDP and FSDP2 take the mean over ranks, and a loss is usually a mean over its own micro-batch; where token counts
differ, that mean of means is not the gradient of the batch. Here the tokens of the step are counted first:

    fabric = Fabric(strategy="ddp", devices=2)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    for micro_batches in itertools.batched(loader, 8):
        loss = accumulated_step(
            fabric,
            model,                                      # returns a TokenLoss: a ModelWithLoss
            micro_batches,
            lambda m: model(m["source"], m["target_in"], target=m["target"]),
            tokens_of=lambda m: (m["target"] != PAD).sum(),
        )
        optimizer.step()
        optimizer.zero_grad()

With `ModelParallelStrategy`, its `parallelize_fn` calls `fully_shard(model, mesh=mesh["data_parallel"])`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.accumulate import accumulate_gradients
from seqpar.distributed.reducers import reducer_over

MicroBatch = TypeVar("MicroBatch")


def accumulated_step(
    fabric: Fabric,
    model: nn.Module,
    micro_batches: Iterable[MicroBatch],
    loss_of: Callable[[MicroBatch], TokenLoss],
    tokens_of: Callable[[MicroBatch], int | Tensor],
) -> TokenLoss:
    """Add to `.grad` the gradient of (summed loss) / (tokens) over the micro-batches of all ranks, as if one batch.

    Plain equivalent, with every rank's micro-batches on one device:
    `loss = sum(loss_of(m) for m in all_micro_batches); (loss.total / loss.tokens).backward()`.

    Args:
        fabric: its `backward` is used, and with it its precision plugin.
        model: the module that `fabric.setup` returned, with DDP or with FSDP2 (`ModelParallelStrategy`); `loss_of`
            calls it.
        micro_batches, loss_of, tokens_of: as `seqpar.accumulate_gradients` takes them.

    Returns:
        `TokenLoss` of the whole step, detached, the same on every rank.

    Raises:
        TypeError: several ranks, and a model that nothing reduces over them; FSDP1.
        Exception: whatever `seqpar.accumulate_gradients` raises.

    Example:
        >>> from lightning.fabric import Fabric
        >>> from seqpar.integrations.fabric import accumulated_step
        >>> loss = seqpar.LossCompute(nn.Linear(8, 50), seqpar.CrossEntropy())
        >>> fabric = Fabric(accelerator="cpu")
        >>> model = fabric.setup_module(seqpar.ModelWithLoss(nn.Embedding(50, 8), loss))
        >>> micro_batches = torch.randint(50, (4, 2, 7))
        >>> loss_of, tokens_of = lambda m: model(m[:, :-1], target=m[:, 1:]), lambda m: m[:, 1:].numel()
        >>> accumulated_step(fabric, model, micro_batches, loss_of, tokens_of).tokens
        tensor(48)
    """
    reducer = reducer_over(fabric.world_size, model, "fabric.setup")
    group: ProcessGroup | None = None
    if reducer is not None and isinstance(fabric.strategy, ModelParallelStrategy):
        group = fabric.strategy.device_mesh["data_parallel"].get_group()
    return accumulate_gradients(micro_batches, loss_of, tokens_of, model=reducer, group=group, backward=fabric.backward)

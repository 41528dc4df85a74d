"""Take a step in Lightning over micro-batches and ranks, with the gradient of one batch on one device.

A loss that `training_step` returns is divided by `accumulate_grad_batches` and averaged over ranks; where token counts
differ, that mean of means is not the gradient of the batch. Use manual optimisation instead, with a data loader whose
batches are lists of micro-batches, as in the example below.

The strategy is DDP, or `ModelParallelStrategy`, whose `configure_model` calls
`fully_shard(self.both, mesh=self.device_mesh["data_parallel"])` on one module that holds the model and its loss, a
`ModelWithLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.accumulate import accumulate_gradients
from seqpar.distributed.reducers import reducer_in

MicroBatch = TypeVar("MicroBatch")


def accumulated_step(
    module: LightningModule,
    micro_batches: Iterable[MicroBatch],
    loss_of: Callable[[MicroBatch], TokenLoss],
    tokens_of: Callable[[MicroBatch], int | Tensor],
) -> TokenLoss:
    """Add to `.grad` the gradient of (summed loss) / (tokens) over the micro-batches of all ranks, as if one batch.

    Plain equivalent, with every rank's micro-batches on one device:
    `loss = sum(loss_of(m) for m in all_micro_batches); (loss.total / loss.tokens).backward()`.

    Args:
        module: the module whose `training_step` calls this, with `automatic_optimization = False`; its
            `manual_backward` is used, and with it the Trainer's precision plugin.
        micro_batches, loss_of, tokens_of: as `seqpar.accumulate_gradients` takes them. `loss_of` calls submodules of
            `module`, as any `training_step` does.

    Returns:
        `TokenLoss` of the whole step, detached, the same on every rank.

    Raises:
        ValueError: a module with automatic optimisation.
        TypeError: a strategy other than one device, DDP or ModelParallelStrategy; nothing that reduces the gradients.
        Exception: whatever `seqpar.accumulate_gradients` raises.

    Example:
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from seqpar.integrations.lightning import accumulated_step
        >>> class Language(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.automatic_optimization = False
        ...         engine = seqpar.LossCompute(nn.Linear(8, 50), seqpar.CrossEntropy())
        ...         self.both = seqpar.ModelWithLoss(nn.Embedding(50, 8), engine)
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        ...     def training_step(self, micro_batches, index):
        ...         optimizer = self.optimizers()
        ...         optimizer.zero_grad()
        ...         loss_of, tokens_of = lambda m: self.both(m[:, :-1], target=m[:, 1:]), lambda m: m[:, 1:].numel()
        ...         loss = accumulated_step(self, micro_batches, loss_of, tokens_of)
        ...         optimizer.step()
        ...         print(loss.tokens)
        >>> steps = torch.utils.data.DataLoader(torch.randint(50, (3, 4, 2, 7)), batch_size=None)  # of 4 micro-batches
        >>> trainer = Trainer(accelerator="cpu", fast_dev_run=1, enable_progress_bar=False, enable_model_summary=False)
        >>> trainer.fit(Language(), steps)
        tensor(48)
    """
    if module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} is optimised automatically, so Lightning would run a backward of its own; set "
            "self.automatic_optimization = False in __init__"
        )
    reducer, group = _reducer(module)
    return accumulate_gradients(
        micro_batches, loss_of, tokens_of, model=reducer, group=group, backward=module.manual_backward
    )


def _reducer(module: LightningModule) -> tuple[nn.Module | None, ProcessGroup | None]:
    """Return what reduces the gradients over ranks, and its group; None for a single device, and for DDP's group."""
    # `strategy.model` may be a wrapper around the LightningModule, whose reduction must wait for the last micro-batch
    strategy = module.trainer.strategy
    if isinstance(strategy, SingleDeviceStrategy):
        return None, None
    if not isinstance(strategy, DDPStrategy | ModelParallelStrategy):
        raise TypeError(
            f"the Trainer's strategy is a {type(strategy).__name__}; accumulated_step supports one device, DDP and "
            "ModelParallelStrategy (FSDP2); for any other call seqpar.accumulate_gradients with the module that "
            "reduces the gradients"
        )
    reducer = reducer_in(strategy.model)
    if reducer is None:
        raise TypeError(
            f"nothing in this {type(module).__name__} reduces the gradients over ranks; with ModelParallelStrategy, "
            'call fully_shard(..., mesh=self.device_mesh["data_parallel"]) in configure_model'
        )
    if isinstance(strategy, DDPStrategy):
        return reducer, None
    return reducer, strategy.device_mesh["data_parallel"].get_group()

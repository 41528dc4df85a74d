"""Take a step with Accelerate over micro-batches and ranks, with the gradient of one batch on one device.

`accelerator.backward` divides by `gradient_accumulation_steps`, and DDP and FSDP2 take the mean over ranks; where token
counts differ, that mean of means is not the gradient of the batch. Here the tokens of the step are counted first, and
`gradient_accumulation_steps` stays at 1:

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for micro_batches in itertools.batched(loader, 8):
        loss = accumulated_step(
            accelerator,
            model,                                      # returns a TokenLoss: a ModelWithLoss
            micro_batches,
            lambda m: model(m["source"], m["target_in"], target=m["target"]),
            tokens_of=lambda m: (m["target"] != PAD).sum(),
        )
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.accumulate import accumulate_gradients
from seqpar.distributed.reducers import reducer_over

MicroBatch = TypeVar("MicroBatch")


def accumulated_step(
    accelerator: Accelerator,
    model: nn.Module,
    micro_batches: Iterable[MicroBatch],
    loss_of: Callable[[MicroBatch], TokenLoss],
    tokens_of: Callable[[MicroBatch], int | Tensor],
) -> TokenLoss:
    """Add to `.grad` the gradient of (summed loss) / (tokens) over the micro-batches of all ranks, as if one batch.

    Plain equivalent, with every rank's micro-batches on one device:
    `loss = sum(loss_of(m) for m in all_micro_batches); (loss.total / loss.tokens).backward()`.

    Args:
        accelerator: its `backward` is used, and with it its gradient scaler.
        model: the module that `accelerator.prepare` returned, with DDP or with FSDP2 over all ranks; `loss_of` calls
            it.
        micro_batches, loss_of, tokens_of: as `seqpar.accumulate_gradients` takes them.

    Returns:
        `TokenLoss` of the whole step, detached, the same on every rank.

    Raises:
        ValueError: an accelerator that divides by accumulation steps itself.
        TypeError: several ranks, and a model that nothing reduces over them; FSDP1.
        Exception: whatever `seqpar.accumulate_gradients` raises. If a model is split over some of the ranks in addition
            to FSDP2, as by tensor parallelism, call that, with the group of the ranks that have different tokens.

    Example:
        >>> from accelerate import Accelerator
        >>> from seqpar.integrations.accelerate import accumulated_step
        >>> loss = seqpar.LossCompute(nn.Linear(8, 50), seqpar.CrossEntropy())
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(seqpar.ModelWithLoss(nn.Embedding(50, 8), loss))
        >>> micro_batches = torch.randint(50, (4, 2, 7))
        >>> loss_of, tokens_of = lambda m: model(m[:, :-1], target=m[:, 1:]), lambda m: m[:, 1:].numel()
        >>> accumulated_step(accelerator, model, micro_batches, loss_of, tokens_of).tokens
        tensor(48)
    """
    # `accelerator.backward` divides the loss by this number, which is already divided by the tokens of the step
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        divides = f"the accelerator has gradient_accumulation_steps={steps} and would divide every loss by it"
        raise ValueError(f"{divides}; leave it at 1: the micro-batches passed here are the accumulation")
    reducer = reducer_over(accelerator.num_processes, model, "accelerator.prepare")
    group = None if reducer is None else dist.group.WORLD
    return accumulate_gradients(
        micro_batches, loss_of, tokens_of, model=reducer, group=group, backward=accelerator.backward
    )

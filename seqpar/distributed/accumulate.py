"""Exact gradients over micro-batches and ranks: the tokens of the whole step are counted before its first backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seqpar.core.structures import leaves, map_tensors
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.collectives import (
    broadcast_object,
    check_agreement,
    check_group,
    group_sum,
    rank_in,
    world_size,
)

MicroBatch = TypeVar("MicroBatch")


class _Step(NamedTuple):
    """What the ranks know of each other before the first forward."""

    micro_batches: list[int]
    """How many each rank has."""
    tokens: int
    """The target tokens of all ranks."""


def accumulate_gradients(
    micro_batches: Iterable[MicroBatch],
    loss_of: Callable[[MicroBatch], TokenLoss],
    tokens_of: Callable[[MicroBatch], int | Tensor],
    *,
    model: nn.Module | None = None,
    group: ProcessGroup | None = None,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    agree: Mapping[str, object] | None = None,
) -> TokenLoss:
    """Leaves in `.grad` the gradient of (summed loss) / (tokens) of all micro-batches of all ranks, as if one batch.

    Plain equivalent, with every rank's micro-batches on one device:
    `loss = sum(loss_of(m) for m in all_micro_batches); (loss.total / loss.tokens).backward()`.

        loss = seqpar.accumulate_gradients(
            micro_batches,
            lambda m: ddp(m.src, m.tgt_in, target=m.tgt_out),         # ddp wraps a ModelWithLoss
            tokens_of=lambda m: (m.tgt_out != pad).sum(),
            model=ddp,
        )
        optimizer.step()

    One small collective at the start tells every rank the tokens of the step and the largest number of micro-batches,
    one at the end adds up the loss. Forward and backward of all micro-batches but the last run without the gradients'
    reduction. A rank that has fewer micro-batches, or none, does not leave the others waiting: it runs one of its own
    again, or one that it borrows, with the factor 0. A rank that raises leaves the others to the group's timeout.

    Args:
        micro_batches: this rank's, any objects; to be lent to a rank that has none they must be picklable.
        loss_of: the summed loss of one micro-batch; with `model`, it calls the model.
        tokens_of: how many of its targets are not ignored: what `loss_of(m).tokens` will say.
        model: what reduces the gradients: a DistributedDataParallel, or a module `fully_shard` was called on. Both
            take the mean over ranks (leave FSDP2's divide factor as it is), which is undone. None: gradients stay
            this rank's part of the sum, and whoever adds them up over `group` has the gradient.
        group: the ranks that hold different tokens, and no others (ranks that share the same tokens, as with a split
            vocabulary, would count them twice): those that the gradients are reduced over. None is DDP's own group;
            without a model, this process alone. FSDP2 needs it named: `dist.group.WORLD` for the whole mesh.
        backward: takes the scaled loss, as `lambda loss: scaler.scale(loss).backward()`.
        agree: what else must be the same on all ranks, by name (`{"step": step, "vocabulary": len(vocab)}`); costs no
            further collective. The number and size of the parameters are always compared.

    Returns:
        `TokenLoss` of the whole step, detached, the same on every rank; `.mean` is the number to log. No tokens at
        all give zero gradients.

    Raises:
        RuntimeError: on every rank: ranks that disagree; a `tokens_of` that does not count what the losses do.
        ValueError: on every rank: no rank has a micro-batch. No group for FSDP2, or another than DDP's.
        TypeError: a model that does not reduce gradients; an argument, or what a function returned, of another kind.
    """
    _check_arguments(micro_batches, loss_of, tokens_of, backward, agree)
    check_group(group)
    mine = list(micro_batches)
    group = _group_of(model, group)
    step = _meet(len(mine), _counted([tokens_of(m) for m in mine]), _facts(model, agree), group)
    longest = max(step.micro_batches)
    spare = _spare(mine, step, group) if min(step.micro_batches) < longest else None
    factor = (1 if model is None else world_size(group)) / max(1, step.tokens)
    losses: list[TokenLoss] = []
    for i in range(longest):
        counts = i < len(mine)
        with _reducing(model, i == longest - 1 or (i == 0 and _learns_its_graph(model))):
            loss = _checked(loss_of(mine[i] if counts else spare))  # type: ignore[arg-type]
            backward(loss.total * (factor if counts else 0.0))
        loss = loss.detach()
        losses.append(loss if counts else TokenLoss(*(None if t is None else torch.zeros_like(t) for t in loss)))  # type: ignore[arg-type]
    whole = sum_over_ranks(sum(losses[1:], start=losses[0]), group)
    if int(whole.tokens) != step.tokens:
        raise RuntimeError(
            f"tokens_of counted {step.tokens} tokens in this step and the losses {int(whole.tokens)}, so the gradients "
            "were divided by a wrong number; count the targets that the criterion does not ignore"
        )
    return whole


def sum_over_ranks(loss: TokenLoss, group: ProcessGroup | None) -> TokenLoss:
    """The loss of all ranks' tokens, detached: each field summed over the group in one collective."""
    if not isinstance(loss, TokenLoss):
        raise TypeError(f"loss is {_kind(loss)}; it must be a seqpar.TokenLoss")
    if world_size(group) == 1:
        return loss.detach()
    fields = [torch.zeros_like(loss.total) if t is None else t for t in loss]
    sums = group_sum(torch.stack([t.detach().to(torch.float64) for t in fields]), group)
    whole = (None if t is None else s.to(t.dtype) for t, s in zip(loss, sums, strict=True))
    return TokenLoss(*whole)  # type: ignore[arg-type]


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _check_arguments(
    micro_batches: object, loss_of: object, tokens_of: object, backward: object, agree: object
) -> None:
    if not isinstance(micro_batches, Iterable):
        raise TypeError(f"micro_batches is {_kind(micro_batches)}; it must be an iterable of this rank's micro-batches")
    for name, function in (("loss_of", loss_of), ("tokens_of", tokens_of), ("backward", backward)):
        if not callable(function):
            raise TypeError(f"{name} is {_kind(function)}; it must be a function")
    if agree is not None and not isinstance(agree, Mapping):
        raise TypeError(f"agree is {_kind(agree)}; it must be a dict of names and what is to be the same")


def _counted(counts: Sequence[int | Tensor]) -> int:
    """Their sum, which a device is waited for once."""
    for count in counts:
        _check_count(count)
    total = float(sum(count.reshape(()) if isinstance(count, Tensor) else count for count in counts))
    if not total >= 0 or total % 1:
        raise ValueError(f"tokens_of counted {total:g} tokens; it must return whole numbers, at least 0")
    return int(total)


def _check_count(count: object) -> None:
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(f"tokens_of returned a tensor of shape {tuple(count.shape)}; it must return one number")
    elif isinstance(count, bool) or not isinstance(count, Real):
        raise TypeError(f"tokens_of returned {_kind(count)}; it must return a whole number, how many tokens count")
    elif not float(count) >= 0 or float(count) % 1:
        raise ValueError(f"tokens_of returned {count}; it must return a whole number, at least 0")


def _checked(loss: TokenLoss) -> TokenLoss:
    if not isinstance(loss, TokenLoss):
        raise TypeError(
            f"loss_of returned {_kind(loss)}; it must return a seqpar.TokenLoss, the summed loss and its tokens: "
            "TokenLoss(total, tokens)"
        )
    if not loss.total.requires_grad:
        raise ValueError("loss_of returned a loss without a gradient; call the model outside torch.no_grad()")
    return loss


def _group_of(model: nn.Module | None, group: ProcessGroup | None) -> ProcessGroup | None:
    own: ProcessGroup | None = getattr(model, "process_group", None)
    if model is not None and not hasattr(model, "no_sync") and not hasattr(model, "set_requires_gradient_sync"):
        raise TypeError(
            f"model is a {type(model).__name__}; it must be what reduces the gradients, a DistributedDataParallel or a "
            "module that fully_shard was called on; pass None where nothing does"
        )
    if model is None or (own is not None and (group is None or group.size() == own.size())):
        return own if group is None else group
    if group is None:
        raise ValueError("name the group of ranks that FSDP2 reduces over: group=torch.distributed.group.WORLD for all")
    if own is not None:
        raise ValueError(f"group has {group.size()} ranks and the model reduces gradients over {own.size()}")
    return group


def _facts(model: nn.Module | None, agree: Mapping[str, object] | None) -> dict[str, object]:
    facts = dict(agree or {})
    if model is not None:
        trained = [p for p in model.parameters() if p.requires_grad]
        facts["the trainable parameters"] = f"{len(trained)} tensors, {sum(p.numel() for p in trained)} numbers"
        facts["the parameters' dtypes"] = sorted({str(p.dtype) for p in trained})
    return facts


def _meet(micro_batches: int, tokens: int, facts: dict[str, object], group: ProcessGroup | None) -> _Step:
    """The one collective before the first forward."""
    everyone = check_agreement(facts, group, [micro_batches, tokens])
    step = _Step([row[0] for row in everyone], sum(row[1] for row in everyone))
    if not max(step.micro_batches):
        raise ValueError(f"there is no micro-batch on any of {len(everyone)} ranks, so there is no step to take")
    return step


def _spare(mine: list[MicroBatch], step: _Step, group: ProcessGroup | None) -> MicroBatch | None:
    """A micro-batch to run with the factor 0: this rank's first, or, on a rank that has none, another rank's.

    Where a rank has none, every rank comes here, and the first that has some lends: its tensors go over the CPU.
    """
    if min(step.micro_batches):
        return mine[0]
    lender = next(rank for rank, count in enumerate(step.micro_batches) if count)
    lent = _without_accelerator(mine[0]) if rank_in(group) == lender else None
    borrowed, was_on_accelerator = broadcast_object(lent, lender, group)
    if mine:
        return mine[0]
    here = torch.accelerator.current_accelerator() if was_on_accelerator else None
    return borrowed if here is None else map_tensors(lambda t: t.to(here), borrowed)  # type: ignore[no-any-return]


def _without_accelerator(micro_batch: Any) -> tuple[Any, bool]:
    on_accelerator = any(isinstance(leaf, Tensor) and not leaf.is_cpu for leaf in leaves(micro_batch))
    return map_tensors(lambda t: t.detach().cpu(), micro_batch), on_accelerator


def _learns_its_graph(model: nn.Module | None) -> bool:
    """Whether DDP with `static_graph` is before its first backward, which must reduce.

    A reduction more does no harm: the mean of what is the same on all ranks already leaves it as it is.
    """
    return bool(getattr(model, "static_graph", False)) and not getattr(
        model, "_static_graph_delay_allreduce_enqueued", True
    )


@contextlib.contextmanager
def _reducing(model: nn.Module | None, reduce: bool) -> Iterator[None]:
    """Forward and backward of a micro-batch, after which gradients are reduced over the ranks, or are not yet."""
    wrapper: Any = model
    if model is None or reduce:
        yield
    elif hasattr(wrapper, "set_requires_gradient_sync"):
        wrapper.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            wrapper.set_requires_gradient_sync(True)
    else:
        with wrapper.no_sync():
            yield

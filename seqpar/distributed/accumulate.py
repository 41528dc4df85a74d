"""Accumulate the gradient of a step's mean loss over micro-batches and ranks, exactly.

The gradient wanted is that of (summed loss of all tokens) / (number of all tokens). A mean of the micro-batches' means
differs from it whenever their token counts differ. So the tokens of the whole step are counted before its first
backward, and each micro-batch's summed loss is divided by that one number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seqpar.core.checks import check_function, check_number, check_shapes, check_type, kind_of
from seqpar.core.device_facts import is_on_host
from seqpar.core.structures import copy_containers, leaves, map_tensors
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.collectives import (
    THIS_PROCESS,
    ThisProcess,
    broadcast_object,
    check_agreement,
    check_group,
    group_sum,
    rank_in,
    ranks_of,
    world_size,
)
from seqpar.distributed.micro_batches import MicroBatch, draw
from seqpar.distributed.reducers import (
    check_forward,
    check_has_all,
    check_reduces_all,
    refuse_fsdp1,
    refuse_no_sync,
    refuse_unnamed,
    watch_reducers,
    without_remains,
)
from seqpar.distributed.torch_private import parameter_groups, records_static_graph


class _Step(NamedTuple):
    """The counts of all ranks, exchanged before the first forward."""

    micro_batches: list[int]
    """The number of micro-batches of each rank."""
    tokens: int
    """The number of target tokens on all ranks together."""


def accumulate_gradients(
    micro_batches: Iterable[MicroBatch],
    loss_of: Callable[[MicroBatch], TokenLoss],
    tokens_of: Callable[[MicroBatch], int | Tensor],
    *,
    model: nn.Module | None = None,
    group: ProcessGroup | ThisProcess | None = None,
    backward: Callable[[Tensor], object] = Tensor.backward,
    agree: Mapping[str, object] | None = None,
) -> TokenLoss:
    """Add to `.grad` the gradient of (summed loss) / (tokens) of all ranks' micro-batches, as if they were one batch.

    Plain equivalent, with every rank's micro-batches on one device:
    `loss = sum(loss_of(m) for m in all_micro_batches); (loss.total / loss.tokens).backward()`.

        loss = seqpar.accumulate_gradients(
            micro_batches,
            lambda m: ddp(m.src, m.tgt_in, target=m.tgt_out),         # ddp wraps a ModelWithLoss
            tokens_of=lambda m: (m.tgt_out != pad).sum(),
            model=ddp,
        )
        optimizer.step()

    One small collective at the start exchanges the counts of tokens and micro-batches, and one at the end sums the
    loss. Gradients are reduced over the ranks in the last micro-batch only. A rank with fewer micro-batches than the
    others still takes part in every forward and backward: it runs one of its own again, or one borrowed from another
    rank, with the factor 0. With FSDP2, whose forwards communicate, every micro-batch must call the same units. If one
    rank raises an error, the others wait until the group's timeout. After an error `.grad` may hold part of the step's
    gradient; after `zero_grad` the next step has only its own gradient, also with FSDP2.

    Args:
        micro_batches: this rank's micro-batches, of any type. They must be picklable if another rank may have none. All
            are drawn before the first one runs, so a loader must not fill the same tensors again.
        loss_of: returns the summed loss of one micro-batch; with `model`, it calls the model. It gets a copy of the
            micro-batch's dicts and lists (not of its tensors), and may `pop` from them.
        tokens_of: returns how many targets of a micro-batch are not ignored, the same number as `loss_of(m).tokens`.
        model: the module that reduces the gradients: a DistributedDataParallel, or a module `fully_shard` was called
            on. Both take the mean over ranks, which is compensated for: leave FSDP2's divide factor unchanged, and let
            a communication hook of your own take the mean as well. None:
            gradients are this rank's contribution, and their sum over `group` is the gradient; `loss_of` must not
            call a module that reduces them.
        group: the ranks that gradients are reduced over and that hold different tokens. Ranks with the same tokens, as
            with a split vocabulary, must not be in it: they would be counted twice. None means DDP's own group; FSDP2
            needs an explicit group of all ranks of its mesh (with HSDP, of both axes): `dist.group.WORLD` if that is
            every rank. Without a model, a group is needed if there are several ranks: `seqpar.THIS_PROCESS` if no other
            rank has tokens of this step.
        backward: takes the scaled loss, such as `lambda loss: scaler.scale(loss).backward()`.
        agree: further values that must be the same on all ranks, by name (`{"step": step, "vocabulary": len(vocab)}`);
            no further collective is needed. The number and size of the parameters are always compared.

    Returns:
        `TokenLoss` of the whole step, detached, the same on every rank; `.mean` is the number to log. A step without
        tokens has zero gradients.

    Raises:
        RuntimeError: on every rank: the ranks disagree, or `tokens_of` and the losses count different numbers of
            tokens. The call is inside `model.no_sync()`, or `loss_of` does not call the DistributedDataParallel.
        ValueError: on every rank: no rank has a micro-batch. Several ranks, and neither a model nor a group. A loader
            that filled the memory of a micro-batch again. A DistributedDataParallel or FSDP2 module that `loss_of`
            calls but that is not given as model. FSDP2 without a group, or with a divide factor other than the number
            of its ranks; a group of ranks other than those that gradients are reduced over. A trainable parameter that
            nothing reduces: ignored, unfrozen or added after wrapping, or outside the model.
        TypeError: a model that does not reduce gradients, or FSDP1; a total in float16 or bfloat16; an argument or a
            returned value of a wrong type.

    Example:
        >>> generator = nn.Linear(8, 50)
        >>> engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
        >>> micro_batches = [(torch.randn(n, 8), torch.randint(50, (n,))) for n in (5, 2)]
        >>> loss = seqpar.accumulate_gradients(micro_batches, lambda m: engine(*m), tokens_of=lambda m: len(m[1]))
        >>> hidden, target = (torch.cat(parts) for parts in zip(*micro_batches))
        >>> (plain,) = torch.autograd.grad(F.cross_entropy(generator(hidden), target), generator.weight)
        >>> torch.allclose(generator.weight.grad, plain, atol=1e-6)
        True
    """
    check_type(micro_batches, "micro_batches", Iterable, "an iterable of this rank's micro-batches")
    for name, function in (("loss_of", loss_of), ("tokens_of", tokens_of), ("backward", backward)):
        check_function(function, name)
    check_type(agree, "agree", (Mapping, NoneType), "a dict of names and the values that must be the same")
    group = _group_of(model, group)
    mine = draw(micro_batches)
    tokens = _count([tokens_of(copy_containers(m)) for m in mine])
    step = _exchange_counts(len(mine), tokens, _facts(model, agree), group)
    longest = max(step.micro_batches)
    # mean over P ranks of (P x this rank's sum / tokens) = sum of all ranks / tokens
    averaged_over = 1 if model is None else world_size(group)
    factors = [averaged_over / max(1, step.tokens)] * len(mine)
    to_run = mine
    if min(step.micro_batches) < longest:
        # Hooks communicate in forward and backward, so every rank must run the same number of them
        missing = longest - len(mine)
        to_run = mine + [_filler(mine, step, group)] * missing
        factors += [0.0] * missing
    losses: list[TokenLoss] = []
    unnamed = watch_reducers(loss_of) if model is None else []
    # The graph of a micro-batch is freed by its own backward, before the next one's forward
    for i, micro_batch in enumerate(to_run):
        # The backward that records a static graph must not run under `no_sync`. A further reduction does no harm: the
        # last one averages these gradients again, which are already equal on all ranks and so do not change
        reduce = i == longest - 1 or (i == 0 and records_static_graph(model))
        # `backward` is inside as well: Lightning prepares the reduction there, others in forward
        with without_remains(model), _reducing(model, reduce), check_forward(model):
            loss = _check_loss(loss_of(copy_containers(micro_batch)))
            # In every micro-batch, because only some may use a certain part of the model, or a second model
            if model is not None:
                check_has_all(loss.total, model)
            else:
                refuse_unnamed(unnamed, loss.total)
            backward(loss.total * factors[i])
        losses.append(loss.detach())
        # Its nodes may hold more than the saved tensors, which backward has freed
        del loss
        # A borrowed micro-batch counts for the rank that lent it
        if i >= len(mine):
            losses[i] = map_tensors(torch.zeros_like, losses[i])
    whole = sum_over_ranks(sum(losses[1:], start=losses[0]), group)
    # The two numbers are the same on every rank, so either all ranks raise or none does
    if int(whole.tokens) != step.tokens:
        raise RuntimeError(
            f"tokens_of counted {step.tokens} tokens in this step and the losses {int(whole.tokens)}, so the gradients "
            "were divided by the wrong number; count the targets that the criterion does not ignore"
        )
    return whole


def sum_over_ranks(loss: TokenLoss, group: ProcessGroup | None) -> TokenLoss:
    """Return the loss of all ranks' tokens, detached: each field summed over the group, in one collective.

    Example:
        >>> hidden, weight, target = torch.randn(6, 8), torch.randn(50, 8), torch.randint(50, (6,))
        >>> own = seqpar.linear_cross_entropy(hidden, weight, target)
        >>> whole = seqpar.sum_over_ranks(own, torch.distributed.group.WORLD)
        >>> whole.tokens  # of one rank; of two, the tokens of both
        tensor(6)
    """
    check_type(loss, "loss", TokenLoss, "a seqpar.TokenLoss")
    if world_size(group) == 1:
        return loss.detach()
    # In float64, counts of tokens are exact up to 2^53, so they may share the losses' collective
    zero = torch.zeros((), dtype=torch.float64, device=loss.total.device)
    numbers = [zero if t is None else t.detach().to(zero) for t in loss]
    has = [zero + (t is not None) for t in loss]
    # As many numbers on every rank, whatever its criterion counts
    sums, ranks = group_sum(torch.stack([torch.stack(numbers), torch.stack(has)]), group)
    world = world_size(group)
    fields = zip(sums, loss, ranks.tolist(), strict=True)
    return TokenLoss(*[None if t is None or count < world else s.to(t.dtype) for s, t, count in fields])  # type: ignore[arg-type]


def _count(counts: Sequence[int | Tensor]) -> int:
    """Return the sum of the counts; tensors are summed on their device, so that it is waited for only once."""
    tensors = [count for count in counts if isinstance(count, Tensor)]
    numbers = [count for count in counts if not isinstance(count, Tensor)]
    for tensor in tensors:
        check_shapes(tensor.numel() == 1, "one number, the count of tokens", **{"what tokens_of returned": tensor})
    for number in numbers:
        check_number(number, "what tokens_of returned")
    # A sum in their own dtype might wrap around: three times 200 is 88 in uint8
    wide = [tensor if tensor.is_floating_point() else tensor.long() for tensor in tensors]
    total = float(sum(tensor.reshape(()) for tensor in wide))
    # Sums of float64 are exact up to 2^53 tokens
    total += float(sum(numbers))
    # Not `< 0`, which is False for nan
    wrong = [number for number in (*numbers, total) if number % 1 or not number >= 0]
    if wrong:
        raise ValueError(f"tokens_of counted {wrong[0]:g} tokens; it must return whole numbers, at least 0")
    return int(total)


def _check_loss(loss: TokenLoss) -> TokenLoss:
    """Return the loss; raise unless it is a TokenLoss that a backward can start from."""
    check_type(loss, "loss_of", TokenLoss, "a seqpar.TokenLoss(total, tokens), of sums", verb="returned")
    if loss.total.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"loss_of returned a total in {loss.total.dtype}, which rounds a sum and with it the gradient; return it "
            "in float32 or wider (with FSDP2 leave output_dtype unset)"
        )
    if not loss.total.requires_grad:
        raise ValueError("loss_of returned a loss without a gradient; call the model outside torch.no_grad()")
    return loss


def _group_of(model: nn.Module | None, group: ProcessGroup | ThisProcess | None) -> ProcessGroup | None:
    """Return the group to count tokens over, which must be the one that the model reduces gradients over."""
    alone = group is THIS_PROCESS
    if isinstance(group, ThisProcess):
        group = None
    check_group(group)
    if model is None:
        if group is None and not alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"neither model nor group is given, and there are {dist.get_world_size()} ranks; pass model=, the "
                "DistributedDataParallel or the module of fully_shard, or group=, the ranks that have different tokens "
                "(torch.distributed.group.WORLD is all), or group=seqpar.THIS_PROCESS if no other rank has tokens of "
                "this step"
            )
        return group
    if not hasattr(model, "no_sync") and not hasattr(model, "set_requires_gradient_sync"):
        raise TypeError(
            f"model is {kind_of(model)}; it must be what reduces the gradients, a DistributedDataParallel or a "
            "module that fully_shard was called on; pass None where nothing does"
        )
    refuse_fsdp1(model)
    refuse_no_sync(model)
    check_reduces_all(model)
    # DDP says what its group is, FSDP2 does not
    own: ProcessGroup | None = getattr(model, "process_group", None)
    if own is not None and group is None and not alone:
        return own
    if group is None and not alone:
        raise ValueError("name the group of ranks that FSDP2 reduces over: group=torch.distributed.group.WORLD for all")
    counted = frozenset({dist.get_rank()}) if group is None else ranks_of(group)
    # Two handles of the same ranks are different objects, so ranks are compared
    reductions = (
        [(name or "the model", *parameters.reduction()) for name, parameters in parameter_groups(model)]
        if own is None
        else [("the model", ranks_of(own), len(ranks_of(own)))]
    )
    for unit, ranks, divisor in reductions:
        if not ranks <= counted or divisor != len(counted):
            raise ValueError(
                f"the gradients of {unit} are summed over the {len(ranks)} ranks {sorted(ranks)!r:.60} and divided by "
                f"{divisor:g}, and group has the {len(counted)} ranks {sorted(counted)!r:.60}; pass the group of those "
                "ranks (WORLD is all) and leave the divide factor unchanged, or, for experts that process other ranks' "
                f"tokens, set_gradient_divide_factor({len(counted)})"
            )
    return group


def _facts(model: nn.Module | None, agree: Mapping[str, object] | None) -> dict[str, object]:
    """Return what must be the same on all ranks: the caller's facts, and the parameters that are trained."""
    facts = dict(agree or {})
    if model is not None:
        trained = [p for p in model.parameters() if p.requires_grad]
        facts["the trainable parameters"] = f"{len(trained)} tensors, {sum(p.numel() for p in trained)} numbers"
        facts["the parameters' dtypes"] = sorted({str(p.dtype) for p in trained})
    return facts


def _exchange_counts(micro_batches: int, tokens: int, facts: dict[str, object], group: ProcessGroup | None) -> _Step:
    """Return every rank's counts from the one collective before the first forward, which also compares the facts."""
    everyone = check_agreement(facts, group, [micro_batches, tokens])
    step = _Step([row[0] for row in everyone], sum(row[1] for row in everyone))
    if not max(step.micro_batches):
        raise ValueError(f"there is no micro-batch on any of {len(everyone)} ranks, so there is no step to take")
    return step


def _filler(mine: list[MicroBatch], step: _Step, group: ProcessGroup | None) -> MicroBatch:
    """Return a micro-batch to run with the factor 0: this rank's first, or, on a rank without any, another rank's.

    If any rank has none, all ranks take part in a broadcast from the first rank that has one. Its tensors are sent
    through the CPU.
    """
    if min(step.micro_batches):
        return mine[0]
    lender = next(rank for rank, count in enumerate(step.micro_batches) if count)
    # Only the lender sends something; the others pass None to the collective
    lent: tuple[MicroBatch, bool] | None = None
    if rank_in(group) == lender:
        on_accelerator = any(isinstance(leaf, Tensor) and not is_on_host(leaf) for leaf in leaves(mine[0]))
        lent = map_tensors(lambda t: t.detach().cpu(), mine[0]), on_accelerator
    borrowed, was_on_accelerator = broadcast_object(lent, lender, group)
    if mine:
        return mine[0]
    here = torch.accelerator.current_accelerator()
    if was_on_accelerator and here is not None:
        borrowed = map_tensors(lambda t: t.to(here), borrowed)
    return borrowed  # type: ignore[no-any-return]


@contextlib.contextmanager
def _reducing(model: nn.Module | None, reduce: bool) -> Iterator[None]:
    """Enter the context of one micro-batch's forward and backward; `reduce` says whether it reduces the gradients."""
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

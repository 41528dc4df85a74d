"""Split time steps over ranks, and make next-token targets across the boundaries between them.

The loss itself does not change: each rank gives the engine its own time steps, and the sum is divided by the tokens of
all data x sequence ranks. Parameter gradients are summed over the sequence ranks as over the data ranks, by one
DistributedDataParallel or `fully_shard` over both (`accumulate_gradients` with that group), or explicitly, with
`copy_to_group(parameter, group)`. If every rank has all hidden states and only the loss is split, split
`copy_to_group(hidden, group)`, and likewise every other tensor with one row per token that needs a gradient: its
gradient is the sum of the ranks' gradients.

Shape suffixes: B batch, T all time steps, t this rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from seqpar.core.checks import (
    CLASS_INDICES,
    check_choice,
    check_dense,
    check_dim,
    check_dtype,
    check_integer,
    check_joinable,
    check_one_device,
    check_type,
)
from seqpar.core.chunks import even_sizes
from seqpar.distributed.collectives import check_agreement, group_gather, rank_in, world_size

Order = Literal["contiguous", "zigzag"]
"""Which time steps each rank has.

"contiguous": one piece; rank r has the r-th of `world` pieces.
"zigzag": two pieces, the r-th and the r-th last of 2 x `world`. Under a causal mask later steps attend to more, and
this order gives every rank the same amount of work (as in the context parallelism of Llama 3).
"""


def time_steps(time: int, rank: int, world: int, order: Order = "contiguous") -> Tensor:
    """Return the time steps of a rank (int64, in its own order), which are also the position ids for its model.

    The lengths of the pieces differ by at most one step, longer ones first; with fewer steps than pieces the last
    pieces are empty. In contiguous `order` rank r has the r-th of `world` pieces; in zigzag order the r-th and the r-th
    last of 2 x `world`, which gives every rank the same amount of work under a causal mask (Llama 3's context
    parallelism).

    Raises:
        ValueError: an unknown order, a rank outside [0, world), or a negative time.
        TypeError: an argument that is not a whole number.

    Example:
        >>> seqpar.time_steps(8, rank=0, world=2)
        tensor([0, 1, 2, 3])
        >>> seqpar.time_steps(8, rank=0, world=2, order="zigzag")
        tensor([0, 1, 6, 7])
    """
    check_choice(order, "order", get_args(Order))
    for name, value, least in (("time", time, 0), ("world", world, 1)):
        check_integer(value, name, least)
    check_integer(rank, "rank", 0, world - 1)
    # Piece p is [ends[p] - sizes[p], ends[p])
    sizes = part_sizes(time, world * len(_pieces_of(rank, world, order)))
    ends = list(accumulate(sizes))
    return torch.cat([torch.arange(ends[p] - sizes[p], ends[p]) for p in _pieces_of(rank, world, order)])


def part_sizes(length: int, parts: int) -> list[int]:
    """Return `parts` sizes that add up to `length` and differ by at most one, larger ones first; some may be 0."""
    sizes = even_sizes(length, parts)
    return sizes + [0] * (parts - len(sizes))


def _pieces_of(rank: int, world: int, order: Order) -> list[int]:
    """Return the numbers, in the order of time, of the pieces that a rank has."""
    if order == "contiguous":
        return [rank]
    return [rank, 2 * world - 1 - rank]


def split_time(tensor: Tensor, group: ProcessGroup | None, dim: int = 1, order: Order = "contiguous") -> Tensor:
    """Return this rank's time steps of a tensor that every rank has in full.

    It is differentiable; the gradient of the whole tensor is that of this rank's steps only. `order` is that of
    `time_steps`.

    Plain equivalent: `tensor.index_select(dim, time_steps(tensor.size(dim), rank, world, order))`.

    Raises:
        TypeError, ValueError: not a dense tensor, no such dimension, not a group, or an unknown order.

    Example:
        >>> tokens = torch.arange(8).unsqueeze(0)
        >>> seqpar.split_time(tokens, torch.distributed.group.WORLD)  # of two ranks, the first would have 0 to 3
        tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    check_dense(tensor, "tensor")
    check_dim(dim, tensor=tensor)
    steps = time_steps(tensor.size(dim), rank_in(group), world_size(group), order)
    return tensor.index_select(dim, steps.to(tensor.device))


def join_time(parts: Sequence[Tensor], dim: int = 1, order: Order = "contiguous") -> Tensor:
    """Return the whole tensor, given all ranks' tensors in rank order: the inverse of `split_time`; differentiable.

    `order` is that of `time_steps`.

    Raises:
        ValueError: sizes other than those of `split_time`, no tensors, or an unknown order or dimension.
        TypeError: not dense tensors, or not all of the same dtype.

    Example:
        >>> tokens = torch.arange(8).unsqueeze(0)
        >>> parts = [tokens[:, seqpar.time_steps(8, rank, world=2, order="zigzag")] for rank in range(2)]
        >>> parts
        [tensor([[0, 1, 6, 7]]), tensor([[2, 3, 4, 5]])]
        >>> torch.equal(seqpar.join_time(parts, order="zigzag"), tokens)
        True
    """
    check_choice(order, "order", get_args(Order))
    _check_parts(parts, dim)
    sizes = [part.size(dim) for part in parts]
    steps = [time_steps(sum(sizes), rank, len(parts), order) for rank in range(len(parts))]
    _check_sizes(sizes, [len(s) for s in steps], order)
    # Step t is at position inverse_T[t] of the tensors put one after another
    inverse_T = torch.argsort(torch.cat(steps)).to(parts[0].device)
    return torch.cat(list(parts), dim).index_select(dim, inverse_T)


def _check_parts(parts: Sequence[Tensor], dim: int) -> None:
    """Raise unless they are dense tensors that may differ only in their size along `dim`."""
    check_type(parts, "parts", (list, tuple), "a list of all ranks' tensors, in rank order")
    if not parts:
        raise ValueError("parts is empty; it must have every rank's tensor, in rank order")
    check_dense(parts[0], "parts[0]")
    dtype = parts[0].dtype
    named = {f"parts[{i}]": part for i, part in enumerate(parts)}
    for name, part in named.items():
        check_dtype(part, name, (dtype,), f"be that of parts[0], {dtype}")
    check_joinable(dim, **named)
    check_one_device(**named)


def _check_sizes(sizes: list[int], expected: list[int], order: Order) -> None:
    """Raise ValueError unless every rank has as many time steps as the order gives it."""
    if sizes != expected:
        raise ValueError(
            f"the ranks have {sizes} time steps, {sum(sizes)} in all, and {order} order gives them {expected}; cut "
            "with split_time"
        )


def next_token_targets(
    tokens: Tensor, group: ProcessGroup | None, *, order: Order = "contiguous", ignore_index: int = -100
) -> Tensor:
    """Return each token's successor (a decoder's target), if each rank has only its own time steps of `tokens` (B, t).

    `order` is that of `time_steps`.

    Plain equivalent, on whole tokens (B, T):
    `split_time(torch.cat([tokens[:, 1:], torch.full((B, 1), ignore_index)], 1), group, order=order)`.

    The targets are int64 whatever dtype the tokens have, because a narrower one cannot hold every `ignore_index`.

    The last target of a piece is the first token of the next piece, on whichever rank that is; one small collective
    exchanges the first tokens. Pieces may be empty. In contiguous order ranks may have any number of steps.

    Raises:
        TypeError, ValueError: tokens that are not (batch, time) indices, zigzag sizes other than those of `split_time`,
            an unknown order, or an ignore_index that is not an int64.
        RuntimeError: the ranks disagree on the batch size.

    Example:
        >>> tokens = torch.tensor([[5, 6, 7], [8, 9, 4]])  # of a single rank
        >>> seqpar.next_token_targets(tokens, torch.distributed.group.WORLD)
        tensor([[   6,    7, -100],
                [   9,    4, -100]])
    """
    check_choice(order, "order", get_args(Order))
    check_integer(ignore_index, "ignore_index")
    check_dense(tokens, "tokens")
    if tokens.dtype not in CLASS_INDICES or tokens.dim() != 2:
        raise TypeError(f"tokens have shape {tuple(tokens.shape)}, {tokens.dtype}; they must be (batch, time) indices")
    tokens = tokens.long()
    rank = rank_in(group)
    world = world_size(group)
    batch, time = tokens.shape
    times = [theirs for (theirs,) in check_agreement({"the batch size": batch}, group, [time])]
    # In zigzag order the sizes must be those of `split_time`, or it would not be known which piece follows which
    if order == "zigzag":
        _check_sizes(times, [len(time_steps(sum(times), r, world, order)) for r in range(world)], order)
    pieces = _pieces_of(rank, world, order)
    # even_sizes puts larger pieces first, so of a rank's two pieces the first has the odd step
    mine_pBt = tokens.tensor_split([-(-time // 2)][: len(pieces) - 1], dim=1)
    first_tokens = _first_tokens(mine_pBt, batch, order, group)
    after_the_end_B1 = tokens.new_full((batch, 1), ignore_index)
    targets = []
    for piece, piece_Bt in zip(pieces, mine_pBt, strict=True):
        # Empty pieces have no first token, so the next piece that has one is taken
        following = (first_tokens[p] for p in sorted(first_tokens) if p > piece)
        next_B1 = next(following, after_the_end_B1)
        # An empty piece gets no target, although `next_B1` has a column
        targets.append(torch.cat([piece_Bt[:, 1:], next_B1], 1)[:, : piece_Bt.size(1)])
    return torch.cat(targets, 1)


def _first_tokens(pieces: Sequence[Tensor], batch: int, order: Order, group: ProcessGroup | None) -> dict[int, Tensor]:
    """Return the first tokens (B, 1) of all ranks' pieces by the number of the piece, without the empty ones."""
    columns = []
    for piece_Bt in pieces:
        # A row in front of the tokens says whether the piece has any: every rank must send the same shape
        column = piece_Bt.new_zeros(1 + batch, 1)
        if piece_Bt.size(1):
            column[0] = 1
            column[1:] = piece_Bt[:, :1]
        columns.append(column)
    found: dict[int, Tensor] = {}
    for rank, theirs in enumerate(group_gather(torch.stack(columns), group)):
        for piece, column in zip(_pieces_of(rank, world_size(group), order), theirs, strict=True):
            if column[0]:
                found[piece] = column[1:]
    return found

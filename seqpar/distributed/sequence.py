"""Time steps split over ranks: who has which, and next-token targets across the seams.

The loss itself needs nothing new: each rank gives the engine its time steps, and the one division is by the tokens of
data x sequence ranks. Parameter gradients are summed over the sequence ranks as over the data ranks, by one
DistributedDataParallel or `fully_shard` over both (`accumulate_gradients` with that group), or by hand, with
`copy_to_group(parameter, group)`. Where hidden states are whole on every rank and only the loss is split, cut
`copy_to_group(hidden, group)`: its gradient is the sum of all ranks' parts.

Shape suffixes: B batch, T all time steps, t this rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from seqpar.core.chunks import even_sizes
from seqpar.core.tensor_checks import CLASS_INDICES, check_dense
from seqpar.distributed.collectives import gather_numbers, group_gather, rank_in, world_size
from seqpar.distributed.vocab_parallel import check_whole
from seqpar.losses.target_checks import check_ignore_index

Order = Literal["contiguous", "zigzag"]
"""Which time steps a rank has.

"contiguous": one piece; rank r has the r-th of `world` pieces.
"zigzag": two pieces, the r-th and the r-th last of 2 x `world`, so that under a causal mask, where later steps attend
to more, every rank has the same work (the order of Llama 3's context parallelism).
"""


def time_steps(time: int, rank: int, world: int, order: Order = "contiguous") -> Tensor:
    """The time steps of a rank, as int64 indices in the order it holds them: also the position ids its model needs.

    Pieces differ by one step at most, larger ones first; with fewer steps than pieces the last pieces are empty.

    Raises:
        ValueError: an unknown order; a rank outside [0, world); time below 0.
        TypeError: what is no whole number.
    """
    _check_order(order)
    for name, value, least in (("time", time, 0), ("world", world, 1), ("rank", rank, 0)):
        check_whole(value, name, least)
    if rank >= world:
        raise ValueError(f"rank is {rank}; it must be in [0, {world})")
    pieces = world if order == "contiguous" else 2 * world
    sizes = part_sizes(time, pieces)
    ends = list(accumulate(sizes))
    return torch.cat([torch.arange(ends[p] - sizes[p], ends[p]) for p in _pieces_of(rank, world, order)])


def _check_order(order: object) -> None:
    if order not in ("contiguous", "zigzag"):
        raise ValueError(f"order is {order!r}; it must be 'contiguous' or 'zigzag'")


def _check_dim(dim: object, tensor: Tensor) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim is {dim!r}; it must be an int, the dimension of time")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim is {dim!r}; the tensor has shape {tuple(tensor.shape)}")


def part_sizes(length: int, parts: int) -> list[int]:
    """How many of `length` each of `parts` has: sizes that differ by one at most, larger ones first; some may be 0."""
    sizes = even_sizes(length, parts)
    return sizes + [0] * (parts - len(sizes))


def _pieces_of(rank: int, world: int, order: Order) -> list[int]:
    return [rank] if order == "contiguous" else [rank, 2 * world - 1 - rank]


def split_time(tensor: Tensor, group: ProcessGroup | None, dim: int = 1, order: Order = "contiguous") -> Tensor:
    """This rank's time steps of a tensor that every rank has whole; differentiable, with this rank's gradient alone.

    Plain equivalent: `tensor.index_select(dim, time_steps(tensor.size(dim), rank, world, order))`.

    Raises:
        TypeError, ValueError: what is no dense tensor, has no such dimension, is no group; an unknown order.
    """
    check_dense(tensor, "tensor")
    _check_dim(dim, tensor)
    steps = time_steps(tensor.size(dim), rank_in(group), world_size(group), order)
    return tensor.index_select(dim, steps.to(tensor.device))


def join_time(parts: Sequence[Tensor], dim: int = 1, order: Order = "contiguous") -> Tensor:
    """The whole tensor from all ranks' parts, in rank order: the opposite of `split_time`; differentiable.

    Raises:
        ValueError: parts whose sizes are not those of `split_time`; no parts; an unknown order or dimension.
        TypeError: parts that are no dense tensors of one dtype.
    """
    _check_order(order)
    _check_parts(parts, dim)
    sizes = [part.size(dim) for part in parts]
    steps = [time_steps(sum(sizes), rank, len(parts), order) for rank in range(len(parts))]
    _check_sizes(sizes, [len(s) for s in steps], order)
    back = torch.argsort(torch.cat(steps)).to(parts[0].device)
    return torch.cat(list(parts), dim).index_select(dim, back)


def _check_parts(parts: Sequence[Tensor], dim: int) -> None:
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"parts is a {type(parts).__name__}; it must be a list of all ranks' tensors, in rank order")
    if not parts:
        raise ValueError("parts is empty; it must have every rank's tensor, in rank order")
    for i, part in enumerate(parts):
        check_dense(part, f"parts[{i}]")
    first = parts[0]
    _check_dim(dim, first)
    for i, part in enumerate(parts):
        shape = list(part.shape)
        if len(shape) == first.dim():
            shape[dim] = first.size(dim)
        if shape != list(first.shape) or part.device != first.device:
            raise ValueError(
                f"parts[{i}] has shape {tuple(part.shape)} on {part.device} and parts[0] {tuple(first.shape)} on "
                f"{first.device}; they may differ in dimension {dim} alone"
            )
        if part.dtype != first.dtype:
            raise TypeError(f"parts[{i}] has dtype {part.dtype} and parts[0] {first.dtype}; they must be the same")


def _check_sizes(sizes: list[int], expected: list[int], order: Order) -> None:
    if sizes != expected:
        raise ValueError(
            f"the ranks have {sizes} time steps, {sum(sizes)} in all, and {order} order gives them {expected}; cut "
            "with split_time"
        )


def next_token_targets(
    tokens: Tensor, group: ProcessGroup | None, *, order: Order = "contiguous", ignore_index: int = -100
) -> Tensor:
    """Each token's successor, where every rank has only its own time steps of `tokens` (B, t): a decoder's targets.

    Plain equivalent, on whole tokens (B, T):
    `split_time(torch.cat([tokens[:, 1:], torch.full((B, 1), ignore_index)], 1), group, order=order)`.

    They are int64, whatever the tokens are: narrower ones have no room for every `ignore_index`.

    The last target of a piece is the first token of the next piece, wherever that is: one small collective carries
    the first tokens. Pieces may be empty. In contiguous order ranks may have any numbers of steps.

    Raises:
        TypeError, ValueError: tokens that are not (batch, time) indices; zigzag pieces that `split_time` did not cut;
            an unknown order; an ignore_index that is no int64.
        RuntimeError: ranks that disagree on the batch size.
    """
    _check_order(order)
    check_ignore_index(ignore_index)
    check_dense(tokens, "tokens")
    if tokens.dtype not in CLASS_INDICES or tokens.dim() != 2:
        raise TypeError(f"tokens have shape {tuple(tokens.shape)}, {tokens.dtype}; they must be (batch, time) indices")
    tokens = tokens.long()
    rank, world = rank_in(group), world_size(group)
    everyone = gather_numbers(list(tokens.shape), group)
    if len({batch for batch, _ in everyone}) > 1:
        raise RuntimeError(f"ranks disagree on the batch size: ranks 0 to {world - 1} have {[b for b, _ in everyone]}")
    times = [time for _, time in everyone]
    if order == "zigzag":
        _check_sizes(times, [len(time_steps(sum(times), r, world, order)) for r in range(world)], order)
    count = 1 if order == "contiguous" else 2
    # even_sizes puts larger pieces first: of a rank's two, the first has the odd step
    mine_pBt = tokens.tensor_split([-(-tokens.size(1) // 2)] if count == 2 else [], dim=1)
    firsts = _firsts(mine_pBt, tokens.size(0), order, group)
    targets = []
    for piece, piece_Bt in zip(_pieces_of(rank, world, order), mine_pBt, strict=True):
        following = next((firsts[p] for p in range(piece + 1, len(firsts)) if firsts[p] is not None), None)
        last = tokens.new_full((tokens.size(0), 1), ignore_index) if following is None else following
        targets.append(torch.cat([piece_Bt[:, 1:], last], 1)[:, : piece_Bt.size(1)])
    return torch.cat(targets, 1)


def _firsts(pieces: Sequence[Tensor], batch: int, order: Order, group: ProcessGroup | None) -> list[Tensor | None]:
    """The first tokens (B, 1) of all pieces of all ranks, in the order of time; None of an empty piece."""
    columns = [p[:, :1] if p.size(1) else p.new_zeros(batch, 1) for p in pieces]
    there = [p.new_full((1, 1), int(p.size(1) > 0)) for p in pieces]
    mine = torch.stack([torch.cat(pair) for pair in zip(there, columns, strict=True)])
    found: dict[int, Tensor | None] = {}
    for rank, theirs in enumerate(group_gather(mine, group)):
        for piece, column in zip(_pieces_of(rank, world_size(group), order), theirs, strict=True):
            found[piece] = column[1:] if column[0] else None
    return [found[piece] for piece in sorted(found)]

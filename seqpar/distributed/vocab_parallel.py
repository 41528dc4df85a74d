"""The vocabulary split over ranks: each has some rows of the weight, and the loss is that of all of them.

Every rank of the group has the same hidden states and targets. Per chunk, one all-reduce finds the largest logit and a
second one, stacked, adds up everything else (the layout of Megatron-LM, Shoeybi et al. 2019, section 3). The softmax is
taken locally and scaled by this rank's share of it, so one rank and many run the same formula. The hidden gradient is
summed over the group once a step; the weight's stays where its rows are.

Shape suffixes: N rows, V this rank's part of the vocabulary, D hidden. `vocab_size` is always the global one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from seqpar.distributed.collectives import (
    check_agreement,
    check_group,
    gather_numbers,
    group_max,
    group_sum,
    rank_in,
    world_size,
)
from seqpar.distributed.wrappers import is_dtensor
from seqpar.losses.softmax_loss import RowSums


def check_whole(value: object, name: str, least: int | None = None) -> None:
    """Raise TypeError unless it is an int, ValueError if it is below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r:.60}; it must be a whole number")
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


@dataclass(frozen=True)
class VocabShard:
    """Which classes this rank has: `start` up to `start` plus the rows of its weight, of `vocab_size` in all.

    Args:
        group: the ranks that share the vocabulary out between them; None is this process alone. On a mesh of data x
            vocabulary it is the vocabulary's group, and each data rank counts its own tokens.
        start: this rank's first class. Shards lie in any order, without gaps; they may be uneven, and empty (but FSDP2
            takes no parameter without rows).
        vocab_size: the classes of all ranks together.

    Raises:
        ValueError: a start outside [0, vocab_size], or a vocabulary without classes.
        TypeError: what is no whole number, or no group.
    """

    group: ProcessGroup | None
    start: int
    vocab_size: int

    def __post_init__(self) -> None:
        check_group(self.group)
        check_whole(self.vocab_size, "vocab_size")
        check_whole(self.start, "start")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size is {self.vocab_size}; the ranks together must have at least one class")
        if not 0 <= self.start <= self.vocab_size:
            raise ValueError(f"start is {self.start}; it must be in [0, {self.vocab_size}]")

    @classmethod
    def of(cls, weight_rows: int, group: ProcessGroup | None) -> VocabShard:
        """The shard of a rank whose weight has `weight_rows` rows, the ranks' parts lying in rank order.

        Every rank of the group calls it, once, when the weight is made: it is one small collective.
        """
        check_whole(weight_rows, "weight_rows", 0)
        rows = [count for (count,) in gather_numbers([weight_rows], group)]
        return cls(group, sum(rows[: rank_in(group)]), sum(rows))

    @property
    def largest_even_part(self) -> int:
        """The rows of an even split, rounded up: what ranks with different parts plan their chunks by."""
        return -(-self.vocab_size // world_size(self.group))

    def meet(self, facts: Mapping[str, object], rows: int = 0, hidden: Tensor | None = None) -> list[list[int]]:
        """Every rank's span of classes and sums of `hidden`, a number each (`span_number`); one collective.

        Raises RuntimeError, on every rank, unless the ranks agree on `facts`.
        """
        sums = (0.0, 0.0)
        if hidden is not None and world_size(self.group) > 1:
            sums = _sums(hidden.detach().flatten(0, -2))
        numbers = span_number(self.start, self.start + rows), _sums_number(sums)
        return check_agreement(facts, self.group, numbers)

    def check(self, rows: int, facts: Mapping[str, object], hidden: Tensor) -> None:
        """Raises RuntimeError, on every rank, unless the ranks agree on `facts` and hidden, and make up the vocabulary.

        One small collective; none where the group is one rank.
        """
        everyone = self.meet(facts, rows, hidden)
        spans = [divmod(number, SPAN) for number, _ in everyone]
        reached = 0
        for start, end in sorted((start, end) for start, end in spans if start < end):
            reached = end if start == reached else -1
        if reached != self.vocab_size:
            said = "; ".join(f"[{start}, {end}) on rank {rank}" for rank, (start, end) in enumerate(spans))
            raise RuntimeError(
                f"the weight's rows are the classes {said}; together they must be [0, {self.vocab_size}), each class "
                "once; VocabShard.of(weight_rows, group) works the starts out"
            )
        sums = [_sums_of(number) for _, number in everyone]
        others = [rank for rank, theirs in enumerate(sums) if _differ(theirs, sums[0], torch.finfo(hidden.dtype).eps)]
        if others:
            raise RuntimeError(
                f"ranks disagree on hidden: ranks {others} have other hidden states than rank 0, and the ranks that "
                "share a vocabulary must have the same; give them one batch and one seed of dropout"
            )

    def locate(self, target_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Each target's row of this rank's weight (any row where another rank has it), and whether it has one."""
        index_N = target_N - self.start
        owned_N = (index_N >= 0) & (index_N < size)
        return index_N.clamp(0, max(0, size - 1)), owned_N

    def combine(self, rows: RowSums, target_N: Tensor) -> RowSums:
        """The row sums of the whole vocabulary: one maximum over the group, then one stacked sum."""
        best_N = group_max(rows.best_N, self.group)
        # Classes that are all masked out (-inf), or none, have no share; their own softmax would be 0/0
        here_N = rows.lse_N.where(rows.best_N != -math.inf, rows.best_N)
        assert rows.argbest_N is not None
        tied_N = rows.best_N == best_N
        # Of classes that tie, the lowest is the prediction: the target's is correct if no tie lies below it
        below_N = tied_N & (self.start + rows.argbest_N < target_N)
        hit_N = (rows.correct_N & tied_N).to(best_N.dtype) - below_N.to(best_N.dtype)
        optional = (rows.sum_N, rows.gold_weight_N, rows.weight_N)
        columns = [(here_N - best_N).exp(), rows.gold_N, hit_N, *(t for t in optional if t is not None)]
        sums = iter(group_sum(torch.stack(columns), self.group))
        lse_N = best_N + next(sums).log()
        gold_N, correct_N = next(sums), next(sums) == 1
        sum_N, gold_weight_N, weight_N = (None if t is None else next(sums) for t in optional)
        return RowSums(
            best_N=best_N,
            lse_N=lse_N,
            gold_N=gold_N,
            correct_N=correct_N,
            sum_N=sum_N,
            gold_weight_N=gold_weight_N,
            weight_N=weight_N,
            share_N=(here_N - lse_N).exp(),
        )


ROUNDINGS = 4
"""Hidden states that are computed on two ranks may differ by so many roundings of their dtype, in all."""
SPAN = 2**32
"""More than any vocabulary has classes."""


def span_number(start: int, end: int) -> int:
    """First class and the one after the last, in one number: a collective of few numbers costs the least."""
    return start * SPAN + end


def _sums(hidden_ND: Tensor) -> tuple[float, float]:
    """A weighted sum of the hidden states, and how large the numbers are that were added up, in float32."""
    rows, width = hidden_ND.shape
    device = hidden_ND.device
    with torch.autocast(device.type, enabled=False):
        column_D = (torch.arange(width, device=device) + 0.5).cos()
        rows_N = (hidden_ND @ column_D.to(hidden_ND.dtype)).float()
        weighted_N = rows_N * (1.3 * torch.arange(rows, device=device) + 0.5).cos()
        total, size = torch.stack([weighted_N.sum(), rows_N.norm()]).tolist()
    return total, size


def _differ(theirs: tuple[float, float], first: tuple[float, float], eps: float) -> bool:
    """Whether two ranks' sums are further apart than rounding, at least float32's; nan is the same as nan."""
    a, b, allowed = theirs[0], first[0], ROUNDINGS * max(eps, torch.finfo(torch.float32).eps) * first[1]
    return not (abs(a - b) <= allowed or a == b or (math.isnan(a) and math.isnan(b)))


def _sums_number(sums: tuple[float, float]) -> int:
    """Both in the 64 bits of one number."""
    (bits,) = struct.unpack("<q", struct.pack("<ff", *sums))
    return int(bits)


def _sums_of(number: int) -> tuple[float, float]:
    total, size = struct.unpack("<ff", struct.pack("<q", number))
    return float(total), float(size)


def local_rows(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, VocabShard]:
    """This rank's rows of a DTensor weight and bias, and which they are; their gradients come back as DTensors.

    Raises:
        TypeError: a weight or bias that is not split by rows, and only so, on a mesh of one axis.
    """
    from torch.distributed.tensor import DTensor, Shard

    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (not isinstance(tensor, DTensor) or tuple(tensor.placements) != (Shard(0),)):
            is_now = f"a DTensor with {tensor.placements}" if isinstance(tensor, DTensor) else "a plain tensor"
            raise TypeError(
                f"{name} is {is_now}; a sharded weight and bias must both be DTensors split by rows, [Shard(0)], on a "
                "mesh of one axis; give other layouts as local tensors with vocab=VocabShard(...)"
            )
    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    # How DTensor cuts: even parts, rounded up, the last ones smaller or empty
    part = -(-weight.size(0) // mesh.size())
    shard = VocabShard(mesh.get_group(), min(mesh.get_local_rank() * part, weight.size(0)), weight.size(0))
    return _local(weight, Shard(0)), None if bias is None else _local(bias, Shard(0)), shard


def local_copy(tensor: Tensor, name: str) -> Tensor:
    """The tensor every rank has; raises TypeError for a DTensor that is cut."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(tensor, DTensor)
    if any(not isinstance(p, Replicate) for p in tensor.placements):
        raise TypeError(
            f"{name} is a DTensor with {tensor.placements}; every rank of the vocabulary's group must have all of it: "
            f"{name}.redistribute(placements=[Replicate()])"
        )
    return _local(tensor, *tensor.placements)


def _local(tensor: Any, *placements: Any) -> Tensor:
    return tensor.to_local(grad_placements=placements)  # type: ignore[no-any-return]

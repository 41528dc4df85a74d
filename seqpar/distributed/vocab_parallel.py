"""Split the vocabulary over ranks: each rank has some rows of the weight, and the loss is over all classes.

Every rank of the group has the same hidden states and targets. One all-gather per chunk brings each rank the others'
sums for each row; `rows/scores.py` has the equations that combine them, the same for one rank and for many. The hidden
gradient is summed over the group once per step; the weight gradient needs no communication.

Shape suffixes: N rows, V this rank's classes, D hidden. `vocab_size` is always the number of classes on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from seqpar.core.checks import check_integer, is_dtensor
from seqpar.distributed.collectives import (
    check_agreement,
    check_group,
    gather_numbers,
    group_gather,
    rank_in,
    world_size,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class VocabShard:
    """This rank's classes out of `vocab_size`: one for each row of its weight, from `start` on.

    Args:
        group: the ranks among which the vocabulary is divided; None means this process alone. On a mesh of data x
            vocabulary it is the vocabulary's group, and each data rank counts its own tokens.
        start: this rank's first class. The ranks may have their classes in any order, but without gaps; shards may
            differ in size and be empty (although FSDP2 does not take a parameter without rows).
        vocab_size: the number of classes on all ranks together.

    Raises:
        ValueError: a start outside [0, vocab_size], or a vocabulary without classes.
        TypeError: a number that is not a whole number, or a group that is not a process group.

    Example:
        >>> group = torch.distributed.group.WORLD
        >>> hidden, target = torch.randn(2, 6, 8), torch.randint(50, (2, 6))
        >>> weight = torch.randn(50, 8)  # the rows of this rank, here the only one
        >>> vocab = seqpar.VocabShard.of(len(weight), group)
        >>> loss = seqpar.linear_cross_entropy(hidden, weight, target, vocab=vocab)
        >>> vocab.start, vocab.vocab_size
        (0, 50)
    """

    group: ProcessGroup | None
    start: int
    vocab_size: int

    def __post_init__(self) -> None:
        check_group(self.group)
        check_integer(self.vocab_size, "vocab_size", 1)
        check_integer(self.start, "start", 0, self.vocab_size)

    @classmethod
    def of(cls, weight_rows: int, group: ProcessGroup | None) -> VocabShard:
        """Return the shard of a rank whose weight has `weight_rows` rows, with the classes in rank order.

        Every rank of the group must call it, once, when the weight is created: it is one small collective.
        """
        check_integer(weight_rows, "weight_rows", 0)
        # This rank's classes begin after those of all lower ranks
        rows = [count for (count,) in gather_numbers([weight_rows], group)]
        return cls(group, sum(rows[: rank_in(group)]), sum(rows))

    @cached_property
    def largest_even_part(self) -> int:
        """Return the number of classes per rank in an even split, rounded up.

        All ranks plan their chunks with this number, because chunks must be the same on every rank.
        """
        return -(-self.vocab_size // world_size(self.group))

    def meet(self, facts: Mapping[str, object], rows: int = 0, hidden: Tensor | None = None) -> list[list[int]]:
        """Return every rank's classes and checksum of `hidden`, each encoded as one number, from one collective.

        `span_number` and `_checksum` encode them. Raises RuntimeError on every rank unless the ranks agree on `facts`.
        """
        checksum = 0
        if hidden is not None and world_size(self.group) > 1:
            checksum = _checksum(hidden.detach().flatten(0, -2))
        return check_agreement(facts, self.group, [span_number(self.start, self.start + rows), checksum])

    def check(self, rows: int, facts: Mapping[str, object], hidden: Tensor, name: str = "hidden") -> None:
        """Raise RuntimeError on every rank unless the ranks agree on `facts` and hidden and have every class once.

        It is one small collective, or none for a group of one rank.

        Args:
            name: what the caller calls `hidden`.
        """
        everyone = self.meet(facts, rows, hidden)
        spans = [divmod(number, SPAN) for number, _ in everyone]
        # In the order of the classes, whatever the order of the ranks; a rank without classes has an empty span
        ordered = sorted((start, end) for start, end in spans if start < end)
        # Each must begin where the one before it ends
        if [*(start for start, _ in ordered), self.vocab_size] != [0, *(end for _, end in ordered)]:
            said = "; ".join(f"[{start}, {end}) on rank {rank}" for rank, (start, end) in enumerate(spans))
            raise RuntimeError(
                f"the weight's rows are the classes {said}; together they must be [0, {self.vocab_size}), each class "
                "once; VocabShard.of(weight_rows, group) computes the starts"
            )
        # Each a sum and a norm, as `_checksum` encodes them
        checksums = torch.tensor([[number] for _, number in everyone], device="cpu").view(torch.float32).tolist()
        eps = torch.finfo(hidden.dtype).eps
        others = [rank for rank, theirs in enumerate(checksums) if _differ(theirs, checksums[0], eps)]
        if others:
            content = "hidden states" if name.endswith("hidden") else "numbers"
            raise RuntimeError(
                f"ranks disagree on {name}: ranks {others} have different {content} from rank 0, but ranks that "
                "share a vocabulary must have the same; give them one batch and one seed of dropout"
            )

    def locate(self, target_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return each target's row in this rank's weight (any row if another rank has it), and whether it has it."""
        index_N = target_N - self.start
        owned_N = (index_N >= 0) & (index_N < size)
        return index_N.clamp(0, max(0, size - 1)), owned_N

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, stacked in rank order."""
        return torch.stack(group_gather(tensor, self.group))

    def rank(self) -> int:
        """Return this rank's place in the group."""
        return rank_in(self.group)


ROUNDINGS = 4
"""By how many roundings of their dtype the checksums of hidden states computed on two ranks may differ."""
SPAN = 2**32
"""A number larger than any vocabulary."""


def span_number(start: int, end: int) -> int:
    """Return the first class and the one after the last as one number, which makes the collective cheaper."""
    return start * SPAN + end


def _checksum(hidden_ND: Tensor) -> int:
    """Return a weighted sum of the hidden states and the norm of its terms, two float32 numbers in an int64's bits.

    sum_nd cos(1.3 n + 0.5) cos(d + 0.5) hidden_nd: unlike a plain sum, it changes if rows or features are swapped.
    """
    rows, width = hidden_ND.shape
    device = hidden_ND.device
    # Autocast would round the products to bfloat16
    with torch.autocast(device.type, enabled=False):
        column_D = (torch.arange(width, device=device) + 0.5).cos()
        rows_N = (hidden_ND @ column_D.to(hidden_ND.dtype)).float()
        weighted_N = rows_N * (1.3 * torch.arange(rows, device=device) + 0.5).cos()
        return int(torch.stack([weighted_N.sum(), rows_N.norm()]).view(torch.int64))


def _differ(theirs: Sequence[float], first: Sequence[float], eps: float) -> bool:
    """Return whether two ranks' checksums differ by more than rounding (float32's or coarser); nan equals nan."""
    a = theirs[0]
    b, norm = first
    allowed = ROUNDINGS * max(eps, torch.finfo(torch.float32).eps) * norm
    return not (abs(a - b) <= allowed or a == b or (math.isnan(a) and math.isnan(b)))


def local_rows(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, VocabShard]:
    """Return this rank's rows of a DTensor weight and bias, and their shard; the gradients arrive as DTensors.

    Raises:
        TypeError: a weight or bias that is not split by rows alone, or is on a mesh of several axes.
    """
    # Importing DTensor takes longer than importing this library
    from torch.distributed.tensor import DTensor, Shard

    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (not isinstance(tensor, DTensor) or tuple(tensor.placements) != (Shard(0),)):
            is_now = "a plain tensor"
            if isinstance(tensor, DTensor):
                is_now = f"a DTensor with {tensor.placements}"
            raise TypeError(
                f"{name} is {is_now}; a sharded weight and bias must both be DTensors split by rows, [Shard(0)], on a "
                "mesh of one axis; give other layouts as local tensors with vocab=VocabShard(...)"
            )
    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    # DTensor splits into even sizes, rounded up, so the last ranks may have fewer rows or none
    most_rows = -(-weight.size(0) // mesh.size())
    shard = VocabShard(mesh.get_group(), min(mesh.get_local_rank() * most_rows, weight.size(0)), weight.size(0))
    if bias is not None:
        assert isinstance(bias, DTensor)
        bias = _local(bias, Shard(0))
    return _local(weight, Shard(0)), bias, shard


def local_copy(tensor: Tensor | None, name: str) -> Tensor | None:
    """Return the whole tensor as a plain one, if every rank has all of it; raise TypeError for a sharded DTensor."""
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


def _local(tensor: DTensor, *placements: Placement) -> Tensor:
    """Return this rank's own tensor; in backward its gradient becomes a DTensor with these placements."""
    return tensor.to_local(grad_placements=placements)

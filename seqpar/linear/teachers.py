"""Describe what a student learns from: a teacher's hidden states, its log-probabilities, or a few classes per row.

Shape suffixes: N rows (batch x time), K rows of a chunk, D the teacher's hidden size, V vocabulary (this rank's
classes, if it is split), k classes given for a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from seqpar.core.checks import (
    check_choice,
    check_classes,
    check_entries,
    check_floating,
    check_like,
)
from seqpar.core.chunks import Chunk
from seqpar.core.device_facts import is_capturing
from seqpar.core.token_loss import wide

Rest = Literal["renormalize", "one_class"]


@dataclass(frozen=True, eq=False)
class TeacherHidden:
    """A teacher given by its hidden states and its projection onto the student's vocabulary.

    Its distribution is `(F.linear(hidden, weight, bias) / temperature).softmax(-1)`, computed chunk by chunk. It gets
    no gradient.

    Args:
        hidden: (rows, D) or (batch, time, D), of target's leading shape and any size D.
        weight: (V, D); if the student's vocabulary is split over ranks, this rank's rows, for the student's classes.
        bias: (V,), or None.

    Example:
        >>> hidden, weight, target = torch.randn(6, 8), torch.randn(50, 8), torch.randint(50, (6,))
        >>> teacher = seqpar.TeacherHidden(torch.randn(6, 32), torch.randn(50, 32))
        >>> loss = seqpar.linear_distillation(hidden, weight, teacher, target, divergence="reverse_kl")
        >>> p, q = (hidden @ weight.T).log_softmax(-1), (teacher.hidden @ teacher.weight.T).log_softmax(-1)
        >>> torch.allclose(loss.total, F.kl_div(q, p, log_target=True, reduction="sum"))
        True
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TeacherLogProbs:
    """A teacher given by a function that computes its log-probabilities for the rows of one chunk.

    Args:
        function: `rows -> (K, V)` log-probabilities of all classes, in any floating dtype, on the student's device and
            at the student's temperature. `rows` selects the chunk's rows of the flattened target: a slice, or int64
            indices. If the vocabulary is split over ranks, the function returns this rank's columns and is called on
            every rank with the same rows. It runs under `torch.no_grad`.

    Example:
        >>> hidden, weight, target = torch.randn(6, 8), torch.randn(50, 8), torch.randint(50, (6,))
        >>> head, states = nn.Linear(32, 50), torch.randn(6, 32)
        >>> teacher = seqpar.TeacherLogProbs(lambda rows: (head(states[rows]) / 2.0).log_softmax(-1))
        >>> loss = seqpar.linear_distillation(hidden, weight, teacher, target, divergence="forward_kl", temperature=2.0)
        >>> p, q = (hidden @ weight.T / 2.0).log_softmax(-1), (head(states) / 2.0).log_softmax(-1)
        >>> torch.allclose(loss.total, F.kl_div(p, q, log_target=True, reduction="sum"))
        True
    """

    function: Callable[[Chunk], Tensor]


@dataclass(frozen=True, eq=False)
class TeacherTopK:
    """A teacher given by its k most likely classes (or any other k) in each row and their log-probabilities.

    The probability of the other classes is either left out, so that the divergence compares the two distributions over
    just the k classes, each divided by its sum, or kept as one more class:

        "renormalize"   q_j / sum_i q_i  against  p_j / sum_i p_i,  for the k classes
        "one_class"     q_j against p_j for the k classes, and 1 - sum_i q_i against 1 - sum_i p_i

    Args:
        ids: target's shape plus k, int64: classes of the whole vocabulary, no class twice in a row. -1 pads a row with
            fewer classes; its log-probability is not read.
        log_probs: ids' shape, floating: log q at the student's temperature, over the whole vocabulary. As
            probabilities they must not sum to more than 1, up to rounding.
        rest: "renormalize" or "one_class". With the latter, a teacher's rest that is within the rounding of its
            log-probabilities counts as 0, and if there are no other classes there is no rest.

    If the vocabulary is split over ranks, ids and log_probs are the same on every rank.

    Example:
        >>> hidden, weight, target = torch.randn(6, 8), torch.randn(50, 8), torch.randint(50, (6,))
        >>> log_probs, ids = torch.randn(6, 50).log_softmax(-1).topk(4)  # as a file may have them
        >>> teacher = seqpar.TeacherTopK(ids, log_probs, rest="renormalize")
        >>> loss = seqpar.linear_distillation(hidden, weight, teacher, target, divergence="forward_kl")
        >>> p, q = (hidden @ weight.T).gather(-1, ids).log_softmax(-1), log_probs.log_softmax(-1)
        >>> torch.allclose(loss.total, F.kl_div(p, q, log_target=True, reduction="sum"))
        True
    """

    ids: Tensor
    log_probs: Tensor
    rest: Rest


Teacher = TeacherHidden | TeacherLogProbs | TeacherTopK


@dataclass(frozen=True, eq=False)
class SparseTarget:
    """A target distribution that gives probability to a few classes of each row, and 0 to all others.

    Args:
        ids: target's shape plus k, int64: classes of the whole vocabulary, no class twice in a row. -1 pads a row with
            fewer classes; its probability is not read.
        probs: ids' shape, floating: q, at least 0. Each row must sum to 1, up to rounding. To leave out the
            probability of other classes, divide by the sum; `token_weight` can hold that sum.

    Example:
        >>> hidden, weight, target = torch.randn(2, 8), torch.randn(50, 8), torch.tensor([3, 7])
        >>> ids, probs = torch.tensor([[3, 4], [7, -1]]), torch.tensor([[0.8, 0.2], [1.0, 0.0]])
        >>> soft = seqpar.SparseTarget(ids, probs)
        >>> loss = seqpar.linear_cross_entropy(hidden, weight, target, soft_target=soft)
        >>> dense = torch.zeros(2, 50)
        >>> dense[0, 3], dense[0, 4], dense[1, 7] = 0.8, 0.2, 1.0
        >>> torch.allclose(loss.total, F.cross_entropy(hidden @ weight.T, dense, reduction="sum"))
        True
    """

    ids: Tensor
    probs: Tensor


def slack(dtype: torch.dtype) -> float:
    """Return how much a sum of probabilities of this dtype may differ from 1: the square root of the dtype's epsilon.

    Probabilities stored in float64 may have been computed in float32.
    """
    return float(max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.5)


def check_top_k(teacher: TeacherTopK, target: Tensor, ignore_index: int, vocab_size: int) -> None:
    """Raise unless ids and log-probabilities can be a teacher's; only rows that count are checked."""
    check_choice(teacher.rest, "teacher.rest", get_args(Rest))
    kept = target.long() != ignore_index
    _check_classes(teacher.ids, "teacher.ids", target, kept, vocab_size)
    _check_values(teacher.log_probs, "teacher.log_probs", teacher.ids, "teacher.ids")
    if is_capturing(target.device):
        return
    sums = probabilities(teacher.ids, teacher.log_probs).sum(-1)
    good = ~kept | ((sums > 0) & (sums <= 1 + slack(teacher.log_probs.dtype)))
    why = "; the sum must be above 0 and at most 1: take them from log_softmax(-1) over the whole vocabulary"
    check_entries(good, sums, "teacher.log_probs as probabilities sum to", why)


def check_sparse_target(soft_target: SparseTarget, target: Tensor, ignore_index: int, vocab_size: int) -> None:
    """Raise unless ids and probabilities form distributions; only rows that count are checked."""
    kept = target.long() != ignore_index
    _check_classes(soft_target.ids, "soft_target.ids", target, kept, vocab_size)
    _check_values(soft_target.probs, "soft_target.probs", soft_target.ids, "soft_target.ids")
    if is_capturing(target.device):
        return
    probs = sparse_probs(soft_target)
    negative = kept.unsqueeze(-1) & ~(probs >= 0)
    check_entries(~negative, probs, "soft_target.probs is", "; a probability is at least 0")
    sums = probs.to(wide(probs.dtype)).sum(-1)
    good = ~kept | ((sums - 1).abs() <= slack(probs.dtype))
    why = "; each row must sum to 1: divide it by its sum, which token_weight can hold"
    check_entries(good, sums, "soft_target.probs sum to", why)


def probabilities(ids: Tensor, log_probs: Tensor) -> Tensor:
    """Return q of the given classes, in float32 or wider, and 0 where a row is padded."""
    return log_probs.detach().to(wide(log_probs.dtype)).exp().masked_fill(ids < 0, 0)


def sparse_probs(soft_target: SparseTarget) -> Tensor:
    """Return q of the given classes, and 0 where a row is padded."""
    return soft_target.probs.detach().masked_fill(soft_target.ids < 0, 0)


def _check_values(values: Tensor, name: str, ids: Tensor, ids_name: str) -> None:
    """Raise unless there is one floating number for each id."""
    check_floating(values, name)
    check_like(values, name, **{ids_name: ids})


def _check_classes(ids: Tensor, name: str, target: Tensor, kept: Tensor, vocab_size: int) -> None:
    """Raise unless ids are classes for each target, or -1, and no row that counts has a class twice."""
    check_classes(ids, name, target, kept, range(-1, vocab_size), "-1 fills up a row with fewer classes")
    if is_capturing(target.device):
        return
    ordered = ids.detach().long().sort(-1).values
    twice = kept.unsqueeze(-1) & (ordered == ordered.roll(1, -1)) & (ordered >= 0)
    # The first has no neighbour before it
    twice[..., 0] = False
    why = "; give each class once, with the sum of its probabilities"
    check_entries(~twice.any(-1), ordered.where(twice, -1).amax(-1), f"{name} repeats class", why)

"""Compare a student's rows of logits with a teacher's over all classes, on one rank or with the vocabulary split.

Per chunk there are three collectives: the largest logits of both, what their softmaxes and the target need, and the
divergence's two sums; all are stacked. For a row of logits z, of which each rank has some classes:

    best = max_k z_k,   log p_k = (z_k - best) - log sum_j exp(z_j - best)

Shape suffixes: K rows of one chunk or of a block of it, V this rank's classes, S students and teachers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.chunks import Chunk, recording
from seqpar.distributed.collectives import group_max, group_sum, world_size
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.divergence_formula import RowResults
from seqpar.linear.formula import Projection
from seqpar.linear.teachers import slack
from seqpar.rows.divergences import RowTerms, logits_gradient_


class AgainstHead:
    """Compare the student with a teacher's hidden states and projection.

    Args:
        terms: the divergence.
        shard: this rank's classes, of the student and of the teacher.
        teacher: the teacher's projection.
        teacher_ND: the teacher's hidden states of all rows.
    """

    def __init__(self, terms: RowTerms, shard: VocabShard, teacher: Projection, teacher_ND: Tensor) -> None:
        self.terms = terms
        self.shard = shard
        self.teacher = teacher
        self.teacher_ND = teacher_ND

    def rows_at_once(self, rows: int) -> int:
        """Return how many rows' logits the teacher's softmax takes at once."""
        return self.teacher.rows_at_once(rows)

    def of_chunk(self, chunk: Chunk, ignored_K: Tensor | None) -> tuple[Tensor, ...]:
        """Return the teacher's product for a chunk's rows."""
        hidden_KD = self.teacher_ND[chunk]
        if ignored_K is not None:
            hidden_KD = hidden_KD.masked_fill(ignored_K.unsqueeze(1), 0)
        with torch.autocast(hidden_KD.device.type, enabled=False):
            return (self.teacher.product(hidden_KD.to(self.teacher.weight_VD.dtype)),)

    def compare_(self, logits_KV: Tensor, target_K: Tensor, teacher: tuple[Tensor, ...]) -> tuple[RowResults, Tensor]:
        """Return the results of some rows and the gradient of their logits, which may be overwritten."""
        (product_KV,) = teacher
        teacher_KV, _ = self.teacher.logits(product_KV)
        given = [logits_KV, teacher_KV.to(logits_KV.dtype)]
        (p, q), nll_K, correct_K = _log_softmax_(given, target_K, self.shard)
        terms = self.terms(p.log_KV, p.prob_KV, q.log_KV, q.prob_KV)
        loss_K, slope_K = group_sum(torch.stack([terms.loss_K, terms.slope_K]), self.shard.group)
        return RowResults(loss_K, nll_K, correct_K), logits_gradient_(terms, slope_K, p.prob_KV)


class AgainstLogProbs:
    """Compare the student with the log-probabilities that a function computes for each chunk.

    Args:
        terms: the divergence.
        shard: this rank's classes.
        function: `rows -> (K, V)` log-probabilities of this rank's classes.
        classes: how many classes this rank has.
        row_N: the numbers of all rows, on the student's device.
    """

    def __init__(
        self, terms: RowTerms, shard: VocabShard, function: Callable[[Chunk], Tensor], classes: int, row_N: Tensor
    ) -> None:
        self.terms = terms
        self.shard = shard
        self.function = function
        self.classes = classes
        self.row_N = row_N

    def rows_at_once(self, rows: int) -> int:
        """Return how many rows are taken at once: any number."""
        return rows

    def of_chunk(self, chunk: Chunk, ignored_K: Tensor | None) -> tuple[Tensor, ...]:
        """Return the teacher's log-probabilities for a chunk's rows, and the rows' numbers."""
        row_K = self.row_N[chunk]
        try:
            log_q_KV = self._called(chunk, row_K)
        except Exception:
            self._failed_anywhere(True)
            raise
        if self._failed_anywhere(False):
            raise RuntimeError("teacher.function failed on another rank of the vocabulary's group; see its error")
        return log_q_KV, row_K

    def compare_(self, logits_KV: Tensor, target_K: Tensor, teacher: tuple[Tensor, ...]) -> tuple[RowResults, Tensor]:
        """Return the results of some rows and the gradient of their logits, which may be overwritten."""
        log_q_KV, row_K = teacher
        dtype = log_q_KV.dtype
        # A copy, because the divergence overwrites it and it may be the caller's own tensor
        log_q_KV = log_q_KV.to(logits_KV.dtype, copy=True)
        q_KV = log_q_KV.exp()
        mass_K = q_KV.sum(-1)
        (p,), nll_K, correct_K = _log_softmax_([logits_KV], target_K, self.shard)
        terms = self.terms(p.log_KV, p.prob_KV, log_q_KV, q_KV)
        sums = torch.stack([terms.loss_K, terms.slope_K, mass_K])
        loss_K, slope_K, mass_K = group_sum(sums, self.shard.group)
        _check_mass(mass_K, row_K, dtype)
        return RowResults(loss_K, nll_K, correct_K), logits_gradient_(terms, slope_K, p.prob_KV)

    def _called(self, chunk: Chunk, row_K: Tensor) -> Tensor:
        """Return what the function returns, after checking it."""
        log_q_KV = self.function(chunk)
        if not isinstance(log_q_KV, Tensor) or not log_q_KV.is_floating_point():
            kind = f"{log_q_KV.dtype} numbers" if isinstance(log_q_KV, Tensor) else f"a {type(log_q_KV).__name__}"
            raise TypeError(f"teacher.function returned {kind}; it must return a tensor of log-probabilities")
        wanted = (len(row_K), self.classes)
        if log_q_KV.shape != wanted or log_q_KV.device != row_K.device:
            raise ValueError(
                f"teacher.function returned shape {tuple(log_q_KV.shape)} on {log_q_KV.device}; it must be {wanted} on "
                f"{row_K.device}, one row for each of the chunk's and one column for each row of weight"
            )
        return log_q_KV.detach()

    def _failed_anywhere(self, here: bool) -> bool:
        """Return whether the function failed on any rank of the group; every rank asks, so that none waits for long."""
        if world_size(self.shard.group) == 1 or recording(self.row_N.device):
            return here
        return bool(group_max(torch.full((1,), float(here), device=self.row_N.device), self.shard.group) > 0)


class _Distribution(NamedTuple):
    """A distribution in each row, of which this rank has some classes."""

    log_KV: Tensor
    prob_KV: Tensor


def _log_softmax_(
    logits: list[Tensor], target_K: Tensor, shard: VocabShard
) -> tuple[list[_Distribution], Tensor, Tensor]:
    """Return the distribution of each set of logits, in their memory; -log p of the target and whether it is the best.

    The target's results are those of the first set.
    """
    first_KV = logits[0]
    here_K, argbest_K = largest(first_KV)
    bests = [here_K, *(largest(z_KV)[0] for z_KV in logits[1:])]
    best_SK = group_max(torch.stack(bests), shard.group)
    shifted = [z_KV.sub_(best_K.unsqueeze(1)) for z_KV, best_K in zip(logits, best_SK, strict=True)]
    exps = [z_KV.exp() for z_KV in shifted]
    gold_K = target_logit(first_KV, target_K, shard)
    hit_K = target_hit(target_K, argbest_K, here_K == best_SK[0], first_KV.size(1), shard).to(gold_K.dtype)
    *sums, gold_K, hit_K = group_sum(torch.stack([*(e_KV.sum(-1) for e_KV in exps), gold_K, hit_K]), shard.group)
    distributions = [
        _Distribution(z_KV.sub_(sum_K.log().unsqueeze(1)), e_KV.div_(sum_K.unsqueeze(1)))
        for z_KV, e_KV, sum_K in zip(shifted, exps, sums, strict=True)
    ]
    return distributions, sums[0].log() - gold_K, hit_K == 1


def largest(logits_KV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row and the lowest class that has it; -inf and 0 without classes."""
    if not logits_KV.size(1):
        lowest_K = logits_KV.new_full((len(logits_KV),), -math.inf)
        return lowest_K, torch.zeros_like(lowest_K, dtype=torch.int64)
    best_K, argbest_K = logits_KV.max(-1)
    return best_K, argbest_K


def target_logit(logits_KV: Tensor, target_K: Tensor, shard: VocabShard) -> Tensor:
    """Return the target's logit, and 0 on a rank that does not have it."""
    index_K, owned_K = shard.locate(target_K, logits_KV.size(1))
    return take(logits_KV, index_K.unsqueeze(1), owned_K.unsqueeze(1)).squeeze(1)


def target_hit(target_K: Tensor, argbest_K: Tensor, tied_K: Tensor, size: int, shard: VocabShard) -> Tensor:
    """Return a number whose sum over the ranks is 1 if the target is the lowest class with the largest logit.

    Args:
        argbest_K: this rank's lowest class with its largest logit, counted from its first.
        tied_K: whether that logit is the largest of all ranks'.
        size: how many classes this rank has.
    """
    index_K, owned_K = shard.locate(target_K, size)
    hit_K = owned_K & tied_K & (argbest_K == index_K)
    below_K = tied_K & (shard.start + argbest_K < target_K)
    return hit_K.to(torch.int64) - below_K.to(torch.int64)


def take(values_KV: Tensor, index_KC: Tensor, owned_KC: Tensor) -> Tensor:
    """Return the values of some classes in each row, and 0 for those that this rank does not have."""
    if not values_KV.size(1):
        return values_KV.new_zeros(index_KC.shape)
    values_KC = values_KV.gather(1, index_KC)
    return values_KC.where(owned_KC, torch.zeros_like(values_KC))


def _check_mass(mass_K: Tensor, row_K: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless the teacher's probabilities sum to 1 in every row.

    On an accelerator a device-side assertion checks it, so that the host does not wait for the device.
    """
    if recording(mass_K.device):
        return
    right_K = (mass_K - 1).abs() <= slack(dtype)
    if mass_K.device.type != "cpu":
        torch._assert_async(right_K.all(), "the log-probabilities of teacher.function do not sum to 1 as probabilities")
    elif not right_K.all():
        first = int((~right_K).nonzero()[0])
        raise ValueError(
            f"teacher.function returned log-probabilities that sum to {float(mass_K[first]):.6g} as probabilities in "
            f"row {int(row_K[first])}; they must sum to 1 over the vocabulary: return log_softmax(-1) of the logits"
        )

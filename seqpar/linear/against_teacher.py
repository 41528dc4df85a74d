"""Compare a student's rows of logits with a teacher's over all classes, on one rank or with the vocabulary split.

A divergence needs log p and log q of every class, so it is not a function of a few scores; `rows/divergences.py` has
it and its gradient. Per chunk there are two collectives for the distributions (one if the teacher gives
log-probabilities) and one for the divergence's sums.

Shape suffixes: K rows of one chunk or of a block of it, V this rank's classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from seqpar.core.checks import check_floating, check_one_device, check_shapes
from seqpar.core.chunked_gradient import differentiable_sum, sum_over_chunks
from seqpar.core.chunks import Chunk, recording
from seqpar.core.device_facts import is_on_host
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.distributed.collectives import group_max, group_sum, world_size
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.chunk_loss import BlockLoss, Factor, StoredLoss
from seqpar.linear.inputs import Checked, Inputs, Settings, planned
from seqpar.linear.projection import Projection
from seqpar.linear.teachers import slack
from seqpar.rows.divergences import RowTerms, logits_gradient_
from seqpar.rows.scores import RowFunction, RowSums


def loss_against_teacher(
    inputs: Inputs,
    settings: Settings,
    given: Checked,
    teacher: AgainstHead | AgainstLogProbs,
    terms: RowTerms,
    loss_scale: float | Tensor,
) -> TokenLoss:
    """Return the summed divergence of arguments that have been checked."""
    leaves, chunks, student, target_N, split, ignored = planned(inputs, settings, given)
    function = RowFunction(shifted=True, correct=True, split=split)
    rows_loss = AgainstRows(student, function, terms, teacher, given.shard)
    walk = partial(sum_over_chunks, StoredLoss(student, rows_loss, target_N, ignored))
    return differentiable_sum(walk, chunks, leaves, loss_scale)


class AgainstRows:
    """The divergence of a row from the teacher's, as a `RowsLoss`.

    Args:
        student: from hidden to logits.
        function: the row function, with z - m beside the softmax.
        terms: the divergence.
        teacher: whose distribution it is compared with.
        shard: this rank's classes.
    """

    def __init__(
        self,
        student: Projection,
        function: RowFunction,
        terms: RowTerms,
        teacher: AgainstHead | AgainstLogProbs,
        shard: VocabShard,
    ) -> None:
        self.student = student
        self.function = function
        self.terms = terms
        self.teacher = teacher
        self.group = shard.group
        self.biased = True

    def rows_at_once(self, rows: int) -> int:
        """Return how many of a chunk's rows are compared at once."""
        # A split vocabulary's collectives cost the same for a block as for the chunk, and ranks must take the same rows
        if self.function.split is not None:
            return rows
        return min(self.student.rows_at_once(rows), self.teacher.rows_at_once(rows))

    def of_chunk(self, chunk: Chunk, counted_K: Tensor | None) -> tuple[Tensor, ...]:
        """Return the teacher's tensors for a chunk."""
        return self.teacher.of_chunk(chunk, counted_K, self.group)

    def block_(
        self,
        product_KV: Tensor,
        target_K: Tensor,
        given: tuple[Tensor, ...],
        counted_K: Tensor | None,
        factor: Factor | None,
    ) -> BlockLoss:
        """Do as `RowsLoss` says."""
        target_K1 = target_K.unsqueeze(1)
        logits_KV, tanh_KV = self.student.logits(product_KV)
        p, sums = _log_softmax_(self.function, logits_KV.to(wide(logits_KV.dtype)), target_K1)
        q = self.teacher.distribution(given, self.function, target_K1, p.log_KV.dtype)
        mass_K = q.prob_KV.sum(-1)
        terms = self.terms(p.log_KV, p.prob_KV, q.log_KV, q.prob_KV)
        loss_K, slope_K, mass_K = group_sum(torch.stack([terms.loss_K, terms.slope_K, mass_K]), self.group)
        self.teacher.check(mass_K, given)
        nll_K = -self.function.scores(sums).log_prob
        assert sums.correct_N is not None
        if factor is None:
            return BlockLoss(loss_K, nll_K, sums.correct_N, None)
        grad_KV = logits_gradient_(terms, slope_K, p.prob_KV)
        if counted_K is not None:
            grad_KV.masked_fill_(~counted_K.unsqueeze(1), 0)
        return BlockLoss(loss_K, nll_K, sums.correct_N, self.student.to_product_(grad_KV, tanh_KV, factor, product_KV))


class AgainstHead:
    """A teacher's hidden states and projection.

    Args:
        head: the teacher's projection onto the classes that this rank has.
        hidden_ND: the teacher's hidden states of all rows.
    """

    def __init__(self, head: Projection, hidden_ND: Tensor) -> None:
        self.head = head
        self.hidden_ND = hidden_ND
        self.rows_at_once = head.rows_at_once

    def of_chunk(self, chunk: Chunk, counted_K: Tensor | None, group: ProcessGroup | None) -> tuple[Tensor, ...]:
        """Return the teacher's product for a chunk's rows."""
        hidden_KD = self.hidden_ND[chunk]
        with torch.autocast(hidden_KD.device.type, enabled=False):
            return (self.head.product(hidden_KD.to(self.head.weight_VD.dtype)),)

    def distribution(
        self, given: tuple[Tensor, ...], function: RowFunction, target_K1: Tensor, dtype: torch.dtype
    ) -> Distribution:
        """Return the teacher's distribution of some rows, in memory that may be overwritten."""
        (product_KV,) = given
        logits_KV, _ = self.head.logits(product_KV)
        q, _ = _log_softmax_(function._replace(correct=False), logits_KV.to(dtype), target_K1)
        return q

    def check(self, mass_K: Tensor, given: tuple[Tensor, ...]) -> None:
        """Check nothing: a softmax sums to 1."""


class AgainstLogProbs:
    """The log-probabilities that a function computes for each chunk.

    Args:
        function: `rows -> (K, V)` log-probabilities of this rank's classes.
        classes: how many classes this rank has.
        row_N: the numbers of all rows, on the student's device.
    """

    def __init__(self, function: Callable[[Chunk], Tensor], classes: int, row_N: Tensor) -> None:
        self.function = function
        self.classes = classes
        self.row_N = row_N

    def rows_at_once(self, rows: int) -> int:
        """Return how many rows are taken at once: any number."""
        return rows

    def of_chunk(self, chunk: Chunk, counted_K: Tensor | None, group: ProcessGroup | None) -> tuple[Tensor, ...]:
        """Return the teacher's log-probabilities for a chunk's rows, and the rows' numbers."""
        row_K = self.row_N[chunk]
        try:
            log_q_KV = self._called(chunk, row_K)
        except Exception:
            self._failed_anywhere(True, group)
            raise
        if self._failed_anywhere(False, group):
            raise RuntimeError("teacher.function failed on another rank of the vocabulary's group; see its error")
        return log_q_KV, row_K

    def distribution(
        self, given: tuple[Tensor, ...], function: RowFunction, target_K1: Tensor, dtype: torch.dtype
    ) -> Distribution:
        """Return the teacher's distribution of some rows, in memory that may be overwritten."""
        # A copy, because the divergence overwrites it and it may be the caller's own tensor
        log_q_KV = given[0].to(dtype, copy=True)
        return Distribution(log_q_KV, log_q_KV.exp())

    def check(self, mass_K: Tensor, given: tuple[Tensor, ...]) -> None:
        """Raise ValueError unless the teacher's probabilities sum to 1 in every row."""
        log_q_KV, row_K = given
        _check_mass(mass_K, row_K, log_q_KV.dtype)

    def _called(self, chunk: Chunk, row_K: Tensor) -> Tensor:
        """Return what the function returns, after checking it."""
        log_q_KV = self.function(chunk)
        named = {"what teacher.function returned": log_q_KV}
        check_floating(log_q_KV, *named)
        shape = (len(row_K), self.classes)
        wanted = f"{shape}: one row for each of the chunk's and one column for each row of weight"
        check_shapes(log_q_KV.shape == shape, wanted, **named)
        check_one_device(weight=row_K, **named)
        return log_q_KV.detach()

    def _failed_anywhere(self, here: bool, group: ProcessGroup | None) -> bool:
        """Return whether the function failed on any rank of the group; every rank asks, so that none waits for long."""
        if world_size(group) == 1 or recording(self.row_N.device):
            return here
        return bool(group_max(torch.full((1,), float(here), device=self.row_N.device), group) > 0)


class Distribution(NamedTuple):
    """A distribution in each row, of which this rank has some classes."""

    log_KV: Tensor
    prob_KV: Tensor


def _log_softmax_(function: RowFunction, logits_KV: Tensor, target_K1: Tensor) -> tuple[Distribution, RowSums]:
    """Return the distribution of each row, in the logits' memory and another of their size, and the row's sums."""
    made, sums = function.sums_(logits_KV, target_K1)
    # log p = (z - m_r) + (m_r - m) - log S, where a shard has subtracted an m_r of its own
    log_KV = made.shifted_NV.add_(((made.best_N - sums.best_N) - sums.log_sum_N).unsqueeze(1))
    if sums.share_N is None:
        return Distribution(log_KV, made.p_NV), sums
    nothing_K1 = (sums.share_N == 0).unsqueeze(1) & (made.best_N == -math.inf).unsqueeze(1)
    prob_KV = made.p_NV.mul_(sums.share_N.unsqueeze(1)).masked_fill_(nothing_K1, 0)
    return Distribution(log_KV.masked_fill_(nothing_K1, -math.inf), prob_KV), sums


def _check_mass(mass_K: Tensor, row_K: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless the teacher's probabilities sum to 1 in every row.

    On an accelerator a device-side assertion checks it, so that the host does not wait for the device.
    """
    if recording(mass_K.device):
        return
    right_K = (mass_K - 1).abs() <= slack(dtype)
    if not is_on_host(mass_K):
        torch._assert_async(right_K.all(), "the log-probabilities of teacher.function do not sum to 1 as probabilities")
    elif not right_K.all():
        first = int((~right_K).nonzero()[0])
        raise ValueError(
            f"teacher.function returned log-probabilities that sum to {float(mass_K[first]):.6g} as probabilities in "
            f"row {int(row_K[first])}; they must sum to 1 over the vocabulary: return log_softmax(-1) of the logits"
        )

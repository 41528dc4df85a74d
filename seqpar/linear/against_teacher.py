"""Compare a student's rows of logits with a teacher's over all classes, on one rank or with the vocabulary split.

A divergence needs log p and log q of every class, so it is not a function of a few scores; `rows/divergences.py` has
it and its gradient. Each chunk takes two collectives for the distributions (one if the teacher gives
log-probabilities) and one for the divergence's sums.

Shape suffixes: K rows of one chunk or of a block of it, V this rank's classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from seqpar.core.checks import check_floating, check_one_device, check_shapes
from seqpar.core.chunked_gradient import differentiable_sum
from seqpar.core.chunks import Chunk
from seqpar.core.device_facts import is_capturing, is_on_host
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.collectives import group_max, group_sum, world_size
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.chunk_loss import Block, BlockLoss, Factor
from seqpar.linear.inputs import Checked, Inputs, Settings, prepare
from seqpar.linear.projection import Projection
from seqpar.linear.teachers import slack
from seqpar.rows.divergences import RowTerms, logits_gradient_
from seqpar.rows.scores import RowFunction, Sums


def loss_against_teacher(
    inputs: Inputs,
    settings: Settings,
    given: Checked,
    teacher: AgainstHead | AgainstLogProbs,
    terms: RowTerms,
    loss_scale: float | Tensor,
) -> TokenLoss:
    """Return the summed divergence, given arguments that have been checked."""
    call = prepare(inputs, settings, given)
    # Every class's z - m is needed besides its softmax
    call.projection.ask_for(RowFunction(shifted=True, correct=True, split=call.split))
    return differentiable_sum(*call.job(TeacherLoss(call.projection, terms, teacher, given.shard)), loss_scale)


class TeacherLoss:
    """The divergence of a row from the teacher's, as a `ProductLoss`.

    Args:
        student: the projection from hidden to logits, already set (`ask_for`) to give z - m besides the softmax.
        terms: the divergence.
        teacher: the teacher whose distribution the student's is compared with.
        shard: this rank's classes.
    """

    def __init__(
        self,
        student: Projection,
        terms: RowTerms,
        teacher: AgainstHead | AgainstLogProbs,
        shard: VocabShard,
    ) -> None:
        self.projection = student
        self.terms = terms
        self.teacher = teacher
        self.group = shard.group

    def rows_at_once(self, rows: int) -> int:
        """Return how many of a chunk's rows are compared at once."""
        # All at once with a split vocabulary, as ranks must take the same rows
        if self.projection.function.split is not None:
            return rows
        return min(self.projection.rows_at_once(rows), self.teacher.rows_at_once(rows))

    def of_chunk(self, chunk: Chunk, counted_K: Tensor | None) -> tuple[Tensor, ...]:
        """Return the teacher's tensors for a chunk."""
        return self.teacher.of_chunk(chunk, counted_K, self.group)

    def block_(self, block: Block, factor: Factor | None) -> BlockLoss:
        """Implement `ProductLoss.block_`."""
        function = self.projection.function
        target_K1 = block.target_K.unsqueeze(1)
        logits_KV, tanh_KV = self.projection.logits(block.product_KV)
        p, sums = _log_softmax_(function, logits_KV, target_K1)
        q = self.teacher.distribution(block.given, function, target_K1, p.log_KV.dtype)
        mass_K = q.prob_KV.sum(-1)
        terms = self.terms(p.log_KV, p.prob_KV, q.log_KV, q.prob_KV)
        loss_K, slope_K, mass_K = group_sum(torch.stack([terms.loss_K, terms.slope_K, mass_K]), self.group)
        self.teacher.check(mass_K, block.given)
        nll_K = -function.scores(sums).log_prob
        assert sums.correct_N is not None
        if factor is None:
            return BlockLoss(loss_K, nll_K, sums.correct_N, None)
        grad_KV = logits_gradient_(terms, slope_K, p.prob_KV)
        if block.counted_K is not None:
            grad_KV.masked_fill_(~block.counted_K.unsqueeze(1), 0)
        grad_KV = self.projection.to_product_(grad_KV, tanh_KV, factor, block.product_KV)
        return BlockLoss(loss_K, nll_K, sums.correct_N, grad_KV)


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
        row_N: the indices of all rows, on the student's device.
    """

    def __init__(self, function: Callable[[Chunk], Tensor], classes: int, row_N: Tensor) -> None:
        self.function = function
        self.classes = classes
        self.row_N = row_N

    def rows_at_once(self, rows: int) -> int:
        """Return how many rows are taken at once: all of them."""
        return rows

    def of_chunk(self, chunk: Chunk, counted_K: Tensor | None, group: ProcessGroup | None) -> tuple[Tensor, ...]:
        """Return the teacher's log-probabilities for a chunk's rows, and the rows' indices."""
        row_K = self.row_N[chunk]
        try:
            log_q_KV = self._call(chunk, row_K)
        except Exception:
            self._has_failed(True, group)
            raise
        if self._has_failed(False, group):
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

    def _call(self, chunk: Chunk, row_K: Tensor) -> Tensor:
        """Return what the function returns, after checking it."""
        log_q_KV = self.function(chunk)
        named = {"what teacher.function returned": log_q_KV}
        check_floating(log_q_KV, *named)
        shape = (len(row_K), self.classes)
        wanted = f"{shape}: one row for each of the chunk's and one column for each row of weight"
        check_shapes(log_q_KV.shape == shape, wanted, **named)
        check_one_device(weight=row_K, **named)
        return log_q_KV.detach()

    def _has_failed(self, here: bool, group: ProcessGroup | None) -> bool:
        """Return whether the function failed on any rank of the group; every rank calls this, so that none is stuck."""
        if world_size(group) == 1 or is_capturing(self.row_N.device):
            return here
        return bool(group_max(torch.full((1,), float(here), device=self.row_N.device), group) > 0)


class Distribution(NamedTuple):
    """This rank's classes of a distribution in each row."""

    log_KV: Tensor
    prob_KV: Tensor


def _log_softmax_(function: RowFunction, logits_KV: Tensor, target_K1: Tensor) -> tuple[Distribution, Sums]:
    """Return the distribution of each row, in the logits' memory and a second tensor of that size, and its sums."""
    made, sums = function.sums_(logits_KV, target_K1)
    # log p = (z - m_r) + (m_r - m) - log S, where m_r is what this shard has subtracted
    log_KV = made.shifted_NV.add_(((made.best_N - sums.best_N) - sums.log_sum_N).unsqueeze(1))
    if sums.share_N is None:
        return Distribution(log_KV, made.p_NV), sums
    nothing_K1 = (sums.share_N == 0).unsqueeze(1) & (made.best_N == -math.inf).unsqueeze(1)
    prob_KV = made.p_NV.mul_(sums.share_N.unsqueeze(1)).masked_fill_(nothing_K1, 0)
    return Distribution(log_KV.masked_fill_(nothing_K1, -math.inf), prob_KV), sums


def _check_mass(mass_K: Tensor, row_K: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless the teacher's probabilities sum to 1 in every row.

    On an accelerator a device-side assertion checks this, so that the host does not wait for the device.
    """
    if is_capturing(mass_K.device):
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

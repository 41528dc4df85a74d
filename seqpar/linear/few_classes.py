"""Compare a student's rows with distributions over a few classes per row: soft targets, and a teacher's k classes.

Both are functions of the classes' log-probabilities. A soft target q costs

    loss = - sum_j q_j log p_j + z_loss lse^2,      d loss / d log p_j = - q_j,   d loss / d lse = 2 z_loss lse

A teacher's k classes are compared by a divergence, either among themselves, with log p'_j = log p_j - log sum_i p_i, or
with all others together as one more class, whose log-probability is the score `log_rest`. That is a separate
log-sum-exp, not the logarithm of 1 - sum_j p_j, so it is exact however little probability the others have, and -inf if
there are none.

Shape suffixes: N rows, C the given classes, with or without the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.checks import check_type
from seqpar.core.chunked_gradient import differentiable_sum
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.agreement import checksum, compare_ranks
from seqpar.linear.chunk_loss import ScoreLoss
from seqpar.linear.inputs import Checked, Inputs, Settings, check_inputs, prepare, tell_errors
from seqpar.linear.projection import product_dtype
from seqpar.linear.teachers import SparseTarget, check_sparse_target, sparse_probs
from seqpar.rows.divergences import RowTerms, logits_gradient_
from seqpar.rows.scores import RowFunction, Scores, Upstream
from seqpar.rows.smoothing import LossOfScores, RowLosses


class SoftTargetOfScores(NamedTuple):
    """The cross-entropy with q, the only per-token tensor; a class with q = 0 adds 0, whatever its log p."""

    z_loss: float

    def __call__(self, scores: Scores, per_token: Sequence[Tensor], wanted: bool) -> RowLosses:
        """Return the loss of each row, with its derivatives."""
        (q_NC,) = per_token
        assert scores.log_probs_at is not None
        loss_N = -(q_NC * scores.log_probs_at.masked_fill(q_NC == 0, 0)).sum(-1)
        lse_N = None
        if self.z_loss:
            loss_N = loss_N + self.z_loss * scores.lse.square()
            lse_N = 2 * self.z_loss * scores.lse
        return RowLosses(loss_N, Upstream(log_probs_at=-q_NC, lse=lse_N))


class DivergenceOfScores(NamedTuple):
    """A divergence from the distribution whose log q is the only per-token tensor, with or without the rest."""

    terms: RowTerms

    def __call__(self, scores: Scores, per_token: Sequence[Tensor], wanted: bool) -> RowLosses:
        """Return the divergence of each row, with its derivatives."""
        (log_q_NC,) = per_token
        assert scores.log_probs_at is not None
        log_p_NC = scores.log_probs_at
        classes = log_p_NC.size(1)
        if scores.log_rest is not None:
            log_p_NC = torch.cat([log_p_NC, scores.log_rest.unsqueeze(1)], 1)
        log_p_NC = log_p_NC.log_softmax(-1)
        p_NC = log_p_NC.exp()
        # The terms overwrite their arguments, and log q may be the caller's
        terms = self.terms(log_p_NC, p_NC, log_q_NC.clone(), log_q_NC.exp())
        grad_NC = logits_gradient_(terms, terms.slope_K, p_NC)
        log_rest_N = grad_NC[:, -1] if scores.log_rest is not None else None
        return RowLosses(terms.loss_K, Upstream(log_probs_at=grad_NC[:, :classes], log_rest=log_rest_N))


def loss_on_few_classes(
    inputs: Inputs,
    settings: Settings,
    given: Checked,
    loss: LossOfScores,
    ids_NC: Tensor,
    values_NC: Tensor,
    loss_scale: float | Tensor,
) -> TokenLoss:
    """Return the summed loss, given arguments that have been checked.

    Args:
        ids_NC: the given classes of all rows; -1 pads a row.
        values_NC: the loss's per-token tensor. If it has one column more than ids_NC, that is the rest as one class.
    """
    call = prepare(inputs, settings, given)
    rest = values_NC.size(1) > ids_NC.size(1)
    call.projection.ask_for(RowFunction(rest=rest, gaps=True, correct=True, split=call.split))
    return differentiable_sum(*call.job(ScoreLoss(call.projection, loss, ids_NC), (values_NC,)), loss_scale)


def soft_cross_entropy(
    inputs: Inputs,
    settings: Settings,
    soft_target: SparseTarget,
    loss_scale: float | Tensor,
    vocab: VocabShard | None,
) -> TokenLoss:
    """Return the loss of `linear_cross_entropy` with a soft target, after checking all arguments."""
    with tell_errors(vocab):
        given = check_inputs(inputs, settings, vocab, loss_scale)
        check_type(soft_target, "soft_target", SparseTarget, "a seqpar.SparseTarget, or None")
        others = {"class_weight": inputs.class_weight is not None, "label_smoothing": settings.label_smoothing != 0}
        for name, is_given in others.items():
            if is_given:
                raise ValueError(f"{name} is given with soft_target; put it into the probabilities of soft_target")
        check_sparse_target(soft_target, inputs.target, settings.ignore_index, given.shard.vocab_size)
    if vocab is not None:
        ids = (*soft_target.ids.shape, checksum(soft_target.ids))
        facts = {"soft_target.ids": ids, "soft_target.probs": sparse_probs(soft_target)}
        compare_ranks(inputs, settings, vocab, facts)
    ids_NC = soft_target.ids.detach().flatten(0, -2).long()
    probs_NC = sparse_probs(soft_target).flatten(0, -2)
    q_NC = probs_NC.to(wide(product_dtype(inputs.hidden)))
    return loss_on_few_classes(
        inputs, settings, given, SoftTargetOfScores(float(settings.z_loss)), ids_NC, q_NC, loss_scale
    )

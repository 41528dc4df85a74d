"""Compare a student's rows of logits with a teacher's on a few classes, and on the rest of the vocabulary as one class.

The k given classes of a row have the logits z_j. All others together act like one class with the logit r:

    r = log sum over the others of exp(z_i),   log p = log_softmax(z_1, ..., z_k, r),   lse = logsumexp(z_1, ..., r)

so a divergence of k + 1 classes has the gradient u_1, ..., u_k, u_r (`rows/divergences.py`), and every logit's is

    d loss / d z_j = u_j for the given classes,   u_r exp(z_i - r) for the others

because d r / d z_i = exp(z_i - r). Where the rest is left out, the divergence is that of the k classes alone: u_r = 0.
r is a log-sum-exp of its own, not the logarithm of 1 - sum_j p_j, so it is exact however little the others have, and
-inf where there are none. A z-loss adds z_loss lse^2, that is 2 z_loss lse p_j to each u.

Per chunk there are two collectives: the largest logits, and one stacked sum that also brings the k logits to every
rank, which then compute the divergence alike.

Shape suffixes: N rows (batch x time), K rows of one chunk or of a block of it, V this rank's classes, C the k given
classes, or k + 1 with the rest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.chunks import Chunk
from seqpar.distributed.collectives import group_max, group_sum
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.dense_rows import largest, take, target_hit, target_logit
from seqpar.linear.divergence_formula import RowResults
from seqpar.rows.divergences import RowTerms, logits_gradient_


class AgainstFewClasses:
    """Compare the student with a distribution over a few classes of each row.

    Args:
        terms: the divergence.
        shard: this rank's classes.
        ids_NC: the given classes of all rows, k of them; -1 fills up a row.
        log_q_NC, q_NC: the distribution, over the k classes, or over k + 1 with the rest as the last one. They may be
            overwritten.
        z_loss: the factor of lse^2.
    """

    def __init__(
        self,
        terms: RowTerms,
        shard: VocabShard,
        ids_NC: Tensor,
        log_q_NC: Tensor,
        q_NC: Tensor,
        z_loss: float = 0.0,
    ) -> None:
        self.terms = terms
        self.shard = shard
        self.ids_NC = ids_NC
        self.log_q_NC = log_q_NC
        self.q_NC = q_NC
        self.with_rest = q_NC.size(1) > ids_NC.size(1)
        self.z_loss = z_loss

    def rows_at_once(self, rows: int) -> int:
        """Return how many rows are taken at once: any number."""
        return rows

    def of_chunk(self, chunk: Chunk, ignored_K: Tensor | None) -> tuple[Tensor, ...]:
        """Return the classes of a chunk's rows and their distribution."""
        return self.ids_NC[chunk], self.log_q_NC[chunk], self.q_NC[chunk]

    def compare_(self, logits_KV: Tensor, target_K: Tensor, teacher: tuple[Tensor, ...]) -> tuple[RowResults, Tensor]:
        """Return the results of some rows and the gradient of their logits, which are overwritten with it."""
        ids_KC, log_q_KC, q_KC = teacher
        sums = _sums_(logits_KV, target_K, ids_KC, self.shard)
        lse_K = sums.logits_KC.logsumexp(-1)
        log_p_KC = sums.logits_KC[:, : q_KC.size(1)].log_softmax(-1)
        p_KC = log_p_KC.exp()
        # This overwrites the chunk's part of q, which no other chunk reads
        terms = self.terms(log_p_KC, p_KC, log_q_KC, q_KC)
        loss_K = terms.loss_K
        grad_KC = logits_gradient_(terms, terms.slope_K, p_KC)
        if self.z_loss:
            whole_lse_K = lse_K + sums.best_K
            loss_K = loss_K + self.z_loss * whole_lse_K.square()
            grad_KC += (2 * self.z_loss * whole_lse_K).unsqueeze(1) * p_KC
        grad_KV = self._spread_(grad_KC, sums, logits_KV, ids_KC)
        return RowResults(loss_K, lse_K - sums.gold_K, sums.correct_K), grad_KV

    def _spread_(self, grad_KC: Tensor, sums: _Sums, others_KV: Tensor, ids_KC: Tensor) -> Tensor:
        """Turn the exponentials of the other classes into the gradient of all of this rank's logits, in place."""
        if self.with_rest:
            # u_r exp(z_i - r); without any others, or if all of them are -inf, there is nothing to divide
            factor_K = (grad_KC[:, -1] / sums.others_K).masked_fill_(sums.others_K == 0, 0)
            others_KV.mul_(factor_K.unsqueeze(1))
        else:
            others_KV.zero_()
        if not others_KV.size(1):
            return others_KV
        index_KC, owned_KC = self.shard.locate(ids_KC, others_KV.size(1))
        given_KC = grad_KC[:, : ids_KC.size(1)]
        return others_KV.scatter_add_(1, index_KC, given_KC.where(owned_KC, torch.zeros_like(given_KC)))


class _Sums(NamedTuple):
    """What a row's divergence needs of all ranks. Logits are less the row's largest, so that no digits are lost."""

    logits_KC: Tensor
    """z_1, ..., z_k, r."""
    gold_K: Tensor
    """The target's logit."""
    best_K: Tensor
    """The largest logit."""
    others_K: Tensor
    """The sum of the exponentials of the other classes, as they are left in the logits' memory."""
    correct_K: Tensor


def _sums_(logits_KV: Tensor, target_K: Tensor, ids_KC: Tensor, shard: VocabShard) -> _Sums:
    """Return the sums of some rows; the logits are overwritten with the exponentials of the other classes.

    exp(z_i - b), b the largest logit of the others, and 0 for the given classes.
    """
    size = logits_KV.size(1)
    index_KC, owned_KC = shard.locate(ids_KC, size)
    here_K, argbest_K = largest(logits_KV)
    given_KC = take(logits_KV, index_KC, owned_KC)
    gold_K = target_logit(logits_KV, target_K, shard)
    if size:
        # Adding 0 leaves the class in whose place an id of another rank stands as it is
        logits_KV.scatter_add_(1, index_KC, torch.zeros_like(given_KC).masked_fill_(owned_KC, -math.inf))
    best_K, others_best_K = group_max(torch.stack([here_K, largest(logits_KV)[0]]), shard.group)
    # If there are no others, -inf - (-inf) would be nan
    others_best_K = others_best_K.masked_fill(others_best_K == -math.inf, 0)
    logits_KV.sub_(others_best_K.unsqueeze(1)).exp_()
    hit_K = target_hit(target_K, argbest_K, here_K == best_K, size, shard).to(gold_K.dtype)
    columns = torch.cat([torch.stack([logits_KV.sum(-1), gold_K, hit_K]), given_KC.t()])
    others_K, gold_K, hit_K, *given = group_sum(columns, shard.group)
    given_KC = torch.stack(given, 1).masked_fill_(ids_KC < 0, -math.inf)
    rest_K = (others_best_K - best_K) + others_K.log()
    logits_KC = torch.cat([given_KC - best_K.unsqueeze(1), rest_K.unsqueeze(1)], 1)
    return _Sums(logits_KC, gold_K - best_K, best_K, others_K, hit_K == 1)

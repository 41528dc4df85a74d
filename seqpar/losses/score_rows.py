"""Compute log-probabilities and the entropy of a row of logits, and their gradient, in closed form.

For a row with logits z_1 ... z_V, m = max_k z_k, target y and further classes id_1 ... id_J:

    log S = log sum_k exp(z_k - m)          log p_k = z_k - m - log S
    log_prob = log p_y                      log_probs_at_j = log p_(id_j)
    entropy  = H = -sum_k p_k log p_k = log S - sum_k p_k (z_k - m)

With the upstream factors u of log_prob, h of entropy and g_j of log_probs_at:

    d / d z_k = u [k = y] + sum_j g_j [k = id_j] - p_k (u + sum_j g_j + h (log p_k + H))

A class with z_k = -inf has p_k = 0 and adds nothing to any of these sums.

All logits are taken relative to m, because a difference of two numbers in the hundreds would lose the digits of a
log-probability near 0. In the code: `best_N` is m, `sum_N` S, `dot_N` sum_k exp(z_k - m) (z_k - m).
Shape suffixes: N rows, V classes (on this rank, where the vocabulary is split), J given classes, P = 1 + J, T top ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.core.chunks import Chunk, recording

NEVER = -1e4
"""exp(NEVER) is 0 in every dtype. In place of -inf it makes the product with a probability of 0 equal 0, not nan."""


class ScoreSums(NamedTuple):
    """What the scores of a row need from its classes."""

    best_N: Tensor
    """m; -inf where there are no classes, or all are masked out."""
    sum_N: Tensor
    """S = sum_k exp(z_k - m)."""
    dot_N: Tensor | None
    """sum_k exp(z_k - m) (z_k - m), which is S times the mean of z - m; None if no entropy is wanted."""
    picked_NP: Tensor
    """z of the target, then of each given class; 0 for a class on another rank."""
    top_NT: Tensor
    """The T largest logits, in descending order; T is 0 if none are wanted."""
    top_ids_NT: Tensor
    """The classes that have them; of equal ones the lower class first."""

    def rows(self, which: Chunk) -> ScoreSums:
        """Return the sums of some rows."""
        return ScoreSums(*(None if t is None else t[which] for t in self))  # type: ignore[arg-type]


class RowScores(NamedTuple):
    """The scores of some rows."""

    log_prob_N: Tensor
    entropy_N: Tensor | None
    log_probs_at_NJ: Tensor
    top_log_probs_NT: Tensor
    top_ids_NT: Tensor


class Upstream(NamedTuple):
    """The gradient that arrives in backward, for each row and each of its scores; None is 0."""

    log_prob_N: Tensor
    entropy_N: Tensor | None
    log_probs_at_NJ: Tensor | None

    def rows(self, which: Chunk) -> Upstream:
        """Return the gradients that arrive for some rows."""
        return Upstream(*(None if t is None else t[which] for t in self))  # type: ignore[arg-type]

    def of_all_log_probs(self) -> Tensor:
        """Return u + sum_j g_j."""
        if self.log_probs_at_NJ is None:
            return self.log_prob_N
        return self.log_prob_N + self.log_probs_at_NJ.sum(-1)


class SplitScores(Protocol):
    """The classes of a split vocabulary that this rank has."""

    @property
    def start(self) -> int:
        """Return this rank's first class."""

    def locate(self, target_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return each target's index among this rank's `size` classes, and whether it is one of them."""

    def combine_scores(self, sums: ScoreSums, top_k: int) -> ScoreSums:
        """Return the sums over the whole vocabulary, given those over this rank's classes."""


class Exponentials(NamedTuple):
    """exp(z - m) and z - m of this rank's classes, where m may be this rank's own maximum."""

    exp_NV: Tensor
    shifted_NV: Tensor
    """z - m, at least NEVER; the same memory as exp_NV if no entropy is wanted."""
    best_N: Tensor
    """The m that was subtracted."""


def exponentials_(
    logits_NV: Tensor, best_N: Tensor, *, entropy: bool, masked: bool, out: Tensor | None = None
) -> Exponentials:
    """Overwrite the logits by z - m if `entropy`, else by exp(z - m).

    Args:
        logits_NV: in float32 or wider.
        best_N: m; where it is -inf, 0 is subtracted, so that all exponentials are 0.
        masked: whether logits may be -inf.
        out: memory for the exponentials if `entropy`; None to choose it here.
    """
    best_N = best_N.masked_fill(best_N == -math.inf, 0)
    shifted_NV = logits_NV.sub_(best_N.unsqueeze(1))
    if not entropy:
        return Exponentials(shifted_NV.exp_(), shifted_NV, best_N)
    if masked:
        shifted_NV.clamp_(min=NEVER)
    return Exponentials(torch.exp(shifted_NV, out=out), shifted_NV, best_N)


def score_sums(
    logits_NV: Tensor,
    picked_NP: Tensor,
    *,
    entropy: bool,
    masked: bool = True,
    top_k: int = 0,
    split: SplitScores | None = None,
    out: Tensor | None = None,
) -> tuple[Exponentials, ScoreSums]:
    """Return the exponentials of this rank's classes, and the sums over all classes; the logits are overwritten.

    Args:
        picked_NP: the target and the given classes, of the whole vocabulary.
        logits_NV, entropy, masked, out: as `exponentials_`.
    """
    index_NP = picked_NP
    owned_NP = None
    if split is not None:
        index_NP, owned_NP = split.locate(picked_NP, logits_NV.size(1))
    if not logits_NV.size(1):
        # An empty maximum is -inf, an empty sum 0
        best_N = logits_NV.new_full((len(logits_NV),), -math.inf)
        picked_logits_NP = logits_NV.new_zeros(index_NP.shape)
    else:
        best_N = logits_NV.amax(-1)
        picked_logits_NP = logits_NV.gather(1, index_NP)
    top_NT, top_ids_NT = top_classes(logits_NV, min(top_k, logits_NV.size(1)))
    made = exponentials_(logits_NV, best_N, entropy=entropy, masked=masked, out=out)
    dot_N = None
    if entropy:
        # A product of matrices for each row is one pass, without a temporary of their size
        dot_N = torch.bmm(made.exp_NV.unsqueeze(1), made.shifted_NV.unsqueeze(2)).reshape(-1)
    sums = ScoreSums(best_N, made.exp_NV.sum(-1), dot_N, picked_logits_NP, top_NT, top_ids_NT)
    if split is None:
        return made, sums
    assert owned_NP is not None
    sums = sums._replace(
        picked_NP=picked_logits_NP.where(owned_NP, torch.zeros_like(picked_logits_NP)),
        top_ids_NT=top_ids_NT + split.start,
    )
    return made, split.combine_scores(sums, top_k)


def row_scores(sums: ScoreSums) -> RowScores:
    """Return the scores: log p_k = z_k - m - log S, and H = log S - sum_k p_k (z_k - m)."""
    best_N1 = sums.best_N.unsqueeze(1)
    log_sum_N = sums.sum_N.log()
    log_sum_N1 = log_sum_N.unsqueeze(1)
    # z - m is taken first: both may be in the hundreds, and their difference near 0
    log_p_NP = (sums.picked_NP - best_N1) - log_sum_N1
    entropy_N = None
    if sums.dot_N is not None:
        entropy_N = log_sum_N - sums.dot_N / sums.sum_N
    top_NT = (sums.top_NT - best_N1) - log_sum_N1
    return RowScores(log_p_NP[:, 0], entropy_N, log_p_NP[:, 1:], top_NT, sums.top_ids_NT)


def log_probs_gradient_(
    made: Exponentials, picked_NP: Tensor, sums: ScoreSums, upstream: Upstream, split: SplitScores | None = None
) -> Tensor:
    """Overwrite exp(z - m) by the gradient of sum u log_prob + sum_j g_j log_probs_at_j with respect to the logits."""
    to_p_N = _factor_of_p(made, sums)
    made.exp_NV.mul_((-upstream.of_all_log_probs() * to_p_N).unsqueeze(1))
    return _add_picked_(made.exp_NV, picked_NP, upstream, split)


def scores_gradient_(
    made: Exponentials, picked_NP: Tensor, sums: ScoreSums, upstream: Upstream, split: SplitScores | None = None
) -> Tensor:
    """Overwrite z - m by the gradient of all scores with respect to the logits; exp(z - m) is not changed."""
    assert upstream.entropy_N is not None
    assert sums.dot_N is not None
    to_p_N = _factor_of_p(made, sums)
    # log p_k + H = (z_k - m) - sum_j p_j (z_j - m), where a shard's z - m is relative to the m it subtracted
    centre_N = _offset(made, sums) - sums.dot_N / sums.sum_N
    slope_N = -upstream.entropy_N * to_p_N
    rest_N = -upstream.of_all_log_probs() * to_p_N + slope_N * centre_N
    shifted_NV = made.shifted_NV
    torch.addcmul(rest_N.unsqueeze(1), shifted_NV, slope_N.unsqueeze(1), out=shifted_NV)
    shifted_NV *= made.exp_NV
    return _add_picked_(shifted_NV, picked_NP, upstream, split)


def _factor_of_p(made: Exponentials, sums: ScoreSums) -> Tensor:
    """Return p_k / exp(z_k - m), where m may be a shard's own."""
    return _offset(made, sums).exp() / sums.sum_N


def _offset(made: Exponentials, sums: ScoreSums) -> Tensor:
    """Return the m that was subtracted, less that of the whole vocabulary; any finite number if a shard has no p."""
    # A shard without classes, or with masked ones alone, has subtracted 0, which may lie far above
    return (made.best_N - sums.best_N).clamp_(max=0)


def _add_picked_(grad_NV: Tensor, picked_NP: Tensor, upstream: Upstream, split: SplitScores | None) -> Tensor:
    """Add u at the target and g_j at each given class."""
    if not grad_NV.size(1):
        return grad_NV
    factor_NP = upstream.log_prob_N.unsqueeze(1)
    if upstream.log_probs_at_NJ is not None:
        factor_NP = torch.cat([factor_NP, upstream.log_probs_at_NJ], 1)
    index_NP = picked_NP[:, : factor_NP.size(1)]
    if split is not None:
        index_NP, owned_NP = split.locate(index_NP, grad_NV.size(1))
        factor_NP = factor_NP.where(owned_NP, torch.zeros_like(factor_NP))
    return grad_NV.scatter_add_(1, index_NP, factor_NP.to(grad_NV.dtype))


def top_classes(logits_NV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits in descending order, and their classes; of equal logits the lower class first."""
    if not top_k:
        return logits_NV[:, :0], torch.zeros((len(logits_NV), 0), dtype=torch.int64, device=logits_NV.device)
    if recording(logits_NV.device):
        # While a CUDA graph is recorded no number can be read
        in_order = logits_NV.sort(dim=-1, descending=True, stable=True)
        return in_order.values[:, :top_k], in_order.indices[:, :top_k]
    top_NT, ids_NT = logits_NV.topk(top_k, -1)
    lowest_N1 = top_NT[:, -1:]
    # topk takes any of the classes that tie with the lowest logit it returns; a stable sort takes the lower ones
    tied_N = (logits_NV == lowest_N1).sum(-1) > (top_NT == lowest_N1).sum(-1)
    rows = tied_N.nonzero().squeeze(1)
    if len(rows):
        in_order = logits_NV[rows].sort(dim=-1, descending=True, stable=True)
        top_NT[rows] = in_order.values[:, :top_k]
        ids_NT[rows] = in_order.indices[:, :top_k]
    return in_descending_order(top_NT, ids_NT)


def in_descending_order(values_NT: Tensor, ids_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values in descending order with their classes; of equal values the lower class first."""
    ids_NT, by_class = ids_NT.sort(-1)
    values_NT, by_value = values_NT.gather(1, by_class).sort(dim=-1, descending=True, stable=True)
    return values_NT, ids_NT.gather(1, by_value)

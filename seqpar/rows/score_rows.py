"""Compute log-probabilities and the entropy of a row of logits, and their gradient, in closed form.

For a row with logits z_1 ... z_V, m = max_k z_k, target y and further classes id_1 ... id_J:

    log S = log sum_k exp(z_k - m)          log p_k = z_k - m - log S
    log_prob = log p_y                      log_probs_at_j = log p_(id_j)
    entropy  = H = -sum_k p_k log p_k = log S - sum_k p_k (z_k - m)

With the upstream factors u of log_prob, h of entropy and g_j of log_probs_at:

    d / d z_k = u [k = y] + sum_j g_j [k = id_j] - p_k (u + sum_j g_j + h (log p_k + H))

A class with z_k = -inf has p_k = 0 and adds nothing to any of these sums.

All logits are taken relative to m, because a difference of two numbers in the hundreds would lose the digits of a
log-probability near 0. In the code: `best_N` is m, `log_sum_N` log S, `mean_N` sum_k p_k (z_k - m).
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
    log_sum_N: Tensor
    """log S."""
    mean_N: Tensor | None
    """sum_k p_k (z_k - m); None if no entropy is wanted."""
    share_N: Tensor | None
    """The sum of p over this rank's classes: their own softmax times share_N is p. None if all classes are here."""
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

    def of_picked(self) -> Tensor:
        """Return u and g_1 ... g_J, or u alone where no g arrives: (N, P)."""
        u_N1 = self.log_prob_N.unsqueeze(1)
        if self.log_probs_at_NJ is None:
            return u_N1
        return torch.cat([u_N1, self.log_probs_at_NJ], 1)

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


class Softmax(NamedTuple):
    """The softmax over this rank's classes, and their logits relative to a maximum."""

    p_NV: Tensor
    shifted_NV: Tensor
    """z - best_N; the same memory as p_NV if no entropy is wanted."""
    best_N: Tensor
    """The m that was subtracted: this rank's own, or that of the whole vocabulary."""


def softmax_(logits_NV: Tensor, best_N: Tensor, *, entropy: bool, masked: bool, out: Tensor | None = None) -> Softmax:
    """Overwrite the logits by z - m if `entropy`, else by their softmax.

    Args:
        logits_NV: in float32 or wider.
        best_N: m.
        masked: whether logits may be -inf.
        out: memory for the softmax if `entropy`; None to choose it here.
    """
    if not entropy:
        return Softmax(torch.softmax(logits_NV, -1, out=logits_NV), logits_NV, best_N)
    p_NV = torch.softmax(logits_NV, -1, out=out)
    shifted_NV = logits_NV.sub_(best_N.unsqueeze(1))
    if masked:
        shifted_NV.clamp_(min=NEVER)
    return Softmax(p_NV, shifted_NV, best_N)


def score_sums(
    logits_NV: Tensor,
    picked_NP: Tensor,
    *,
    entropy: bool,
    masked: bool = True,
    top_k: int = 0,
    split: SplitScores | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> tuple[Softmax, ScoreSums]:
    """Return the softmax over this rank's classes, and the sums over all classes; the logits are overwritten.

    Args:
        picked_NP: the target and the given classes, of the whole vocabulary.
        logits_NV, entropy, masked, out: as `softmax_`.
        scratch: memory of the logits' size for the entropy's terms. None overwrites z - m by them.
    """
    index_NP = picked_NP
    owned_NP = None
    if split is not None:
        index_NP, owned_NP = split.locate(picked_NP, logits_NV.size(1))
    if not logits_NV.size(1):
        made = Softmax(logits_NV, logits_NV, logits_NV.new_full((len(logits_NV),), -math.inf))
        sums = _no_classes(made, picked_NP, entropy)
    else:
        best_N = logits_NV.amax(-1)
        picked_logits_NP = logits_NV.gather(1, index_NP)
        top_NT, top_ids_NT = top_classes(logits_NV, min(top_k, logits_NV.size(1)))
        made = softmax_(logits_NV, best_N, entropy=entropy, masked=masked, out=out)
        # The largest p is 1 / S, at least 1/V, so that its log is exact
        log_sum_N = -made.p_NV.amax(-1).log()
        mean_N = None
        if entropy:
            # Added in a tree, by `sum`: a product of vectors adds from left to right, five times as far from the truth
            terms_NV = torch.mul(made.shifted_NV, made.p_NV, out=made.shifted_NV if scratch is None else scratch)
            mean_N = terms_NV.sum(-1)
        sums = ScoreSums(best_N, log_sum_N, mean_N, None, picked_logits_NP, top_NT, top_ids_NT)
    if split is None:
        return made, sums
    assert owned_NP is not None
    return made, over_ranks(sums, owned_NP, split, top_k)


def over_ranks(sums: ScoreSums, owned_NP: Tensor, split: SplitScores, top_k: int) -> ScoreSums:
    """Return the sums over the whole vocabulary, given those over this rank's classes, of which it owns some picked."""
    sums = sums._replace(
        picked_NP=sums.picked_NP.where(owned_NP, torch.zeros_like(sums.picked_NP)),
        top_ids_NT=sums.top_ids_NT + split.start,
    )
    return split.combine_scores(sums, top_k)


def _no_classes(made: Softmax, picked_NP: Tensor, entropy: bool) -> ScoreSums:
    """Return the sums of a rank without classes: an empty maximum is -inf, an empty sum 0."""
    zero_N = torch.zeros_like(made.best_N)
    nothing_NT = zero_N.new_zeros((len(zero_N), 0))
    return ScoreSums(
        best_N=made.best_N,
        log_sum_N=zero_N,
        mean_N=zero_N if entropy else None,
        share_N=None,
        picked_NP=zero_N.new_zeros(picked_NP.shape),
        top_NT=nothing_NT,
        top_ids_NT=nothing_NT.long(),
    )


def row_scores(sums: ScoreSums) -> RowScores:
    """Return the scores: log p_k = z_k - m - log S, and H = log S - sum_k p_k (z_k - m)."""
    best_N1 = sums.best_N.unsqueeze(1)
    log_sum_N1 = sums.log_sum_N.unsqueeze(1)
    # z - m is taken first: both may be in the hundreds, and their difference near 0
    log_p_NP = (sums.picked_NP - best_N1) - log_sum_N1
    entropy_N = None
    if sums.mean_N is not None:
        entropy_N = sums.log_sum_N - sums.mean_N
    top_NT = (sums.top_NT - best_N1) - log_sum_N1
    return RowScores(log_p_NP[:, 0], entropy_N, log_p_NP[:, 1:], top_NT, sums.top_ids_NT)


def log_probs_gradient_(
    made: Softmax, picked_NP: Tensor, sums: ScoreSums, upstream: Upstream, split: SplitScores | None = None
) -> Tensor:
    """Overwrite the softmax by the gradient of sum u log_prob + sum_j g_j log_probs_at_j with respect to the logits."""
    grad_NV = made.p_NV.mul_(_times_share(-upstream.of_all_log_probs(), sums).unsqueeze(1))
    return _add_picked_(_hide_masked_shards_(grad_NV, sums), picked_NP, upstream, split)


def scores_gradient_(
    made: Softmax, picked_NP: Tensor, sums: ScoreSums, upstream: Upstream, split: SplitScores | None = None
) -> Tensor:
    """Overwrite z - m by the gradient of all scores with respect to the logits; the softmax is not changed."""
    assert upstream.entropy_N is not None
    assert sums.mean_N is not None
    # log p_k + H = (z_k - m) - sum_j p_j (z_j - m), where a shard may have subtracted an m of its own
    centre_N = (made.best_N - sums.best_N) - sums.mean_N
    slope_N = _times_share(-upstream.entropy_N, sums)
    rest_N = _times_share(-upstream.of_all_log_probs(), sums) + slope_N * centre_N
    # Two passes over rows in a cache take a quarter of the time of addcmul, which is slow where it broadcasts
    grad_NV = made.shifted_NV.mul_(slope_N.unsqueeze(1)).add_(rest_N.unsqueeze(1)).mul_(made.p_NV)
    return _add_picked_(_hide_masked_shards_(grad_NV, sums), picked_NP, upstream, split)


def _times_share(factor_N: Tensor, sums: ScoreSums) -> Tensor:
    """Return the factor of p as a factor of the softmax over this rank's classes."""
    if sums.share_N is None:
        return factor_N
    return factor_N * sums.share_N


def _hide_masked_shards_(grad_NV: Tensor, sums: ScoreSums) -> Tensor:
    """Set rows to 0 where all logits of this rank are -inf: their own softmax is 0/0 = nan, while p is 0."""
    if sums.share_N is None:
        return grad_NV
    return grad_NV.masked_fill_((sums.share_N == 0).unsqueeze(1), 0)


def _add_picked_(grad_NV: Tensor, picked_NP: Tensor, upstream: Upstream, split: SplitScores | None) -> Tensor:
    """Add u at the target and g_j at each given class."""
    if not grad_NV.size(1):
        return grad_NV
    factor_NP = upstream.of_picked()
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

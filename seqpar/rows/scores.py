"""The scores of a row of logits, and the gradient of any function of them, in closed form.

For a row with logits z_1 ... z_V, m = max_k z_k, target y and further classes id_1 ... id_J:

    log S = log sum_k exp(z_k - m)          log p_k = z_k - m - log S
    log_prob = log p_y                      log_probs_at_j = log p_(id_j)
    lse      = m + log S                    entropy = H = log S - sum_k p_k (z_k - m)
    weighted = sum_k w_k log p_k            log_rest = log sum of p_k over the classes that are not ids

With the upstream factors u of log_prob, g_j of log_probs_at, r of lse, h of entropy, v of weighted and f of log_rest,
W = sum_k w_k and R = exp(log_rest):

    d / d z_k = u [k = y] + sum_j g_j [k = id_j] + v w_k + f [k is not an id] p_k / R
                + p_k (r - u - sum_j g_j - v W - f - h (log p_k + H))

Cross-entropy in every convention, z-loss, soft targets of a few classes and all objectives are functions of these
scores. A class with z_k = -inf has p_k = 0 and adds nothing to any sum.

All logits are taken relative to m, because a difference of two numbers in the hundreds would lose the digits of a
log-probability near 0. In the code: `best_N` is m, `log_sum_N` log S, `mean_N` sum_k p_k (z_k - m), `sum_N` sum_k w_k
z_k.

The classes of a row may be divided into parts: the ranks of a split vocabulary, and for log_rest each given class by
itself. With m_r and S_r of part r,

    m = max_r m_r,   S = sum_r S_r exp(m_r - m),   p_k = (softmax within part r)_k S_r exp(m_r - m) / S

so that a part takes the softmax of its own classes and scales it by its share of the probability.

Shape suffixes: N rows, V classes (on this rank, where the vocabulary is split), J given classes, P = 1 + J picked ones,
R parts, T top classes.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.core.chunks import Chunk
from seqpar.core.device_facts import is_capturing, is_on_host, may_read
from seqpar.core.structures import each

NEVER = -1e4
"""exp(NEVER) is 0 in every dtype. In place of -inf it makes the product with a probability of 0 equal 0, not nan."""

FEW = 2**13
"""How many logits the CPU multiplies in the time that one torch call takes."""


class Scores(NamedTuple):
    """The scores of some rows, in nats, float32 or wider."""

    log_prob: Tensor
    """(rows,) log p of the target."""
    lse: Tensor
    """(rows,) the log-sum-exp of the logits."""
    entropy: Tensor | None = None
    """(rows,) -sum_k p_k log p_k; None unless asked for."""
    log_probs_at: Tensor | None = None
    """(rows, J) log p of the classes `ids`; None unless given."""
    weighted: Tensor | None = None
    """(rows,) sum_k w_k log p_k; None without weights."""
    log_rest: Tensor | None = None
    """(rows,) log of the probability of all classes that are not among the ids; None unless asked for."""


class Upstream(NamedTuple):
    """The gradient of a loss with respect to each score; None is 0."""

    log_prob: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    log_probs_at: Tensor | None = None
    weighted: Tensor | None = None
    log_rest: Tensor | None = None

    def select(self, which: Chunk) -> Upstream:
        """Return the gradients of some rows."""
        return each(lambda t: t[which], self)

    def times(self, factor: float | Tensor, counted_N: Tensor | None = None) -> Upstream:
        """Return them times a factor, one for all rows or one for each; 0 in rows that do not count, even if nan."""
        if counted_N is None and not isinstance(factor, Tensor) and factor == 1:
            return self
        return each(lambda t: times(t, factor, counted_N), self)

    def of_picked(self) -> Tensor | None:
        """Return u and g_1 ... g_J, (N, P); only u if no g arrives, and None if neither does."""
        if self.log_probs_at is None:
            return None if self.log_prob is None else self.log_prob.unsqueeze(1)
        u_N = self.log_probs_at.new_zeros(len(self.log_probs_at)) if self.log_prob is None else self.log_prob
        return torch.cat([u_N.unsqueeze(1), self.log_probs_at], 1)

    def of_every_logit(self, weights: ClassWeights | None) -> Tensor | None:
        """Return r - u - sum_j g_j - v W - f, the factor of p_k without the entropy's part; None if nothing arrives."""
        terms = [] if self.lse is None else [self.lse]
        if self.log_prob is not None:
            terms.append(-self.log_prob)
        if self.log_rest is not None:
            terms.append(-self.log_rest)
        if self.log_probs_at is not None:
            terms.append(-self.log_probs_at.sum(-1))
        if self.weighted is not None and weights is not None:
            terms.append(self.weighted * -weights.total)
        return sum(terms[1:], start=terms[0]) if terms else None


class ClassWeights(NamedTuple):
    """The weights w of this rank's classes."""

    weight_V: Tensor | None
    """w; None if all are 1. The weight of a class that is not used may be inf or nan."""
    excluded: int | None
    """The class whose w is 0, such as padding, counted from this rank's first class."""
    total: float | Tensor
    """W, over all ranks."""

    def sum_of(self, logits_NV: Tensor) -> Tensor:
        """Return sum_k w_k z_k."""
        parts = [slice(None)]
        # Left out, not subtracted or multiplied by 0: masked by -1e9 or -inf, it would destroy the others' digits
        if self.excluded is not None:
            parts = [slice(0, self.excluded), slice(self.excluded + 1, None)]
        w_V = self.weight_V
        sums = [logits_NV[:, p].sum(-1) if w_V is None else logits_NV[:, p] @ w_V[p] for p in parts]
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]

    def add_(self, grad_NV: Tensor, v_N: Tensor) -> None:
        """Add v w_k to the gradient of every logit."""
        if self.weight_V is not None:
            grad_NV.addcmul_(v_N.unsqueeze(1), included_weight(self.weight_V, self.excluded))
            return
        grad_NV += v_N.unsqueeze(1)
        if self.excluded is not None:
            grad_NV[:, self.excluded] -= v_N


class Sums(NamedTuple):
    """What the scores of a row, and their gradient, need from its classes."""

    best_N: Tensor
    """m; -inf where there are no classes, or all are masked out."""
    log_sum_N: Tensor
    """log S."""
    picked_NP: Tensor
    """z of the target, then of each given class; 0 for a class on another rank, -inf for an id that is no class."""
    mean_N: Tensor | None = None
    """sum_k p_k (z_k - m); None if no entropy is wanted."""
    sum_N: Tensor | None = None
    """sum_k w_k z_k; None without weights."""
    share_N: Tensor | None = None
    """The sum of p over this rank's part: its own softmax times share_N is p. None if there is only one part."""
    rest_N: Tensor | None = None
    """log S of the classes that are not ids, relative to the same m; None unless asked for."""
    rest_share_N: Tensor | None = None
    """This rank's share of those classes' probability."""
    correct_N: Tensor | None = None
    """Whether the target is the lowest class with the largest logit; None unless asked for."""
    top_NT: Tensor | None = None
    """The T largest logits, in descending order; None if none are wanted."""
    top_ids_NT: Tensor | None = None
    """Their classes; among equal logits the lower class first."""
    rank_N: Tensor | None = None
    """How many classes come before the target; None unless asked for."""

    def select(self, which: Chunk) -> Sums:
        """Return the sums of some rows."""
        return each(lambda t: t[which], self)


class SplitVocabulary(Protocol):
    """The classes of a split vocabulary that this rank has."""

    @property
    def start(self) -> int:
        """Return this rank's first class."""

    def locate(self, target_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return each target's index among this rank's `size` classes, and whether it is one of them."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Return every part's tensor (..., N), stacked in their order; a rank may have several parts."""

    def rank(self) -> int:
        """Return this rank's place among the parts."""


class Softmax(NamedTuple):
    """The softmax over this rank's part, and its logits relative to a maximum."""

    p_NV: Tensor
    shifted_NV: Tensor
    """z - best_N; if it is not wanted, the same memory as p_NV."""
    best_N: Tensor
    """The m that was subtracted: this rank's own, or that of the whole vocabulary."""


class RowFunction(NamedTuple):
    """Which scores of a row are wanted, over which classes."""

    entropy: bool = False
    weights: ClassWeights | None = None
    rest: bool = False
    """Whether log_rest is wanted; not together with the entropy or the weighted sum."""
    gaps: bool = False
    """Whether an id may be -1, which stands for no class."""
    correct: bool = False
    top_k: int = 0
    rank: bool = False
    """Whether the target's rank is wanted, which `before` counts once its logit is known."""
    masked: bool = True
    """Whether logits may be -inf."""
    shifted: bool = False
    """Whether z - m is wanted besides the softmax; the entropy needs it."""
    split: SplitVocabulary | None = None
    """The classes that this rank has; None if it has all."""

    def softmax_(self, logits_NV: Tensor, best_N: Tensor, out: Tensor | None = None) -> Softmax:
        """Return the softmax; overwrite the logits (float32 or wider) with z - m if that is wanted.

        Args:
            out: memory for the softmax, which may be that of the logits if z - m is not wanted; None to choose it here.
        """
        p_NV = torch.softmax(logits_NV, -1, dtype=logits_NV.dtype, out=out)
        if not (self.entropy or self.shifted):
            return Softmax(p_NV, p_NV, best_N)
        shifted_NV = logits_NV.sub_(best_N.unsqueeze(1))
        if self.masked and self.entropy:
            shifted_NV.clamp_(min=NEVER)
        return Softmax(p_NV, shifted_NV, best_N)

    def probabilities_(self, logits_NV: Tensor, sums: Sums, out: Tensor | None = None) -> Softmax:
        """Return p = exp(z - m) / S of some classes, instead of a softmax over them; otherwise like `softmax_`.

        Args:
            sums: those over all classes.
        """
        shifted_NV = logits_NV.sub_(sums.best_N.unsqueeze(1))
        if self.masked and self.entropy:
            shifted_NV.clamp_(min=NEVER)
        p_NV = torch.exp(shifted_NV, out=out).mul_(sums.log_sum_N.neg().exp_().unsqueeze(1))
        return Softmax(p_NV, shifted_NV, sums.best_N)

    def sums_(
        self,
        logits_NV: Tensor,
        picked_NP: Tensor,
        *,
        out: Tensor | None = None,
        scratch: Tensor | None = None,
    ) -> tuple[Softmax, Sums]:
        """Return the softmax over this rank's part, and the sums over all classes; the arguments are `own_sums_`'s."""
        made, own, here_NP = self.own_sums_(logits_NV, picked_NP, out=out, scratch=scratch)
        return made, self.over_parts(own, picked_NP, here_NP)

    def own_sums_(
        self,
        logits_NV: Tensor,
        picked_NP: Tensor,
        *,
        out: Tensor | None = None,
        scratch: Tensor | None = None,
    ) -> tuple[Softmax, Sums, Tensor | None]:
        """Return the softmax over this rank's part, its sums as `over_parts` takes them, and which classes are here.

        Args:
            picked_NP: the target and the given classes, of the whole vocabulary.
            logits_NV, out: as in `softmax_`. The logits are left unchanged only if z - m is not wanted and `out` is
                None or separate memory.
            scratch: memory of the logits' size for the entropy's terms; None to choose it here.
        """
        index_NP, here_NP = self.locate(picked_NP, logits_NV.size(1))
        if not logits_NV.size(1):
            made = Softmax(logits_NV, logits_NV, logits_NV.new_full((len(logits_NV),), -math.inf))
            return made, self._no_classes(made.best_N, picked_NP), here_NP
        picked_logits_NP = logits_NV.gather(1, index_NP)
        overwritten = out is not None and out.data_ptr() == logits_NV.data_ptr()
        best_N, correct_N = self._best(logits_NV, picked_NP, index_NP, picked_logits_NP[:, 0], overwritten)
        top_NT = top_ids_NT = None
        if self.top_k:
            top_NT, top_ids_NT = top_classes(logits_NV, min(self.top_k, logits_NV.size(1)))
        sum_N = None if self.weights is None else self.weights.sum_of(logits_NV)
        own_best_N = best_N
        if self.rest:
            assert here_NP is not None
            # Each given class is a part of its own. Adding 0 spares the class that stands in for another rank's id
            mask_NJ = torch.zeros_like(picked_logits_NP[:, 1:]).masked_fill_(here_NP[:, 1:], -math.inf)
            logits_NV.scatter_add_(1, index_NP[:, 1:], mask_NJ)
            own_best_N = logits_NV.amax(-1)
        made = self.softmax_(logits_NV, own_best_N, out)
        # The largest p is 1 / S, at least 1/V, so its log is accurate
        log_sum_N = -made.p_NV.amax(-1).log()
        mean_N = None
        if self.entropy:
            # `sum` adds in a tree; a product of vectors adds from left to right, with five times the error
            mean_N = torch.mul(made.shifted_NV, made.p_NV, out=scratch).sum(-1)
        own = Sums(
            own_best_N, log_sum_N, picked_logits_NP, mean_N, sum_N,
            rest_N=best_N if self.rest else None, correct_N=correct_N, top_NT=top_NT, top_ids_NT=top_ids_NT,
        )  # fmt: skip
        return made, own, here_NP

    def locate(self, picked_NP: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
        """Return each picked class's index among this rank's `size` classes, and whether it is one of them.

        A class that is not gets some valid index; the second result is None if all are here.
        """
        if self.split is not None:
            return self.split.locate(picked_NP, size)
        if self.gaps:
            return picked_NP.clamp(min=0), picked_NP >= 0
        return picked_NP, None

    def over_parts(self, own: Sums, picked_NP: Tensor, here_NP: Tensor | None) -> Sums:
        """Return the sums over all ranks' classes, given those over this rank's: one all-gather, two more with top_k.

        Each rank adds the ranks' numbers in rank order, so that a row's sums do not depend on its place in the batch,
        as they may with an all-reduce.

        Args:
            own: here `rest_N` is still the largest logit, ids included; `correct_N` is 1 if the target is the lowest
                class here with that logit, -1 if a class below the target has it, and 0 otherwise.
            here_NP: which picked classes this rank has.
        """
        if self.split is None and not self.gaps:
            return own
        assert here_NP is not None
        own = own._replace(picked_NP=own.picked_NP.where(here_NP, torch.zeros_like(own.picked_NP)))
        every = _stack(own, self.split)
        rank = 0 if self.split is None else self.split.rank()
        picked_logits_NP = every.picked_NP.sum(0)
        if self.gaps:
            picked_logits_NP = picked_logits_NP.masked_fill(picked_NP < 0, -math.inf)
        best_RN, log_sum_RN = every.best_N, every.log_sum_N
        ranks = len(best_RN)
        if self.rest:
            ids_JN = picked_logits_NP[:, 1:].t()
            best_RN = torch.cat([best_RN, ids_JN])
            log_sum_RN = torch.cat([log_sum_RN, torch.zeros_like(ids_JN)])
        best_N = best_RN.amax(0)
        offset_RN = best_RN - best_N
        # A part without classes, or with only masked ones (-inf), adds nothing
        empty_RN = best_RN == -math.inf
        share_RN = (log_sum_RN + offset_RN).exp().masked_fill(empty_RN, 0)
        sum_N = share_RN.sum(0)
        mean_N = None
        if every.mean_N is not None:
            # sum_k p_k (z_k - m) = sum_r share_r (mean_r + m_r - m)
            mean_N = (share_RN / sum_N * (every.mean_N + offset_RN)).masked_fill(empty_RN, 0).sum(0)
        correct_N = own.correct_N
        if every.correct_N is not None:
            # Of classes that tie, the lowest is the prediction: the target is correct if no class below it ties
            largest_RN = every.best_N if every.rest_N is None else every.rest_N
            correct_N = every.correct_N.where(largest_RN == largest_RN.amax(0), 0).sum(0) == 1
        rest_N = rest_share_N = None
        if self.rest:
            others_RN = (log_sum_RN + offset_RN).masked_fill(empty_RN, -math.inf)[:ranks]
            rest_N = others_RN.logsumexp(0)
            rest_share_N = (others_RN[rank] - rest_N).exp().masked_fill(empty_RN[rank], 0)
        top_NT, top_ids_NT = self._top_of_all(own)
        return Sums(
            best_N,
            sum_N.log(),
            picked_logits_NP,
            mean_N,
            None if every.sum_N is None else every.sum_N.sum(0),
            share_N=share_RN[rank] / sum_N,
            rest_N=rest_N,
            rest_share_N=rest_share_N,
            correct_N=correct_N,
            top_NT=top_NT,
            top_ids_NT=top_ids_NT,
        )

    def before(self, logits_NV: Tensor, target_N: Tensor, gold_N: Tensor) -> Tensor:
        """Return how many of this rank's classes come before the target, whose logit is `gold_N`.

        Those are the classes with a larger logit, and the lower classes with the same logit, as in the order of
        `top_classes`: no class comes before a correct target.
        """
        classes_V = torch.arange(logits_NV.size(1), device=logits_NV.device)
        if self.split is not None:
            classes_V += self.split.start
        gold_N1 = gold_N.unsqueeze(1)
        lower_NV = classes_V < target_N.unsqueeze(1)
        return ((logits_NV > gold_N1) | ((logits_NV == gold_N1) & lower_NV)).sum(-1)

    def over_ranks(self, before_N: Tensor) -> Tensor:
        """Return how many of all ranks' classes come before the target, given how many of this rank's do."""
        return before_N if self.split is None else self.split.gather(before_N).sum(0)

    def scores(self, sums: Sums) -> Scores:
        """Return the scores that follow from the sums."""
        log_p_NP = self.log_probs(sums, sums.picked_NP)
        lse_N = sums.best_N + sums.log_sum_N
        return Scores(
            log_p_NP[:, 0],
            lse_N,
            None if sums.mean_N is None else sums.log_sum_N - sums.mean_N,
            log_p_NP[:, 1:] if log_p_NP.size(1) > 1 else None,
            # sum_k w_k z_k - W lse
            None if sums.sum_N is None or self.weights is None else sums.sum_N - self.weights.total * lse_N,
            None if sums.rest_N is None else sums.rest_N - sums.log_sum_N,
        )

    def log_probs(self, sums: Sums, logits_NP: Tensor) -> Tensor:
        """Return log p of classes with these logits."""
        # z - m is taken first: both may be in the hundreds, and their difference near 0
        return (logits_NP - sums.best_N.unsqueeze(1)) - sums.log_sum_N.unsqueeze(1)

    def gradient_(self, made: Softmax, picked_NP: Tensor, sums: Sums, upstream: Upstream) -> Tensor:
        """Write the gradient of the logits over z - m if a gradient of the entropy arrives, else over the softmax."""
        a_N = upstream.of_every_logit(self.weights)
        grad_NV = self._gradient_of_every_logit_(made, sums, upstream, a_N)
        share_N = sums.share_N if sums.rest_share_N is None else sums.rest_share_N
        if share_N is not None:
            # Where all logits of this part are -inf, its own softmax is 0/0 = nan, while p is 0
            grad_NV.masked_fill_((share_N == 0).unsqueeze(1), 0)
        if not grad_NV.size(1):
            return grad_NV
        if upstream.weighted is not None and self.weights is not None:
            self.weights.add_(grad_NV, upstream.weighted)
        factor_NP = upstream.of_picked()
        if self.rest and factor_NP is not None and a_N is not None:
            # The ids are not part of this softmax: p_j (r - u - ...) is added here
            p_NJ = self.log_probs(sums, sums.picked_NP[:, 1:]).exp()
            factor_NP[:, 1:] += p_NJ * a_N.unsqueeze(1)
        if factor_NP is None:
            return grad_NV
        index_NP, here_NP = self.locate(picked_NP[:, : factor_NP.size(1)], grad_NV.size(1))
        if here_NP is not None:
            factor_NP = factor_NP.where(here_NP, torch.zeros_like(factor_NP))
        return grad_NV.scatter_add_(1, index_NP, factor_NP.to(grad_NV.dtype))

    def _gradient_of_every_logit_(self, made: Softmax, sums: Sums, upstream: Upstream, a_N: Tensor | None) -> Tensor:
        """Return p_k (a - h (log p_k + H)) + f p_k / R, in the memory that `gradient_` overwrites."""
        h_N = upstream.entropy
        if h_N is not None:
            assert sums.mean_N is not None
            # log p_k + H = (z_k - m) - sum_j p_j (z_j - m), but a shard may have subtracted its own m
            slope_N = _times(-h_N, sums.share_N)
            rest_N = slope_N * ((made.best_N - sums.best_N) - sums.mean_N)
            if a_N is not None:
                rest_N = rest_N + _times(a_N, sums.share_N)
            # Three passes over rows in cache take a quarter of the time of addcmul, which is slow when it broadcasts
            return made.shifted_NV.mul_(slope_N.unsqueeze(1)).add_(rest_N.unsqueeze(1)).mul_(made.p_NV)
        if a_N is None:
            return made.p_NV.zero_()
        factor_N = _times(a_N, sums.share_N)
        if upstream.log_rest is not None and sums.rest_share_N is not None:
            # f p_k / R = f (softmax of this rank's other classes) x its share of them, which is exact where p_k is 0
            factor_N = factor_N + upstream.log_rest * sums.rest_share_N
        return _scale_(made.p_NV, factor_N)

    def _best(
        self, logits_NV: Tensor, picked_NP: Tensor, index_NP: Tensor, gold_N: Tensor, may_overwrite: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the largest logit and, if asked for, whether the target is the lowest class that has it.

        With several parts, the second is a number, as `over_parts` takes it.
        """
        if not self.correct:
            return logits_NV.amax(-1), None
        if self.split is None and not self.gaps and may_overwrite and is_on_host(logits_NV):
            return _best_(logits_NV, index_NP[:, 0], gold_N)
        best_N, argbest_N = logits_NV.max(-1)
        return best_N, self.hit(argbest_N, picked_NP[:, 0])

    def hit(self, argbest_N: Tensor, target_N: Tensor) -> Tensor:
        """Return whether the target is the lowest class with the largest logit, as `_best` does.

        Args:
            argbest_N: the lowest class here with the largest logit, counted from this rank's first.
        """
        if self.split is not None:
            argbest_N = argbest_N + self.split.start
        if self.split is None and not self.gaps:
            return argbest_N == target_N
        return (argbest_N == target_N).long() - (argbest_N < target_N).long()

    def _no_classes(self, lowest_N: Tensor, picked_NP: Tensor) -> Sums:
        """Return the sums of a rank without classes: an empty maximum is -inf, an empty sum 0."""
        zero_N = torch.zeros_like(lowest_N)
        nothing_NT = zero_N.new_zeros((len(zero_N), 0))
        return Sums(
            lowest_N,
            zero_N,
            zero_N.new_zeros(picked_NP.shape),
            mean_N=zero_N if self.entropy else None,
            sum_N=None if self.weights is None else zero_N,
            rest_N=lowest_N if self.rest else None,
            correct_N=zero_N.long() if self.correct else None,
            top_NT=nothing_NT if self.top_k else None,
            top_ids_NT=nothing_NT.long() if self.top_k else None,
        )

    def _top_of_all(self, own: Sums) -> tuple[Tensor | None, Tensor | None]:
        """Return the `top_k` largest of all ranks' top logits, and their classes."""
        if own.top_NT is None or own.top_ids_NT is None or self.split is None:
            return own.top_NT, own.top_ids_NT
        top_NT, top_ids_NT = self.filled_top(own.top_NT, own.top_ids_NT + self.split.start)
        values_NC = self.split.gather(top_NT.t()).movedim(2, 0).flatten(1)
        ids_NC = self.split.gather(top_ids_NT.t()).movedim(2, 0).flatten(1)
        values_NC, ids_NC = in_descending_order(values_NC, ids_NC)
        return values_NC[:, : self.top_k], ids_NC[:, : self.top_k]

    def filled_top(self, top_NT: Tensor, top_ids_NT: Tensor) -> tuple[Tensor, Tensor]:
        """Return top classes padded to `top_k` columns: a part with fewer gets a class above all others, at -inf."""
        missing = self.top_k - top_NT.size(1)
        # Above all classes, and exact as a float, which `pad` converts it to
        last = 2**62
        filled_NT = torch.nn.functional.pad(top_NT, (0, missing), value=-math.inf)
        return filled_NT, torch.nn.functional.pad(top_ids_NT, (0, missing), value=last)


def _stack(own: Sums, split: SplitVocabulary | None) -> Sums:
    """Return every rank's sums except the top classes, (R, N), after one all-gather; R = 1 if nothing is split."""
    own = own._replace(top_NT=None, top_ids_NT=None)
    if split is None:
        return each(lambda t: t.unsqueeze(0), own)
    given = {name: t for name, t in own._asdict().items() if t is not None}
    dtype = own.best_N.dtype
    # One collective for all columns costs a fraction of one per column
    columns_CN = [(t.unsqueeze(1) if t.dim() == 1 else t).to(dtype).t() for t in given.values()]
    sizes = [len(columns) for columns in columns_CN]
    everyone = split.gather(torch.cat(columns_CN)).split(sizes, 1)
    every = {
        name: columns_RCN.movedim(1, 2) if given[name].dim() > 1 else columns_RCN.squeeze(1)
        for name, columns_RCN in zip(given, everyone, strict=True)
    }
    return Sums(**every)


def _times(factor_N: Tensor, share_N: Tensor | None) -> Tensor:
    """Return the factor of p as a factor of the softmax over this rank's part."""
    return factor_N if share_N is None else factor_N * share_N


def _scale_(p_NV: Tensor, factor_N: Tensor) -> Tensor:
    """Return p times the factor of its row, in place; on the CPU a pass is saved if all factors are 1, up to rounding.

    They are for every cross-entropy without class weights, as its q sums to 1. On other devices reading them would
    wait, and a pass over few numbers takes less time than the check.
    """
    if p_NV.numel() > FEW and may_read(p_NV):
        rounding = torch.finfo(factor_N.dtype).eps
        if bool((factor_N.sub(1).abs_() <= rounding).all()):
            return p_NV
    return p_NV.mul_(factor_N.unsqueeze(1))


def included_weight(weight_V: Tensor, excluded: int | None) -> Tensor:
    """Return w with 0 for the excluded class, whose own weight may be inf or nan."""
    if excluded is None:
        return weight_V
    weight_V = weight_V.clone()
    weight_V[excluded] = 0
    return weight_V


def times(values: Tensor, factor: float | Tensor, counted_N: Tensor | None = None) -> Tensor:
    """Return each row's number or numbers times a factor, one for all rows or one each; 0 where rows do not count."""
    if isinstance(factor, Tensor):
        values = values * (as_column(factor, values) if factor.dim() else factor)
    elif factor != 1:
        values = values * factor
    if counted_N is not None:
        values = values.where(as_column(counted_N, values), torch.zeros_like(values))
    return values


def as_column(numbers_N: Tensor, values: Tensor) -> Tensor:
    """Return one number per row, reshaped to broadcast with `values`, which have a number or several in each row."""
    return numbers_N.view(-1, *(1,) * (values.dim() - 1))


def _best_(logits_NV: Tensor, index_N: Tensor, gold_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit, and whether the target is the lowest class that has it.

    The CPU takes five to twenty times as long for the index of a maximum as for its value. So the target is compared
    with the best of the other classes, and the index is computed only for rows where the two tie. The target's logit is
    temporarily overwritten for this; afterwards the logits are the same as before.
    """
    at_N1 = index_N.unsqueeze(1)
    logits_NV.scatter_(1, at_N1, -math.inf)
    other_N = logits_NV.amax(-1)
    logits_NV.scatter_(1, at_N1, gold_N.unsqueeze(1))
    correct_N = gold_N > other_N
    tied = (gold_N == other_N).nonzero().squeeze(1)
    if len(tied):
        correct_N[tied] = logits_NV[tied].max(-1).indices == index_N[tied]
    return torch.maximum(gold_N, other_N), correct_N


def top_classes(logits_NV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits in descending order, and their classes; among equal logits the lower class first."""
    if is_capturing(logits_NV.device):
        # While a CUDA graph is being captured, no number can be read
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
    """Return the values in descending order with their classes; among equal values the lower class first."""
    ids_NT, by_class = ids_NT.sort(-1)
    values_NT, by_value = values_NT.gather(1, by_class).sort(dim=-1, descending=True, stable=True)
    return values_NT, ids_NT.gather(1, by_value)

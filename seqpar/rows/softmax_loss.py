"""The loss of a row of logits, and its gradient, in closed form.

For a row with logits z_1 ... z_V and target y:

    lse = log sum_k exp(z_k)          p_k = exp(z_k - lse), the softmax, so that -log p_k = lse - z_k
    q_k = each + gold [k = y]         the target distribution; 0 for the excluded class (`SoftTarget`)
    w_k                               class weights, 1 where there are none

    loss = sum_k w_k q_k (lse - z_k) + z_loss lse^2
         = gold w_y (lse - z_y) + each (W lse - Z) + z_loss lse^2,      W = sum_k w_k,  Z = sum_k w_k z_k

    d loss / d z_k = (gold w_y + each W + 2 z_loss lse) p_k - w_k q_k

where W and Z leave out the excluded class. The KL form (the "harvard" convention) adds the constant
sum_k w_k q_k log q_k, so that a perfect prediction costs 0.

In the code: `lse_N` is lse, `gold_N` z_y, `sum_N` Z, `gold_weight_N` w_y, `weight_N` W, `p_NV` p.
Shape suffixes: N rows, V vocabulary (the classes on this rank, where the vocabulary is split).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.core.tensor_checks import check_number
from seqpar.core.token_loss import wide

Convention = Literal["torch", "fairseq", "harvard"]


class SoftTarget(NamedTuple):
    """The target distribution q of a row, with class weights w and the factor of the z-loss."""

    gold: float
    """q of the target, less `each`."""
    each: float
    """q of every class except the target and the excluded one."""
    excluded: int | None
    """The class whose q is 0, such as padding."""
    classes: int
    """How many classes of the whole vocabulary are not excluded."""
    kl_gold: float = 0.0
    """q log q of the target in the KL form, else 0."""
    kl_each: float = 0.0
    """q log q of the other classes in the KL form, else 0."""
    weight_V: Tensor | None = None
    """w; None if all class weights are 1."""
    z_loss: float = 0.0


def check_smoothing(label_smoothing: float, smoothing_convention: str) -> None:
    """Raise ValueError for a number outside [0, 1) or an unknown convention."""
    check_number(label_smoothing, "label_smoothing", at_least=0, below=1)
    if smoothing_convention not in ("torch", "fairseq", "harvard"):
        raise ValueError(
            f"smoothing_convention is {smoothing_convention!r}; it must be 'torch', 'fairseq' or 'harvard'"
        )


def soft_target(
    label_smoothing: float, smoothing_convention: Convention, ignore_index: int, vocab_size: int
) -> SoftTarget:
    """Return the smoothed target over the whole vocabulary; `LabelSmoothing` defines the conventions."""
    eps = label_smoothing
    convention = smoothing_convention
    V = vocab_size
    if convention == "torch":
        return SoftTarget(gold=1 - eps, each=eps / V, excluded=None, classes=V)
    # fairseq gives nothing to the target, harvard nothing to the padding class either
    others = {"fairseq": V - 1, "harvard": V - 2}[convention]
    if convention == "harvard" and not 0 <= ignore_index < V:
        raise ValueError(
            f"ignore_index is {ignore_index}; the 'harvard' convention excludes the padding class, so it must be one "
            f"of the {V} classes"
        )
    if others < 1 and eps:
        raise ValueError(f"{V} classes are too few for label smoothing in the {convention!r} convention")
    each = eps / max(1, others)
    gold = 1 - eps - each
    if convention == "fairseq":
        return SoftTarget(gold, each, excluded=None, classes=V)
    return SoftTarget(
        gold, each, excluded=ignore_index, classes=V - 1, kl_gold=_x_log_x(1 - eps), kl_each=_x_log_x(each)
    )


def _x_log_x(x: float) -> float:
    """Return x log x, whose limit at 0 is 0."""
    return x * math.log(x) if x else 0.0


class RowSums(NamedTuple):
    """The sums over the whole vocabulary that a row's loss and gradient need."""

    best_N: Tensor
    """The largest logit."""
    lse_N: Tensor
    """lse."""
    gold_N: Tensor
    """z_y."""
    correct_N: Tensor
    """Whether the target is the lowest class with the largest logit."""
    argbest_N: Tensor | None = None
    """The lowest class with the largest logit, counted from this rank's first; None if no rank has to know it."""
    sum_N: Tensor | None = None
    """Z; None without smoothing."""
    gold_weight_N: Tensor | None = None
    """w_y; None without class weights."""
    weight_N: Tensor | None = None
    """W, the same in every row; None without class weights."""
    share_N: Tensor | None = None
    """The sum of p over this rank's classes: their own softmax times share_N is p. None if all classes are here."""


class SplitVocabulary(Protocol):
    """The classes of a split vocabulary that this rank has."""

    def locate(self, target_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return each target's index among this rank's `size` classes, and whether it is one of them.

        The index of a target on another rank is any valid one.
        """

    def combine(self, rows: RowSums, target_N: Tensor) -> RowSums:
        """Return the sums over the whole vocabulary, given those over this rank's classes."""


def softmax_and_sums(
    logits_NV: Tensor, target_N: Tensor, q: SoftTarget, split: SplitVocabulary | None = None, out: Tensor | None = None
) -> tuple[Tensor, RowSums]:
    """Return the softmax over this rank's classes, in float32 or wider, and the row sums over all classes.

    Args:
        q: the target distribution; its `excluded` and `weight_V` count this rank's classes.
        split: the classes of a split vocabulary that this rank has; None if it has all of them.
        out: memory for the softmax, or None. It may be that of the logits, which may then be overwritten.
    """
    dtype = wide(logits_NV.dtype)
    if logits_NV.dtype != dtype and logits_NV.device.type == "cpu":
        # One conversion before all passes: the CPU's reductions over bfloat16 take several times as long
        logits_NV = out = logits_NV.to(dtype) if out is None else out.copy_(logits_NV)
    if split is None:
        p_NV, rows = _softmax_and_local_sums(logits_NV, target_N, q, dtype, out, argbest_is_needed=False)
        return p_NV, with_weights(rows, q, target_N, None)
    index_N, owned_N = split.locate(target_N, logits_NV.size(1))
    if logits_NV.size(1):
        p_NV, rows = _softmax_and_local_sums(logits_NV, index_N, q, dtype, out, argbest_is_needed=True)
    else:
        p_NV = logits_NV.to(dtype)
        rows = _no_classes(index_N, q, dtype)
    gold_N = rows.gold_N.where(owned_N, torch.zeros_like(rows.gold_N))
    rows = rows._replace(gold_N=gold_N, correct_N=rows.correct_N & owned_N)
    return p_NV, split.combine(with_weights(rows, q, index_N, owned_N), target_N)


def _softmax_and_local_sums(
    logits_NV: Tensor, index_N: Tensor, q: SoftTarget, dtype: torch.dtype, out: Tensor | None, argbest_is_needed: bool
) -> tuple[Tensor, RowSums]:
    """Return the softmax over at least one class, and the row sums over the same classes, without class weights."""
    gold_N = _take(logits_NV, index_N).to(dtype)
    sum_N = _weighted_sum(logits_NV, q, dtype)
    argbest_N = None
    may_overwrite = out is not None and out.data_ptr() == logits_NV.data_ptr()
    if may_overwrite and not argbest_is_needed and logits_NV.device.type == "cpu":
        best_N, correct_N = _best(logits_NV, index_N, gold_N)
    else:
        best_N, argbest_N = logits_NV.max(-1)
        best_N = best_N.to(dtype)
        correct_N = argbest_N == index_N
    p_NV = torch.softmax(logits_NV, -1, dtype=dtype, out=out)
    # log sum exp(z) = z_k - log p_k for any k; the largest p is at least 1/V, so its log is exact
    lse_N = best_N - p_NV.amax(-1).log()
    return p_NV, RowSums(best_N, lse_N, gold_N, correct_N, argbest_N, sum_N)


def _no_classes(index_N: Tensor, q: SoftTarget, dtype: torch.dtype) -> RowSums:
    """Return the row sums of a rank without classes: an empty maximum is -inf, an empty sum 0."""
    lowest_N = torch.full(index_N.shape, -math.inf, dtype=dtype, device=index_N.device)
    zero_N = torch.zeros_like(lowest_N)
    return RowSums(
        best_N=lowest_N,
        lse_N=lowest_N,
        gold_N=zero_N,
        correct_N=index_N < 0,
        argbest_N=index_N,
        sum_N=zero_N if q.each else None,
    )


def with_weights(rows: RowSums, q: SoftTarget, index_N: Tensor, owned_N: Tensor | None) -> RowSums:
    """Return the sums with w_y and W added, if there are class weights.

    The weight of a class that no term uses is not multiplied by 0 either, because it may be inf.
    """
    if q.weight_V is None:
        return rows
    gold_weight_N = torch.zeros_like(rows.lse_N)
    weight = torch.zeros_like(q.weight_V.sum())
    if len(q.weight_V):
        gold_weight_N = _owned(q.weight_V[index_N], owned_N)
    if q.each:
        weight = included_weight(q.weight_V, q).sum()
    return rows._replace(gold_weight_N=gold_weight_N, weight_N=weight.expand_as(gold_weight_N))


def included_weight(weight_V: Tensor, q: SoftTarget) -> Tensor:
    """Return w with 0 for the excluded class, whose own weight may be inf or nan."""
    if q.excluded is None:
        return weight_V
    weight_V = weight_V.clone()
    weight_V[q.excluded] = 0
    return weight_V


def _owned(values_N: Tensor, owned_N: Tensor | None) -> Tensor:
    """Return the values with 0 for targets on another rank; multiplying an infinite weight by 0 would give nan."""
    if owned_N is None:
        return values_N
    return values_N.where(owned_N, torch.zeros_like(values_N))


def row_losses(rows: RowSums, q: SoftTarget) -> Tensor:
    """Return each row's loss: gold w_y (lse - z_y) + each (W lse - Z) + z_loss lse^2, and the KL form's constant."""
    gold_weight_N, weight_N = _weights(rows, q)
    # Each difference is taken before anything is added: lse and z_y may be in the hundreds, and their difference near 0
    loss_N = q.gold * gold_weight_N * (rows.lse_N - rows.gold_N)
    if rows.sum_N is not None:
        loss_N = loss_N + q.each * (weight_N * rows.lse_N - rows.sum_N)
    if q.kl_gold:
        # sum_k w_k q_k log q_k = kl_gold w_y + kl_each (W - w_y)
        loss_N = loss_N + (q.kl_gold - q.kl_each) * gold_weight_N + q.kl_each * weight_N
    if q.z_loss:
        loss_N = loss_N + q.z_loss * rows.lse_N.square()
    return loss_N


def logits_gradient_(
    p_NV: Tensor, target_N: Tensor, rows: RowSums, q: SoftTarget, split: SplitVocabulary | None = None
) -> Tensor:
    """Turn p into the gradient of the summed `row_losses` with respect to this rank's logits, in place.

    (gold w_y + each W + 2 z_loss lse) p_k - w_k q_k
    """
    if not p_NV.size(1):
        return p_NV
    factor_N = softmax_factor(rows, q)
    if rows.share_N is not None:
        # If all logits of this rank are -inf, its own softmax is 0/0 = nan, while p is 0
        p_NV.masked_fill_((rows.share_N == 0).unsqueeze(1), 0)
        factor_N = factor_N * rows.share_N
    # factor p_k; plain cross-entropy has the factor 1
    if isinstance(factor_N, Tensor):
        p_NV *= factor_N.unsqueeze(1)
    # - w_k q_k: `each` for every class that is not excluded, then `gold` for the target
    if q.each:
        if q.weight_V is not None:
            p_NV -= q.each * included_weight(q.weight_V, q)
        else:
            p_NV -= q.each
            if q.excluded is not None:
                p_NV[:, q.excluded] += q.each
    index_N = target_N
    owned_N = None
    if split is not None:
        index_N, owned_N = split.locate(target_N, p_NV.size(1))
    gold_N = p_NV.new_full(index_N.shape, -q.gold)
    if q.weight_V is not None:
        gold_N = gold_N * q.weight_V[index_N]
    return p_NV.scatter_add_(1, index_N.unsqueeze(1), _owned(gold_N, owned_N).unsqueeze(1))


def _best(logits_NV: Tensor, index_N: Tensor, gold_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit, and whether the target is the lowest class that has it.

    The CPU takes five to twenty times as long for the index of a maximum as for its value. So the target is compared
    with the best of the other classes, and the index is computed only for rows where the two tie. For this the target's
    logit is overwritten for a moment; afterwards the logits are the same as before.
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


def _take(values_NV: Tensor, index_N: Tensor) -> Tensor:
    """Return one value of each row."""
    return values_NV.gather(1, index_N.unsqueeze(1)).squeeze(1)


def _weighted_sum(logits_NV: Tensor, q: SoftTarget, dtype: torch.dtype) -> Tensor | None:
    """Return Z = sum_k w_k z_k without the excluded class; None without smoothing, where no term uses it."""
    if not q.each:
        return None
    weight_V = q.weight_V
    parts = [slice(None)]
    # Left out, not subtracted or multiplied by 0: it may be masked, by -1e9 or -inf, and would take the others' digits
    if q.excluded is not None:
        parts = [slice(0, q.excluded), slice(q.excluded + 1, None)]
    sums = []
    for part in parts:
        some_NV = logits_NV[:, part]
        sums.append(some_NV.sum(-1, dtype=dtype) if weight_V is None else some_NV.to(dtype) @ weight_V[part])
    return torch.stack(sums).sum(0)


def _weights(rows: RowSums, q: SoftTarget) -> tuple[Tensor | float, Tensor | float]:
    """Return w_y and W; without class weights, 1 and the number of classes."""
    if rows.gold_weight_N is None or rows.weight_N is None:
        return 1.0, float(q.classes)
    return rows.gold_weight_N, rows.weight_N


def softmax_factor(rows: RowSums, q: SoftTarget) -> Tensor | float:
    """Return the factor of p in the gradient: gold w_y + each W + 2 z_loss lse."""
    # Without class weights w_y = 1 and W = classes, and q sums to 1: gold + each classes = 1
    mass_N: Tensor | float = 1.0
    if rows.gold_weight_N is not None and rows.weight_N is not None:
        mass_N = q.gold * rows.gold_weight_N
        if q.each:
            mass_N = mass_N + q.each * rows.weight_N
    if q.z_loss:
        mass_N = mass_N + 2 * q.z_loss * rows.lse_N
    return mass_N

"""The loss of a row of logits and its gradient, in closed form.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.core.tensor_checks import check_number
from seqpar.core.token_loss import wide
from seqpar.losses.target_checks import check_range as check_range
from seqpar.losses.target_checks import check_target as check_target

Convention = Literal["torch", "fairseq", "harvard"]


class SoftTarget(NamedTuple):
    """What a row's logits z are held against: the distribution q, class weights w and a z-loss.

    With p = softmax(z) the loss of a row is  sum_k w_k q_k (-log p_k)  +  z_loss (log sum_k exp z_k)^2,
    in the KL form with  sum_k w_k q_k log q_k  added.
    """

    gold: float
    """How much more q has on the target than `each`."""
    each: float
    """q of every class but `excluded`."""
    excluded: int | None
    classes: int
    """How many classes have `each`, over the whole vocabulary."""
    kl_gold: float = 0.0
    """q log q of the target in the KL form, else 0."""
    kl_each: float = 0.0
    weight_V: Tensor | None = None
    z_loss: float = 0.0


def check_smoothing(smoothing: float, convention: str, names: tuple[str, str] = ("smoothing", "convention")) -> None:
    """Raises ValueError, by the caller's names, for a share outside [0, 1) or an unknown convention."""
    check_number(smoothing, names[0], at_least=0, below=1)
    if convention not in ("torch", "fairseq", "harvard"):
        raise ValueError(f"{names[1]} is {convention!r}; it must be 'torch', 'fairseq' or 'harvard'")


def soft_target(smoothing: float, convention: Convention, ignore_index: int, vocab_size: int) -> SoftTarget:
    """The smoothed target over `vocab_size` classes, all of them; `LabelSmoothing` says what the conventions are."""
    eps, V = smoothing, vocab_size
    if convention == "torch":
        return SoftTarget(1 - eps, eps / V, None, V)
    others = V - 1 if convention == "fairseq" else V - 2
    if convention == "harvard" and not 0 <= ignore_index < V:
        raise ValueError(
            f"ignore_index is {ignore_index}; the 'harvard' convention leaves the padding class out, so it "
            f"must be one of the {V} classes"
        )
    if others < 1 and eps:
        raise ValueError(f"{V} classes are too few to share smoothing out by the {convention!r} convention")
    each = eps / others if eps else 0.0
    if convention == "fairseq":
        return SoftTarget(1 - eps - each, each, None, V)
    logs = (1 - eps) * math.log(1 - eps), each * math.log(each) if eps else 0.0
    return SoftTarget(1 - eps - each, each, ignore_index, V - 1, *logs)


class RowSums(NamedTuple):
    """What loss and gradient need of each row's logits z, summed over the whole vocabulary."""

    best_N: Tensor
    """The largest z."""
    lse_N: Tensor
    """log sum_k exp z_k."""
    gold_N: Tensor
    """z of the target."""
    correct_N: Tensor
    """Whether the target is the lowest class with the largest z."""
    argbest_N: Tensor | None = None
    """That class, counted from the first one here; None where the whole vocabulary is here."""
    sum_N: Tensor | None = None
    """sum_k w_k z_k without the excluded class; None without smoothing."""
    gold_weight_N: Tensor | None = None
    """w of the target; None without class weights."""
    weight_N: Tensor | None = None
    """sum_k w_k without the excluded class, the same in every row; None without class weights."""
    share_N: Tensor | None = None
    """sum of p over the classes here, by which the local softmax is too large; None where all classes are here."""


class VocabPart(Protocol):
    """The part of a vocabulary whose logits are here, and how its row sums become those of the whole."""

    def place(self, target_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Each target's class among the `size` classes here (any class where it is elsewhere), and whether it is."""

    def combine(self, rows: RowSums, target_N: Tensor) -> RowSums:
        """The sums over the whole vocabulary."""


def softmax_and_sums(
    logits_NV: Tensor, target_N: Tensor, q: SoftTarget, part: VocabPart | None = None, out: Tensor | None = None
) -> tuple[Tensor, RowSums]:
    """softmax(logits) over the classes here, in float32 or wider, and the row sums over all classes.

    `out`, where given, is the memory of the softmax; it may be that of the logits, which then may be written to.
    `q.excluded` and `q.weight_V` speak of the classes here.
    """
    dtype = wide(logits_NV.dtype)
    if logits_NV.dtype != dtype and logits_NV.device.type == "cpu":
        # One conversion up front: the CPU's reductions over bfloat16 take several times as long
        logits_NV = out = logits_NV.to(dtype) if out is None else out.copy_(logits_NV)
    ours = out is not None and out.data_ptr() == logits_NV.data_ptr()
    index_N, owned_N = (target_N, None) if part is None else part.place(target_N, logits_NV.size(1))
    if not logits_NV.size(1):  # a rank without classes
        none = torch.full(target_N.shape, -math.inf, dtype=dtype, device=logits_NV.device)
        p_NV, rows = logits_NV.to(dtype), RowSums(none, none, torch.zeros_like(none), index_N < 0, index_N)
    else:
        gold_N, sum_N = _take(logits_NV, index_N).to(dtype), _weighted_sum(logits_NV, q, dtype)
        argbest_N = None
        if part is None and ours and logits_NV.device.type == "cpu":
            best_N, correct_N = _best(logits_NV, index_N, gold_N)
        else:
            best_N, argbest_N = logits_NV.max(-1)
            best_N, correct_N = best_N.to(dtype), argbest_N == index_N
        p_NV = torch.softmax(logits_NV, -1, dtype=dtype, out=out)
        # log sum exp(z) = z_k - log p_k for any k; the largest p is at least 1/V, so its log is exact
        lse_N = best_N - p_NV.amax(-1).log()
        rows = RowSums(best_N, lse_N, gold_N, correct_N, argbest_N, sum_N)
    if owned_N is not None:
        gold_N = rows.gold_N.where(owned_N, torch.zeros_like(rows.gold_N))
        rows = rows._replace(gold_N=gold_N, correct_N=rows.correct_N & owned_N)
    if q.each and rows.sum_N is None:
        rows = rows._replace(sum_N=torch.zeros_like(rows.lse_N))
    rows = with_weights(rows, q, index_N, owned_N)
    return p_NV, rows if part is None else part.combine(rows, target_N)


def with_weights(rows: RowSums, q: SoftTarget, index_N: Tensor, owned_N: Tensor | None) -> RowSums:
    """The same sums with those of the class weights, where there are any.

    The weight of a class that no row has and that shares nothing is never multiplied, not even by 0.
    """
    if q.weight_V is None:
        return rows
    gold_weight_N, weight = torch.zeros_like(rows.lse_N), torch.zeros_like(q.weight_V.sum())
    if len(q.weight_V):
        gold_weight_N = _owned(q.weight_V[index_N], owned_N)
    if q.each:
        weight = _shared_weight(q.weight_V, q).sum()
    return rows._replace(gold_weight_N=gold_weight_N, weight_N=weight.expand_as(gold_weight_N))


def _shared_weight(weight_V: Tensor, q: SoftTarget) -> Tensor:
    """The weights of the classes that share `each`: 0 for the excluded one, whose own weight may be inf or nan."""
    if q.excluded is None:
        return weight_V
    weight_V = weight_V.clone()
    weight_V[q.excluded] = 0
    return weight_V


def _owned(values_N: Tensor, owned_N: Tensor | None) -> Tensor:
    """0 where the target's class is elsewhere; a product with 0 would make nan of a class weight that is inf."""
    return values_N if owned_N is None else values_N.where(owned_N, torch.zeros_like(values_N))


def row_losses(rows: RowSums, q: SoftTarget) -> Tensor:
    """Each row's loss, as `SoftTarget` defines it."""
    gold_weight_N, weight_N = _weights(rows, q)
    # Differences first: each is 0 or more, while its two sides may be hundreds
    loss_N = q.gold * gold_weight_N * (rows.lse_N - rows.gold_N)
    if rows.sum_N is not None:
        loss_N = loss_N + q.each * (weight_N * rows.lse_N - rows.sum_N)
    if q.kl_gold:
        loss_N = loss_N + (q.kl_gold - q.kl_each) * gold_weight_N + q.kl_each * weight_N
    return loss_N + q.z_loss * rows.lse_N.square() if q.z_loss else loss_N


def logits_gradient_(
    p_NV: Tensor, target_N: Tensor, rows: RowSums, q: SoftTarget, part: VocabPart | None = None
) -> Tensor:
    """The gradient of the sum of `row_losses` with respect to the logits here, made in the softmax's own place.

    (sum_k w_k q_k + 2 z_loss lse) p - w q
    """
    if not p_NV.size(1):
        return p_NV
    factor_N = softmax_factor(rows, q)
    if rows.share_N is not None:
        # Where nothing here has a share of the softmax, the one over these classes alone may be nan (all -inf)
        p_NV.masked_fill_((rows.share_N == 0).unsqueeze(1), 0)
        factor_N = factor_N * rows.share_N
    if isinstance(factor_N, Tensor):
        p_NV *= factor_N.unsqueeze(1)
    if q.each:
        if q.weight_V is not None:
            p_NV -= q.each * _shared_weight(q.weight_V, q)
        else:
            p_NV -= q.each
            if q.excluded is not None:
                p_NV[:, q.excluded] += q.each
    index_N, owned_N = (target_N, None) if part is None else part.place(target_N, p_NV.size(1))
    gold_N = p_NV.new_full(index_N.shape, -q.gold)
    if q.weight_V is not None:
        gold_N = gold_N * q.weight_V[index_N]
    return p_NV.scatter_add_(1, index_N.unsqueeze(1), _owned(gold_N, owned_N).unsqueeze(1))


def _best(logits_NV: Tensor, index_N: Tensor, gold_N: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit, and whether the target is the lowest class that has it; the logits are left as they were.

    Without the index of the maximum, for which the CPU takes five to twenty times as long as for its value: the
    target is held against the best of the others, and only where the two tie is the index looked for.
    """
    at_N1 = index_N.unsqueeze(1)
    logits_NV.scatter_(1, at_N1, -math.inf)
    other_N = logits_NV.amax(-1)
    logits_NV.scatter_(1, at_N1, gold_N.unsqueeze(1))
    correct_N, tied = gold_N > other_N, (gold_N == other_N).nonzero().squeeze(1)
    if len(tied):
        correct_N[tied] = logits_NV[tied].max(-1).indices == index_N[tied]
    return torch.maximum(gold_N, other_N), correct_N


def _take(values_NV: Tensor, index_N: Tensor) -> Tensor:
    return values_NV.gather(1, index_N.unsqueeze(1)).squeeze(1)


def _weighted_sum(logits_NV: Tensor, q: SoftTarget, dtype: torch.dtype) -> Tensor | None:
    if not q.each:
        return None
    if q.weight_V is None:
        sum_N = logits_NV.sum(-1, dtype=dtype)
        return sum_N if q.excluded is None else sum_N - logits_NV[:, q.excluded]
    return logits_NV.to(dtype) @ _shared_weight(q.weight_V, q)


def _weights(rows: RowSums, q: SoftTarget) -> tuple[Tensor | float, Tensor | float]:
    """The target's weight, and that of all classes that share `each`."""
    if rows.gold_weight_N is None or rows.weight_N is None:
        return 1.0, float(q.classes)
    return rows.gold_weight_N, rows.weight_N


def softmax_factor(rows: RowSums, q: SoftTarget) -> Tensor | float:
    """What p is multiplied by in the gradient: sum_k w_k q_k, 1 without class weights, and 2 z_loss lse."""
    mass_N: Tensor | float = 1.0
    if rows.gold_weight_N is not None and rows.weight_N is not None:
        mass_N = q.gold * rows.gold_weight_N
        if q.each:
            mass_N = mass_N + q.each * rows.weight_N
    return mass_N + 2 * q.z_loss * rows.lse_N if q.z_loss else mass_N

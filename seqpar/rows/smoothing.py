"""Cross-entropy with a smoothed target, class weights and z-loss, as a function of a row's scores.

For a row with log p_k = z_k - lse, target y and class weights w_k (1 where there are none):

    q_k  = each + gold [k = y]      the target distribution; 0 for the excluded class (`SoftTarget`)
    loss = - sum_k w_k q_k log p_k + z_loss lse^2
         = - gold w_y log_prob - each weighted + z_loss lse^2

where `weighted` = sum_k w_k log p_k leaves out the excluded class. A convention (`rows/conventions.py`) defines both
shares, and whether the loss is the KL divergence: that adds the constant sum_k w_k q_k log q_k, so that a perfect
prediction costs 0. The derivatives are

    d loss / d log_prob = - gold w_y,   d loss / d weighted = - each,   d loss / d lse = 2 z_loss lse

Shape suffixes: N rows, V vocabulary (the classes on this rank, where the vocabulary is split).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.core.checks import check_number
from seqpar.rows.conventions import Convention, shares_of
from seqpar.rows.scores import ClassWeights, Scores, Upstream, included_weight


class RowLosses(NamedTuple):
    """The losses of some rows, and their gradients with respect to what they were computed from."""

    loss_N: Tensor
    upstream: Upstream
    per_token: tuple[Tensor, ...] = ()
    """The gradient of each per-token tensor that the loss takes, if any of them wants one."""


class LossOfScores(Protocol):
    """A function of rows' scores, and of further tensors with one entry for each row."""

    def __call__(self, scores: Scores, per_token: Sequence[Tensor], wanted: bool) -> RowLosses:
        """Return the loss of each row; if `wanted`, with its derivatives."""


class SoftTarget(NamedTuple):
    """The target distribution q of a row, and the factor of the z-loss."""

    gold: float
    """q of the target, minus `each`."""
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
    z_loss: float = 0.0


class CrossEntropyOfScores(NamedTuple):
    """The loss of a row and its derivatives.

    The only per-token tensor is w_y, the weight of the target's class; there is none without class weights.
    """

    q: SoftTarget
    """The target distribution."""
    weights: ClassWeights | None
    """w of the classes, with W over all ranks; None without smoothing."""

    def __call__(self, scores: Scores, per_token: Sequence[Tensor], wanted: bool) -> RowLosses:
        """Return the loss of each row; if `wanted`, with its derivatives."""
        q = self.q
        gold: float | Tensor = q.gold
        gold_weight: float | Tensor = 1.0
        for weight_N in per_token:
            gold_weight = weight_N
            gold = q.gold * weight_N
        loss_N = -gold * scores.log_prob
        if scores.weighted is not None:
            loss_N = loss_N - q.each * scores.weighted
        if q.kl_gold:
            # sum_k w_k q_k log q_k = kl_gold w_y + kl_each (W - w_y)
            loss_N = loss_N + (q.kl_gold - q.kl_each) * gold_weight
            if self.weights is not None:
                loss_N = loss_N + q.kl_each * self.weights.total
        if q.z_loss:
            loss_N = loss_N + q.z_loss * scores.lse.square()
        if not wanted:
            return RowLosses(loss_N, Upstream())
        like_N = scores.log_prob
        upstream = Upstream(
            log_prob=-gold if isinstance(gold, Tensor) else torch.full_like(like_N, -gold),
            lse=2 * q.z_loss * scores.lse if q.z_loss else None,
            weighted=None if scores.weighted is None else torch.full_like(like_N, -q.each),
        )
        return RowLosses(loss_N, upstream)


def class_weights(q: SoftTarget, weight_V: Tensor | None) -> ClassWeights | None:
    """Return the weights of this rank's classes, with W over them only; None without smoothing, which uses no weights.

    The weight of the excluded class, which no term uses, is not added, because it may be inf.

    Args:
        q: its `excluded` is counted from this rank's first class.
    """
    if not q.each:
        return None
    total: float | Tensor = float(q.classes)
    if weight_V is not None:
        total = included_weight(weight_V, q.excluded).sum()
    return ClassWeights(weight_V, q.excluded, total)


def check_smoothing(label_smoothing: float, smoothing_convention: str) -> None:
    """Raise ValueError for a number outside [0, 1) or an unknown convention."""
    check_number(label_smoothing, "label_smoothing", at_least=0, below=1)
    shares_of(smoothing_convention)


def soft_target(
    label_smoothing: float, smoothing_convention: Convention, ignore_index: int, vocab_size: int
) -> SoftTarget:
    """Return the smoothed target over the whole vocabulary.

    Raises:
        ValueError: an unknown convention; a convention that excludes a padding that is not a class; too few classes.
    """
    eps = label_smoothing
    convention = smoothing_convention
    V = vocab_size
    shares = shares_of(convention)
    if not shares.padding and not 0 <= ignore_index < V:
        raise ValueError(
            f"ignore_index is {ignore_index}; the {convention!r} convention excludes the padding class, so it must be "
            f"one of the {V} classes"
        )
    others = shares.classes(V)
    if others < 1 and eps:
        raise ValueError(f"{V} classes are too few for label smoothing in the {convention!r} convention")
    each = eps / max(1, others)
    # q of the target is 1 - eps, plus its own share if it gets one
    of_target = 1 - eps
    gold = of_target - each
    if shares.target:
        of_target, gold = of_target + each, of_target
    excluded = shares.excluded_class(ignore_index)
    q = SoftTarget(gold, each, excluded, classes=V - (excluded is not None))
    if shares.kl:
        return q._replace(kl_gold=_x_log_x(of_target), kl_each=_x_log_x(each))
    return q


def _x_log_x(x: float) -> float:
    """Return x log x, whose limit at 0 is 0."""
    return x * math.log(x) if x else 0.0

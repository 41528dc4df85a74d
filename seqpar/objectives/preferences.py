"""Objectives over preferred and rejected responses: DPO and its variants, KTO, ORPO, SimPO, CPO.

Each takes one number per response and returns one loss per pair (KTO: per response), for `per_item`. The numbers come
from tokens through `sequence_sums` or `sequence_means`; for a batch of chosen responses followed by the rejected ones,
`.chunk(2)` gives the two halves.

Shape suffixes: none; every tensor is (pairs,).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.core.checks import check_choice, check_mask, check_number, check_scalar, check_scores

Variant = Literal["sigmoid", "hinge", "ipo", "robust"]


def dpo(
    chosen_log_ratio: Tensor,
    rejected_log_ratio: Tensor,
    *,
    beta: float,
    variant: Variant = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of direct preference optimisation, one per pair.

    With m = log pi(y_w)/pi_ref(y_w) - log pi(y_l)/pi_ref(y_l), and e = label_smoothing:

        "sigmoid": -log sigmoid(beta m)                                     Rafailov et al. 2023, eq. 7
                   -(1-e) log sigmoid(beta m) - e log sigmoid(-beta m)      conservative, Mitchell 2023
        "robust":  the same with +e, divided by 1 - 2e                      Chowdhury et al. 2024
        "hinge":   max(0, 1 - beta m)                                       SLiC, Zhao et al. 2023; Liu et al. 2024
        "ipo":     (m - 1 / (2 beta))^2                                     Azar et al. 2023, eq. 17

    Args:
        chosen_log_ratio, rejected_log_ratio: summed over each response's tokens,
            `sequence_sums(token_log_ratio(log_prob, reference_log_prob, mask), segment_ids, sequences)`. For IPO, some
            implementations take the means over the tokens (`sequence_means`).
        beta: above 0; IPO's tau.
        label_smoothing: the probability that a label is wrong, in [0, 0.5); for "sigmoid" and "robust" only.

    Raises:
        TypeError: log-ratios that are not floating.
        ValueError: different shapes or devices, an unknown variant, numbers out of range.

    Example:
        >>> from seqpar.objectives import dpo
        >>> chosen, rejected = torch.tensor([0.5, -0.2]), torch.tensor([-0.3, 0.1])
        >>> torch.allclose(dpo(chosen, rejected, beta=0.1), -F.logsigmoid(0.1 * (chosen - rejected)))
        True
    """
    chosen, rejected = check_scores(chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    check_number(beta, "beta", above=0)
    _check_variant(variant, label_smoothing)
    margin = chosen - rejected
    if variant == "ipo":
        return (margin - 1 / (2 * beta)).square()
    if variant == "hinge":
        return F.relu(1 - beta * margin)
    loss = -F.logsigmoid(beta * margin)
    # Both mixtures need one logarithm, because -log sigmoid(-x) = -log sigmoid(x) + x
    if label_smoothing and variant == "sigmoid":
        return loss + label_smoothing * beta * margin
    if label_smoothing:
        return loss - label_smoothing / (1 - 2 * label_smoothing) * beta * margin
    return loss


def _check_variant(variant: object, label_smoothing: float) -> None:
    check_choice(variant, "variant", get_args(Variant))
    check_number(label_smoothing, "label_smoothing", at_least=0, below=0.5)
    if label_smoothing and variant in ("hinge", "ipo"):
        raise ValueError(
            f"label_smoothing is {label_smoothing:g} and variant {variant!r}, which has none; use 'sigmoid' or 'robust'"
        )


def kto(
    log_ratio: Tensor,
    desirable: Tensor,
    *,
    beta: float,
    reference_point: Tensor | float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the loss of Kahneman-Tversky optimisation, one per response; responses need not come in pairs.

    With r = log pi(y|x) / pi_ref(y|x) and z0 = max(0, reference_point) (Ethayarajh et al. 2024, eq. 7-8):

        desirable:    lambda_D (1 - sigmoid(beta (r - z0)))
        undesirable:  lambda_U (1 - sigmoid(beta (z0 - r)))

    z0 estimates KL(pi || pi_ref) from responses paired with other prompts, and no gradient flows through it. It is a
    mean over the WHOLE step: compute it once, before the losses of any micro-batch,

        seqpar.sum_over_ranks(per_item(mismatched_log_ratio), group).mean

    Args:
        log_ratio: (S,), summed over each response's tokens, as for `dpo`.
        desirable: (S,) bool.
        beta: above 0.
        reference_point: one number, before the clamp at 0.
        desirable_weight, undesirable_weight: lambda_D and lambda_U, at least 0.

    Raises:
        TypeError: a log-ratio that is not floating, labels that are not bool, a reference_point of several numbers.
        ValueError: different shapes or devices, numbers out of range.

    Example:
        >>> from seqpar.objectives import kto
        >>> log_ratio, desirable = torch.tensor([0.5, -1.0]), torch.tensor([True, False])
        >>> loss = kto(log_ratio, desirable, beta=0.1, reference_point=0.2)
        >>> torch.allclose(loss, 1 - torch.tensor([0.1 * (0.5 - 0.2), 0.1 * (0.2 + 1.0)]).sigmoid())
        True
    """
    (log_ratio,) = check_scores(log_ratio=log_ratio)
    check_mask(desirable, "desirable", log_ratio=log_ratio)
    check_number(beta, "beta", above=0)
    check_number(desirable_weight, "desirable_weight", at_least=0)
    check_number(undesirable_weight, "undesirable_weight", at_least=0)
    margin = beta * (log_ratio - _reference_point(reference_point).to(log_ratio))
    # 1 - sigmoid(x) as sigmoid(-x), which does not suffer from cancellation
    return torch.where(desirable, desirable_weight * torch.sigmoid(-margin), undesirable_weight * torch.sigmoid(margin))


def _reference_point(value: Tensor | float) -> Tensor:
    """Return z0: one number, detached, at least 0."""
    check_scalar(value, "reference_point")
    if not isinstance(value, Tensor):
        value = torch.tensor(float(value), dtype=torch.float64)
    return value.detach().reshape(()).clamp(min=0)


def orpo(
    chosen_mean: Tensor,
    rejected_mean: Tensor,
    *,
    weight: float,
    nll_weight: float = 1.0,
    chosen_nll: Tensor | None = None,
) -> Tensor:
    """Return the loss of odds-ratio preference optimisation, one per pair.

    With log p = the mean log-probability of a response's tokens, and odds(p) = p / (1 - p) (Hong et al. 2024, eq. 3-7):

        loss = -nll_weight log p_w - lambda log sigmoid(log odds(p_w) - log odds(p_l))

    In TRL and Liger the likelihood is instead a mean over all chosen tokens, so that long responses count more.
    With the numbers of pairs and of chosen tokens in the whole step:

        chosen_nll = -sequence_sums(log_prob, segment_ids, sequences) * pairs / tokens      # of the chosen responses

    TRL also counts the tokens of the prompt if the model has no encoder; Liger counts only those of the response.

    Args:
        chosen_mean, rejected_mean: `sequence_means(log_prob, segment_ids, sequences)`, at most 0. A probability above
            1 - eps of the dtype gets the odds of 1 - eps, so that an empty response has a finite loss.
        weight: lambda, above 0.
        nll_weight: the weight of the likelihood, at least 0; 1 in the paper, alpha in Liger.
        chosen_nll: replaces -log p_w; None keeps the paper's.

    Raises:
        TypeError: means that are not floating.
        ValueError: different shapes or devices, weight not above 0, nll_weight below 0.

    Example:
        >>> from seqpar.objectives import orpo
        >>> chosen, rejected = torch.tensor([-0.7, -1.2]), torch.tensor([-1.5, -0.9])
        >>> log_odds = torch.logit(chosen.exp()) - torch.logit(rejected.exp())
        >>> torch.allclose(orpo(chosen, rejected, weight=0.1), -chosen - 0.1 * F.logsigmoid(log_odds))
        True
    """
    chosen, rejected = check_scores(chosen_mean=chosen_mean, rejected_mean=rejected_mean)
    nll = -chosen
    if chosen_nll is not None:
        _, nll = check_scores(chosen_mean=chosen_mean, chosen_nll=chosen_nll)
    check_number(weight, "weight", above=0)
    check_number(nll_weight, "nll_weight", at_least=0)
    return nll_weight * nll - weight * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_p: Tensor) -> Tensor:
    """Return log(p / (1 - p)) = log p - log(1 - exp(log p))."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    return log_p - torch.log(-torch.expm1(log_p))


def simpo(chosen_mean: Tensor, rejected_mean: Tensor, *, beta: float, gamma: float) -> Tensor:
    """Return the loss of simple preference optimisation, one per pair; it needs no reference.

        -log sigmoid(beta/|y_w| log pi(y_w) - beta/|y_l| log pi(y_l) - gamma)       Meng et al. 2024, eq. 6

    Args:
        chosen_mean, rejected_mean: `sequence_means(log_prob, segment_ids, sequences)`.
        beta: above 0.
        gamma: the margin, at least 0.

    Raises:
        TypeError: means that are not floating. ValueError: different shapes or devices, numbers out of range.

    Example:
        >>> from seqpar.objectives import simpo
        >>> chosen, rejected = torch.tensor([-0.7, -1.2]), torch.tensor([-1.5, -0.9])
        >>> torch.allclose(simpo(chosen, rejected, beta=2.0, gamma=0.5), -F.logsigmoid(2.0 * (chosen - rejected) - 0.5))
        True
    """
    chosen, rejected = check_scores(chosen_mean=chosen_mean, rejected_mean=rejected_mean)
    check_number(beta, "beta", above=0)
    check_number(gamma, "gamma", at_least=0)
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def cpo(chosen_sum: Tensor, rejected_sum: Tensor, *, beta: float, nll_weight: float = 1.0) -> Tensor:
    """Return the loss of contrastive preference optimisation, one per pair; it was made for translation.

        -log sigmoid(beta log pi(y_w) - beta log pi(y_l)) - nll_weight log pi(y_w)       Xu et al. 2024, section 3

    Args:
        chosen_sum, rejected_sum: `sequence_sums(log_prob, segment_ids, sequences)`.
        beta: above 0.
        nll_weight: the weight of the chosen response's likelihood, at least 0; 1 in the paper.

    Raises:
        TypeError: sums that are not floating. ValueError: different shapes or devices, numbers out of range.

    Example:
        >>> from seqpar.objectives import cpo
        >>> chosen, rejected = torch.tensor([-4.0, -6.0]), torch.tensor([-5.0, -5.5])
        >>> torch.allclose(cpo(chosen, rejected, beta=0.1), -F.logsigmoid(0.1 * (chosen - rejected)) - chosen)
        True
    """
    chosen, rejected = check_scores(chosen_sum=chosen_sum, rejected_sum=rejected_sum)
    check_number(beta, "beta", above=0)
    check_number(nll_weight, "nll_weight", at_least=0)
    return -F.logsigmoid(beta * (chosen - rejected)) - nll_weight * chosen

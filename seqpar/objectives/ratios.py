"""Compare two policies on sampled tokens: log-ratios, importance weights, and estimates of divergence.

A log-ratio is log pi(y) - log pi'(y); `pi'` is the reference, the policy before the update, or the sampler.

Shape suffixes: S sequences.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from seqpar.core.checks import check_choice, check_mask, check_number, check_scores, check_segments
from seqpar.objectives.sequences import sequence_means

Estimator = Literal["k1", "k3"]


def token_log_ratio(log_prob: Tensor, other_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return each token's log-ratio to another policy, and 0 where `mask` is false.

    Plain equivalent: `(log_prob - other_log_prob.detach()).masked_fill(~mask, 0)`. A masked token gets the gradient 0
    from whatever is computed with it, even if its log-probability is -inf.

    Args:
        log_prob: that of the policy in training, as `token_scores` returns it.
        other_log_prob: that of the other policy, on the same tokens; a constant.
        mask: bool, true for the tokens that count.

    Returns:
        (the shape of log_prob), float32 or wider.

    Raises:
        TypeError: log-probabilities that are not floating, a mask that is not bool.
        ValueError: different shapes or devices.

    Example:
        >>> from seqpar.objectives import token_log_ratio
        >>> log_prob, other_log_prob = torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([-2.0, -5.0, -3.0])
        >>> token_log_ratio(log_prob, other_log_prob, mask=torch.tensor([True, True, False]))
        tensor([1., 3., 0.])
    """
    log_prob, other_log_prob = check_scores(log_prob=log_prob, other_log_prob=other_log_prob)
    check_mask(mask, "mask", log_prob=log_prob)
    # Masked here, before any exponential: 0 times the gradient of an infinite or undefined ratio is nan in backward
    return torch.where(mask, log_prob - other_log_prob.detach(), 0)


def sequence_log_ratio(log_prob: Tensor, other_log_prob: Tensor, segment_ids: Tensor, sequences: int) -> Tensor:
    """Return each sequence's mean log-ratio per token (S,), the logarithm of GSPO's importance ratio.

        log s = 1/|y| sum_t (log pi(y_t) - log pi'(y_t))          Zheng et al. 2025 (GSPO), eq. 7

    Use it instead of the tokens' log-ratios in `clipped_surrogate`. DPO and KTO take the sum instead:
    `sequence_sums(token_log_ratio(...), segment_ids, sequences)`.

    Args:
        log_prob, other_log_prob: as in `token_log_ratio`.
        segment_ids, sequences: as in `sequence_sums`. A sequence without tokens has the log-ratio 0.

    Raises:
        TypeError, ValueError, IndexError: as in `token_log_ratio` and `sequence_sums`.

    Example:
        >>> from seqpar.objectives import sequence_log_ratio
        >>> log_prob, other_log_prob = torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([-2.0, -5.0, -3.0])
        >>> segment_ids = torch.tensor([0, 0, 1])  # two sequences, packed
        >>> sequence_log_ratio(log_prob, other_log_prob, segment_ids, sequences=2)
        tensor([ 2., -1.])
    """
    (log_prob,) = check_scores(log_prob=log_prob)
    check_segments(segment_ids, sequences, log_prob=log_prob)
    log_ratio = token_log_ratio(log_prob, other_log_prob, segment_ids >= 0)
    return sequence_means(log_ratio, segment_ids, sequences)


def truncated_weights(log_ratio: Tensor, *, max_weight: float) -> Tensor:
    """Return importance weights min(pi / pi', C), detached, to correct for a sampler that differs from the trainer.

        w = min(pi_trainer(y) / pi_sampler(y), C)                 Ionides 2008; for language models Yao et al. 2025

    Even with the same parameters, an inference engine computes slightly different probabilities. Multiply the unreduced
    losses by these weights, with `log_ratio = token_log_ratio(old_log_prob, sampler_log_prob, mask)`, where
    `old_log_prob` is the trainer's own score of the sampled tokens before the update.

    Args:
        log_ratio: per token or per sequence.
        max_weight: C, above 0.

    Raises:
        TypeError: a log-ratio that is not floating. ValueError: max_weight is not above 0.

    Example:
        >>> from seqpar.objectives import truncated_weights
        >>> truncated_weights(torch.tensor([0.0, 0.5, 3.0]), max_weight=2.0)
        tensor([1.0000, 1.6487, 2.0000])
    """
    (log_ratio,) = check_scores(log_ratio=log_ratio)
    check_number(max_weight, "max_weight", above=0)
    return log_ratio.detach().clamp(max=math.log(max_weight)).exp()


def masked_weights(log_ratio: Tensor, *, min_weight: float, max_weight: float) -> Tensor:
    """Return IcePop's importance weights, detached: those outside a range are 0, which drops their tokens.

        w = k if min_weight <= k <= max_weight, else 0,    k = pi_trainer(y) / pi_sampler(y)

    Ling Team 2025 (Every Step Evolves, arXiv 2510.18855). Use them like `truncated_weights`, which keep such tokens.

    Args:
        log_ratio: per token or per sequence.
        min_weight, max_weight: the range, both ends included; above 0.

    Raises:
        TypeError: a log-ratio that is not floating. ValueError: a range that is empty, or not above 0.

    Example:
        >>> from seqpar.objectives import masked_weights
        >>> masked_weights(torch.tensor([0.0, 0.5, 3.0, -3.0]), min_weight=0.5, max_weight=2.0)
        tensor([1.0000, 1.6487, 0.0000, 0.0000])
    """
    (log_ratio,) = check_scores(log_ratio=log_ratio)
    check_number(min_weight, "min_weight", above=0)
    check_number(max_weight, "max_weight", at_least=min_weight)
    log_ratio = log_ratio.detach()
    kept = (log_ratio >= math.log(min_weight)) & (log_ratio <= math.log(max_weight))
    return torch.where(kept, log_ratio, -math.inf).exp()


def kl_estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """Return an unbiased estimate of KL(policy || reference) per token, from the policy's own samples.

    With r = pi_ref(y_t) / pi(y_t) (Schulman 2020, "Approximating KL divergence"):

        k1 = -log r
        k3 = (r - 1) - log r            never negative, lower variance; Shao et al. 2024 (GRPO), eq. 4

    The values of both are unbiased. GRPO adds beta * k3 to its token losses and differentiates through it.

    Args:
        log_ratio: log(pi / pi_ref), from `token_log_ratio(log_prob, reference_log_prob, mask)`.
        estimator: "k1" or "k3". In float32, k3 is inf if the reference's log-probability is more than 88 above the
            policy's.

    Raises:
        TypeError: a log-ratio that is not floating. ValueError: an unknown estimator.

    Example:
        >>> from seqpar.objectives import kl_estimate
        >>> log_ratio = torch.tensor([0.0, 0.5, -0.5])
        >>> kl_estimate(log_ratio, "k1"), kl_estimate(log_ratio, "k3")
        (tensor([ 0.0000,  0.5000, -0.5000]), tensor([0.0000, 0.1065, 0.1487]))
    """
    (log_ratio,) = check_scores(log_ratio=log_ratio)
    check_choice(estimator, "estimator", get_args(Estimator))
    if estimator == "k1":
        return log_ratio
    return torch.expm1(-log_ratio) + log_ratio

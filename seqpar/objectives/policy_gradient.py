"""Objectives over the policy's own samples: PPO, GRPO, DAPO, Dr. GRPO, GSPO, LUSPO, SAPO, CISPO, VESPO.

Each method combines unreduced parts and a denominator:

    | method   | log-ratio              | advantages                              | denominator      |
    | GRPO     | token_log_ratio        | group_advantages                        | per_sequence     |
    | DAPO     | token_log_ratio        | group_advantages, eps_high > eps_low    | per_token        |
    | Dr. GRPO | token_log_ratio        | group_advantages(divide_by_std=False)   | per_constant     |
    | GSPO     | sequence_log_ratio     | group_advantages, one per sequence      | per_item         |
    | LUSPO    | sequence_log_ratio     | as in GSPO; losses x sequence_lengths   | per_item         |
    | PPO      | token_log_ratio        | the caller's, one per token             | per_token        |

SAPO replaces the clipping (`soft_surrogate`). CISPO and VESPO are policy gradients with a constant weight
(`weighted_policy_gradient`): `truncated_weights` of the tokens, `gamma_weights` of the sequences.

Add a divergence from a reference (`kl_estimate`) or an entropy bonus to the token losses, before the denominator:
`losses + beta * kl_estimate(...) - coefficient * scores.entropy`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seqpar.core.checks import check_groups, check_number, check_scores

LARGEST = 80.0
"""A log-ratio whose exponential still fits in float32."""


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float, max_ratio: float | None = None
) -> Tensor:
    """Return the negative of PPO's clipped surrogate, unreduced.

        loss = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A),   r = exp(log_ratio)

    Schulman et al. 2017, eq. 7; Shao et al. 2024 (GRPO), eq. 3; two ranges as in DAPO (Yu et al. 2025). At r = 1, where
    nothing is clipped, its gradient is that of the policy gradient, -A log pi. Per token it is a function of the
    token's own score, so it may be the loss of `seqpar.scored_loss` (`examples/grpo.py`).

    Args:
        log_ratio: per token (`token_log_ratio`) or per sequence (`sequence_log_ratio`), relative to the sampling
            policy. A masked token has log-ratio 0 and loss -A; the denominator leaves it out.
        advantages: of the same shape; a constant. `spread_to_tokens` copies one per sequence to its tokens.
        eps_low, eps_high: the clip range below and above 1; at least 0, eps_low below 1.
        max_ratio: also bounds r where A is negative and r above the range, where the loss is then -min(r, max_ratio) A,
            as in dual-clip PPO (Ye et al. 2020). Above 1 + eps_high. Without it, the loss overflows in float32 if the
            log-ratio is above 88 and A is negative.

    Returns:
        (the shape of log_ratio), float32 or wider.

    Raises:
        TypeError: arguments that are not floating. ValueError: different shapes or devices, numbers out of range.

    Example:
        >>> from seqpar.objectives import clipped_surrogate
        >>> log_ratio, advantages = torch.tensor([0.0, 0.5, -0.5]), torch.ones(3)
        >>> clipped_surrogate(log_ratio, advantages, eps_low=0.2, eps_high=0.2)
        tensor([-1.0000, -1.2000, -0.6065])
    """
    log_ratio, advantages = check_scores(log_ratio=log_ratio, advantages=advantages)
    check_number(eps_low, "eps_low", at_least=0, below=1)
    check_number(eps_high, "eps_high", at_least=0)
    largest = None
    if max_ratio is not None:
        check_number(max_ratio, "max_ratio", above=1 + eps_high)
        largest = math.log(max_ratio)
    advantages = advantages.detach()
    # The sign of A picks on which side the minimum clips the ratio. Clipping logarithms keeps exp() from overflowing
    if_positive = log_ratio.clamp(max=math.log1p(eps_high))
    if_negative = log_ratio.clamp(min=math.log1p(-eps_low), max=largest)
    return -torch.where(advantages < 0, if_negative, if_positive).exp() * advantages


def soft_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, temperature: float = 1.0, negative_temperature: float = 1.05
) -> Tensor:
    """Return the negative of SAPO's surrogate, unreduced: a sigmoid where PPO clips.

        loss = -f(r) A,   f(r) = sigmoid(tau (r - 1)) 4 / tau,   r = exp(log_ratio)

    Gao et al. 2025 (Soft Adaptive Policy Optimization, arXiv 2511.20347). tau is `temperature` where A is positive, and
    `negative_temperature` elsewhere. At r = 1 its gradient is that of the policy gradient. Divide `per_sequence`.

    Args:
        log_ratio, advantages: as in `clipped_surrogate`.
        temperature, negative_temperature: above 0; the larger, the sooner a ratio far from 1 loses its gradient.

    Returns:
        (the shape of log_ratio), float32 or wider.

    Raises:
        TypeError: arguments that are not floating. ValueError: different shapes or devices, numbers out of range.

    Example:
        >>> from seqpar.objectives import soft_surrogate
        >>> soft_surrogate(torch.tensor([0.0, 0.5, -0.5]), torch.ones(3))
        tensor([-2.0000, -2.6269, -1.6115])
    """
    log_ratio, advantages = check_scores(log_ratio=log_ratio, advantages=advantages)
    check_number(temperature, "temperature", above=0)
    check_number(negative_temperature, "negative_temperature", above=0)
    advantages = advantages.detach()
    tau = _by_sign(advantages > 0, temperature, negative_temperature, advantages)
    # The sigmoid is 1 long before its argument is infinite, where the gradient would be 0 times infinity
    ratio = log_ratio.clamp(max=LARGEST).exp()
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


def weighted_policy_gradient(log_prob: Tensor, weights: Tensor, advantages: Tensor) -> Tensor:
    """Return the losses of a policy gradient whose weights are constants, unreduced.

        loss = -w A log pi

    CISPO (MiniMax 2025, arXiv 2506.13585, eq. 4) has w = min(r, C), `truncated_weights` of the tokens' log-ratios:
    tokens with a large ratio keep a gradient, which PPO's clipping removes. VESPO has `gamma_weights` of sequences.
    Divide `per_token`.

    Args:
        log_prob: per token; the only argument that gets a gradient.
        weights, advantages: of the same shape; constants. `spread_to_tokens` copies one per sequence to its tokens.

    Raises:
        TypeError: arguments that are not floating. ValueError: different shapes or devices.

    Example:
        >>> from seqpar.objectives import truncated_weights, weighted_policy_gradient
        >>> log_prob, log_ratio = torch.tensor([-1.0, -2.0]), torch.tensor([0.0, 3.0])
        >>> weighted_policy_gradient(log_prob, truncated_weights(log_ratio, max_weight=5.0), torch.ones(2))
        tensor([ 1., 10.])
    """
    log_prob, weights, advantages = check_scores(log_prob=log_prob, weights=weights, advantages=advantages)
    return -(weights * advantages).detach() * log_prob


def gamma_weights(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    power: float = 2.0,
    decay: float = 3.0,
    negative_power: float = 3.0,
    negative_decay: float = 2.0,
) -> Tensor:
    """Return VESPO's weights of sequences, detached.

        phi(w) = w^k exp(lambda (1 - w)),   w = exp(log_ratio)

    arXiv 2602.10693. phi(1) is 1, and both a likely and an unlikely sequence count less. k is `power` and lambda
    `decay` where A is at least 0, `negative_power` and `negative_decay` elsewhere.

    Args:
        log_ratio: (S,), one per sequence: the sum over its tokens, `sequence_sums(token_log_ratio(...), ...)`,
            relative to the sampling policy.
        advantages: (S,).
        power, decay, negative_power, negative_decay: above 0.

    Raises:
        TypeError: arguments that are not floating. ValueError: different shapes or devices, numbers out of range.

    Example:
        >>> from seqpar.objectives import gamma_weights
        >>> gamma_weights(torch.tensor([0.0, 1.0, -1.0]), torch.ones(3))
        tensor([1.0000, 0.0426, 0.9016])
    """
    log_ratio, advantages = check_scores(log_ratio=log_ratio, advantages=advantages)
    given = {"power": power, "decay": decay, "negative_power": negative_power, "negative_decay": negative_decay}
    for name, number in given.items():
        check_number(number, name, above=0)
    log_w = log_ratio.detach().clamp(max=LARGEST)
    k = _by_sign(advantages >= 0, power, negative_power, log_w)
    rate = _by_sign(advantages >= 0, decay, negative_decay, log_w)
    return (k * log_w + rate * (1 - log_w.exp())).exp()


def _by_sign(is_there: Tensor, number: float, other: float, like: Tensor) -> Tensor:
    """Return one number or the other; `torch.where` on two Python numbers would round them to the default dtype."""
    return torch.where(is_there, like.new_full((), number), like.new_full((), other))


def group_advantages(rewards: Tensor, group_size: int, *, divide_by_std: bool = True, eps: float = 1e-4) -> Tensor:
    """Return each response's advantage over the others of its group, detached.

        A_i = (r_i - mean(r)) / (std(r) + eps)              Shao et al. 2024 (GRPO), section 4.1
        A_i = r_i - mean(r)     if not divide_by_std        Liu et al. 2025 (Dr. GRPO)

    The standard deviation is the sample's, with group_size - 1 in the denominator. If all rewards of a group are equal,
    its advantages are 0.

    Args:
        rewards: (groups x group_size,), one group after the other; a micro-batch must contain whole groups.
        group_size: responses per prompt, at least 2.
        divide_by_std: whether to divide by the standard deviation.
        eps: added to the standard deviation; above 0.

    Raises:
        TypeError: rewards that are not floating, a group size that is not an int.
        ValueError: rewards that are not a vector of whole groups; eps or group_size out of range.

    Example:
        >>> from seqpar.objectives import group_advantages
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.5, 0.5]), group_size=2)
        tensor([ 0.7070, -0.7070,  0.0000,  0.0000])
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.5, 0.5]), group_size=2, divide_by_std=False)
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    (rewards,) = check_scores(rewards=rewards)
    check_groups(group_size, 2, rewards=rewards)
    check_number(eps, "eps", above=0)
    grouped = rewards.detach().view(-1, group_size)
    # Relative to the first, which is exact if all are equal: a mean is rounded, and the standard deviation with it
    grouped = grouped - grouped[:, :1]
    advantages = grouped - grouped.mean(1, keepdim=True)
    if divide_by_std:
        variance = advantages.square().sum(1, keepdim=True) / (group_size - 1)
        advantages = advantages / (variance.sqrt() + eps)
    return advantages.flatten()

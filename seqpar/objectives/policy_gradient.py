"""Objectives over the policy's own samples: PPO, GRPO, DAPO, Dr. GRPO, GSPO.

Each method combines unreduced parts and a denominator:

    | method   | log-ratio              | advantages                              | denominator      |
    | GRPO     | token_log_ratio        | group_advantages                        | per_sequence     |
    | DAPO     | token_log_ratio        | group_advantages, eps_high > eps_low    | per_token        |
    | Dr. GRPO | token_log_ratio        | group_advantages(divide_by_std=False)   | per_constant     |
    | GSPO     | sequence_log_ratio     | group_advantages, one per sequence      | per_item         |
    | PPO      | token_log_ratio        | the caller's, one per token             | per_token        |

A divergence from a reference (`kl_estimate`) or a bonus for entropy is added to the token losses, before the
denominator: `losses + beta * kl_estimate(...) - coefficient * scores.entropy`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seqpar.core.checks import check_groups, check_number, checked_scores


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float, max_ratio: float | None = None
) -> Tensor:
    """Return the negative of PPO's clipped surrogate, unreduced.

        loss = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A),   r = exp(log_ratio)

    Schulman et al. 2017, eq. 7; Shao et al. 2024 (GRPO), eq. 3; two ranges as in DAPO (Yu et al. 2025). At r = 1, where
    nothing is clipped, its gradient is that of the policy gradient, -A log pi. Per token it is a function of the
    token's own score, so it may be the loss of `seqpar.scored_loss` (`examples/grpo.py`).

    Args:
        log_ratio: per token (`token_log_ratio`) or per sequence (`sequence_log_ratio`), to the policy that sampled.
            A masked token has the log-ratio 0 and the loss -A; the denominator leaves it out.
        advantages: of the same shape; a constant. `spread_to_tokens` brings one per sequence to its tokens.
        eps_low, eps_high: the clip range below and above 1; at least 0, eps_low below 1.
        max_ratio: bounds r where A is negative, which the equation does not: there the loss is -min(r, max_ratio) A, as
            in dual-clip PPO (Ye et al. 2020). Above 1 + eps_high. Without it, the loss overflows in float32 where the
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
    log_ratio, advantages = checked_scores(log_ratio=log_ratio, advantages=advantages)
    check_number(eps_low, "eps_low", at_least=0, below=1)
    check_number(eps_high, "eps_high", at_least=0)
    largest = None
    if max_ratio is not None:
        check_number(max_ratio, "max_ratio", above=1 + eps_high)
        largest = math.log(max_ratio)
    advantages = advantages.detach()
    # The minimum is the clipped ratio's side that the sign of A picks. Clipping logarithms keeps exp() from overflowing
    if_positive = log_ratio.clamp(max=math.log1p(eps_high))
    if_negative = log_ratio.clamp(min=math.log1p(-eps_low), max=largest)
    return -torch.where(advantages < 0, if_negative, if_positive).exp() * advantages


def group_advantages(rewards: Tensor, group_size: int, *, divide_by_std: bool = True, eps: float = 1e-4) -> Tensor:
    """Return each response's advantage over the others of its group, detached.

        A_i = (r_i - mean(r)) / (std(r) + eps)              Shao et al. 2024 (GRPO), section 4.1
        A_i = r_i - mean(r)     if not divide_by_std        Liu et al. 2025 (Dr. GRPO)

    The standard deviation is the sample's, with group_size - 1 in the denominator. If all rewards of a group are equal,
    the advantages are 0.

    Args:
        rewards: (groups x group_size,), one group after the other; a group must be whole in its micro-batch.
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
    (rewards,) = checked_scores(rewards=rewards)
    check_groups(group_size, 2, rewards=rewards)
    check_number(eps, "eps", above=0)
    grouped = rewards.detach().view(-1, group_size)
    # From the first one on, which is exact where all are equal: a mean is rounded, and the standard deviation with it
    grouped = grouped - grouped[:, :1]
    advantages = grouped - grouped.mean(1, keepdim=True)
    if divide_by_std:
        variance = advantages.square().sum(1, keepdim=True) / (group_size - 1)
        advantages = advantages / (variance.sqrt() + eps)
    return advantages.flatten()

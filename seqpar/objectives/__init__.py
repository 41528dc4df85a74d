"""Post-training objectives as pure functions of log-probabilities: DPO, KTO, PPO, GRPO, minimum risk and others.

The scores come from `seqpar.token_scores`; there are no logits here and no projection. An objective returns its losses
UNREDUCED, per token or per sequence, and a denominator (`per_token`, `per_sequence`, `per_item`, `per_constant`) turns
them into a `seqpar.TokenLoss`, exact over any split into micro-batches and ranks.
"""

from seqpar.objectives.denominators import per_constant, per_item, per_sequence, per_token
from seqpar.objectives.policy_gradient import (
    clipped_surrogate,
    gamma_weights,
    group_advantages,
    soft_surrogate,
    weighted_policy_gradient,
)
from seqpar.objectives.preferences import cpo, dpo, kto, orpo, simpo
from seqpar.objectives.ratios import kl_estimate, masked_weights, sequence_log_ratio, token_log_ratio, truncated_weights
from seqpar.objectives.sequences import (
    head_targets,
    padded_segments,
    sequence_lengths,
    sequence_means,
    sequence_sums,
    spread_to_tokens,
)
from seqpar.objectives.supervised import dft, minimum_risk

__all__ = [
    "clipped_surrogate",
    "cpo",
    "dft",
    "dpo",
    "gamma_weights",
    "group_advantages",
    "head_targets",
    "kl_estimate",
    "kto",
    "masked_weights",
    "minimum_risk",
    "orpo",
    "padded_segments",
    "per_constant",
    "per_item",
    "per_sequence",
    "per_token",
    "sequence_lengths",
    "sequence_log_ratio",
    "sequence_means",
    "sequence_sums",
    "simpo",
    "soft_surrogate",
    "spread_to_tokens",
    "token_log_ratio",
    "truncated_weights",
    "weighted_policy_gradient",
]

"""Compute the log-probabilities of prime-rl's trainer without the logits of all tokens:

    [trainer.loss]
    type = "custom"
    import_path = "seqpar.integrations.prime_rl.default_loss"

prime-rl imports the file for its loss, and the import puts the scores into its fused output heads. Any other function
of `LossInputs` works as well if its file imports this one. Tested with the sources of August 2026 (559b447).
"""

from __future__ import annotations

from typing import Any

from prime_rl.configs.trainer import DefaultLossConfig
from prime_rl.trainer.models.layers.lm_head import FusedOutputLinear, PrimeLmOutput, VanillaOutputLinear
from prime_rl.trainer.models.layers.lm_head_gemma import GemmaFusedOutputLinear, GemmaVanillaOutputLinear
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs, default_loss_fn
from prime_rl.utils.logger import get_logger
from torch import Tensor

from seqpar.integrations.say_once import say_once
from seqpar.linear.token_scores import token_scores


def default_loss(inputs: LossInputs, **settings: Any) -> LossOutputs:
    """Return prime-rl's own default loss; `settings`, the custom loss's `kwargs`, are its configuration's fields."""
    return default_loss_fn(inputs, DefaultLossConfig(**settings))


def scored_forward(self: Any, hidden_states: Tensor, labels: Tensor, temperature: Tensor) -> PrimeLmOutput:
    """Return what prime-rl's fused heads return: log-probabilities, and entropies with no gradient.

    Args:
        hidden_states: (batch, time, D).
        labels: (batch, time), the token that each position predicts.
        temperature: (batch, time), one for each token.
    """
    say_once("prime-rl", get_logger().info, self.weight, scores=True)
    scores = token_scores(
        hidden_states,
        self.weight,
        labels,
        temperature=temperature,
        softcap=getattr(self, "softcap", None),
        entropy=True,
    )
    assert scores.entropy is not None
    return PrimeLmOutput(logprobs=scores.log_prob, entropy=scores.entropy.detach())


def refuse_logits(self: Any, *_: object, **__: object) -> None:
    """Raise TypeError: the head that returns all logits, used if the fused one is disabled, has no scores."""
    raise TypeError("fused_lm_head_token_chunk_size is disabled, so there are only logits: leave the setting out")


FusedOutputLinear.forward = GemmaFusedOutputLinear.forward = scored_forward
VanillaOutputLinear.forward = GemmaVanillaOutputLinear.forward = refuse_logits

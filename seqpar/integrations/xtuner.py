"""Compute the cross-entropy of xtuner's v1 engine without the logits of all tokens:

    model_cfg.lm_loss_cfg = SeqparCrossEntropyConfig(label_smoothing=0.1)     # or the Trainer's loss_cfg

Tested with the sources of August 2026 (b934f46), which have not been published as a package.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from xtuner.v1.loss.ce_loss import CELossConfig, LMHeadLossContext
from xtuner.v1.utils import get_logger

from seqpar.integrations.say_once import say_once
from seqpar.linear.cross_entropy import linear_cross_entropy


class SeqparCrossEntropyConfig(CELossConfig):  # type: ignore[misc, unused-ignore]
    """xtuner's configuration of the loss, with smoothing; weights of samples (`loss_reduction`) are xtuner's own.

    `label_smoothing` is eps in [0, 1), eps/V for every class; `chunk_tokens` the maximum number of tokens whose logits
    exist at once. Models with heads for several next tokens build their own loss from it, and refuse these two fields.
    """

    label_smoothing: float = 0.0
    chunk_tokens: int | None = None

    @property
    def loss_ctx_cls(self) -> type[SeqparCrossEntropy]:
        """Return the class that computes the loss."""
        return SeqparCrossEntropy

    def model_post_init(self, context: Any) -> None:
        """Raise ValueError for a mode in which xtuner computes the loss in its own way."""
        if self.mode != "eager":
            raise ValueError(f"mode is {self.mode!r}, xtuner's own way to cut the loss; leave it out: seqpar cuts it")


class SeqparCrossEntropy(LMHeadLossContext):
    """The loss of a micro-batch: each token's cross-entropy times its weight, which has the step's denominator."""

    def eager_mode(
        self, hidden_states: Tensor, head_weight: Tensor, head_bias: Tensor | None, loss_kwargs: Any
    ) -> tuple[Tensor, tuple[None, dict[str, Any]]]:
        """Return the loss of this rank's tokens, and None for the logits, as xtuner's chunked loss does."""
        config = self.loss_cfg
        say_once("xtuner", get_logger().info, head_weight, config.chunk_tokens)
        loss = linear_cross_entropy(
            hidden_states,
            head_weight,
            loss_kwargs.shifted_labels,
            bias=head_bias,
            ignore_index=config.ignore_idx,
            token_weight=loss_kwargs.loss_weight,
            label_smoothing=config.label_smoothing,
            chunk_tokens=config.chunk_tokens,
        )
        return loss.total, (None, {})

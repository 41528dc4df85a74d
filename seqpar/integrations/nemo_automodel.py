"""Compute the cross-entropy of NVIDIA NeMo AutoModel's recipes without the logits of all tokens:

    loss_fn:
      _target_: seqpar.integrations.nemo_automodel.SeqparCrossEntropy
      label_smoothing: 0.1

To AutoModel it is a `ChunkedCrossEntropy`, which AutoModel refuses if hidden states are not available (a pipeline, a
model without `logits_to_keep`); any other loss of hidden states it would replace with one of logits. Tested with 0.7.0.
"""

from __future__ import annotations

import logging
from typing import Any

from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy
from torch import Tensor, nn

from seqpar.integrations.say_once import say_once
from seqpar.integrations.transformers_model import settings_of_logits
from seqpar.linear.cross_entropy import linear_cross_entropy


class SeqparCrossEntropy(ChunkedCrossEntropy):
    """The summed cross-entropy divided by `num_label_tokens`; without that the sum, as in AutoModel's other losses.

    `label_smoothing` is eps in [0, 1), eps/V for every class; `chunk_tokens` the maximum number of tokens in a chunk.
    """

    def __init__(self, label_smoothing: float = 0.0, chunk_tokens: int | None = None, ignore_index: int = -100) -> None:
        super().__init__(compile=False, ignore_index=ignore_index)
        self.settings: dict[str, Any] = {"label_smoothing": label_smoothing, "chunk_tokens": chunk_tokens}

    def validate_lm_head(self, lm_head: nn.Module | None, *, model_config: Any = None) -> Any:
        """Return the output head; raise ValueError unless the logits are just a product with its weight."""
        for name, value in () if model_config is None else settings_of_logits(model_config):
            raise ValueError(f"{name} is {value}, and the loss is given only lm_head.weight; use MaskedCrossEntropy")
        return super().validate_lm_head(lm_head)

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
        loss_weights: Tensor | None = None,
        logits_dtype: object = None,
    ) -> Tensor:
        """Return the loss of hidden states (..., D) and labels, with a constant weight for each token if given."""
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        say_once("NeMo AutoModel", logging.getLogger(__name__).info, weight, self.settings["chunk_tokens"])
        rows, target = hidden_states.flatten(0, -2).to(weight.dtype), labels.flatten().to(weight.device)
        options = {"ignore_index": self.ignore_index, **self.settings}
        if loss_weights is not None:
            options["token_weight"] = loss_weights.flatten().to(weight.device)
        loss = linear_cross_entropy(rows, weight, target, **options)
        # If no rank has a token, the sum is 0
        return loss.total / num_label_tokens if num_label_tokens else loss.total

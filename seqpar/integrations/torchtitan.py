"""Compute torchtitan's cross-entropy without the logits of all tokens: in a configuration of its Trainer,

    loss=SeqparCrossEntropy.Config(label_smoothing=0.1)

takes the place of `ChunkedLossWrapper.Config(...)`. Divided by the tokens of all ranks and micro-batches, as
torchtitan's own. Tested with torchtitan 0.3.0's trainer step under FSDP2 and tensor parallelism; pipelines are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.tools.logging import logger

from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.integrations.made_up import full_name, is_plain_linear
from seqpar.integrations.say_once import say_once
from seqpar.linear.cross_entropy import linear_cross_entropy


# The one kind of BaseLoss that the trainer hands hidden states and `lm_head`
class SeqparCrossEntropy(ChunkedLossWrapper):
    """The cross-entropy of a torchtitan model: hidden states and labels in, the loss and no metrics out."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        label_smoothing: float = 0.0
        """eps of every class, eps/V."""
        z_loss: float = 0.0
        chunk_tokens: int | None = None

    def __init__(self, config: Config, *, compile_config: object = None) -> None:
        self.settings: dict[str, Any] = {
            name: getattr(config, name) for name in ("label_smoothing", "z_loss", "chunk_tokens")
        }

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Make the loss the forward of `lm_head`: FSDP2 gathers a weight around the forward of its module."""
        if not is_plain_linear(lm_head) or getattr(lm_head, "bias", None) is not None:
            raise TypeError(
                f"lm_head is a {full_name(lm_head)}; the loss needs an nn.Linear without a bias and without a forward "
                "of its own (LoRA, soft caps); use ChunkedLossWrapper for this model"
            )
        self.lm_head = lm_head
        vars(lm_head)["forward"] = self._token_loss

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: object
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss of hidden states, divided by `global_valid_tokens` if they are given."""
        with spmd.no_typecheck():
            total = self.lm_head(pred, labels).total
            return total if global_valid_tokens is None else total / global_valid_tokens, {}

    def _token_loss(self, hidden: Tensor, labels: Tensor) -> TokenLoss:
        weight = self.lm_head.weight
        say_once("torchtitan", logger.info, weight, self.settings["chunk_tokens"])
        vocab = None
        # A DTensor says itself how it is split
        if not isinstance(weight, DTensor) and spmd_mesh_size("tp") > 1:
            tensor_parallel = current_spmd_mesh().get_group("tp")
            vocab = VocabShard.of(len(weight), tensor_parallel)
            # linear_cross_entropy sums hidden's gradient over the group, and torchtitan's norm would do so again
            hidden = spmd.convert(hidden, tensor_parallel, src=spmd.R, dst=spmd.I, expert_mode=True)
        return linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORE_INDEX, vocab=vocab, **self.settings)

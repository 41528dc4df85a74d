"""Compute torchtitan's cross-entropy without the logits of all tokens: in a configuration of its Trainer,

    loss=SeqparCrossEntropy.Config(label_smoothing=0.1)

Tested with torchtitan 0.3.0's trainer step under DDP, FSDP2 and tensor parallelism; pipelines are not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import spmd_types as spmd
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.tools.logging import logger

from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.integrations.made_up import full_name, is_plain_linear
from seqpar.integrations.say_once import say_once
from seqpar.linear.cross_entropy import linear_cross_entropy


class SeqparCrossEntropy(ChunkedLossWrapper):
    """The cross-entropy of hidden states; the trainer passes these and `lm_head` only to a `ChunkedLossWrapper`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        label_smoothing: float = 0.0
        z_loss: float = 0.0
        chunk_tokens: int | None = None

    def __init__(self, config: Config, *, compile_config: object = None) -> None:
        self.settings = asdict(config) | {"ignore_index": IGNORE_INDEX}

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Make the loss the forward of `lm_head`, because FSDP2 gathers a weight for the forward of its module."""
        if not is_plain_linear(lm_head) or getattr(lm_head, "bias", None) is not None:
            raise TypeError(f"lm_head is a {full_name(lm_head)}, not an nn.Linear without bias: use ChunkedLossWrapper")
        self.lm_head = lm_head
        vars(lm_head)["forward"] = self._total

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, positions: object = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss of hidden states, divided by `global_valid_tokens` if they are given."""
        with spmd.no_typecheck():
            return self.lm_head(pred, labels) / (1 if global_valid_tokens is None else global_valid_tokens), {}

    def _total(self, hidden: Tensor, labels: Tensor) -> Tensor:
        weight, vocab = self.lm_head.weight, None
        say_once("torchtitan", logger.info, weight, self.settings["chunk_tokens"])
        # A DTensor itself says how it is split
        if not isinstance(weight, DTensor) and spmd_mesh_size("tp") > 1:
            tensor_parallel = current_spmd_mesh().get_group("tp")
            vocab = VocabShard.of(len(weight), tensor_parallel)
            # linear_cross_entropy already sums hidden's gradient over the group; torchtitan's norm would do it again
            hidden = spmd.convert(hidden, tensor_parallel, src=spmd.R, dst=spmd.I, expert_mode=True)
        return linear_cross_entropy(hidden, weight, labels, vocab=vocab, **self.settings).total

"""Compute ms-swift's fine-tuning loss without the logits of all tokens: with a file plugin.py of one line,

    import seqpar.integrations.ms_swift

    swift sft --external_plugins plugin.py --loss_type seqpar --label_smoothing_factor 0.1 ...

Tested with ms-swift 4.6.0.
"""

from __future__ import annotations

from typing import Any

from swift.loss import BaseLoss, loss_map
from swift.utils import get_logger
from torch import Tensor

from seqpar.integrations.say_once import say_once
from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func

OTHER_LOSSES = "enable_dft_loss", "enable_channel_loss"
"""The trainer's options that compute losses of their own from the logits."""


class SeqparLoss(BaseLoss):
    """`compute_loss_func` of `apply_seqpar_loss` as one of ms-swift's losses; the smoothing is the Trainer's option."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(args, trainer)
        self._refuse(args, trainer)
        model = trainer.template.model
        if model is None:
            raise ValueError(
                "template.model is None; set it to the model before you make the trainer, as swift sft does"
            )
        self.loss_of = compute_loss_func(apply_seqpar_loss(model, label_smoothing=args.label_smoothing_factor))
        say_once("ms-swift", get_logger().info, model.get_output_embeddings().weight)

    def _refuse(self, args: Any, trainer: Any) -> None:
        """Raise ValueError for what the trainer would compute from logits that are not there."""
        named = [name for name in OTHER_LOSSES if getattr(args, name, False)]
        template = trainer.template
        if self.is_megatron:
            named.append("Megatron")
        if template.sequence_parallel_size > 1:
            named.append(f"sequence_parallel_size={template.sequence_parallel_size}")
        if not template.loss_scale.is_binary_loss_scale:
            named.append("a loss_scale with weights other than 0 and 1")
        if named:
            raise ValueError(
                f"--loss_type seqpar does not support {' or '.join(named)}; leave it out, or the loss_type"
            )

    def __call__(
        self, outputs: Any, labels: Tensor, *, num_items_in_batch: Any = None, loss_scale: Any = None, **_: object
    ) -> Tensor:
        """Return the loss, and leave no hidden states behind for the trainer's accuracy to read as logits."""
        if loss_scale is not None:
            raise ValueError("--loss_type seqpar does not support loss_scale; leave it out, or the loss_type")
        training = self.trainer.model.training
        loss = self.loss_of(outputs, labels, num_items_in_batch)
        if training:
            outputs.logits = None
        return loss


loss_map["seqpar"] = SeqparLoss

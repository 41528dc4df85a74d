"""Compute ms-swift's fine-tuning loss without the logits of all tokens: with a file plugin.py of one line,

    import seqpar.integrations.ms_swift

    swift sft --external_plugins plugin.py --loss_type seqpar --label_smoothing_factor 0.1 ...

Tested with ms-swift 4.6.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swift.loss import BaseLoss, loss_map
from swift.utils import get_logger
from torch import Tensor

from seqpar.integrations.say_once import say_once
from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func

WAY_OUT = "leave it out, or the loss_type"


class SeqparLoss(BaseLoss):
    """`compute_loss_func` of `apply_seqpar_loss` as one of ms-swift's losses; the smoothing is the Trainer's option."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(args, trainer)
        if named := list(self._options_using_logits()):
            raise ValueError(f"--loss_type seqpar does not support {' or '.join(named)}; {WAY_OUT}")
        model = trainer.template.model
        if model is None:
            raise ValueError("template.model is None; set it before you make the trainer, as swift sft does")
        self.loss_of = compute_loss_func(apply_seqpar_loss(model, label_smoothing=args.label_smoothing_factor))
        say_once("ms-swift", get_logger().info, model.get_output_embeddings().weight)

    def _options_using_logits(self) -> Iterator[str]:
        """Yield the options for which the trainer needs the logits, which do not exist here."""
        yield from (n for n in ("enable_dft_loss", "enable_channel_loss") if getattr(self.args, n, False))
        if self.is_megatron:
            yield "Megatron"
        if (ranks := self.trainer.template.sequence_parallel_size) > 1:
            yield f"sequence_parallel_size={ranks}"
        if not self.trainer.template.loss_scale.is_binary_loss_scale:
            yield "a loss_scale with weights other than 0 and 1"

    def __call__(self, outputs: Any, labels: Tensor, *, loss_scale: object = None, **options: Any) -> Tensor:
        """Return the loss, divided by `num_items_in_batch` if that is given."""
        if loss_scale is not None:
            raise ValueError(f"--loss_type seqpar does not support loss_scale; {WAY_OUT}")
        return self.loss_of(outputs, labels, options.get("num_items_in_batch"))


loss_map["seqpar"] = SeqparLoss

"""Compute axolotl's losses without the logits of all tokens:

    plugins:
      - seqpar.integrations.axolotl.SeqparPlugin
    seqpar_label_smoothing: 0.1     # and seqpar_chunk_tokens

Tested with axolotl 0.19.0, whose own loss under accumulation is a mean of means.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from axolotl.utils.logging import get_logger
from pydantic import BaseModel, model_validator

from seqpar.integrations.say_once import say_once
from seqpar.integrations.transformers import apply_seqpar_loss
from seqpar.integrations.transformers_trainer import model_of
from seqpar.integrations.trl import apply_seqpar_scores

CHUNKED = "cut_cross_entropy", "chunked_cross_entropy", "liger_fused_linear_cross_entropy"
LOSSES = *CHUNKED, "liger_cross_entropy", "use_eaft"
"""axolotl's options that replace the loss."""


class SeqparArgs(BaseModel):
    """The options that the plugin adds to a configuration."""

    seqpar_label_smoothing: float = 0.0
    seqpar_chunk_tokens: int | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_another_loss(cls, data: Any) -> Any:
        """Raise ValueError for a second loss, and for smoothing with a reinforcement objective, which has none."""
        if named := [name for name in LOSSES if data.get(name)]:
            raise ValueError(f"{named[0]} replaces the loss, as the plugin SeqparPlugin does; leave one of them out")
        if data.get("rl") and data.get("seqpar_label_smoothing"):
            raise ValueError(f"seqpar_label_smoothing is for a cross-entropy; rl: {data['rl']} has none: leave it out")
        return data


class SeqparPlugin(BasePlugin):
    """Give axolotl's trainers the loss of `apply_seqpar_loss`, and with `rl` the scores of `apply_seqpar_scores`."""

    def get_input_args(self) -> str:
        """Return the name of the options' class, as axolotl expects it."""
        return f"{__name__}.SeqparArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Apply the loss or scores after axolotl has told the Trainer not to count the tokens of all micro-batches."""
        chunk_tokens, weight = cfg.seqpar_chunk_tokens, model_of(trainer).get_output_embeddings().weight
        if cfg.rl:
            apply_seqpar_scores(trainer, chunk_tokens=chunk_tokens)
        else:
            apply_seqpar_loss(trainer, label_smoothing=cfg.seqpar_label_smoothing or 0.0, chunk_tokens=chunk_tokens)
        # axolotl drops everything but warnings from loggers with other names
        say_once("axolotl", get_logger("axolotl.seqpar").info, weight, chunk_tokens, scores=bool(cfg.rl))

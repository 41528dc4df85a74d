"""Compute axolotl's losses without the logits of all tokens:

    plugins:
      - seqpar.integrations.axolotl.SeqparPlugin
    seqpar_label_smoothing: 0.1     # and seqpar_chunk_tokens

The model's loss is that of `apply_seqpar_loss`; with `rl`, the trainer's scores are those of `apply_seqpar_scores`.
Tested with axolotl 0.19.0, whose own loss under accumulation is a mean of means.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from axolotl.utils.logging import get_logger
from pydantic import BaseModel, model_validator

from seqpar.integrations.say_once import say_once
from seqpar.integrations.transformers import apply_seqpar_loss
from seqpar.integrations.trl import apply_seqpar_scores

LOSSES = (
    "cut_cross_entropy",
    "chunked_cross_entropy",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
    "use_eaft",
)
"""axolotl's options that replace the loss."""


class SeqparArgs(BaseModel):
    """The options that the plugin adds to a configuration."""

    seqpar_label_smoothing: float = 0.0
    seqpar_chunk_tokens: int | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_another_loss(cls, data: Any) -> Any:
        """Raise ValueError for a second loss, and for smoothing where a reinforcement objective has none."""
        for name in LOSSES:
            if data.get(name):
                raise ValueError(
                    f"{name} replaces the loss, and so does the plugin SeqparPlugin; leave one of them out"
                )
        if data.get("rl") and data.get("seqpar_label_smoothing"):
            raise ValueError(
                f"seqpar_label_smoothing is for the cross-entropy; rl: {data['rl']} has none: leave it out"
            )
        return data


class SeqparPlugin(BasePlugin):
    """axolotl's plugin, whose calls all come before the first step."""

    def get_input_args(self) -> str:
        """Return the options' class by name, as axolotl asks for it."""
        return f"{__name__}.SeqparArgs"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Apply the loss to the model, before its Trainer reads the flags that it sets."""
        if cfg.rl:
            return
        apply_seqpar_loss(
            model, label_smoothing=cfg.seqpar_label_smoothing or 0.0, chunk_tokens=cfg.seqpar_chunk_tokens
        )
        self._say(cfg, model)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Apply the scores to TRL's trainer; let the Trainer of the loss count the tokens of all micro-batches."""
        if not cfg.rl:
            # axolotl switches this off, and its micro-batches weigh the same whatever tokens they have
            trainer.model_accepts_loss_kwargs = True
            return
        apply_seqpar_scores(trainer, chunk_tokens=cfg.seqpar_chunk_tokens)
        self._say(cfg, trainer.model)

    @staticmethod
    def _say(cfg: Any, model: Any) -> None:
        say_once(
            "axolotl",
            get_logger(__name__).info,
            model.get_output_embeddings().weight,
            cfg.seqpar_chunk_tokens,
            scores=bool(cfg.rl),
        )

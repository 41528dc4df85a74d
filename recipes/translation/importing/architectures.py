"""Which published models can be imported, and what their settings in transformers are here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models import PRESETS, TransformerConfig
from models.presets import ARCHITECTURES, Tie
from recipes.translation.errors import CheckpointError

PUBLISHED = {"marian": "opus_mt", "m2m_100": "m2m100", "mbart": "mbart"}
"""The name in `models.PRESETS` for each `model_type` in config.json."""


def sizes_of(config: Any, where: str) -> TransformerConfig:
    """Return the sizes and choices of the model that a transformers config describes, except `tie`.

    Raises CheckpointError for a choice that the models here do not support, with its name and value.
    """
    if config.model_type not in PUBLISHED:
        raise CheckpointError(
            f"{where}: model_type is {config.model_type!r}; it must be one of {', '.join(PUBLISHED)} (NLLB-200 is "
            "m2m_100)"
        )
    preset = PRESETS[PUBLISHED[config.model_type]]
    assert isinstance(preset, TransformerConfig)
    if not config.scale_embedding:
        raise CheckpointError(
            f"{where}: scale_embedding is false, and the models here multiply token vectors by the square root of "
            "d_model, as all published ones do"
        )
    for name in ("ffn_dim", "attention_heads"):
        encoder, decoder = (getattr(config, f"{side}_{name}") for side in ("encoder", "decoder"))
        if encoder != decoder:
            raise CheckpointError(
                f"{where}: encoder_{name} is {encoder}, decoder_{name} {decoder}; here both sides have the same"
            )
    lengths = preset.max_positions
    if ARCHITECTURES[preset.architecture].positions == "learned":
        lengths = config.max_position_embeddings
    try:
        return replace(
            preset,
            d_model=config.d_model,
            d_ff=config.encoder_ffn_dim,
            heads=config.encoder_attention_heads,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            dropout=config.dropout,
            activation={"silu": "swish"}.get(config.activation_function, config.activation_function),
            max_positions=lengths,
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def tie_of(model: Any) -> Tie:
    """Return which of the vocabulary's matrices are tied in a transformers model, whatever config.json says."""
    source, target = (side.embed_tokens.weight for side in (model.model.encoder, model.model.decoder))
    if target is not model.lm_head.weight:
        return "none"
    return "all" if source is target else "target"

"""Which published models can be imported: their settings in transformers, and ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from models import PRESETS, TransformerConfig
from models.presets import ARCHITECTURES, Activation, Tie
from recipes.translation.errors import CheckpointError


class Published(NamedTuple):
    """A kind of model in transformers."""

    preset: str
    """Its name in `models.PRESETS`."""
    translates: str
    """The class of its models with a projection to the vocabulary."""


PUBLISHED: dict[str, Published] = {
    "marian": Published("opus_mt", "MarianMTModel"),
    "m2m_100": Published("m2m100", "M2M100ForConditionalGeneration"),
    "mbart": Published("mbart", "MBartForConditionalGeneration"),
}
"""By the `model_type` of config.json."""
ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}


def published(settings: dict[str, Any], where: str) -> Published:
    """Return the kind of model that config.json describes; raise CheckpointError for one that is not known here."""
    kind = settings.get("model_type")
    if kind not in PUBLISHED:
        raise CheckpointError(
            f"{where}: model_type is {kind!r}; it must be one of {', '.join(PUBLISHED)} (NLLB-200 is m2m_100)"
        )
    found = PUBLISHED[kind]
    classes = settings.get("architectures") or [found.translates]
    if found.translates not in classes:
        raise CheckpointError(
            f"{where}: the model is a {', '.join(classes)}, which does not translate: {found.translates} does"
        )
    return found


def sizes_of(settings: dict[str, Any], where: str) -> TransformerConfig:
    """Return the sizes and choices of the model that config.json describes.

    Raises CheckpointError for a choice that the models here do not have, with its name and value.
    """
    preset = PRESETS[published(settings, where).preset]
    assert isinstance(preset, TransformerConfig)
    activation = settings.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{where}: activation_function is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}"
        )
    if not settings.get("scale_embedding", False):
        raise CheckpointError(
            f"{where}: scale_embedding is false, and the models here multiply token vectors by the square root of "
            "d_model, as all published ones do"
        )
    lengths = preset.max_positions
    if ARCHITECTURES[preset.architecture].positions == "learned":
        lengths = settings.get("max_position_embeddings", 1024)
    try:
        return replace(
            preset,
            d_model=settings["d_model"],
            d_ff=_same(settings, "ffn_dim", where),
            heads=_same(settings, "attention_heads", where),
            encoder_layers=settings["encoder_layers"],
            decoder_layers=settings["decoder_layers"],
            dropout=float(settings.get("dropout", 0.1)),
            activation=ACTIVATIONS[activation],
            tie=_tie(settings, where),
            max_positions=lengths,
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _tie(settings: dict[str, Any], where: str) -> Tie:
    shared = settings.get("share_encoder_decoder_embeddings", True)
    tied = settings.get("tie_word_embeddings", True)
    if shared and not tied:
        raise CheckpointError(
            f"{where}: tie_word_embeddings is false, but both sides share their embeddings; here the projection to the "
            "vocabulary is then the same matrix too"
        )
    if shared:
        return "all"
    if tied:
        return "target"
    return "none"


def _same(settings: dict[str, Any], name: str, where: str) -> int:
    encoder: int = settings[f"encoder_{name}"]
    decoder: int = settings[f"decoder_{name}"]
    if encoder != decoder:
        raise CheckpointError(
            f"{where}: encoder_{name} is {encoder}, decoder_{name} {decoder}; here both sides have the same"
        )
    return encoder

"""What other programs' files cannot hold of a model: other architectures, and some of its decoding settings.

For a setting that is lost, it says what comes nearest there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from models import DecoderOnlyConfig, TransformerConfig
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import SavedModel, saved_config
from recipes.translation.run_folder.translator import Translator, model_sizes
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.text.model_text import ModelText


def transformer_sizes(model: Translator | SavedModel) -> TransformerConfig:
    """Return the sizes of a Transformer that other programs support; raise ConfigError for any other model."""
    preset = model.config.model.preset
    sizes = model_sizes(model.config.model)
    if isinstance(sizes, DecoderOnlyConfig):
        raise ConfigError(f"model.preset {preset} has no encoder; only encoder-decoders are exported")
    return sizes


USUAL_LENGTH = 25
"""The translation length, in subwords, at which two length penalties are made to agree."""


def length_penalty_there(decoding: DecodingConfig) -> float:
    """Return the exponent of transformers' and CTranslate2's length^exponent that comes nearest to the length penalty.

    When log n rises by 1, the logarithm of ((5 + n) / 6)^a rises by a n / (5 + n).
    """
    if decoding.length_norm == "length":
        return decoding.length_penalty
    return round(decoding.length_penalty * USUAL_LENGTH / (5 + USUAL_LENGTH), 3)


def lost_settings_in(folder: Path, to: str) -> list[str]:
    """Return the `lost_settings` of the model in a folder."""
    config = saved_config(folder)
    return list(lost_settings(config.decoding, ModelText.of(config), to))


def lost_settings(decoding: DecodingConfig, text: ModelText, to: str) -> Iterator[str]:
    """Yield a line for each setting that a format has no place for, with the nearest alternative."""
    if to == "safetensors":
        return
    penalty = length_penalty_there(decoding)
    if decoding.beam > 1 and decoding.length_penalty and (to != "hf" or decoding.length_norm == "gnmt"):
        nearest = f"the nearest is length_penalty {penalty:g}, at translations of {USUAL_LENGTH} subwords"
        if decoding.length_norm == "length":
            nearest = f"pass length_penalty {penalty:g}"
        where = {
            "hf": f"{nearest}, which is in generation_config.json",
            "ctranslate2": f"`translate --engine ctranslate2` applies it; in your own program {nearest}",
            "onnx": "ONNX Runtime has no search: your own must divide by it",
        }
        yield f"decoding.length_penalty {decoding.length_penalty:g} ({decoding.length_norm}): {where[to]}"
    if to == "ctranslate2":
        yield (
            f"decoding.beam {decoding.beam}, max_length and the like: `translate --engine ctranslate2` applies them; "
            f"your own program must pass beam_size={decoding.beam}, max_decoding_length={decoding.max_length}"
        )
    if to == "hf":
        yield (
            f"decoding.max_ratio {decoding.max_ratio:g}: transformers has no limit by the source's length; only "
            f"max_length {decoding.max_length:,} ends a translation"
        )
    if to == "onnx":
        yield f"decoding.beam {decoding.beam}, max_ratio {decoding.max_ratio:g}: your program does the search"
    if text.lowercase:
        yield "subwords.lowercase true: your program must lower-case each sentence"
    if text.tags:
        yield "tags: your program must put the tag before each sentence, as in training"

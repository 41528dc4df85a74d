"""Which models can be exported to other programs."""

from __future__ import annotations

from models import DecoderOnlyConfig, TransformerConfig
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import SavedModel
from recipes.translation.run_folder.translator import Translator, model_sizes


def transformer_sizes(model: Translator | SavedModel) -> TransformerConfig:
    """Return the sizes of a Transformer that other programs support; raise ConfigError for any other model."""
    preset = model.config.model.preset
    sizes = model_sizes(model.config.model)
    if isinstance(sizes, DecoderOnlyConfig):
        raise ConfigError(f"model.preset {preset} has no encoder; only encoder-decoders are exported")
    return sizes

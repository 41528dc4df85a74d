"""Which models other programs can be given."""

from __future__ import annotations

from models import DecoderOnlyConfig, TransformerConfig
from recipes.translation.run_folder.checkpoint import Translator, model_sizes
from recipes.translation.settings.config import ConfigError


def transformer_sizes(translator: Translator) -> TransformerConfig:
    """Return the sizes of a Transformer; raise ConfigError for a model of another architecture."""
    sizes = model_sizes(translator.config.model)
    if isinstance(sizes, DecoderOnlyConfig):
        raise ConfigError(
            f"model.preset {translator.config.model.preset} has no encoder; only encoder-decoder Transformers are "
            "exported"
        )
    if not isinstance(sizes, TransformerConfig):
        raise ConfigError(
            f"model.preset {translator.config.model.preset} is not a Transformer; only these are exported"
        )
    return sizes

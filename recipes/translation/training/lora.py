"""LoRA: `training.lora_rank` trains a change of low rank beside the weights, which stay as they are."""

from __future__ import annotations

from dataclasses import replace

from models import EncoderDecoder
from models.lora import add_lora, without_lora
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import Translator, model_sizes
from recipes.translation.settings.config import RunConfig


def adapt(model: EncoderDecoder, config: RunConfig) -> None:
    """Add LoRA to a model by the settings, in place; without `training.lora_rank` it stays as it is.

    Raises ConfigError for an LSTM, and for a rank above the model's width.
    """
    rank = config.training.lora_rank
    if not rank:
        return
    width = model_sizes(config.model).d_model
    if rank > width:
        raise ConfigError(
            f"training.lora_rank is {rank}, above model.d_model, which is {width}: choose a lower rank, or train the "
            "weights themselves by training.lora_rank 0"
        )
    try:
        add_lora(model, rank, config.training.lora_alpha)
    except ValueError as error:
        raise ConfigError(
            f"training.lora_rank is {rank}, but model.preset {config.model.preset} is no Transformer: set it to 0; "
            "training.freeze can keep parts as they are"
        ) from error


def merged(translator: Translator) -> Translator:
    """Return the translator with an ordinary model in place of one with LoRA, of the same outputs up to rounding."""
    if not translator.config.training.lora_rank:
        return translator
    return replace(translator, model=without_lora(translator.model))

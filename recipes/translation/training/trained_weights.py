"""Which weights are trained: all of them, those of parts that are not frozen, or a low-rank change to them (LoRA)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from models import EncoderDecoder
from models.lora import add_lora, without_lora
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.settings.training import PARTS


def freeze(model: EncoderDecoder, names: Collection[str], bias: bool = False) -> None:
    """Freeze the named parts, keys of PARTS, so that they have no gradient and never change.

    With `bias`, the output projection's bias is frozen too, for published models that have no such weight.

    Raises ConfigError if a weight of a named part is tied to a part that is not named, or if nothing is left to train.
    """
    parts = {name: getattr(model, part) for name, part in PARTS.items() if hasattr(model, part)}
    weights = {name: {id(each) for each in part.parameters()} for name, part in parts.items()}
    for name in names:
        tied = [other for other in weights if weights[other] & weights[name]]
        if missing := [other for other in tied if other not in names]:
            raise ConfigError(
                f"training.freeze names {name} but not {' and '.join(missing)}; {', '.join(tied)} share a weight, so "
                "they can only be frozen together: name all of them, or none"
            )
    if set(names) >= weights.keys():
        raise ConfigError("training.freeze names every part of the model, and leaves nothing to train: name fewer")
    for name in names:
        parts[name].requires_grad_(False)
    if bias:
        model.generator.bias.requires_grad_(False)


def adapt(model: EncoderDecoder, settings: TrainingConfig, width: int) -> None:
    """Add LoRA to a model of this width as the settings say, in place; without `training.lora_rank` do nothing.

    Raises ConfigError for a rank above the model's width.
    """
    rank = settings.lora_rank
    if not rank:
        return
    if rank > width:
        raise ConfigError(
            f"training.lora_rank is {rank}, above model.d_model {width}: choose a lower rank, or train the weights "
            "themselves with training.lora_rank 0"
        )
    add_lora(model, rank, settings.lora_alpha)


def merge_lora(translator: Translator) -> Translator:
    """Return the translator with LoRA merged into an ordinary model, whose outputs are the same up to rounding."""
    if not translator.config.training.lora_rank:
        return translator
    return replace(translator, model=without_lora(translator.model))

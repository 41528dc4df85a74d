"""A model with its subwords and settings: its sizes, how it is built, and how saved tensors are loaded into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from models import (
    PRESETS,
    DecoderOnlyConfig,
    EncoderDecoder,
    make_decoder_only,
    make_transformer,
)
from models.presets import Sizes
from models.transformer import allocate
from recipes.translation.data.corpus import check_length, most_subwords
from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.files.tensors import describe_tensors
from recipes.translation.settings.config import DecodingConfig, ModelConfig, RunConfig
from recipes.translation.text.model_text import ModelText
from recipes.translation.text.subwords import PAD, Subwords

WEIGHTS = {"float64": torch.float64} | dict.fromkeys(("float32", "bf16", "fp16"), torch.float32)
"""The dtype of weights and moments for each `training.precision`."""


@dataclass(frozen=True)
class Translator:
    """A model with the subwords and settings that belong to it."""

    config: RunConfig
    model: EncoderDecoder
    source: Subwords
    target: Subwords
    others: tuple[EncoderDecoder, ...] = ()
    """Models that translate together with `model`; they are not saved."""
    digests: tuple[str, ...] = ()
    """The SHA-256 of each model's weights, as they were saved, if they were read from a folder."""

    @property
    def models(self) -> list[EncoderDecoder]:
        """Return the models whose probabilities are averaged in translation: usually one."""
        return [self.model, *self.others]

    @property
    def text(self) -> ModelText:
        """Return how the model reads and writes text."""
        return ModelText.of(self.config)

    @property
    def positions(self) -> int | None:
        """Return the most subwords of a sentence that the model has learned positions for; None if any number does."""
        return most_subwords(model_sizes(self.config.model), self.source.symbols)

    def with_decoding(self, decoding: DecodingConfig) -> Translator:
        """Return the same models with these decoding settings; ConfigError if they allow more than the positions."""
        check_length("decoding.max_length", decoding.max_length, self.positions)
        return replace(self, config=replace(self.config, decoding=decoding))


def model_sizes(config: ModelConfig) -> Sizes:
    """Return the sizes of the preset, which determines the architecture, overridden by settings that are not None."""
    if config.preset not in PRESETS:
        raise ConfigError(f"model.preset is {config.preset!r}; it must be one of {', '.join(PRESETS)}")
    changed = {name: value for name, value in asdict(config).items() if name != "preset" and value is not None}
    preset = PRESETS[config.preset]
    known = {field.name for field in fields(preset)}
    for name in changed.keys() - known:
        raise ConfigError(f"model.{name} is not a setting of {config.preset}, which has {', '.join(sorted(known))}")
    try:
        return replace(preset, **changed)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


def build_model(sizes: Sizes, source: Subwords, target: Subwords) -> EncoderDecoder:
    """Build a model with random weights for these subwords."""
    try:
        if isinstance(sizes, DecoderOnlyConfig):
            return make_decoder_only(sizes, len(target), pad=PAD)
        return make_transformer(sizes, len(source), len(target), pad=PAD)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


def model_on_meta(sizes: Sizes, source: Subwords, target: Subwords) -> EncoderDecoder:
    """Build a model on the device "meta": no weights are drawn, and the run's random state does not change."""
    with torch.device("meta"):
        return build_model(sizes, source, target)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's weights, tied ones only under their first name; the models here have no buffers."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def fill_model(model: nn.Module, saved: Mapping[str, Tensor], folder: Path | str) -> None:
    """Copy saved tensors into a model of the same shape, which gets memory on the CPU if it is on "meta"."""
    check_fits(tensors_of(model), saved, folder)
    # Only once everything is known to fit, so that an error leaves the model as it was
    allocate(model, torch.device("cpu"))
    for name, tensor in tensors_of(model).items():
        tensor.copy_(saved[name])


def check_layers(sizes: Sizes, saved: Mapping[str, Tensor], folder: Path | str) -> None:
    """Raise CheckpointError for more layers than there are saved tensors, before the layers are built."""
    layers = sum(getattr(sizes, name, 0) for name in ("encoder_layers", "decoder_layers"))
    if layers > len(saved):
        raise CheckpointError(
            f"{folder} does not fit the model its config.yaml describes: {layers:,} layers, but only {len(saved):,} "
            "tensors"
        )


def check_fits(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], folder: Path | str) -> None:
    """Raise CheckpointError unless saved tensors have the names and shapes of a model's own, and a dtype of weights."""
    saved = describe_tensors(saved)
    for name in sorted(own.keys() ^ saved.keys()):
        what = f"{name} is missing"
        if name in saved:
            what = f"the model has no {name}"
        raise CheckpointError(f"{folder} does not fit the model its config.yaml describes: {what}")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            raise CheckpointError(
                f"{folder} does not fit the model its config.yaml describes: {name} is {tuple(saved[name].shape)} "
                f"in the file and {tuple(tensor.shape)} in the model"
            )
        if saved[name].dtype not in WEIGHTS.values():
            raise CheckpointError(f"{folder}: {name} is {saved[name].dtype}, but weights must be float32 or float64")

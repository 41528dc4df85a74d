"""Translators with random weights, and sentences of which they make different translations."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.run_folder.checkpoint import SavedModel
from recipes.translation.run_folder.translator import Translator, build_model, model_sizes, tensors_of
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.text.subwords import EOS, Subwords
from recipes.translation.translating.ctranslate2_engine import ExportedTranslator
from tests.recipes.tiny import tiny

SENTENCES = [pair.source for pair in pairs(64, 3)]


def random_translator(
    subwords: Subwords, run: Path, changes: dict[str, Any], end: float = 2.0, seed: int = 7
) -> Translator:
    """Random weights large enough that translations differ; `end` is added to the end symbol's logit."""
    settings = {"model.encoder_layers": 2, "model.decoder_layers": 3, "decoding.max_length": 12, **changes}
    config = tiny(run, settings)
    torch.manual_seed(seed)
    model = build_model(model_sizes(config.model), subwords, subwords)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        for layer in model.decoder.layers:
            layer.memory_attention.output.weight.mul_(4)  # the source has a say
        model.generator.bias[EOS] += end
        bytes_ = [number for number, piece in enumerate(subwords.pieces()) if piece.startswith("<0x")]
        model.generator.bias[bytes_] = -1e4  # text that differs is then seen to differ
    return Translator(config, model.eval(), subwords, subwords)


def as_saved(translator: Translator) -> SavedModel:
    """The same model, as it would be read from a folder."""
    return SavedModel(
        Path("made"), translator.config, translator.source, translator.target, tensors_of(translator.model), ""
    )


def under(found: ExportedTranslator, decoding: DecodingConfig) -> ExportedTranslator:
    """The same export, which translates by these settings."""
    return replace(found, config=replace(found.config, decoding=decoding))


def recorded(decoding: DecodingConfig) -> tuple[DecodingConfig, set[str]]:
    """The same settings, and a set that is given the name of each one that is read."""
    names = {each.name for each in fields(DecodingConfig)}
    read: set[str] = set()

    class Recorded(DecodingConfig):
        def __getattribute__(self, name: str) -> Any:
            if name in names:
                read.add(name)
            return super().__getattribute__(name)

    return Recorded(**asdict(decoding)), read

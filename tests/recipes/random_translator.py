"""A translator with random weights: what it says depends on the whole sentence, and is nonsense."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.run_folder.translator import Translator, build_model, model_sizes, tensors_of
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.subwords import EOS, Subwords, train_subwords
from tests.recipes.tiny import tiny


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of names, dtypes, shapes and every bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def subwords_in(folder: Path, config: RunConfig, corpus: int = 1) -> Subwords:
    """Both languages' subwords, by the settings of a run."""
    train_subwords([side for pair in pairs(200, corpus) for side in pair], folder / "joint", config.subwords)
    return Subwords.load(folder / "joint.model")


def translator_of(
    config: RunConfig, source: Subwords, target: Subwords, scale: float = 1.0, end: float | None = None, seed: int = 1
) -> Translator:
    """One with weights so many times those that a training begins with, and a bias of the end of a translation."""
    torch.manual_seed(seed)
    model = build_model(model_sizes(config.model), source, target)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
        if end is not None:
            model.generator.bias[EOS] = end
    return Translator(config, model.eval(), source, target)


def random_translator(folder: Path, seed: int = 1, corpus: int = 1) -> Translator:
    """One whose translations have different lengths, which a length penalty tells apart."""
    config = tiny(folder / "run")
    subwords = subwords_in(folder, config, corpus)
    made = translator_of(config, subwords, subwords, 2.0, 8.0, seed)
    return replace(made, digests=(fingerprint(tensors_of(made.model)),))

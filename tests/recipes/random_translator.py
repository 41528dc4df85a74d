"""A translator with random weights: what it says depends on the whole sentence, and is nonsense."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.run_folder.translator import Translator, build_model, model_sizes, tensors_of
from recipes.translation.text.subwords import EOS, Subwords, train_subwords
from tests.recipes.tiny import tiny


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of names, dtypes, shapes and every bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def random_translator(folder: Path, seed: int = 1, corpus: int = 1) -> Translator:
    """One whose translations have different lengths, which a length penalty tells apart."""
    config = tiny(folder / "run")
    train_subwords([side for pair in pairs(200, corpus) for side in pair], folder / "joint", config.subwords)
    subwords = Subwords.load(folder / "joint.model")
    torch.manual_seed(seed)
    model = build_model(model_sizes(config.model), subwords, subwords)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        model.generator.bias[EOS] = 8
    return Translator(config, model.eval(), subwords, subwords, digests=(fingerprint(tensors_of(model)),))

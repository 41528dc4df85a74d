"""A translator with random weights: what it says depends on the whole sentence, and is nonsense."""

from __future__ import annotations

from pathlib import Path

import torch

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.run_folder.translator import Translator, build_model, fingerprint, model_sizes, tensors_of
from recipes.translation.text.subwords import EOS, Subwords, train_subwords
from tests.recipes.tiny import tiny


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

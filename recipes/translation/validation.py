"""How well a model does on the validation data, in the middle of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

import seqpar
from recipes.translation.checkpoint import Translator
from recipes.translation.corpus import Corpus
from recipes.translation.evaluate import score
from recipes.translation.translate import translate

NAMES = ("loss", "perplexity", "accuracy", "bleu")


@dataclass(frozen=True)
class Validation:
    """What a validation found."""

    step: int
    loss: float
    """Per target token, smoothed as in training."""
    perplexity: float
    """exp of the unsmoothed negative log-likelihood per target token (a subword, the end symbol included)."""
    accuracy: float
    """Percentage of target tokens that are the most likely one, given the right ones before."""
    bleu: float | None
    """Of greedy translations of the first `validate_bleu` sentences; None where that is 0."""

    def as_dict(self) -> dict[str, object]:
        """One record of `metrics.jsonl`."""
        return {"step": self.step, **{f"valid_{name}": getattr(self, name) for name in NAMES}}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        return cls(record["step"], *(record[f"valid_{name}"] for name in NAMES))

    def __str__(self) -> str:
        bleu = "" if self.bleu is None else f"   BLEU {self.bleu:.1f}"
        return f"loss {self.loss:.3f}   perplexity {self.perplexity:.2f}   accuracy {self.accuracy:.1f} %{bleu}"


@torch.no_grad()
def validate(
    translator: Translator,
    corpus: Corpus,
    encoder_decoder: seqpar.DataParallel,
    engine: seqpar.LossCompute,
    step: int,
) -> Validation:
    """Loss over all validation pairs, through the same parallel modules as training, and BLEU over the first ones."""
    config, model = translator.config, translator.model
    model.eval()
    batches = (corpus.valid.batch(indices) for indices in corpus.valid.epoch(0))
    loss: seqpar.TokenLoss = sum(engine(encoder_decoder(b.src, b.tgt_in), b.tgt_out) for b in batches)
    tokens = int(loss.tokens)
    assert loss.nll is not None  # LabelSmoothing can tell both
    assert loss.correct is not None
    pairs = corpus.valid_pairs[: config.training.validate_bleu]
    bleu = None
    if pairs:
        greedy = replace(config.decoding, beam=1)
        translations = translate(translator, [pair.source for pair in pairs], greedy)
        bleu = score(translations, [pair.target for pair in pairs], lowercase=config.subwords.lowercase).bleu
    return Validation(
        step=step,
        loss=float(loss.total) / tokens,
        perplexity=math.exp(min(float(loss.nll) / tokens, 700.0)),  # exp(710) overflows
        accuracy=100 * int(loss.correct) / tokens,
        bleu=bleu,
    )

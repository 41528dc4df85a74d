"""How well a model does on the validation data, in the middle of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

import seqpar
from models import EncoderDecoder
from recipes.translation.data.batches import Batch
from recipes.translation.data.corpus import Corpus
from recipes.translation.evaluate import score
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.run_folder.checkpoint import Translator
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
    loss_of: Callable[[Batch], seqpar.TokenLoss],
    step: int,
    ranks: Ranks = ALONE,
) -> Validation:
    """Loss over all validation pairs, and BLEU over the first ones; the ranks share both out.

    `loss_of` is that of the translator's model, which is whole on every rank.
    """
    config, model = translator.config, translator.model
    model.eval()
    mine = corpus.valid.epoch(0)[ranks.rank :: ranks.world]
    loss = seqpar.sum_over_ranks(
        sum((loss_of(corpus.valid.batch(indices)) for indices in mine), start=nothing(model)), ranks.group
    )
    tokens = int(loss.tokens)
    assert loss.nll is not None  # LabelSmoothing can tell both
    assert loss.correct is not None
    pairs = corpus.valid_pairs[: config.training.validate_bleu]
    bleu = None
    if pairs:
        greedy = replace(config.decoding, beam=1)
        translations = translate(translator, [pair.source for pair in pairs], greedy, ranks)
        bleu = score(
            translations,
            [pair.target for pair in pairs],
            lowercase=config.subwords.lowercase,
            tokenize=corpus.tokenize,
        ).bleu
    return Validation(
        step=step,
        loss=float(loss.total) / tokens,
        perplexity=math.exp(min(float(loss.nll) / tokens, 700.0)),  # exp(710) overflows
        accuracy=100 * int(loss.correct) / tokens,
        bleu=bleu,
    )


def nothing(model: EncoderDecoder) -> seqpar.TokenLoss:
    """The loss of no tokens, where the model's losses are."""
    weight = model.generator.weight
    return seqpar.TokenLoss.zero(weight.dtype, weight.device, tells=True)

"""Validation during training: loss, perplexity, accuracy, BLEU and chrF."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

import seqpar
from models import EncoderDecoder
from recipes.translation.data.batches import Batch
from recipes.translation.data.corpus import Corpus
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.run_folder.checkpoint import Translator
from recipes.translation.scores.scores import bleu as bleu_of
from recipes.translation.scores.scores import chrf as chrf_of
from recipes.translation.translate import translate

NAMES = ("loss", "perplexity", "accuracy", "bleu", "chrf")


@dataclass(frozen=True)
class Validation:
    """The result of a validation."""

    step: int
    loss: float
    """Per target token, smoothed as in training."""
    perplexity: float
    """exp of the unsmoothed negative log-likelihood per target token (subwords and the end symbol)."""
    accuracy: float
    """Percentage of target tokens that are the most likely ones, given the reference's tokens before them."""
    bleu: float | None
    """BLEU of greedy translations of the first `validate_bleu` sentences; None if that is 0."""
    chrf: float | None = None
    """chrF of the same translations."""
    translations: Sequence[str] = field(default=(), compare=False, repr=False)
    """The translations themselves; empty where the validation was read from a record."""

    def as_dict(self) -> dict[str, object]:
        """Return a record of `metrics.jsonl`."""
        return {"step": self.step, **{f"valid_{name}": getattr(self, name) for name in NAMES}}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Read a record that `as_dict` returned."""
        record = {"valid_chrf": None, **record}  # earlier versions did not have it
        return cls(record["step"], *(record[f"valid_{name}"] for name in NAMES))

    def __str__(self) -> str:
        line = f"loss {self.loss:.3f}   perplexity {self.perplexity:.2f}   accuracy {self.accuracy:.1f} %"
        if self.bleu is None:
            return line
        line += f"   BLEU {self.bleu:.1f}"
        if self.chrf is None:  # of a version that did not compute it
            return line
        return f"{line}   chrF {self.chrf:.1f}"


@torch.no_grad()
def validate(
    translator: Translator,
    corpus: Corpus,
    loss_of: Callable[[Batch], seqpar.TokenLoss],
    step: int,
    ranks: Ranks = ALONE,
) -> Validation:
    """Compute the loss of all validation pairs, BLEU and chrF of the first ones, each rank a subset of them.

    `loss_of` computes the loss of a batch by the translator's model, which is whole on every rank.
    """
    config = translator.config
    model = translator.model
    model.eval()
    # Sums of losses and tokens, divided once: a mean over the ranks' means would weigh their tokens differently
    mine = corpus.valid.epoch(0)[ranks.rank :: ranks.world]
    loss = seqpar.sum_over_ranks(
        sum((loss_of(corpus.valid.batch(indices)) for indices in mine), start=nothing(model)), ranks.group
    )
    tokens = int(loss.tokens)
    assert loss.nll is not None  # LabelSmoothing computes both
    assert loss.correct is not None
    pairs = corpus.valid_pairs[: config.training.validate_bleu]
    bleu = None
    chrf = None
    translations: Sequence[str] = ()
    if pairs:
        # A beam would take several times as long, and the score only compares validations with each other
        greedy = replace(config.decoding, beam=1)
        translations = translate(translator, [pair.source for pair in pairs], greedy, ranks)
        references = [pair.target for pair in pairs]
        lowercase = config.subwords.lowercase
        bleu = bleu_of(translations, references, lowercase=lowercase, tokenize=corpus.tokenize)
        chrf = chrf_of(translations, references, lowercase=lowercase)
    return Validation(
        step=step,
        loss=float(loss.total) / tokens,
        perplexity=math.exp(min(float(loss.nll) / tokens, 700.0)),  # exp(710) overflows
        accuracy=100 * int(loss.correct) / tokens,
        bleu=bleu,
        chrf=chrf,
        translations=translations,
    )


def nothing(model: EncoderDecoder) -> seqpar.TokenLoss:
    """Return the loss of no tokens, on the model's device and in its dtype."""
    weight = model.generator.weight
    return seqpar.TokenLoss.zero(weight.dtype, weight.device, tells=True)

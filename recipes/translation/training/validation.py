"""Validation during training: loss, perplexity, accuracy, BLEU and chrF, of the whole and of each pair of languages.

The loss of several pairs of languages is that of all their tokens, as in fairseq's multilingual tasks; BLEU and chrF
are means over the pairs, since a score of sentences in several languages would depend on the size of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

import seqpar
from models import EncoderDecoder
from recipes.translation.data.batches import Batch, TokenBatches
from recipes.translation.data.corpus import Corpus, ValidationSet
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.run_folder.checkpoint import Translator
from recipes.translation.scores.scores import bleu as bleu_of
from recipes.translation.scores.scores import chrf as chrf_of
from recipes.translation.text.pair import Pair
from recipes.translation.translating.translate import translate

NAMES = ("loss", "perplexity", "accuracy", "bleu", "chrf")


@dataclass(frozen=True)
class Validation:
    """The result of a validation, of one pair of languages or of several together."""

    step: int
    loss: float
    """Per target token, smoothed as in training."""
    perplexity: float
    """exp of the unsmoothed negative log-likelihood per target token (subwords and the end symbol)."""
    accuracy: float
    """Percentage of target tokens that are the most likely ones, given the reference's tokens before them."""
    bleu: float | None
    """BLEU of greedy translations of the first `validate_bleu` sentences; None if that is 0. Of several pairs of
    languages the mean."""
    chrf: float | None = None
    """chrF of the same translations."""
    translations: Sequence[str] = field(default=(), compare=False, repr=False)
    """The translations themselves; empty where the validation was read from a record."""
    sentences: Sequence[Pair] = field(default=(), compare=False, repr=False)
    """The sentences that were translated, with their references."""
    parts: Mapping[str, Validation] = field(default_factory=dict)
    """The result of each corpus by its name, where several have validation data."""

    def as_dict(self) -> dict[str, object]:
        """Return a record of `metrics.jsonl`."""
        record: dict[str, object] = {"step": self.step}
        for suffix, found in {"": self, **{f".{part}": found for part, found in self.parts.items()}}.items():
            record |= {f"valid_{name}{suffix}": getattr(found, name) for name in NAMES}
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Read a record that `as_dict` returned."""
        record = {"valid_chrf": None, **record}  # earlier versions did not have it
        parts = {part: cls._read(record, f".{part}") for part in parts_of(record)}
        return replace(cls._read(record), parts=parts)

    @classmethod
    def _read(cls, record: Mapping[str, Any], suffix: str = "") -> Self:
        return cls(record["step"], *(record[f"valid_{name}{suffix}"] for name in NAMES))

    def __str__(self) -> str:
        line = f"loss {self.loss:.3f}   perplexity {self.perplexity:.2f}   accuracy {self.accuracy:.1f} %"
        if self.bleu is None:
            return line
        line += f"   BLEU {self.bleu:.1f}"
        if self.chrf is None:  # of a version that did not compute it
            return line
        return f"{line}   chrF {self.chrf:.1f}"


def parts_of(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the corpora of which a record of `metrics.jsonl` has a validation of their own."""
    return [name.removeprefix("valid_loss.") for name in record if name.startswith("valid_loss.")]


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
    translator.model.eval()
    losses = [_loss(translator, valid.batches, loss_of, ranks) for valid in corpus.valid]
    parts = [_of_set(translator, valid, loss, step, ranks) for valid, loss in zip(corpus.valid, losses, strict=True)]
    if len(parts) == 1:
        return parts[0]
    return Validation(
        step=step,
        **figures(sum(losses, start=nothing(translator.model))),
        bleu=_mean([part.bleu for part in parts]),
        chrf=_mean([part.chrf for part in parts]),
        translations=[text for part in parts for text in part.translations],
        sentences=[pair for part in parts for pair in part.sentences],
        parts={valid.held_out.name: part for valid, part in zip(corpus.valid, parts, strict=True)},
    )


def figures(loss: seqpar.TokenLoss) -> dict[str, Any]:
    """Return loss, perplexity and accuracy per token."""
    tokens = int(loss.tokens)
    assert loss.nll is not None  # LabelSmoothing computes both
    assert loss.correct is not None
    return {
        "loss": float(loss.total) / tokens,
        "perplexity": math.exp(min(float(loss.nll) / tokens, 700.0)),  # exp(710) overflows
        "accuracy": 100 * int(loss.correct) / tokens,
    }


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    if not known:
        return None
    return sum(known) / len(known)


def _loss(
    translator: Translator, batches: TokenBatches, loss_of: Callable[[Batch], seqpar.TokenLoss], ranks: Ranks
) -> seqpar.TokenLoss:
    # Sums of losses and tokens, divided once: a mean over the ranks' means would weigh their tokens differently
    mine = batches.epoch(0)[ranks.rank :: ranks.world]
    losses = (loss_of(batches.batch(indices)) for indices in mine)
    return seqpar.sum_over_ranks(sum(losses, start=nothing(translator.model)), ranks.group)


def _of_set(
    translator: Translator, valid: ValidationSet, loss: seqpar.TokenLoss, step: int, ranks: Ranks
) -> Validation:
    """Translate the first sentences of a set, whose loss is given, and return the result of its validation."""
    config = translator.config
    pairs = valid.pairs[: config.training.validate_bleu]
    bleu = None
    chrf = None
    translations: Sequence[str] = ()
    if pairs:
        # A beam would take several times as long, and the score only compares validations with each other
        greedy = replace(config.decoding, beam=1)
        translations = translate(translator, [pair.source for pair in pairs], greedy, ranks)
        references = [pair.target for pair in pairs]
        lowercase = config.subwords.lowercase
        bleu = bleu_of(translations, references, lowercase=lowercase, tokenize=valid.tokenize)
        chrf = chrf_of(translations, references, lowercase=lowercase)
    return Validation(
        step=step,
        **figures(loss),
        bleu=bleu,
        chrf=chrf,
        translations=translations,
        sentences=pairs,
    )


def nothing(model: EncoderDecoder) -> seqpar.TokenLoss:
    """Return the loss of no tokens, on the model's device and in its dtype."""
    weight = model.generator.weight
    return seqpar.TokenLoss.zero(weight.dtype, weight.device, tells=True)

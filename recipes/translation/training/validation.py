"""Validation during training: METRICS of the whole and of each language pair, and the best validation so far.

The loss over several language pairs is that of all their tokens, as in fairseq's multilingual tasks. Scores of
translations are means over the pairs, since a score over sentences in several languages would depend on each one's
share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

import seqpar
from models import EncoderDecoder
from recipes.translation.data.batches import Batch, TokenBatches
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import Corpus, ValidationSet, validation_set
from recipes.translation.errors import DataError
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.run_folder.checkpoint import TrainingState, load_facts, load_translator
from recipes.translation.run_folder.translator import Translator
from recipes.translation.scores.scores import score_of
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.settings.metrics import METRICS, Translated
from recipes.translation.settings.schedules import SCHEDULES
from recipes.translation.text.model_text import ModelText
from recipes.translation.text.pair import Pair
from recipes.translation.training.objective import Objective
from recipes.translation.translating.sentences import unknown_tag
from recipes.translation.translating.translate import translate


@dataclass(frozen=True)
class Validation:
    """The result of a validation, for one language pair or for several together."""

    step: int
    values: Mapping[str, float | None]
    """By the names in METRICS; None for what is missing, such as BLEU if nothing was translated."""
    translations: Sequence[str] = field(default=(), compare=False, repr=False)
    """Greedy translations of the first `validate_bleu` sentences; empty if the validation was read from a record."""
    sentences: Sequence[Pair] = field(default=(), compare=False, repr=False)
    """The sentences that were translated, with their references."""
    parts: Mapping[str, Validation] = field(default_factory=dict)
    """The result of each corpus by its name, if several have validation data."""

    def __getitem__(self, name: str) -> float | None:
        return self.values[name]

    def as_dict(self) -> dict[str, object]:
        """Return a record of `metrics.jsonl`."""
        record: dict[str, object] = {"step": self.step}
        for suffix, found in {"": self, **{f".{part}": found for part, found in self.parts.items()}}.items():
            record |= {f"valid_{name}{suffix}": value for name, value in found.values.items()}
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Read a record that `as_dict` returned."""
        names = [name.removeprefix("valid_loss.") for name in record if name.startswith("valid_loss.")]
        parts = {part: cls._read_part(record, f".{part}") for part in names}
        return replace(cls._read_part(record), parts=parts)

    @classmethod
    def _read_part(cls, record: Mapping[str, Any], suffix: str = "") -> Self:
        return cls(record["step"], {name: record.get(f"valid_{name}{suffix}") for name in METRICS})

    def __str__(self) -> str:
        known = ((METRICS[name], value) for name, value in self.values.items() if value is not None)
        return "   ".join(metric.format_value(value) for metric, value in known)


@torch.no_grad()
def validate(
    translator: Translator,
    sets: Sequence[ValidationSet],
    loss_of: Callable[[Batch], seqpar.TokenLoss],
    step: int,
    ranks: Ranks = ALONE,
) -> Validation:
    """Compute the loss of all validation pairs, and BLEU and chrF of the first ones; each rank takes a subset.

    `loss_of` computes the loss of a batch with the translator's model; the `ranks` must be able to call it
    independently.
    """
    translator.model.eval()
    losses = [_loss(translator, valid.batches, loss_of, ranks) for valid in sets]
    parts = [_of_set(translator, valid, loss, step, ranks) for valid, loss in zip(sets, losses, strict=True)]
    if len(parts) == 1:
        return parts[0]
    together = sum(losses, start=nothing(translator.model))
    means = {name: _mean([part[name] for part in parts]) for name in METRICS}
    return Validation(
        step,
        {name: metric.of_loss(together) if metric.of_loss else means[name] for name, metric in METRICS.items()},
        translations=[text for part in parts for text in part.translations],
        sentences=[pair for part in parts for pair in part.sentences],
        parts={valid.held_out.name: part for valid, part in zip(sets, parts, strict=True)},
    )


def validate_folder(folder: Path) -> Validation:
    """Validate the model in a folder, in this process only, on the validation data in its settings."""
    translator = load_translator(folder, "cuda" if torch.cuda.is_available() else "cpu")
    valid = [
        validation_set(each, translator.source, translator.target)
        for each in Corpora(translator.config).held_out("valid")
    ]
    model = translator.model
    loss = Objective(translator.config.training).loss(model, None, None)

    def loss_of(batch: Batch) -> seqpar.TokenLoss:
        src, tgt_in, tgt_out = (ids.to(model.generator.weight.device) for ids in batch)
        found: seqpar.TokenLoss = loss(model(src, tgt_in), tgt_out)
        return found

    return validate(translator, valid, loss_of, load_facts(folder)["step"])


def values_of(loss: seqpar.TokenLoss, translated: Translated | None) -> dict[str, float | None]:
    """Return every metric of a loss and, if there are any, of translations."""
    found: dict[str, float | None] = dict.fromkeys(METRICS)
    for name, metric in METRICS.items():
        if metric.of_loss:
            found[name] = metric.of_loss(loss)
        elif metric.of_translations and translated:
            found[name] = metric.of_translations(translated)
    return found


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    if not known:
        return None
    return sum(known) / len(known)


def _loss(
    translator: Translator, batches: TokenBatches, loss_of: Callable[[Batch], seqpar.TokenLoss], ranks: Ranks
) -> seqpar.TokenLoss:
    # Sums of losses and tokens, divided once: a mean over the ranks' means would weight their tokens differently
    mine = batches.epoch(0)[ranks.rank :: ranks.world]
    loss = sum((loss_of(batches.batch(indices)) for indices in mine), start=nothing(translator.model))
    ranks.meet()
    return seqpar.sum_over_ranks(loss, ranks.group)


def check_tags(corpus: Corpus, text: ModelText, translated: int) -> None:
    """Raise DataError for a validation sentence to be translated that begins with the tag of an unknown language."""
    for valid in corpus.valid:
        for number, pair in enumerate(valid.pairs[:translated], start=1):
            if reason := unknown_tag(corpus.source, text, pair.source):
                raise DataError(f"{valid.held_out.setting}: the source of pair {number:,} {reason}: leave it out")


def _of_set(
    translator: Translator, valid: ValidationSet, loss: seqpar.TokenLoss, step: int, ranks: Ranks
) -> Validation:
    """Translate the first sentences of a set with the given loss, and return the result of its validation."""
    config = translator.config
    pairs = valid.pairs[: config.training.validate_bleu]
    if not pairs:
        return Validation(step, values_of(loss, None))
    # A beam would take several times as long, and the score only compares validations with each other
    greedy = translator.with_decoding(replace(config.decoding, beam=1))
    translations = translate(greedy, [pair.source for pair in pairs], ranks)
    references = [pair.target for pair in pairs]
    lowercase = config.subwords.lowercase
    translated = Translated(
        translations,
        references,
        bleu=partial(score_of, "bleu", translations, references, lowercase, valid.held_out.tokenizer),
        chrf=partial(score_of, "chrf", translations, references, lowercase),
    )
    return Validation(step, values_of(loss, translated), translations, pairs)


def nothing(model: EncoderDecoder) -> seqpar.TokenLoss:
    """Return the loss of no tokens, on the model's device and in its dtype."""
    weight = model.generator.weight
    return seqpar.TokenLoss.zero(weight.dtype, weight.device, tells=True)


def note_validation(state: TrainingState, found: Validation, best_by: str = "loss") -> bool:
    """Record a validation in the state; return whether it is the best by `best_by`. In a tie the earlier one stays."""
    before = state.best_loss if best_by == "loss" else state.best_score
    now = found[best_by]
    assert now is not None  # the settings are refused where validations translate nothing
    smaller = METRICS[best_by].smaller_is_better
    better = before is None or math.isnan(before) or (now < before if smaller else now > before)
    if better:
        state.stale = 0
        state.best_loss = found["loss"]
        if best_by != "loss":
            state.best_score = now
        state.best_step = found.step
    else:
        state.stale += 1
    return better


def reduce_rate(state: TrainingState, settings: TrainingConfig) -> bool:
    """Note in the state that the validations so far reduce the learning rate; return whether they do."""
    patience = settings.plateau_patience
    due = SCHEDULES[settings.schedule].by_validations and state.stale > 0 and state.stale % patience == 0
    state.reductions += due
    return due


def out_of_patience(state: TrainingState, settings: TrainingConfig) -> bool:
    """Return whether the last `patience` validations brought no improvement; never with patience 0."""
    return 0 < settings.patience <= state.stale

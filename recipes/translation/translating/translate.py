"""Translate sentences with a trained model: one translation of each, the n best with their scores, or samples.

Every command that translates, validation, distillation and the service come through `alternatives`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from models import Hypothesis, Phrase
from recipes.translation.data.model_text import finished
from recipes.translation.errors import DataError
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.run_folder.checkpoint import Translator
from recipes.translation.settings.config import DecodingConfig, RunConfig
from recipes.translation.text.subwords import Subwords
from recipes.translation.translating.demands import phrases_of, prefix_ids
from recipes.translation.translating.in_batches import in_batches
from recipes.translation.translating.search import Task, search_rows
from recipes.translation.translating.search_options import SearchOptions
from recipes.translation.translating.sentences import source_ids


class Translation(NamedTuple):
    """One translation of a sentence."""

    text: str
    score: float
    """The log-probability over the length normaliser of the settings; of a sample, the log-probability."""
    log_probability: float


def translate(
    translator: Translator,
    sentences: Sequence[str],
    decoding: DecodingConfig,
    ranks: Ranks = ALONE,
    label: str = "",
) -> list[str]:
    """Translate each sentence into one line, in the same order; an empty sentence stays empty.

    A sentence of more subwords than both `training.max_length` and `decoding.max_length` is cut to the larger of them,
    with a note on stderr. Each rank translates some sentences of every length, and returns the translations of all.
    With a `label`, a line on stderr that begins with it says how far the work is.

    Raises DataError for text that is not Unicode, which is what Python makes of an argument in another encoding.
    """
    found = alternatives(translator, sentences, decoding, SearchOptions(scores=False), ranks, label)
    return [row[0].text for row in found]


def alternatives(
    translator: Translator,
    sentences: Sequence[str],
    decoding: DecodingConfig,
    options: SearchOptions,
    ranks: Ranks = ALONE,
    label: str = "",
) -> list[list[Translation]]:
    """Translate each sentence under `options`, best first; an empty sentence has one translation, which is empty.

    Sentences are cut as in `translate`. A translation that lacks a phrase, because the search did not find one that
    contains it within `decoding.max_length`, is returned with a note on stderr. `label` is as in `translate`.

    Raises ConfigError or DataError for options and sentences that do not fit together, and where the rules leave a
    sentence no translation.
    """
    options.check(sentences, decoding)
    tasks = tasks_of(translator, sentences, decoding, options)
    search = partial(search_rows, translator, tasks, decoding, options)
    sources = [task.source for task in tasks]
    found = in_batches(translator, sources, decoding.batch_sentences, search, ranks, label)
    note_unmet(found, options.constraints or [])
    empty = [Hypothesis([], 0.0, 0.0)]
    rows = [found.get(row, empty) for row in range(len(sentences))]
    return in_words(rows, sentences, translator.target, translator.config)


def in_words(
    rows: Sequence[Sequence[Hypothesis]],
    sentences: Sequence[str],
    subwords: Subwords,
    config: RunConfig,
) -> list[list[Translation]]:
    """Return the translations of each sentence as text."""
    said = [sentence for sentence, row in zip(sentences, rows, strict=True) for _ in row]
    texts = subwords.decode([one.tokens for row in rows for one in row])
    each = iter(finished(texts, said, config))
    return [[Translation(next(each), one.score, one.log_probability) for one in row] for row in rows]


def tasks_of(
    translator: Translator, sentences: Sequence[str], decoding: DecodingConfig, options: SearchOptions
) -> list[Task]:
    """Return sentences and demands in subwords; raise DataError for a beginning that leaves no step to go on."""
    sources = source_ids(translator.source, translator.config, sentences, decoding)
    prefixes: list[list[int]] = [[] for _ in sources]
    phrases: list[list[Phrase]] = [[] for _ in sources]
    if options.prefixes is not None:
        prefixes = prefix_ids(translator, options.prefixes, sentences)
    if options.constraints is not None:
        phrases = phrases_of(translator, options.constraints, sentences)
    for number, (source, prefix, demanded) in enumerate(zip(sources, prefixes, phrases, strict=True), start=1):
        if not source and (prefix or demanded):
            option = "--prefixes" if prefix else "--constraints"
            raise DataError(
                f"{option}: line {number:,} is not empty, but sentence {number:,} has no subwords: remove one of them"
            )
    for number, prefix in enumerate(prefixes, start=1):
        if len(prefix) >= decoding.max_length:
            raise DataError(
                f"--prefixes: line {number:,} has {len(prefix):,} subwords, and a translation at most "
                f"{decoding.max_length:,} steps, the run's decoding.max_length, with one for the end: shorten it"
            )
    return [Task(*each) for each in zip(sources, prefixes, phrases, strict=True)]


def note_unmet(found: Mapping[int, list[Hypothesis]], constraints: Sequence[Sequence[str]]) -> None:
    """Say on stderr which sentences have translations that lack a phrase."""
    for row, hypotheses in sorted(found.items()):
        lacking = [one.unmet for one in hypotheses if one.unmet]
        if lacking:
            names = ", ".join(repr(constraints[row][number]) for number in sorted(set().union(*lacking)))
            print(
                f"[translate] sentence {row + 1:,}: {len(lacking)} of {len(hypotheses)} translations lack {names}, not "
                "found within the steps allowed; try a wider --beam",
                file=sys.stderr,
            )

"""The search for translations in subwords: greedy, beam, constrained and random, under the same rules and limits.

A setting of decoding is followed here, and by `export.ctranslate2_engine`, whose search is its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from models import (
    DeadEndError,
    ForcedPrefixes,
    Hypothesis,
    MinimumLength,
    NoRepeatedNgrams,
    Phrase,
    beam_search,
    constrained_beam_search,
    default_limit,
    greedy,
    sample,
)
from models.decoding_rules import Rule
from recipes.translation.errors import DataError
from recipes.translation.run_folder.checkpoint import Translator
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.text.subwords import EOS
from recipes.translation.translating.demands import word_boundaries
from recipes.translation.translating.in_batches import as_batch
from recipes.translation.translating.search_options import SearchOptions


@dataclass(frozen=True)
class Task:
    """One sentence in subwords, with what is demanded of its translation."""

    source: list[int]
    prefix: Sequence[int] = ()
    phrases: Sequence[Phrase] = ()


def most_steps(task: Task, decoding: DecodingConfig) -> int:
    """Return the most steps of a translation.

    They are twice the sentence's subwords and 12, or what is demanded if that is more, but never above
    `decoding.max_length`; the end symbol takes one.
    """
    # The end symbol is a token of the source too
    usual = default_limit(len(task.source) + 1)
    phrases = sum(len(phrase.tokens) for phrase in task.phrases)
    return min(max(usual, decoding.min_length + 1, len(task.prefix) + 1) + phrases, decoding.max_length)


def search_rows(
    translator: Translator, tasks: Sequence[Task], decoding: DecodingConfig, options: SearchOptions, rows: list[int]
) -> list[list[Hypothesis]]:
    """Translate the sentences of these rows, the longest first; without `options.scores` they may be nan."""
    models = translator.models
    some = [tasks[row] for row in rows]
    src = as_batch(translator, [task.source for task in some])
    shared: dict[str, Any] = {
        "bos": translator.target.symbols.start,
        "eos": EOS,
        "rules": rules_of(some, decoding, options),
        "max_length": [most_steps(task, decoding) for task in some],
    }
    by_beam: dict[str, Any] = {
        "beam": decoding.beam,
        "length_penalty": decoding.length_penalty,
        "length_norm": decoding.length_norm,
        "n_best": options.n_best,
        **shared,
    }
    try:
        if how := options.sampling:
            # Another number for each pair of seed and sentence
            seeds = [how.seed * 2**32 + row for row in rows]
            drawn = {name: value for name, value in asdict(how).items() if name != "seed"}
            return sample(models, src, seeds=seeds, **drawn, **shared)
        if options.constraints is not None:
            phrases = [task.phrases for task in some]
            return constrained_beam_search(models, src, phrases, boundaries=word_boundaries(translator), **by_beam)
        if decoding.beam == 1 and not options.scores:
            # What a beam of width 1 finds, without the scores, which would take a softmax at each step
            return [[Hypothesis(tokens, math.nan, math.nan)] for tokens in greedy(models, src, **shared)]
        return beam_search(models, src, **by_beam)
    except DeadEndError as error:
        raise DataError(
            f"sentence {rows[error.sentence] + 1:,} has no translation under these options: after some subword, "
            "decoding.min_length, decoding.no_repeat_ngram and --prefixes together forbid every next one; loosen one "
            "of them"
        ) from None


def rules_of(tasks: Sequence[Task], decoding: DecodingConfig, options: SearchOptions) -> list[Rule]:
    """Return the rules that every translation must satisfy."""
    rules: list[Rule] = []
    if decoding.min_length:
        rules.append(MinimumLength(decoding.min_length, EOS))
    if decoding.no_repeat_ngram:
        rules.append(NoRepeatedNgrams(decoding.no_repeat_ngram))
    if options.prefixes is not None:
        rules.append(ForcedPrefixes([task.prefix for task in tasks]))
    return rules

"""The search for translations in subwords: greedy, beam, constrained and random, under the same rules and limits.

A setting of decoding is followed here, and by `export.ctranslate2_engine`, whose search is its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from models import (
    ConstrainedHypothesis,
    DeadEndError,
    ForcedPrefixes,
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
from recipes.translation.translating.search_options import Sampling, SearchOptions


@dataclass(frozen=True)
class Task:
    """One sentence in subwords, with what is demanded of its translation."""

    source: list[int]
    prefix: list[int]
    phrases: list[Phrase]


@dataclass(frozen=True)
class Batch:
    """Sentences that are translated together."""

    translator: Translator
    decoding: DecodingConfig
    options: SearchOptions
    rows: list[int]
    """The number of each sentence, from 0."""
    tasks: list[Task]

    def src(self) -> Tensor:
        """Return the sources as a tensor."""
        return as_batch(self.translator, [task.source for task in self.tasks])

    def limits(self) -> list[int]:
        """Return the most steps of each translation."""
        return [
            most_steps(
                len(task.source),
                self.decoding,
                len(task.prefix),
                sum(len(phrase.tokens) for phrase in task.phrases),
            )
            for task in self.tasks
        ]

    def rules(self) -> list[Rule]:
        """Return the rules that every translation must satisfy."""
        rules: list[Rule] = []
        if self.decoding.min_length:
            rules.append(MinimumLength(self.decoding.min_length, EOS))
        if self.decoding.no_repeat_ngram:
            rules.append(NoRepeatedNgrams(self.decoding.no_repeat_ngram))
        if self.options.prefixes is not None:
            rules.append(ForcedPrefixes([task.prefix for task in self.tasks]))
        return rules


def most_steps(source: int, decoding: DecodingConfig, prefix: int = 0, phrases: int = 0) -> int:
    """Return the most steps of a translation, given the subwords of its sentence, its beginning and its phrases.

    They are twice the sentence's subwords and 12, or what is demanded if that is more, but never above
    `decoding.max_length`; the end symbol takes one.
    """
    # The end symbol is a token of the source too
    usual = default_limit(source + 1)
    return min(max(usual, decoding.min_length + 1, prefix + 1) + phrases, decoding.max_length)


def search_rows(
    translator: Translator, tasks: Sequence[Task], decoding: DecodingConfig, options: SearchOptions, rows: list[int]
) -> list[list[ConstrainedHypothesis]]:
    """Translate the sentences of these rows, the longest first."""
    batch = Batch(translator, decoding, options, rows, [tasks[row] for row in rows])
    try:
        if options.sampling:
            return drawn(batch, options.sampling)
        if options.constraints is not None:
            return constrained(batch)
        if decoding.beam == 1 and not options.scores:
            return most_probable(batch)
        return best(batch)
    except DeadEndError as error:
        raise DataError(
            f"sentence {rows[error.sentence] + 1:,} has no translation under these options: after some subword, "
            "decoding.min_length, decoding.no_repeat_ngram and --prefixes together forbid every next one; loosen one "
            "of them"
        ) from None


def most_probable(batch: Batch) -> list[list[ConstrainedHypothesis]]:
    """Find what a beam of width 1 does, without the scores, which would take a softmax at each step."""
    found = greedy(
        batch.translator.models,
        batch.src(),
        bos=batch.translator.target.symbols.start,
        eos=EOS,
        rules=batch.rules(),
        max_length=batch.limits(),
    )
    return [[ConstrainedHypothesis(tokens, math.nan, math.nan, unmet=[])] for tokens in found]


def best(batch: Batch) -> list[list[ConstrainedHypothesis]]:
    """Find the n best."""
    found = beam_search(
        batch.translator.models,
        batch.src(),
        bos=batch.translator.target.symbols.start,
        eos=EOS,
        beam=batch.decoding.beam,
        length_penalty=batch.decoding.length_penalty,
        length_norm=batch.decoding.length_norm,
        n_best=batch.options.n_best,
        rules=batch.rules(),
        max_length=batch.limits(),
    )
    return [[ConstrainedHypothesis(*one, unmet=[]) for one in row] for row in found]


def constrained(batch: Batch) -> list[list[ConstrainedHypothesis]]:
    """Find the n best that contain their sentence's phrases."""
    return constrained_beam_search(
        batch.translator.models,
        batch.src(),
        [task.phrases for task in batch.tasks],
        bos=batch.translator.target.symbols.start,
        eos=EOS,
        boundaries=word_boundaries(batch.translator),
        beam=batch.decoding.beam,
        length_penalty=batch.decoding.length_penalty,
        length_norm=batch.decoding.length_norm,
        n_best=batch.options.n_best,
        rules=batch.rules(),
        max_length=batch.limits(),
    )


def drawn(batch: Batch, how: Sampling) -> list[list[ConstrainedHypothesis]]:
    """Draw translations."""
    found = sample(
        batch.translator.models,
        batch.src(),
        bos=batch.translator.target.symbols.start,
        eos=EOS,
        # Another number for each pair of seed and sentence
        seeds=[how.seed * 2**32 + row for row in batch.rows],
        samples=how.samples,
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
        rules=batch.rules(),
        max_length=batch.limits(),
    )
    return [[ConstrainedHypothesis(*one, unmet=[]) for one in row] for row in found]

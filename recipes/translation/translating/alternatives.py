"""Several translations of a sentence with their scores: the n best, samples, and what must be in them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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
    sample,
)
from models.decoding_rules import Rule
from recipes.translation.data.model_text import finished
from recipes.translation.errors import DataError
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.run_folder.checkpoint import Translator
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.text.subwords import EOS
from recipes.translation.translating.demands import phrases_of, prefix_ids, word_boundaries
from recipes.translation.translating.search_options import Sampling, SearchOptions
from recipes.translation.translating.translate import as_batch, in_batches, source_ids


class Translation(NamedTuple):
    """One translation of a sentence."""

    text: str
    score: float
    """The log-probability over the length normaliser of the settings; of a sample, the log-probability."""
    log_probability: float


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
        """Return the most steps of each translation: as in `translate`, or what is demanded of it, if that is more."""
        limits = []
        for task in self.tasks:
            # The end symbol is a token of the source too
            usual = default_limit(len(task.source) + 1)
            steps = max(usual, self.options.min_length + 1, len(task.prefix) + 1)
            steps += sum(len(phrase.tokens) for phrase in task.phrases)
            limits.append(min(steps, self.decoding.max_length))
        return limits

    def rules(self) -> list[Rule]:
        """Return the rules that every translation must satisfy."""
        rules: list[Rule] = []
        if self.options.min_length:
            rules.append(MinimumLength(self.options.min_length, EOS))
        if self.options.no_repeat_ngram:
            rules.append(NoRepeatedNgrams(self.options.no_repeat_ngram))
        if self.options.prefixes is not None:
            rules.append(ForcedPrefixes([task.prefix for task in self.tasks]))
        return rules


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
    empty = [ConstrainedHypothesis([], 0.0, 0.0, [])]
    rows = [found.get(row, empty) for row in range(len(sentences))]
    said = [sentence for sentence, row in zip(sentences, rows, strict=True) for _ in row]
    texts = translator.target.decode([one.tokens for row in rows for one in row])
    each = iter(finished(texts, said, translator.config))
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
        return best(batch)
    except DeadEndError as error:
        raise DataError(
            f"sentence {rows[error.sentence] + 1:,} has no translation under these options: after some subword, "
            "--min-length, --no-repeat-ngram and --prefixes together forbid every next one; loosen one of them"
        ) from None


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


def note_unmet(found: Mapping[int, list[ConstrainedHypothesis]], constraints: Sequence[Sequence[str]]) -> None:
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


def table(found: Sequence[Sequence[Translation]], scores: bool) -> list[str]:
    """Return a line for each translation: its sentence's number, score and log-probability if wanted, and its text."""
    lines = []
    for number, row in enumerate(found, start=1):
        for one in row:
            columns = [str(number)]
            if scores:
                columns += [f"{one.score:.6f}", f"{one.log_probability:.6f}"]
            # A tab in the text would be one more column
            lines.append("\t".join([*columns, one.text.replace("\t", " ")]))
    return lines

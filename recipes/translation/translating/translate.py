"""Translate sentences with a trained model: one translation of each, the n best with their scores, or samples.

Every command that translates, validation, distillation and the service go through `alternatives`. Decoding settings
take effect here and in `ctranslate2_engine`, which has its own search.
"""

from __future__ import annotations

import math
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from models import (
    DeadEndError,
    ForcedPrefixes,
    Hypothesis,
    MinimumLength,
    NoRepeatedNgrams,
    Phrase,
    beam_search,
    constrained_beam_search,
    evaluating,
    greedy,
    sample,
)
from models.decoding_rules import Rule
from recipes.translation.data.batches import pad_rows
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.processes.status_line import SentenceProgress
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.text.model_text import one_line
from recipes.translation.text.subwords import EOS, Subwords
from recipes.translation.translating.demands import check_letters, phrases_of, word_boundaries
from recipes.translation.translating.sentences import source_ids
from seqpar.distributed.collectives import gather_objects


@dataclass(frozen=True)
class Task:
    """One sentence in subwords, with what is demanded of its translation."""

    source: list[int]
    prefix: Sequence[int] = ()
    phrases: Sequence[Phrase] = ()


class Translation(NamedTuple):
    """One translation of a sentence."""

    text: str
    score: float
    """The log-probability over the settings' length normaliser; for a sample, the log-probability."""
    log_probability: float
    finished: bool = True
    """Whether it ended within the steps allowed; otherwise it is cut off."""


def translate(translator: Translator, sentences: Sequence[str], ranks: Ranks = ALONE, label: str = "") -> list[str]:
    """Translate each sentence into one line, in the same order; an empty sentence stays empty.

    A sentence with more subwords than both `training.max_length` and `decoding.max_length` is cut to the larger of
    them, with a note on stderr. Each rank translates some sentences of every length, and returns the translations of
    all. With a `label`, lines on stderr that start with it show the progress, and how many translations are cut.

    Raises DataError for text that is not Unicode, as Python produces from an argument in another encoding.
    """
    found = best(translator, sentences, ranks, label)
    if label and ranks.is_main:
        note_unfinished(found, label)
    return [one.text for one in found]


def best(translator: Translator, sentences: Sequence[str], ranks: Ranks = ALONE, label: str = "") -> list[Translation]:
    """Do the same as `translate`, without a note about cut translations: each Translation says whether it is cut."""
    return [row[0] for row in alternatives(translator, sentences, SearchOptions(scores=False), ranks, label)]


def note_unfinished(found: Sequence[Translation], label: str, before: int = 0) -> int:
    """Report on stderr how many translations are cut, if any are; return their number.

    Sentences are numbered after the `before` ones that precede them.
    """
    cut = [number for number, one in enumerate(found, start=before + 1) if not one.finished]
    if cut:
        print(
            f"[{label}] {len(cut):,} of {len(found):,} translations are unfinished, the first that of sentence "
            f"{cut[0]:,}: they have as many subwords as decoding.max_ratio and decoding.max_length allow (--max-ratio, "
            "--max-length)",
            file=sys.stderr,
        )
    return len(cut)


def alternatives(
    translator: Translator, sentences: Sequence[str], options: SearchOptions, ranks: Ranks = ALONE, label: str = ""
) -> list[list[Translation]]:
    """Translate each sentence under `options`, best first; an empty sentence has one translation, which is empty.

    Sentences are cut as in `translate`. A translation that lacks a phrase, because the search found none that contains
    it within `decoding.max_length`, is returned with a note on stderr. `label` is as in `translate`.

    Raises ConfigError or DataError for options and sentences that do not fit together, and if the rules leave a
    sentence no translation.
    """
    options.check(sentences, translator.config.decoding)
    tasks = tasks_of(translator, sentences, options)

    def search(rows: list[int]) -> list[list[Hypothesis]]:
        return search_rows(translator, tasks, options, rows)

    sources = [task.source for task in tasks]
    found = in_batches(translator, sources, search, ranks, label)
    note_unmet(found, options.constraints or [])
    empty = [Hypothesis([], 0.0, 0.0)]
    rows = [found.get(row, empty) for row in range(len(sentences))]
    return in_words(rows, translator.target, [most_steps(task, translator.config.decoding) for task in tasks])


def in_words(
    rows: Sequence[Sequence[Hypothesis]], subwords: Subwords, limits: Sequence[int]
) -> list[list[Translation]]:
    """Return the translations of each sentence as text; `limits` are the most steps for each sentence."""
    texts = iter(subwords.decode([one.tokens for row in rows for one in row]))
    return [
        # The end symbol takes a step as well
        [Translation(one_line(next(texts)), one.score, one.log_probability, len(one.tokens) < limit) for one in row]
        for row, limit in zip(rows, limits, strict=True)
    ]


def tasks_of(translator: Translator, sentences: Sequence[str], options: SearchOptions) -> list[Task]:
    """Return sentences and demands in subwords; raise DataError for a prefix that leaves no step to continue."""
    sources = source_ids(translator.source, translator.text, sentences, options.before)
    longest = translator.config.decoding.max_length
    prefixes: list[list[int]] = [[] for _ in sources]
    phrases: list[list[Phrase]] = [[] for _ in sources]
    if options.prefixes is not None:
        texts = list(map(translator.text.target, options.prefixes))
        for number, text in enumerate(texts, start=1):
            check_letters(translator, text, f"--prefixes: {text!r} of line {number:,}")
        prefixes = translator.target.encode(texts)
    if options.constraints is not None:
        phrases = phrases_of(translator, options.constraints)
    for number, (source, prefix, demanded) in enumerate(zip(sources, prefixes, phrases, strict=True), start=1):
        if not source and (prefix or demanded):
            option = "--prefixes" if prefix else "--constraints"
            raise DataError(
                f"{option}: line {number:,} is not empty, but sentence {number:,} has no subwords: remove one of them"
            )
        if len(prefix) >= longest:
            raise DataError(
                f"--prefixes: line {number:,} has {len(prefix):,} subwords, but a translation has at "
                f"most {longest:,} steps (the run's decoding.max_length), one of them for the end: shorten it"
            )
    return [Task(*each) for each in zip(sources, prefixes, phrases, strict=True)]


def most_steps(task: Task, decoding: DecodingConfig) -> int:
    """Return the most steps that a translation may have.

    This is `decoding.max_ratio` times the sentence's subwords plus 12, or what is demanded if that is more, but never
    above `decoding.max_length`; the end symbol takes one step.
    """
    usual = math.ceil(decoding.max_ratio * len(task.source)) + 12
    phrases = sum(len(phrase.tokens) for phrase in task.phrases)
    return min(max(usual, decoding.min_length + 1, len(task.prefix) + 1) + phrases, decoding.max_length)


def search_rows(
    translator: Translator, tasks: Sequence[Task], options: SearchOptions, rows: list[int]
) -> list[list[Hypothesis]]:
    """Translate the sentences in these rows, the longest first; without `options.scores`, scores may be nan."""
    models = translator.models
    decoding = translator.config.decoding
    some = [tasks[row] for row in rows]
    symbols = translator.source.symbols
    src = pad_rows([symbols.source(task.source) for task in some]).to(translator.model.generator.weight.device)
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
            # A different number for each pair of seed and sentence
            seeds = [how.seed * 2**32 + options.before + row for row in rows]
            drawn = {name: value for name, value in asdict(how).items() if name != "seed"}
            return sample(models, src, seeds=seeds, **drawn, **shared)
        if options.constraints is not None:
            phrases = [task.phrases for task in some]
            return constrained_beam_search(models, src, phrases, boundaries=word_boundaries(translator), **by_beam)
        if decoding.beam == 1 and not options.scores:
            # Finds the same as a beam of width 1, but without scores, which would take a softmax at each step
            return [[Hypothesis(tokens, math.nan, math.nan)] for tokens in greedy(models, src, **shared)]
        return beam_search(models, src, **by_beam)
    except DeadEndError as error:
        raise DataError(
            f"sentence {options.before + rows[error.sentence] + 1:,} has no translation under these options: after "
            "some subword, decoding.min_length, decoding.no_repeat_ngram and --prefixes together forbid every next "
            "one; loosen one of them"
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


def note_unmet(found: Mapping[int, list[Hypothesis]], constraints: Sequence[Sequence[str]]) -> None:
    """Report on stderr which sentences have translations that lack a phrase."""
    for row, hypotheses in sorted(found.items()):
        lacking = [one.unmet for one in hypotheses if one.unmet]
        if lacking:
            names = ", ".join(repr(constraints[row][number]) for number in sorted(set().union(*lacking)))
            print(
                f"[translate] sentence {row + 1:,}: {len(lacking)} of {len(hypotheses)} translations lack {names}, not "
                "found within the steps allowed; try a wider --beam",
                file=sys.stderr,
            )


@dataclass(frozen=True)
class Sampling:
    """Draw translations instead of searching for the best."""

    samples: int = 1
    """Number of translations of each sentence."""
    temperature: float = 1.0
    top_k: int | None = None
    """Draw from this many of the most probable subwords; None draws from all."""
    top_p: float = 1.0
    """Draw from the most probable subwords whose probabilities reach this."""
    seed: int = 0


@dataclass(frozen=True)
class SearchOptions:
    """How many translations of each sentence are wanted, and what is demanded of those of each line."""

    n_best: int = 1
    scores: bool = True
    """Whether scores are wanted; otherwise those of a greedy search are nan."""
    prefixes: Sequence[str] | None = None
    """The beginning of each sentence's translation, possibly empty."""
    constraints: Sequence[Sequence[str]] | None = None
    """The phrases that each sentence's translation must contain, possibly none."""
    sampling: Sampling | None = None
    before: int = 0
    """Number of sentences of the same text before these, so that sentence numbers and random seeds continue."""

    def check(self, sentences: Sequence[str], decoding: DecodingConfig) -> None:
        """Raise a one-line ConfigError or DataError for options that contradict the settings or the sentences."""
        if not self.sampling and self.n_best > decoding.beam:
            raise ConfigError(
                f"--n-best {self.n_best} is above the beam of {decoding.beam}: ask for fewer, or add "
                f"--beam {self.n_best}"
            )
        check_lines("--prefixes", self.prefixes, sentences)
        check_lines("--constraints", self.constraints, sentences)


def check_lines(option: str, lines: Sequence[object] | None, sentences: Sequence[str]) -> None:
    """Raise DataError unless there is a line for each sentence."""
    if lines is not None and len(lines) != len(sentences):
        raise DataError(
            f"{option} has {len(lines):,} lines for {len(sentences):,} sentences: give one line for each, empty where "
            "there is nothing to demand"
        )


T = TypeVar("T")


def in_batches(
    translator: Translator,
    ids: list[list[int]],
    search: Callable[[list[int]], list[T]],
    ranks: Ranks,
    label: str = "",
) -> Mapping[int, T]:
    """Search in batches of sentences of similar length; return the results by row, except for empty sentences.

    `search` takes the rows of a batch, the longest sentence first. Each rank searches some sentences of every length,
    and returns the results of all. `label` is as in `translate`.
    """
    longest_first = sorted((row for row in range(len(ids)) if ids[row]), key=lambda row: -len(ids[row]))
    # Batches of sentences of similar length have little padding; every rank gets some of every length
    mine = longest_first[ranks.rank :: ranks.world]
    size = translator.config.decoding.batch_sentences
    found: dict[int, T] = {}
    progress = SentenceProgress(label, [len(ids[row]) for row in mine], len(longest_first))
    with evaluating(translator.models), progress:
        for start in range(0, len(mine), size):
            rows = mine[start : start + size]
            found.update(zip(rows, search(rows), strict=True))
            progress.advance(len(rows))
    ranks.meet()
    return ChainMap(*gather_objects(found, ranks.group))

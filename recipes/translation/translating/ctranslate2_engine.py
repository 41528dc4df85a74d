"""Translate with CTranslate2: the search is CTranslate2's, text and subwords are handled as in `translate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ctranslate2
import torch

from models import Hypothesis, length_normaliser
from models.hypotheses import best_first
from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.files.atomic_folder import verified_folder
from recipes.translation.files.json_fields import field_in
from recipes.translation.run_folder.checkpoint import load_belongings
from recipes.translation.settings.config import DecodingConfig, RunConfig, load_config
from recipes.translation.text.model_text import ModelText, longest_of
from recipes.translation.text.subwords import PAD, Subwords
from recipes.translation.translating.sentences import source_ids
from recipes.translation.translating.translate import Task, Translation, in_words, most_steps, note_unfinished


@dataclass(frozen=True)
class ExportedTranslator:
    """A model in CTranslate2's format with the settings and subwords that belong to it."""

    config: RunConfig
    engine: ctranslate2.Translator
    source: Subwords
    target: Subwords

    @property
    def text(self) -> ModelText:
        """Return how the model reads and writes text."""
        return ModelText.of(self.config)


def load(folder: Path, overrides: Mapping[str, object] | None = None) -> ExportedTranslator:
    """Read the model that `export --to ctranslate2` wrote, for the CPU.

    It translates as many batches at a time as torch has threads, each in one thread. Several threads per batch were
    slower than one, for models of width 128 and 512 (docs/export.md).
    """
    whole = verified_folder(folder)
    config, source, target = load_belongings(whole, overrides)
    exported = load_config(whole / "config.yaml")
    most = longest_of(exported.training, exported.decoding)
    if config.decoding.max_length > most:
        raise ConfigError(
            f"decoding.max_length is {config.decoding.max_length}, but {folder} was exported with positions for {most} "
            f"subwords: set it to {most} or less, export again with a larger one, or translate with --engine torch"
        )
    threads = torch.get_num_threads()
    try:
        engine = ctranslate2.Translator(str(whole), inter_threads=threads, intra_threads=1)
    except (RuntimeError, ValueError, LookupError) as error:  # LookupError for a missing variable
        raise CheckpointError(f"{folder} cannot be opened by CTranslate2: {error}") from error
    finally:
        torch.set_num_threads(threads)  # CTranslate2 sets this process's OpenMP, and so torch, to `intra_threads`
    for side, subwords in (("source", source), ("target", target)):
        if _vocabulary(whole, side) != subwords.pieces():
            raise CheckpointError(
                f"{folder}: CTranslate2's {side} vocabulary does not match its subwords: export the model again"
            )
    return ExportedTranslator(config, engine, source, target)


def _vocabulary(folder: Path, side: str) -> object:
    """Read one side's vocabulary, from its own file if the sides do not share one; None if it cannot be read."""
    path = folder / "shared_vocabulary.json"
    if not path.exists():
        path = folder / f"{side}_vocabulary.json"
    return field_in(path)


def translate(translator: ExportedTranslator, sentences: Sequence[str], before: int = 0) -> list[str]:
    """Translate each sentence into one line, in the same order; an empty sentence stays empty.

    Greedy translations (beam 1) are those of the model in torch, up to rounding. With a wider beam CTranslate2 searches
    until `beam` hypotheses are finished; the best of them by the length normalisation in the settings is taken.
    """
    found = [row[0] for row in alternatives(translator, sentences, 1, before)]
    note_unfinished(found, "translate", before)
    return [one.text for one in found]


def alternatives(
    translator: ExportedTranslator, sentences: Sequence[str], n_best: int, before: int = 0
) -> list[list[Translation]]:
    """Return the `n_best` translations of each sentence, best first; there are at most `beam` of them.

    An empty sentence has one translation, which is empty.
    """
    decoding = translator.config.decoding
    ids = source_ids(translator.source, translator.text, sentences, before)
    rows = [row for row in range(len(ids)) if ids[row]]
    most = [most_steps(Task(each), decoding) for each in ids]
    limits = [most[row] for row in rows]
    pieces = translator.source.pieces()
    symbols = translator.source.symbols
    whole = [ids[row] if symbols.only_end else symbols.source(ids[row]) for row in rows]
    sources = [[pieces[token] for token in row] for row in whole]
    found = search(translator.engine, translator.target, sources, limits, decoding, n_best)
    hypotheses = [[Hypothesis([], 0.0, 0.0)] for _ in ids]
    for row, some in zip(rows, found, strict=True):
        hypotheses[row] = some
    return in_words(hypotheses, translator.target, most)


def search(
    engine: ctranslate2.Translator,
    subwords: Subwords,
    sources: list[list[str]],
    limits: list[int],
    decoding: DecodingConfig,
    n_best: int,
) -> list[list[Hypothesis]]:
    """Return the best translations found for each source, as ids, none longer than its limit."""
    tags = len(subwords.symbols.start) - 1  # number of tags that each hypothesis begins with
    shared = shared_limits(sources, limits)
    found = _search(engine, subwords, sources, dict(enumerate(shared)), decoding)
    cut = {
        row: limits[row]
        for row, limit in enumerate(shared)
        if limit < limits[row] and any(len(words) - tags >= limit for words in found[row].hypotheses)
    }
    found |= _search(engine, subwords, sources, cut, decoding)
    numbers = {piece: number for number, piece in enumerate(subwords.pieces())}
    return [_rank_hypotheses(found[row], numbers, decoding, tags)[:n_best] for row in range(len(sources))]


def shared_limits(sources: list[list[str]], limits: list[int]) -> list[int]:
    """Reduce the limits to a few, none above those given, since CTranslate2 has one limit for a whole batch.

    A source shares a smaller limit if it has at most two thirds as many pieces, as its translations then mostly stay
    below it. A search whose hypotheses all do so finds the same under any larger limit, because log-probabilities only
    fall as a hypothesis grows. Otherwise the smaller limit may cut off hypotheses, and `search` repeats the search.
    """
    shared = list(limits)
    smallest = 0
    for row in sorted(range(len(limits)), key=limits.__getitem__):
        if 3 * len(sources[row]) > 2 * smallest:
            smallest = limits[row]
        shared[row] = smallest
    return shared


def _search(
    engine: ctranslate2.Translator,
    subwords: Subwords,
    sources: list[list[str]],
    limits: Mapping[int, int],
    decoding: DecodingConfig,
) -> dict[int, ctranslate2.TranslationResult]:
    """Search for the rows of `limits`, those with the same limit together."""
    pieces = subwords.pieces()
    start = subwords.symbols.start
    never = {PAD, start[-1]}
    tag = [pieces[each] for each in start[1:]]
    share = math.ceil(len(limits) / engine.num_translators)
    found: dict[int, ctranslate2.AsyncTranslationResult] = {}
    for limit in sorted(set(limits.values())):
        rows = [row for row in limits if limits[row] == limit]
        results = engine.translate_batch(
            [sources[row] for row in rows],
            target_prefix=[tag] * len(rows) if tag else None,
            max_batch_size=min(decoding.batch_sentences, share),
            asynchronous=True,
            beam_size=decoding.beam,
            num_hypotheses=decoding.beam,
            length_penalty=0,
            return_scores=True,
            suppress_sequences=[[pieces[each]] for each in sorted(never)],
            max_input_length=0,
            max_decoding_length=limit + len(tag),
            min_decoding_length=decoding.min_length and decoding.min_length + len(tag),
            no_repeat_ngram_size=decoding.no_repeat_ngram,
        )
        found.update(zip(rows, results, strict=True))
    return {row: result.result() for row, result in found.items()}


def _rank_hypotheses(
    result: ctranslate2.TranslationResult, numbers: Mapping[str, int], decoding: DecodingConfig, tags: int
) -> list[Hypothesis]:
    """Return the hypotheses, best first, without the tags that each begins with.

    Without a length penalty, CTranslate2's score is the log-probability.
    """
    found = []
    for whole, log_probability in zip(result.hypotheses, result.scores, strict=True):
        words = whole[tags:]
        # The end symbol is a token of the translation too
        normaliser = length_normaliser(len(words) + 1, decoding.length_penalty, decoding.length_norm)
        score = float(log_probability) / normaliser
        found.append(Hypothesis([numbers[piece] for piece in words], score, float(log_probability)))
    return best_first(found)

"""Translate with CTranslate2: the search is its own, text and subwords are handled as by `translate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ctranslate2
import torch

from models import Hypothesis, default_limit, length_normaliser
from models.hypotheses import best_first
from recipes.translation.alternatives import Translation
from recipes.translation.atomic_folder import CheckpointError, verified_folder
from recipes.translation.data.model_text import finished
from recipes.translation.data.subwords import PAD, Subwords
from recipes.translation.run_folder.checkpoint import load_belongings
from recipes.translation.settings.config import DecodingConfig, RunConfig
from recipes.translation.translate import source_ids


class ExportedTranslator(NamedTuple):
    """A model in CTranslate2's format with the settings and subwords that belong to it."""

    config: RunConfig
    engine: ctranslate2.Translator
    source: Subwords
    target: Subwords


def load(
    folder: Path, device: str = "cpu", threads: int = 0, overrides: Mapping[str, object] | None = None
) -> ExportedTranslator:
    """Read the model that `export --to ctranslate2` wrote.

    On a CPU `threads` batches are translated at the same time, each by one thread; 0 takes as many as torch. Several
    threads for one batch were slower than one, for models of width 128 and 512 (docs/export.md).
    """
    whole = verified_folder(folder)
    config, source, target = load_belongings(whole, overrides)
    try:
        batches = 1
        if device == "cpu":
            batches = threads or torch.get_num_threads()
        engine = ctranslate2.Translator(str(whole), device=device, inter_threads=batches, intra_threads=1)
    except (RuntimeError, ValueError, LookupError) as error:  # LookupError for a variable that is missing
        raise CheckpointError(f"{folder} cannot be opened by CTranslate2: {error}") from error
    return ExportedTranslator(config, engine, source, target)


def translate(translator: ExportedTranslator, sentences: Sequence[str], decoding: DecodingConfig) -> list[str]:
    """Translate each sentence into one line, in the same order; an empty sentence stays empty.

    Greedy translations (beam 1) are those of the model in torch, up to rounding. With a wider beam CTranslate2 searches
    until `beam` hypotheses are finished; the best of them by `decoding`'s own length normalisation is taken.
    """
    return [row[0].text for row in alternatives(translator, sentences, decoding)]


def alternatives(
    translator: ExportedTranslator, sentences: Sequence[str], decoding: DecodingConfig, n_best: int = 1
) -> list[list[Translation]]:
    """Return the `n_best` translations of each sentence, best first, at most `decoding.beam` of them.

    An empty sentence has one translation, which is empty.
    """
    ids = source_ids(translator.source, translator.config, sentences, decoding)
    rows = [row for row in range(len(ids)) if ids[row]]
    limits = [min(default_limit(len(ids[row]) + 1), decoding.max_length) for row in rows]
    pieces = translator.source.pieces()
    sources = [[pieces[token] for token in ids[row]] for row in rows]
    found = search(translator.engine, translator.target, sources, limits, decoding, n_best)
    hypotheses = [[Hypothesis([], 0.0, 0.0)] for _ in ids]
    for row, some in zip(rows, found, strict=True):
        hypotheses[row] = some
    repeated = [sentence for sentence, row in zip(sentences, hypotheses, strict=True) for _ in row]
    texts = translator.target.decode([one.tokens for row in hypotheses for one in row])
    each = iter(finished(texts, repeated, translator.config))
    return [[Translation(next(each), one.score, one.log_probability) for one in row] for row in hypotheses]


def search(
    engine: ctranslate2.Translator,
    subwords: Subwords,
    sources: list[list[str]],
    limits: list[int],
    decoding: DecodingConfig,
    n_best: int = 1,
) -> list[list[Hypothesis]]:
    """Return the best translations found for each source, as ids, none longer than its limit."""
    if not sources:
        return []
    pieces = subwords.pieces()
    numbers = {piece: number for number, piece in enumerate(pieces)}
    found = _search(engine, subwords, sources, max(limits), decoding)
    best = [_ranked(result, numbers, decoding)[:n_best] for result in found]
    # CTranslate2 has one limit for a whole batch: what went beyond its own limit is searched again, which is rare
    for row, limit in enumerate(limits):
        if any(len(one.tokens) >= limit for one in best[row]):
            (result,) = _search(engine, subwords, [sources[row]], limit, decoding)
            best[row] = _ranked(result, numbers, decoding)[:n_best]
    return best


def _search(
    engine: ctranslate2.Translator, subwords: Subwords, sources: list[list[str]], limit: int, decoding: DecodingConfig
) -> list[ctranslate2.TranslationResult]:
    pieces = subwords.pieces()
    never = {PAD, *subwords.symbols.start}
    share = math.ceil(len(sources) / engine.num_translators)
    found: list[ctranslate2.TranslationResult] = engine.translate_batch(
        sources,
        max_batch_size=min(decoding.batch_sentences, share),
        beam_size=decoding.beam,
        num_hypotheses=decoding.beam,
        length_penalty=0,
        return_scores=True,
        suppress_sequences=[[pieces[each]] for each in sorted(never)],
        max_input_length=0,
        max_decoding_length=limit,
        min_decoding_length=0,
    )
    return found


def _ranked(
    result: ctranslate2.TranslationResult, numbers: Mapping[str, int], decoding: DecodingConfig
) -> list[Hypothesis]:
    """Return the hypotheses, best first; without a length penalty, CTranslate2's score is the log-probability."""
    found = []
    for words, log_probability in zip(result.hypotheses, result.scores, strict=True):
        # The end symbol is a token of the translation too
        normaliser = length_normaliser(len(words) + 1, decoding.length_penalty, decoding.length_norm)
        score = float(log_probability) / normaliser
        found.append(Hypothesis([numbers[piece] for piece in words], score, float(log_probability)))
    return best_first(found)

"""Translate with CTranslate2: the search is its own, text and subwords are handled as by `translate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ctranslate2

from models import default_limit, length_normaliser
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
    """Read the model that `export --to ctranslate2` wrote; `threads` 0 takes CTranslate2's own choice."""
    whole = verified_folder(folder)
    config, source, target = load_belongings(whole, overrides)
    try:
        engine = ctranslate2.Translator(str(whole), device=device, intra_threads=threads)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be opened by CTranslate2: {error}") from error
    return ExportedTranslator(config, engine, source, target)


def translate(translator: ExportedTranslator, sentences: Sequence[str], decoding: DecodingConfig) -> list[str]:
    """Translate each sentence into one line, in the same order; an empty sentence stays empty.

    Greedy translations (beam 1) are those of the model in torch, up to rounding. With a wider beam CTranslate2 searches
    until `beam` hypotheses are finished; the best of them by `decoding`'s own length normalisation is taken.
    """
    ids = source_ids(translator.source, translator.config, sentences, decoding)
    rows = [row for row in range(len(ids)) if ids[row]]
    limits = [min(default_limit(len(ids[row]) + 1), decoding.max_length) for row in rows]
    pieces = translator.source.pieces()
    sources = [[pieces[token] for token in ids[row]] for row in rows]
    found = search(translator.engine, translator.target, sources, limits, decoding)
    translations: list[list[int]] = [[] for _ in ids]
    for row, tokens in zip(rows, found, strict=True):
        translations[row] = tokens
    return finished(translator.target.decode(translations), sentences, translator.config)


def search(
    engine: ctranslate2.Translator,
    subwords: Subwords,
    sources: list[list[str]],
    limits: list[int],
    decoding: DecodingConfig,
) -> list[list[int]]:
    """Return the best translation found for each source, as ids, none longer than its limit."""
    if not sources:
        return []
    pieces = subwords.pieces()
    numbers = {piece: number for number, piece in enumerate(pieces)}
    found = _search(engine, subwords, sources, max(limits), decoding)
    best = [_best(result, numbers, decoding) for result in found]
    # CTranslate2 has one limit for a whole batch: what went beyond its own limit is searched again, which is rare
    for row, limit in enumerate(limits):
        if len(best[row]) >= limit:
            (result,) = _search(engine, subwords, [sources[row]], limit, decoding)
            best[row] = _best(result, numbers, decoding)
    return best


def _search(
    engine: ctranslate2.Translator, subwords: Subwords, sources: list[list[str]], limit: int, decoding: DecodingConfig
) -> list[ctranslate2.TranslationResult]:
    pieces = subwords.pieces()
    never = {PAD, *subwords.symbols.start}
    found: list[ctranslate2.TranslationResult] = engine.translate_batch(
        sources,
        max_batch_size=decoding.batch_sentences,
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


def _best(result: ctranslate2.TranslationResult, numbers: Mapping[str, int], decoding: DecodingConfig) -> list[int]:
    """Return the hypothesis with the best score; without a length penalty, CTranslate2's is the log-probability."""

    def score(hypothesis: int) -> float:
        # The end symbol is a token of the translation too
        length = len(result.hypotheses[hypothesis]) + 1
        normaliser = length_normaliser(length, decoding.length_penalty, decoding.length_norm)
        return float(result.scores[hypothesis]) / normaliser

    best = max(range(len(result.hypotheses)), key=score)
    return [numbers[piece] for piece in result.hypotheses[best]]

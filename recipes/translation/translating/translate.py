"""Translate sentences with a trained model: greedy or beam search over batches of similar length."""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from models import beam_search, default_limit, evaluating, greedy
from recipes.translation.data.batches import padded
from recipes.translation.data.corpora import tags_of
from recipes.translation.data.model_text import finished, source_text
from recipes.translation.errors import DataError
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.processes.status_line import SentenceProgress
from recipes.translation.run_folder.checkpoint import Translator
from recipes.translation.settings.config import DecodingConfig, RunConfig
from recipes.translation.text.subwords import EOS, UNK, Subwords
from seqpar.distributed.collectives import gather_objects

T = TypeVar("T")


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
    ids = source_ids(translator.source, translator.config, sentences, decoding)

    def search_rows(rows: list[int]) -> list[list[int]]:
        return search(translator, [ids[row] for row in rows], decoding)

    found = in_batches(translator, ids, decoding.batch_sentences, search_rows, ranks, label)
    texts = translator.target.decode([found.get(row, []) for row in range(len(ids))])
    return finished(texts, sentences, translator.config)


def in_batches(
    translator: Translator,
    ids: list[list[int]],
    size: int,
    search: Callable[[list[int]], list[T]],
    ranks: Ranks,
    label: str = "",
) -> Mapping[int, T]:
    """Search in batches of `size` sentences of similar length; return what was found by row, except empty sentences'.

    `search` takes the rows of a batch, the longest sentence first. Each rank has some sentences of every length, and
    returns what all have found. `label` is as in `translate`.
    """
    longest_first = sorted((row for row in range(len(ids)) if ids[row]), key=lambda row: -len(ids[row]))
    # Sentences of similar length share a batch, which then has little padding; every rank gets some of every length
    mine = longest_first[ranks.rank :: ranks.world]
    found: dict[int, T] = {}
    progress = SentenceProgress(label, [len(ids[row]) for row in mine], len(longest_first))
    with evaluating(translator.models), progress:
        for start in range(0, len(mine), size):
            rows = mine[start : start + size]
            found.update(zip(rows, search(rows), strict=True))
            progress.done(len(rows))
    return ChainMap(*gather_objects(found, ranks.group))


def source_ids(
    subwords: Subwords, config: RunConfig, sentences: Sequence[str], decoding: DecodingConfig
) -> list[list[int]]:
    """Return the subwords of each sentence, as in training, cut to the longest length of the settings."""
    longest = longest_source(config, decoding)
    check_unicode(sentences)
    ids = subwords.encode([source_text(config, sentence) for sentence in sentences])
    tags = {tag for row in subwords.encode(list(tags_of(config))) for tag in row} - {UNK}
    # Of a line without subwords (of control characters, say) nothing is left but its tag
    ids = [row if any(subword not in tags for subword in row) else [] for row in ids]
    cut = [number for number, row in enumerate(ids, start=1) if len(row) > longest]
    if cut:
        first = cut[0]
        subject = f"{len(cut):,} sentences are"
        if len(cut) == 1:
            subject = "1 sentence is"
        print(
            f"[translate] {subject} cut to {longest:,} "
            f"subwords, the larger of training.max_length and decoding.max_length: sentence {first:,} has "
            f"{len(ids[first - 1]):,}; split what is longer into sentences",
            file=sys.stderr,
        )
    return [row[:longest] for row in ids]


def longest_source(config: RunConfig, decoding: DecodingConfig) -> int:
    """Return the most subwords of a sentence that are translated."""
    return max(config.training.max_length, decoding.max_length)


def search(translator: Translator, sources: list[list[int]], decoding: DecodingConfig) -> list[list[int]]:
    """Return the best translation found for each source, as ids; the first source must be the longest."""
    src = as_batch(translator, sources)
    start = translator.target.symbols.start
    # The end symbol is a token of the source too
    limits = [min(default_limit(len(ids) + 1), decoding.max_length) for ids in sources]
    if decoding.beam == 1:
        return greedy(translator.models, src, bos=start, eos=EOS, max_length=limits)
    found = beam_search(
        translator.models,
        src,
        bos=start,
        eos=EOS,
        beam=decoding.beam,
        length_penalty=decoding.length_penalty,
        length_norm=decoding.length_norm,
        max_length=limits,
    )
    return [hypotheses[0].tokens for hypotheses in found]


def as_batch(translator: Translator, sources: list[list[int]]) -> Tensor:
    """Return the sources with their symbols as one tensor."""
    symbols = translator.source.symbols
    return padded([symbols.source(ids) for ids in sources]).to(translator.model.generator.weight.device)


def check_unicode(sentences: Sequence[str]) -> None:
    """Raise DataError for text that is not Unicode, which is what Python makes of an argument in another encoding."""
    for number, sentence in enumerate(sentences, start=1):
        if reason := not_unicode(sentence):
            raise DataError(f"sentence {number:,} {reason}")


def not_unicode(sentence: str) -> str:
    """Return what is wrong with a sentence that is not Unicode; "" of any other."""
    try:
        sentence.encode()
    except UnicodeEncodeError as error:
        near = sentence[max(0, error.start - 20) : error.end + 20]
        return f"is not UTF-8 text: {near!a}; convert it to UTF-8"
    return ""

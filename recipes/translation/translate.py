"""Translate sentences with a trained model: greedy or beam search over batches of similar length."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence

import torch

from models import beam_search, evaluating, greedy
from recipes.translation.checkpoint import Translator
from recipes.translation.config import DecodingConfig
from recipes.translation.ranks import ALONE, Ranks
from recipes.translation.subwords import BOS, EOS, PAD
from seqpar.collectives import gather_objects


def translate(
    translator: Translator, sentences: Sequence[str], decoding: DecodingConfig, ranks: Ranks = ALONE
) -> list[str]:
    """The translation of each sentence, in the same order; an empty line stays empty.

    Ranks share the sentences out, those of every length alike, and each has all translations.
    """
    lowercase = translator.config.subwords.lowercase
    ids = translator.source.encode([sentence.lower() if lowercase else sentence for sentence in sentences])
    longest_first = sorted((row for row in range(len(ids)) if ids[row]), key=lambda row: -len(ids[row]))
    mine = longest_first[ranks.rank :: ranks.world]
    found: dict[int, list[int]] = {}
    with evaluating(translator.model):
        for start in range(0, len(mine), decoding.batch_sentences):
            rows = mine[start : start + decoding.batch_sentences]
            found.update(zip(rows, search(translator, [ids[row] for row in rows], decoding), strict=True))
    everyone = ChainMap(*gather_objects(found, ranks.group))
    return translator.target.decode([everyone.get(row, []) for row in range(len(ids))])


def search(translator: Translator, sources: list[list[int]], decoding: DecodingConfig) -> list[list[int]]:
    """The best translation found for each source, as ids; the sources come longest first."""
    model = translator.model
    width = len(sources[0]) + 1
    rows = [[*ids, EOS, *[PAD] * (width - len(ids) - 1)] for ids in sources]
    src = torch.tensor(rows, device=model.generator.weight.device)
    # Without a limit the search has its own, twice each source plus 10: rarely reached, and never by much
    limit = None if 2 * width + 10 <= decoding.max_length else decoding.max_length
    if decoding.beam == 1:
        return greedy(model, src, bos=BOS, eos=EOS, max_length=limit)
    found = beam_search(
        model,
        src,
        bos=BOS,
        eos=EOS,
        beam=decoding.beam,
        length_penalty=decoding.length_penalty,
        max_length=limit,
    )
    return [hypotheses[0].tokens for hypotheses in found]

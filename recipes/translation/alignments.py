"""Alignments of words: for each pair of sentences, which word of the target comes from which word of the source."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence

from torch import Tensor

from models.alignment import attention_weights
from models.ensemble import evaluating
from models.transformer import Decoder
from recipes.translation.data.model_text import source_text, target_text
from recipes.translation.data.subwords import BOS, EOS, Subwords
from recipes.translation.forced_decoding import padded
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.run_folder.checkpoint import Translator
from recipes.translation.settings.config import ConfigError, DecodingConfig
from recipes.translation.translate import check_unicode
from seqpar.distributed.collectives import gather_objects

Link = tuple[int, int]
"""The numbers of a source and a target word, from 0; words are what spaces separate."""


def align(
    translator: Translator,
    sources: Sequence[str],
    targets: Sequence[str],
    decoding: DecodingConfig,
    ranks: Ranks = ALONE,
) -> list[list[Link]]:
    """Return the links between the words of each source and its translation, each rank some of the pairs.

    Each subword of the target is linked to the subword of the source that the model attends to most when it predicts
    it, without the end symbol; two words are linked if any of their subwords are (Garg et al. 2019). Of an ensemble the
    first model is asked. Raises ConfigError for a model that is not a Transformer.
    """
    if not isinstance(translator.model.decoder, Decoder):
        raise ConfigError(f"--alignments: model.preset {translator.config.model.preset} is not a Transformer")
    check_unicode(sources)
    check_unicode(targets)
    config = translator.config
    read = [source_text(config, source) for source in sources]
    written = [target_text(config, target, source) for source, target in zip(sources, targets, strict=True)]
    source_words, source_rows = _subwords_of(translator.source, read, sources)
    target_words, target_rows = _subwords_of(translator.target, written, targets)
    # Without a subword on either side there is nothing to link
    pairs = [row for row in range(len(sources)) if source_rows[row] and target_rows[row]]
    mine = sorted(pairs, key=lambda row: -len(source_rows[row]))[ranks.rank :: ranks.world]
    found: dict[int, list[Link]] = {}
    device = translator.model.generator.weight.device
    with evaluating(translator.model):
        for start in range(0, len(mine), decoding.batch_sentences):
            rows = mine[start : start + decoding.batch_sentences]
            src_BS = padded([[*source_rows[row], EOS] for row in rows]).to(device)
            tgt_BT = padded([[BOS, *target_rows[row][:-1]] for row in rows]).to(device)
            for row, weights_TS in zip(rows, attention_weights(translator.model, src_BS, tgt_BT).cpu(), strict=True):
                found[row] = links(weights_TS, source_words[row], target_words[row])
    everyone = ChainMap(*gather_objects(found, ranks.group))
    return [everyone.get(row, []) for row in range(len(sources))]


def links(weights_TS: Tensor, source_words: Sequence[int], target_words: Sequence[int]) -> list[Link]:
    """Link the words of a pair, given the attention of each target subword and the word that each subword is part of.

    What follows the subwords of either side, the end symbol and padding, is never linked, and neither is a tag, which
    has the number -1.
    """
    own = [place for place, word in enumerate(source_words) if word >= 0]
    best_T = weights_TS[: len(target_words), own].argmax(1).tolist()
    return sorted({(source_words[own[best]], word) for best, word in zip(best_T, target_words, strict=True)})


def pharaoh(pairs: Sequence[Link]) -> str:
    """Return links in Pharaoh's format: source-target, separated by blanks."""
    return " ".join(f"{source}-{target}" for source, target in pairs)


def _subwords_of(
    subwords: Subwords, texts: Sequence[str], sentences: Sequence[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the number of the sentence's word that each subword is part of, and the subwords, of each text.

    A text is its sentence as the model reads it: the same words in other letters, after a tag that may be new. Words
    are encoded one by one, which gives the subwords of the text, as none of them extends over a space.
    """
    numbers = []
    ids = []
    for text, sentence in zip(texts, sentences, strict=True):
        words = text.split()
        encoded = subwords.encode(words)
        # A tag that the sentence does not have is word -1
        first = len(sentence.split()) - len(words)
        numbers.append([number for number, word in enumerate(encoded, start=first) for _ in word])
        ids.append([subword for word in encoded for subword in word])
    return numbers, ids

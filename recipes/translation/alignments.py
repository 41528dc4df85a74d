"""Alignments of words: for each pair of sentences, which word of the target comes from which word of the source."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence

from torch import Tensor

from models.alignment import attention_weights
from models.ensemble import evaluating
from models.transformer import Decoder
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
    first model is asked. Raises ConfigError for a model that is not a Transformer, or whose settings have language tags
    or placeholders.
    """
    if not isinstance(translator.model.decoder, Decoder):
        raise ConfigError(f"--alignments: model.preset {translator.config.model.preset} is not a Transformer")
    if translator.config.data.language_tags or translator.config.subwords.placeholders:
        raise ConfigError(
            "--alignments: the model reads more or less than the words of a sentence (data.language_tags, "
            "subwords.placeholders), and such models cannot be aligned"
        )
    source_words, source_rows = _subwords_of(translator, translator.source, sources)
    target_words, target_rows = _subwords_of(translator, translator.target, targets)
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

    What follows the subwords of either side, the end symbol and padding, is never linked.
    """
    best_T = weights_TS[: len(target_words), : len(source_words)].argmax(1).tolist()
    return sorted({(source_words[best], word) for best, word in zip(best_T, target_words, strict=True)})


def pharaoh(pairs: Sequence[Link]) -> str:
    """Return links in Pharaoh's format: source-target, separated by blanks."""
    return " ".join(f"{source}-{target}" for source, target in pairs)


def _subwords_of(
    translator: Translator, subwords: Subwords, sentences: Sequence[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the number of the word that each subword is part of, and the subwords, of each sentence.

    Words are encoded one by one, which gives the subwords of the sentence, as none of them extends over a space.
    """
    check_unicode(sentences)
    numbers = []
    ids = []
    for sentence in sentences:
        words = sentence.split()
        if translator.config.subwords.lowercase:
            words = [word.lower() for word in words]
        encoded = subwords.encode(words)
        numbers.append([number for number, word in enumerate(encoded) for _ in word])
        ids.append([subword for word in encoded for subword in word])
    return numbers, ids

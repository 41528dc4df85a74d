"""Alignments of words: for each pair of sentences, which word of the target comes from which word of the source."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from torch import Tensor

from models.alignment import attention_weights
from recipes.translation.data.batches import padded_batch
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.subwords import Subwords
from recipes.translation.translating.in_batches import in_batches
from recipes.translation.translating.sentences import check_unicode

Link = tuple[int, int]
"""The numbers of a source and a target word, from 0; words are what spaces separate."""
Words = Sequence[int]
"""The words that a subword is part of: one of the model's subwords may extend over a space."""


def align(
    translator: Translator, sources: Sequence[str], targets: Sequence[str], ranks: Ranks = ALONE
) -> list[list[Link]]:
    """Return the links between the words of each source and its translation, each rank some of the pairs.

    Each subword of the target is linked to the subword of the source that the model attends to most when it predicts
    it, without the end symbol; two words are linked if any of their subwords are (Garg et al. 2019). Of an ensemble the
    first model is asked. `models.alignment` says which attention that is in each architecture. Of a sentence that is
    cut for its translation, what is cut off has no links.
    """
    check_unicode(sources)
    check_unicode(targets)
    text = translator.text
    read = list(map(text.source, sources))
    written = list(map(text.target, targets))
    source_words, source_rows = _subwords_of(translator.source, read, sources)
    source_words = [words[: text.longest] for words in source_words]
    source_rows = [row[: text.longest] for row in source_rows]
    target_words, target_rows = _subwords_of(translator.target, written, targets)
    # Without a subword on either side there is nothing to link
    rows = [source if target else [] for source, target in zip(source_rows, target_rows, strict=True)]
    device = translator.model.generator.weight.device
    symbols = translator.source.symbols

    def link_rows(some: list[int]) -> list[list[Link]]:
        # The last subword of a target predicts nothing that is linked
        batch = padded_batch([source_rows[row] for row in some], [target_rows[row][:-1] for row in some], symbols)
        weights_BTS = attention_weights(translator.model, batch.src.to(device), batch.tgt_in.to(device)).cpu()
        # The step that reads the last token of the start predicts the first subword; no tag before a source is linked
        weights_BTS = weights_BTS[:, len(symbols.start) - 1 :, len(symbols.prefix) :]
        return [
            links(weights_TS, source_words[row], target_words[row])
            for row, weights_TS in zip(some, weights_BTS, strict=True)
        ]

    everyone = in_batches(translator, rows, link_rows, ranks)
    return [everyone.get(row, []) for row in range(len(sources))]


def links(weights_TS: Tensor, source_words: Sequence[Words], target_words: Sequence[Words]) -> list[Link]:
    """Link the words of a pair, given the attention of each target subword and the words that each subword is part of.

    What follows the subwords of either side, the end symbol and padding, is never linked, and neither is a tag, which
    is part of none.
    """
    own = [place for place, words in enumerate(source_words) if words]
    if not own:
        return []
    best_T = weights_TS[: len(target_words), own].argmax(1).tolist()
    found = zip((source_words[own[best]] for best in best_T), target_words, strict=True)
    return sorted({(word, other) for words, others in found for word in words for other in others})


def pharaoh(pairs: Sequence[Link]) -> str:
    """Return links in Pharaoh's format: source-target, separated by blanks."""
    return " ".join(f"{source}-{target}" for source, target in pairs)


def _subwords_of(
    subwords: Subwords, texts: Sequence[str], sentences: Sequence[str]
) -> tuple[list[list[Words]], list[list[int]]]:
    """Return the numbers of the sentence's words that each subword is part of, and the subwords, of each text.

    A text is its sentence as the model reads it: the same words in other letters, after a tag that may be new.
    """
    words = [_words_of(subwords, text, len(sentence.split())) for text, sentence in zip(texts, sentences, strict=True)]
    return words, subwords.encode(list(texts))


def _words_of(subwords: Subwords, text: str, count: int) -> list[Words]:
    """Return the words that each subword of a text is part of, where the last word is number `count` - 1.

    A blank is part of the word that follows it, or of the last one.
    """
    read, places = subwords.places(text)
    found = list(re.finditer(r"\S+", read))
    # A tag that the sentence does not have is no word of it
    first = count - len(found)
    # A word that the rules of normalisation remove has no subwords
    kept = [(number, word) for number, word in enumerate(found, start=first) if subwords.normalize(word[0])]
    starts = [word.start() for _, word in kept]
    ends = [word.end() for _, word in kept]
    words: list[Words] = []
    for begin, end in places:
        # What a character becomes may be several subwords, of which all but the last end where they begin
        low = min(bisect_right(ends, begin), len(kept) - 1)
        high = max(bisect_left(starts, max(end, begin + 1)), low + 1)
        words.append([number for number, _ in kept[low:high] if number >= 0])
    return words

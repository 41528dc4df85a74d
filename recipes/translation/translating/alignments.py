"""Word alignments: for each sentence pair, which word of the target comes from which word of the source."""

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
from recipes.translation.translating.sentences import check_unicode
from recipes.translation.translating.translate import in_batches

Link = tuple[int, int]
"""The numbers of a source and a target word, from 0; words are separated by spaces."""
Words = Sequence[int]
"""The words that a subword is part of: a subword may extend over a space."""


def align(
    translator: Translator, sources: Sequence[str], targets: Sequence[str], ranks: Ranks = ALONE
) -> list[list[Link]]:
    """Return the links between the words of each source and its translation, each rank some of the pairs.

    Each target subword is linked to the source subword, other than the end symbol, that the model attends to most when
    predicting it; two words are linked if any of their subwords are (Garg et al. 2019). In an ensemble the first model
    is used. `models.alignment` says which attention this is in each architecture. If a sentence is cut for translation,
    the part that is cut off has no links.
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
    # A translation may be divided into more subwords than the model wrote, and learned positions end
    most = translator.positions
    target_words = [words[:most] for words in target_words]
    target_rows = [row[:most] for row in target_rows]
    # If one side has no subwords there is nothing to link
    rows = [source if target else [] for source, target in zip(source_rows, target_rows, strict=True)]
    device = translator.model.generator.weight.device
    symbols = translator.source.symbols

    def link_rows(some: list[int]) -> list[list[Link]]:
        # The last target subword predicts only the end symbol, which is not linked
        batch = padded_batch([source_rows[row] for row in some], [target_rows[row][:-1] for row in some], symbols)
        weights_BTS = attention_weights(translator.model, batch.src.to(device), batch.tgt_in.to(device)).cpu()
        # The step that reads the start's last token predicts the first subword; tags before a source are not linked
        weights_BTS = weights_BTS[:, len(symbols.start) - 1 :, len(symbols.prefix) :]
        return [
            links(weights_TS, source_words[row], target_words[row])
            for row, weights_TS in zip(some, weights_BTS, strict=True)
        ]

    everyone = in_batches(translator, rows, link_rows, ranks)
    return [everyone.get(row, []) for row in range(len(sources))]


def links(weights_TS: Tensor, source_words: Sequence[Words], target_words: Sequence[Words]) -> list[Link]:
    """Link the words of a pair, given each target subword's attention and the words that each subword is part of.

    Whatever follows the subwords on either side, the end symbol and padding, is never linked, and neither is a tag,
    which is part of no word.
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
    """Return, for each text, the numbers of the sentence's words that each subword is part of, and the subwords.

    A text is its sentence as the model reads it: the same words, perhaps in lower case, after a tag that may be added.
    """
    words = [_words_of(subwords, text, len(sentence.split())) for text, sentence in zip(texts, sentences, strict=True)]
    return words, subwords.encode(list(texts))


def _words_of(subwords: Subwords, text: str, count: int) -> list[Words]:
    """Return the words that each subword of a text is part of; the last word has number `count` - 1.

    A blank is part of the word that follows it, or else of the last one.
    """
    read, places = subwords.places(text)
    found = list(re.finditer(r"\S+", read))
    # An added tag is not a word of the sentence
    first = count - len(found)
    # A word that the normalisation rules remove has no subwords
    kept = [(number, word) for number, word in enumerate(found, start=first) if subwords.normalize(word[0])]
    starts = [word.start() for _, word in kept]
    ends = [word.end() for _, word in kept]
    words: list[Words] = []
    for begin, end in places:
        # A character may become several subwords, of which all but the last have an empty span
        low = min(bisect_right(ends, begin), len(kept) - 1)
        high = max(bisect_left(starts, max(end, begin + 1)), low + 1)
        words.append([number for number, _ in kept[low:high] if number >= 0])
    return words

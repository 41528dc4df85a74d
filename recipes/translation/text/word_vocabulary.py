"""A vocabulary of whole words: which of the words of a text are in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import sentencepiece

from recipes.translation.errors import ConfigError
from recipes.translation.settings.config import SubwordConfig
from recipes.translation.text.segmentations import BLANK

UNKNOWN = "<unk>"
"""How a word outside the vocabulary is written."""
SPECIAL = 4
"""Padding, the unknown word, start and end symbol, which are part of `subwords.vocab_size`."""
RESERVED = (UNKNOWN, "<pad>", "<s>", "</s>", "\u2585")
"""What sentencepiece keeps for itself: a word of a text that contains one of these is unknown."""


def chosen_words(sentences: Iterable[str], config: SubwordConfig, symbols: Sequence[str] = ()) -> dict[str, int]:
    """Return the words of a vocabulary and how often each occurs, the most frequent first.

    Words are what blanks separate after sentencepiece's normalisation (NFKC). Those that occur less often than
    `min_count` are left out, and the rarest of the others where there are more than `vocab_size` allows; of equally
    frequent ones the first in the order of their characters stay. The `symbols` are in every vocabulary. Nothing is
    returned for sentences without words; for settings that leave no word, ConfigError.
    """
    counts = counted_words(sentences)
    if not counts:
        return {}
    often = max(counts.values())
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    frequent = [item for item in ranked if item[1] >= config.min_count and is_word(item[0]) and item[0] not in symbols]
    kept = frequent[: max(config.vocab_size - SPECIAL - len(symbols), 0)]
    if not kept:
        raise ConfigError(
            f"subwords.min_count {config.min_count:,} and subwords.vocab_size {config.vocab_size:,} leave none of the "
            f"{len(counts):,} words of the training text: the most frequent one occurs {often:,} times, and "
            f"{SPECIAL + len(symbols):,} places are taken by special words and symbols"
        )
    return {**dict.fromkeys(symbols, often), **dict(kept)}


def is_word(word: str) -> bool:
    """Return whether a word of a text can be in a vocabulary."""
    return not any(name in word for name in RESERVED)


def counted_words(sentences: Iterable[str]) -> Counter[str]:
    """Count the words of sentences, as sentencepiece separates them."""
    normalizer = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc")
    counts: Counter[str] = Counter()
    for sentence in sentences:
        counts.update(word for word in normalizer.normalize(sentence).split(BLANK) if word)
    return counts


def as_training_text(words: dict[str, int]) -> list[str]:
    """Return words with their counts as sentencepiece reads them in its format tsv."""
    return [f"{word}\t{count}" for word, count in words.items()]

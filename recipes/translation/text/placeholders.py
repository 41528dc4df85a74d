"""Placeholders: web and mail addresses and numbers that are replaced before translation and put back afterwards.

The first address of a sentence becomes the symbol <url1>, the second <url2>, and so on; each symbol is one subword. A
training pair keeps what does not stand on both sides as it is, so that the model learns to translate that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.translation.text.pair import Pair

PATTERNS = {
    "url": r"(?:https?://|www\.)[^\s<>\"]*[^\s<>\".,;:!?()\[\]{}'»”]",
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "number": r"\d(?:[\d.,]*\d)?",
}
"""What each kind of placeholder stands for. In a text they are looked for in this order."""
MOST = 9
"""Placeholders of one kind in a sentence; further ones stay as they are."""


def placeholder_symbols(kinds: Sequence[str]) -> list[str]:
    """Return every placeholder of these kinds."""
    return [_symbol(kind, number) for kind in PATTERNS if kind in kinds for number in range(1, MOST + 1)]


def masked(sentence: str, kinds: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the sentence with placeholders, and what each of them stands for."""
    originals = _originals(sentence, kinds)
    return _replaced(sentence, originals, kinds), originals


def masked_pair(pair: Pair, kinds: Sequence[str]) -> Pair:
    """Replace what stands on both sides by the same placeholder on both; the source decides on the numbers."""
    if not kinds:
        return pair
    of_target = set(_found(pair.target, kinds))
    originals = {symbol: text for symbol, text in _originals(pair.source, kinds).items() if text in of_target}
    return Pair(_replaced(pair.source, originals, kinds), _replaced(pair.target, originals, kinds))


def masked_translation(translation: str, sentence: str, kinds: Sequence[str]) -> str:
    """Replace in a translation what the sentence's placeholders stand for, which is what a model sees of it."""
    return _replaced(translation, _originals(sentence, kinds), kinds)


def restored(translation: str, originals: dict[str, str]) -> str:
    """Put back what the placeholders stand for; one that the sentence did not have stays as it is."""
    if not originals:
        return translation
    symbols = "|".join(map(re.escape, originals))
    return re.sub(symbols, lambda match: originals[match[0]], translation)


def _symbol(kind: str, number: int) -> str:
    return f"<{kind}{number}>"


def _pattern(kinds: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in PATTERNS.items() if kind in kinds), re.I)


def _found(sentence: str, kinds: Sequence[str]) -> dict[str, str]:
    """Return the kind of each text that is to be replaced, in the order of the sentence."""
    return {match[0]: str(match.lastgroup) for match in _pattern(kinds).finditer(sentence)}


def _originals(sentence: str, kinds: Sequence[str]) -> dict[str, str]:
    originals: dict[str, str] = {}
    if not kinds:
        return originals
    counts = dict.fromkeys(kinds, 0)
    for text, kind in _found(sentence, kinds).items():
        counts[kind] += 1
        if counts[kind] <= MOST:
            originals[_symbol(kind, counts[kind])] = text
    return originals


def _replaced(sentence: str, originals: dict[str, str], kinds: Sequence[str]) -> str:
    if not originals:
        return sentence
    symbols = {text: symbol for symbol, text in originals.items()}
    return _pattern(kinds).sub(lambda match: symbols.get(match[0], match[0]), sentence)

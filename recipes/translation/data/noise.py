"""Noise in source sentences: other case, typing errors and missing words, as a function of the sentence and a seed.

Models that are trained on clean text alone translate a sentence with typing errors much worse (Belinkov and Bisk 2018,
"Synthetic and natural noise both break neural machine translation").
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from recipes.translation.settings.data import NoiseConfig


def noisy(sentence: str, settings: NoiseConfig, seed: str, kept: Sequence[str] = ()) -> str:
    """Return the sentence with the noise that this seed draws; words in `kept` (tags, symbols) stay as they are.

    Everything is drawn with `random.Random(seed).random()`, which is the same in every version of Python.
    """
    draw = random.Random(seed).random
    change: Callable[[str], str] = str
    if draw() < settings.case:
        change = str.upper
        if draw() < 0.5:
            change = str.lower
    parts = [_without_words(sentence, settings.drop_words, set(kept), draw)]
    if kept:
        parts = re.split("(" + "|".join(map(re.escape, sorted(kept, key=len, reverse=True))) + ")", parts[0])
    # Every second part is one that is kept
    parts[::2] = [_typed(change(part), settings, draw) for part in parts[::2]]
    return "".join(parts)


def _without_words(sentence: str, probability: float, kept: set[str], draw: Callable[[], float]) -> str:
    words = sentence.split()
    own = [index for index, word in enumerate(words) if word not in kept]
    dropped = {index for index in own if probability and draw() < probability}
    if dropped and len(dropped) == len(own):
        dropped.remove(own[int(draw() * len(own))])
    if not dropped:
        return sentence
    return " ".join(word for index, word in enumerate(words) if index not in dropped)


def _typed(text: str, settings: NoiseConfig, draw: Callable[[], float]) -> str:
    """Type a text with errors, each letter with at most one of them."""
    if not (settings.swap or settings.drop or settings.double):
        return text
    typed = []
    position = 0
    while position < len(text):
        letter = text[position]
        following = text[position + 1 : position + 2]
        position += 1
        if not letter.isalpha():
            typed.append(letter)
            continue
        chance = draw()
        if chance < settings.swap:
            if following.isalpha():
                letter = following + letter
                position += 1
        elif chance < settings.swap + settings.drop:
            letter = ""
        elif chance < settings.swap + settings.drop + settings.double:
            letter *= 2
        typed.append(letter)
    return "".join(typed)

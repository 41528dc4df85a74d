"""Translations of a test set, better and worse, for tests of scores."""

from __future__ import annotations

import random

from recipes.translation.data.builtin_corpus import pairs


def references(count: int) -> list[str]:
    """German sentences."""
    return [pair.target for pair in pairs(count, 3, "test")]


def damaged(sentences: list[str], share: float, seed: int) -> list[str]:
    """The same, with a share of their words replaced and some of the sentences in another order."""
    draw = random.Random(seed)
    words = [word for sentence in sentences for word in sentence.split()]
    found = []
    for sentence in sentences:
        changed = [draw.choice(words) if draw.random() < share else word for word in sentence.split()]
        if draw.random() < share:
            draw.shuffle(changed)
        found.append(" ".join(changed))
    return found

"""Phrases that a translation must contain, and how much of them a prefix contains."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

State = tuple[int, ...]
"""The state of each phrase's `Automaton`."""


class Phrase(NamedTuple):
    """Tokens that a translation must contain consecutively."""

    tokens: Sequence[int]
    whole: bool = False
    """Whether the end, or one of the given boundary tokens, must follow, so that `houses` does not satisfy `house`."""


class Automaton:
    """The automaton of Knuth, Morris and Pratt (1977) for a phrase of n tokens.

    State m < n: the last m tokens of the prefix are the first m of the phrase, and m is the largest such number. State
    n: the phrase has just occurred, but what follows decides whether it is whole. State n + 1: it has been met for
    good.
    """

    def __init__(self, phrase: Phrase, boundaries: Collection[int]) -> None:
        self.tokens = list(phrase.tokens)
        self.whole = phrase.whole
        self.boundaries = boundaries
        # fallback[m]: length of the longest start of the phrase, shorter than m, that its first m tokens end with
        self.fallback = [0, 0]
        for token in self.tokens[1:]:
            self.fallback.append(self._longest(self.fallback[-1], token))

    def after(self, state: int, token: int) -> int:
        """Return the state after one more token."""
        length = len(self.tokens)
        if state > length or (state == length and token in self.boundaries):
            return length + 1
        state = self._longest(state, token)
        if state == length and not self.whole:
            return length + 1
        return state

    def _longest(self, state: int, token: int) -> int:
        """Return the length of the longest start of the phrase that the prefix ends with, once `token` is appended."""
        while state and (state == len(self.tokens) or self.tokens[state] != token):
            state = self.fallback[state]
        return state + (self.tokens[state] == token)


class Constraints:
    """The phrases that one sentence's translation must contain, in any order; they may overlap."""

    def __init__(self, phrases: Sequence[Phrase], boundaries: Collection[int] = ()) -> None:
        self.automata = [Automaton(phrase, boundaries) for phrase in phrases]
        self.start: State = (0,) * len(phrases)
        self.total = sum(len(phrase.tokens) for phrase in phrases)
        """Number of tokens in all phrases."""

    def after(self, state: State, token: int) -> State:
        """Return the state after one more token."""
        return tuple(one.after(at, token) for one, at in zip(self.automata, state, strict=True))

    def count_met(self, state: State) -> int:
        """Return how many tokens of the phrases a prefix contains; this is `total` once it may end."""
        return sum(min(at, len(one.tokens)) for one, at in zip(self.automata, state, strict=True))

    def unmet_phrases(self, state: State) -> tuple[int, ...]:
        """Return the numbers of the phrases that a translation lacks if it ends here."""
        pairs = enumerate(zip(self.automata, state, strict=True))
        return tuple(number for number, (one, at) in pairs if at < len(one.tokens))

    def wanted_tokens(self, state: State) -> set[int]:
        """Return the tokens that continue the phrases that are still unmet."""
        pairs = zip(self.automata, state, strict=True)
        return {one.tokens[at] for one, at in pairs if at < len(one.tokens)}

    def awaits_boundary(self, state: State) -> bool:
        """Return whether a phrase has just occurred, but counts only if a boundary follows."""
        return any(at == len(one.tokens) for one, at in zip(self.automata, state, strict=True))


def allot(candidates: Sequence[int], beam: int) -> list[int]:
    """Divide the slots of a beam among banks according to the candidates of each: dynamic beam allocation.

    Each bank gets the same number, the last one also the remainder. A bank with more slots than candidates gives its
    spare ones to the nearest banks that lack slots; of two equally near, to the one with more constraints met.
    """
    slots = [beam // len(candidates)] * len(candidates)
    slots[-1] += beam % len(candidates)
    for bank, count in enumerate(candidates):
        spare = max(0, slots[bank] - count)
        slots[bank] -= spare
        for other in sorted(range(len(candidates)), key=lambda other: (abs(other - bank), -other)):
            taken = min(spare, max(0, candidates[other] - slots[other]))
            slots[other] += taken
            spare -= taken
    return slots

"""Translations with their scores, and how their length enters into these."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Hypothesis(NamedTuple):
    """A translation, its score and its log-probability."""

    tokens: list[int]
    """Token ids without start and end symbols."""
    score: float
    """The log-probability over `length_normaliser`."""
    log_probability: float
    """Summed over the tokens and the end symbol, or over the tokens only if the hypothesis is unfinished."""
    unmet: tuple[int, ...] = ()
    """In `constrained_beam_search`, the numbers of the phrases that it should contain but lacks."""


LengthNorm = Literal["gnmt", "length"]
"""What is raised to the power of the length penalty."""


def length_normaliser(length: int, alpha: float, norm: LengthNorm = "gnmt") -> float:
    """Compute the number that a hypothesis's log-probability is divided by.

    gnmt: ((5 + length) / 6)^alpha, the length penalty of Wu et al. 2016, equation 14.
    length: length^alpha, as in fairseq's generator; with alpha 1 the score is the mean log-probability of a token.

    `length` includes the end symbol. With alpha 0 the number is 1; a larger alpha favours longer translations.
    """
    if norm == "length":
        return float(length**alpha)
    return float(((5 + length) / 6) ** alpha)


def default_limit(length: int) -> int:
    """Return the default number of decoding steps for a source of `length` tokens, including the end symbol."""
    return 2 * length + 10


def best_first(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Sort hypotheses by score."""
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)

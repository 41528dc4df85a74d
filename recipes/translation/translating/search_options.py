"""What one call asks for beyond the decoding settings: how many translations, and what each must contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.translation.errors import ConfigError, DataError
from recipes.translation.settings.config import DecodingConfig


@dataclass(frozen=True)
class Sampling:
    """Draw translations instead of searching for the best."""

    samples: int = 1
    """Number of translations of each sentence."""
    temperature: float = 1.0
    top_k: int | None = None
    """Draw from this many of the most probable subwords; None draws from all."""
    top_p: float = 1.0
    """Draw from the most probable subwords whose probabilities reach this."""
    seed: int = 0


@dataclass(frozen=True)
class SearchOptions:
    """How many translations of each sentence are wanted, and what is demanded of those of each line."""

    n_best: int = 1
    scores: bool = True
    """Whether scores are wanted; otherwise those of a greedy search are nan."""
    prefixes: Sequence[str] | None = None
    """The beginning of each sentence's translation, possibly empty."""
    constraints: Sequence[Sequence[str]] | None = None
    """The phrases that each sentence's translation must contain, possibly none."""
    sampling: Sampling | None = None
    before: int = 0
    """Number of sentences of the same text before these, so that sentence numbers and random seeds continue."""

    def check(self, sentences: Sequence[str], decoding: DecodingConfig) -> None:
        """Raise a one-line ConfigError or DataError for options that contradict the settings or the sentences."""
        if not self.sampling and self.n_best > decoding.beam:
            raise ConfigError(
                f"--n-best {self.n_best} is above the beam of {decoding.beam}: ask for fewer, or add "
                f"--beam {self.n_best}"
            )
        check_lines("--prefixes", self.prefixes, sentences)
        check_lines("--constraints", self.constraints, sentences)


def check_lines(option: str, lines: Sequence[object] | None, sentences: Sequence[str]) -> None:
    """Raise DataError unless there is a line for each sentence."""
    if lines is not None and len(lines) != len(sentences):
        raise DataError(
            f"{option} has {len(lines):,} lines for {len(sentences):,} sentences: give one line for each, empty where "
            "there is nothing to demand"
        )

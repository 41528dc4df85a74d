"""How sentences are translated, beyond the settings of a run: what `translate` has options for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.translation.errors import ConfigError, DataError
from recipes.translation.settings.config import DecodingConfig


@dataclass(frozen=True)
class Sampling:
    """Draw translations instead of searching for the best."""

    samples: int = 1
    """Translations of each sentence."""
    temperature: float = 1.0
    top_k: int | None = None
    """Draw from so many of the most probable subwords; None draws from all."""
    top_p: float = 1.0
    """Draw from the most probable subwords whose probabilities reach this."""
    seed: int = 0


@dataclass(frozen=True)
class SearchOptions:
    """What a translation is to be like, and how many of each sentence are wanted."""

    n_best: int = 1
    min_length: int = 0
    """The fewest subwords of a translation."""
    no_repeat_ngram: int = 0
    """No sequence of so many subwords occurs twice in a translation; 0 lets all repeat."""
    prefixes: Sequence[str] | None = None
    """For each sentence the beginning of its translation, perhaps empty."""
    constraints: Sequence[Sequence[str]] | None = None
    """For each sentence the phrases that its translation must contain, perhaps none."""
    sampling: Sampling | None = None

    def check(self, sentences: Sequence[str], decoding: DecodingConfig) -> None:
        """Raise ConfigError or DataError, as one line, for options that contradict each other or the sentences."""
        if self.sampling and self.constraints is not None:
            raise ConfigError("--constraints needs a search, and --sample draws translations: leave one of them out")
        if self.sampling and self.n_best > 1:
            raise ConfigError("--n-best searches and --sample draws translations: give --sample the number, or search")
        if not self.sampling and self.n_best > decoding.beam:
            raise ConfigError(
                f"--n-best {self.n_best} is above the beam of {decoding.beam}: ask for fewer, or add "
                f"--beam {self.n_best}"
            )
        if self.min_length >= decoding.max_length:
            raise ConfigError(
                f"--min-length {self.min_length} leaves no translation of at most {decoding.max_length} steps, the "
                "run's decoding.max_length, the last of them for the end: ask for less"
            )
        check_lines("--prefixes", self.prefixes, sentences)
        check_lines("--constraints", self.constraints, sentences)


def check_lines(option: str, lines: Sequence[object] | None, sentences: Sequence[str]) -> None:
    """Raise DataError unless there is a line for each sentence, and an empty one for an empty sentence."""
    if lines is None:
        return
    if len(lines) != len(sentences):
        raise DataError(
            f"{option} has {len(lines):,} lines for {len(sentences):,} sentences: give one line for each, empty where "
            "there is nothing to demand"
        )
    for number, (line, sentence) in enumerate(zip(lines, sentences, strict=True), start=1):
        if line and not sentence.strip():
            raise DataError(f"{option}: line {number:,} is not empty, but sentence {number:,} is: remove one of them")

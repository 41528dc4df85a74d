"""Settings of the noise in training sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from recipes.translation.settings.schema import Help, Range

Probability = Range(at_least=0, below=1)


@dataclass(frozen=True)
class NoiseConfig:
    """Noise in the source sentences of the training data, drawn anew in every epoch."""

    case: Annotated[
        float,
        Help("Probability that a sentence is written in capitals or in lower case, half of the time each."),
        Probability,
    ] = 0.0
    swap: Annotated[float, Help("Probability of a letter to change places with the next one."), Probability] = 0.0
    drop: Annotated[float, Help("Probability of a letter to be left out."), Probability] = 0.0
    double: Annotated[float, Help("Probability of a letter to be written twice."), Probability] = 0.0
    drop_words: Annotated[float, Help("Probability of a word to be left out; one word always stays."), Probability] = (
        0.0
    )

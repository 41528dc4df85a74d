"""The settings of translation, which are options of every command that translates, and of `LoadedTranslator`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from recipes.translation.settings.schema import Help, Range


@dataclass(frozen=True)
class DecodingConfig:
    """Translation."""

    beam: Annotated[int, Help("Beam width, at most 1,000; 1 is greedy."), Range(at_least=1, below=1_001)] = 4
    length_penalty: Annotated[
        float, Help("Exponent of the length penalty; 0 has none."), Range(at_least=0, below=50)
    ] = 0.6
    length_norm: Annotated[
        Literal["gnmt", "length"],
        Help(
            "What a hypothesis's log-probability is divided by, with the length penalty as exponent: gnmt "
            "((5 + length) / 6) | length (as in fairseq)."
        ),
    ] = "gnmt"
    batch_sentences: Annotated[
        int, Help("Sentences translated at a time; changes the speed, not the translations."), Range(at_least=1)
    ] = 64
    max_length: Annotated[
        int,
        Help(
            "Most subwords of a translation; for a short sentence the limit is twice its own subwords plus 12. A "
            "longer sentence is cut to this or to training.max_length, whichever is more."
        ),
        Range(at_least=1),
    ] = 256
    min_length: Annotated[int, Help("Fewest subwords of a translation."), Range(at_least=0)] = 0
    no_repeat_ngram: Annotated[
        int,
        Help("No sequence of so many subwords occurs more than once in a translation; 0 lets all repeat."),
        Range(at_least=0),
    ] = 0

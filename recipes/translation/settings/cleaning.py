"""Settings of the rules that clean the training data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from recipes.translation.settings.schema import Help, Range


@dataclass(frozen=True)
class CleaningConfig:
    """Rules by which training pairs are removed; the log counts the pairs that each rule removes."""

    max_words: Annotated[
        int | None, Help("Remove pairs with more words than this on a side; null has no limit."), Range(at_least=1)
    ] = None
    max_characters: Annotated[
        int | None,
        Help("Remove pairs with more characters than this on a side; null has no limit."),
        Range(at_least=1),
    ] = None
    max_ratio: Annotated[
        float | None,
        Help("Remove pairs with a side above this many times as long as the other, in characters; null has no limit."),
        Range(at_least=1),
    ] = None
    script: Annotated[
        bool,
        Help(
            "Remove pairs in which most letters of a side are in a script that its language does not use. The "
            "language is an ISO 639 code (de, deu), which may name the script itself (sr-Cyrl, zho_Hant)."
        ),
    ] = False
    encoding: Annotated[
        bool, Help("Remove pairs with replacement or control characters, or with UTF-8 that was read as Latin-1.")
    ] = False
    copies: Annotated[bool, Help("Remove pairs with the same text on both sides.")] = False
    duplicates: Annotated[bool, Help("Keep only the first of several equal pairs.")] = False

"""Phrases that translations must contain, turned from text into subwords."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from models import Phrase
from recipes.translation.errors import DataError
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.model_text import one_line, same_text
from recipes.translation.text.segmentations import BLANK


def phrases_of(translator: Translator, constraints: Sequence[Sequence[str]]) -> list[list[Phrase]]:
    """Return each sentence's phrases as subwords; raise DataError for a phrase that has none.

    If the last character has an upper and a lower case, or is a digit, the phrase must end where a word ends. Other
    scripts need not separate words, so only the subwords count there, without a blank before the first.
    """
    pieces = translator.target.pieces()
    return [
        [phrase_of(translator, text, pieces, f"sentence {number:,}") for text in texts]
        for number, texts in enumerate(constraints, start=1)
    ]


def phrase_of(translator: Translator, text: str, pieces: Sequence[str], where: str) -> Phrase:
    """Return one phrase as subwords."""
    text = translator.text.target(text)
    ids = translator.target.encode([text])[0]
    if ids and pieces[ids[0]] == BLANK and not in_words(text.lstrip()[0]):
        ids = ids[1:]
    if not ids:
        raise DataError(f"--constraints: {text!r} of {where} has no subwords, only what sentencepiece leaves out")
    check_letters(translator, text, f"--constraints: {text!r} of {where}")
    return Phrase(ids, whole=in_words(text.rstrip()[-1]))


def check_letters(translator: Translator, text: str, what: str) -> None:
    """Raise DataError for text that the model would write in a different form."""
    (written,) = translator.target.respell([text])
    if not same_text(text, one_line(written)):
        raise DataError(
            f"{what} cannot be written as it is: with subwords.normalization {translator.target.normalization} this "
            f"model writes {written!r}; demand that"
        )


def word_boundaries(translator: Translator) -> list[int]:
    """Return the subwords that do not continue the word before them."""
    # Control pieces such as <s>, and bytes of any character, may continue a word
    return [number for number, piece in enumerate(translator.target.texts) if piece and begins_anew(piece)]


def begins_anew(piece: str) -> bool:
    """Return whether a piece starts a word, or starts with a punctuation mark or symbol."""
    return piece.startswith(BLANK) or unicodedata.category(piece[0])[0] in "PSZ"


def in_words(character: str) -> bool:
    """Return whether a character belongs to a script that separates words."""
    return character.isdigit() or character.lower() != character.upper()

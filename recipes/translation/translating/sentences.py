"""Sentences as a model reads them: in subwords, and cut to the longest length that the settings allow."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence

from recipes.translation.errors import DataError
from recipes.translation.text.model_text import ModelText
from recipes.translation.text.subwords import TAG, UNK, Subwords


def source_ids(subwords: Subwords, text: ModelText, sentences: Sequence[str], before: int = 0) -> list[list[int]]:
    """Return the subwords of each sentence, as in training, cut to the longest length that the settings allow.

    Messages number the sentences after the `before` ones that precede them.
    """
    check_unicode(sentences, before)
    for number, sentence in enumerate(sentences, start=before + 1):
        if reason := unknown_tag(subwords, text, sentence):
            raise DataError(f"sentence {number:,} {reason}")
    ids = subwords.encode([text.source(sentence) for sentence in sentences])
    tags = {tag for row in subwords.encode(list(text.tags)) for tag in row} - {UNK}
    # Of a line without subwords of its own (only control characters, say) only the tag is left
    ids = [row if any(subword not in tags for subword in row) else [] for row in ids]
    cut = [number for number, row in enumerate(ids, start=before + 1) if len(row) > text.longest]
    if cut:
        first = cut[0]
        subject = f"{len(cut):,} sentences are"
        if len(cut) == 1:
            subject = "1 sentence is"
        print(
            f"[translate] {subject} cut to {text.longest:,} "
            f"subwords, the larger of training.max_length and decoding.max_length: sentence {first:,} has "
            f"{len(ids[first - before - 1]):,}; split what is longer into sentences",
            file=sys.stderr,
        )
    return [row[: text.longest] for row in ids]


def refusals(subwords: Subwords, text: ModelText, lines: Sequence[str]) -> dict[int, str]:
    """Return why lines cannot be translated, by index: not Unicode, an unknown tag, or longer than the model reads."""
    found = {
        place: reason
        for place, line in enumerate(lines)
        if (reason := not_unicode(line) or unknown_tag(subwords, text, line))
    }
    readable = [place for place in range(len(lines)) if place not in found]
    ids = subwords.encode([text.source(lines[place]) for place in readable])
    for place, row in zip(readable, ids, strict=True):
        if len(row) > text.longest:
            found[place] = (
                f"has {len(row):,} subwords, but the model reads at most {text.longest:,}: split it into sentences, "
                "one per line"
            )
    return found


def unknown_tag(subwords: Subwords, text: ModelText, sentence: str) -> str:
    """Return what is wrong with a sentence that begins with the tag of a language that the model does not have."""
    known = subwords.tags | {tag for tag in text.tags if tag.startswith("<2")}
    found = re.match(rf"\s*({TAG}|<2[\w-]+>)", sentence)
    if not found or found[1] in known or not any(tag[:2] == found[1][:2] for tag in known):
        return ""
    near = difflib.get_close_matches(found[1], known, n=3, cutoff=0) or sorted(known)[:3]
    return f"begins with {found[1]}, but the model has no such language: it has {len(known)}, such as {', '.join(near)}"


def check_unicode(sentences: Sequence[str], before: int = 0) -> None:
    """Raise DataError for text that is not Unicode, as Python produces from an argument in another encoding."""
    for number, sentence in enumerate(sentences, start=before + 1):
        if reason := not_unicode(sentence):
            raise DataError(f"sentence {number:,} {reason}")


def not_unicode(sentence: str) -> str:
    """Return what is wrong with a sentence that is not Unicode; "" for any other."""
    try:
        sentence.encode()
    except UnicodeEncodeError as error:
        near = sentence[max(0, error.start - 20) : error.end + 20]
        return f"is not UTF-8 text: {near!a}; convert it to UTF-8"
    return ""

"""What a request asks for, read from its fields, checked and split into lines."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from recipes.translation.serve.batching import Line, Model, Wanted
from recipes.translation.serve.bodies import Limits, quote

IGNORED = ("api_key", "secret")
"""Fields that LibreTranslate's clients send but that mean nothing here."""


@dataclass(frozen=True)
class Translate:
    """A request to translate texts, in the format of LibreTranslate's clients."""

    texts: list[str]
    several: bool
    """Whether the texts were given as a list, and so are returned as one."""
    wanted: Wanted

    @property
    def lines(self) -> list[str]:
        """Return the lines of all texts, without carriage returns at their ends."""
        return [line.removesuffix("\r") for text in self.texts for line in text.split("\n")]

    def answer(self, found: Sequence[Line]) -> dict[str, object]:
        """Return the translations, each with the line breaks of its text."""
        best, *others = (self._texts(found, rank) for rank in range(self.wanted.n_best))
        fields: dict[str, Any] = {"translatedText": best}
        if others:
            fields["alternatives"] = [list(of_text) for of_text in zip(*others, strict=True)]
        if not self.several:
            fields = {name: of_each[0] for name, of_each in fields.items()}
        return fields

    def _texts(self, found: Sequence[Line], rank: int) -> list[str]:
        """Return the texts with each line's translation of this rank, or its last if it has fewer."""
        each = iter(found)
        texts = []
        for text in self.texts:
            lines = []
            for line in text.split("\n"):
                translations = next(each).translations
                end = "\r" * line.endswith("\r")
                lines.append(translations[min(rank, len(translations) - 1)].text + end)
            texts.append("\n".join(lines))
        return texts


def parse_translate(fields: Mapping[str, object], models: Sequence[Model], limits: Limits) -> Translate:
    """Return what the fields of `POST /translate` ask for; raise HTTPException for what is missing or wrong."""
    check_names(fields, ("q", "source", "target", "format", "alternatives"))
    q = fields.get("q")
    several = isinstance(q, list)
    texts = strings(q if several else [q])
    if texts is None:
        raise HTTPException(400, "q is the text to translate: send a string, or a list of strings")
    if (form := fields.get("format", "text")) != "text":
        raise HTTPException(400, f"format is {quote(form)}: only text is translated, not markup")
    number = model_of(fields, models)
    n_best = 1 + whole(fields, "alternatives", 0, 0, models[number].beam - 1)
    asked = Translate(texts, several, Wanted(number, n_best))
    check_size(asked.lines, limits)
    return asked


def parse_lines(fields: Mapping[str, object], models: Sequence[Model], limits: Limits) -> tuple[Wanted, list[str]]:
    """Return what the fields of `POST /lines` ask for; raise HTTPException for what is missing or wrong."""
    check_names(fields, ("model", "lines", "n_best", "links"))
    lines = strings(fields.get("lines"))
    if lines is None:
        raise HTTPException(400, "lines are what to translate: send a list of strings")
    if any("\n" in line for line in lines):
        raise HTTPException(400, "one of the lines has a line break: send the lines one by one")
    links = fields.get("links", False)
    if not isinstance(links, bool):
        raise HTTPException(400, f"links is {quote(links)}: send true or false")
    model = whole(fields, "model", 0, 0, len(models) - 1)
    n_best = whole(fields, "n_best", 1, 1, models[model].beam)
    check_size(lines, limits)
    return Wanted(model, n_best, links), lines


def line_answer(line: str, found: Line) -> dict[str, object]:
    """Return a line's translations, its words and those of the best translation, and their links; or an error."""
    if found.refused:
        return {"error": found.refused}
    return {
        "translations": [translation._asdict() for translation in found.translations],
        "source_words": line.split(),
        "target_words": found.translations[0].text.split(),
        "links": found.links,
    }


def strings(value: object) -> list[str] | None:
    """Return a list of strings as such; None for anything else."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        return None
    return value


def model_of(fields: Mapping[str, object], models: Sequence[Model]) -> int:
    """Return the number of the first model that translates between the languages of the request."""
    source, target = (fields.get(name) for name in ("source", "target"))
    for name, given in (("source", source), ("target", target)):
        if not isinstance(given, str) or not given:
            known = ", ".join(sorted({getattr(model, name) for model in models}))
            raise HTTPException(400, f"{name} is missing: name a language, one of {known}")
    if source == "auto":
        raise HTTPException(400, "source is auto, and languages are not detected here: name the language of the text")
    for number, model in enumerate(models):
        if (model.source, model.target) == (source, target):
            return number
    pairs = ", ".join(sorted({f"{model.source} to {model.target}" for model in models}))
    raise HTTPException(400, f"{quote(source)} to {quote(target)} is not supported: the models here translate {pairs}")


def whole(fields: Mapping[str, object], name: str, default: int, least: int, most: int) -> int:
    """Return a whole number from the request; in a form it is text."""
    found = fields.get(name, default)
    if isinstance(found, str) and found.isascii() and found.isdecimal() and len(found) < 10:
        found = int(found)
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
        raise HTTPException(400, f"{name} is {quote(found)}: send a whole number from {least} to {most}")
    return found


def check_names(fields: Mapping[str, object], known: Sequence[str]) -> None:
    """Raise HTTPException for an unknown field, suggesting the nearest known one."""
    for name in fields:
        if name in known or name in IGNORED:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        hint = "the fields are " + ", ".join(known)
        if near:
            hint = f"did you mean {near[0]}?"
        raise HTTPException(400, f"unknown field {quote(name)}; {hint}")


def check_size(lines: Sequence[str], limits: Limits) -> None:
    """Raise HTTPException for more text than a request may have."""
    characters = sum(map(len, lines))
    for what, found, most in (("lines", len(lines), limits.lines), ("characters", characters, limits.characters)):
        if found > most:
            message = f"the text has {found:,} {what}, and at most {most:,} are translated at a time"
            raise HTTPException(413, message)

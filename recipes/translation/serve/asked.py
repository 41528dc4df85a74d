"""What a request asks for: its body is read within limits, its fields are checked, and its text is split into lines."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from recipes.translation.files.json_fields import parse_json
from recipes.translation.serve.batching import Line, Model, Wanted


@dataclass(frozen=True)
class Limits:
    """How much the service accepts."""

    body_bytes: int = 2**20
    body_seconds: float = 20.0
    """Time within which a request's body must have arrived."""
    characters: int = 50_000
    """Per request."""
    lines: int = 1_000
    """Per request."""
    queued_lines: int = 5_000
    """In all waiting requests together."""
    connections: int = 512
    """The most connections, and also the most requests, at the same time."""
    header_seconds: float = 10.0
    """Time within which a client must have sent the header of a request."""
    answer_seconds: float = 120.0
    """Time from the end of a request's body to its translation."""


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error in LibreTranslate's format."""
    return JSONResponse({"error": message}, status, headers)


JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


async def fields_of(request: Request, limits: Limits) -> dict[str, object]:
    """Read the fields of the query string and of the body, a JSON object or a form.

    Raises HTTPException, with a one-line detail, for anything else, for a field that is given twice, and for a body
    that is too large or too slow.
    """
    query = request.scope["query_string"]
    asked = form_of(text_of(query, "query string"), "query string")
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    if query and empty:
        return asked
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (JSON, FORM):
        raise HTTPException(415, f"Content-Type is {kind or 'missing'}: send {JSON} or {FORM}")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "Content-Encoding is not supported: send the body uncompressed")
    text = text_of(await body_of(request, limits), "body")
    fields = object_of(text) if kind == JSON else form_of(text, "body")
    return once([*asked.items(), *fields.items()])


def text_of(content: bytes, what: str) -> str:
    """Decode UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"the {what} is not UTF-8 text, at byte {error.start:,}") from None


async def body_of(request: Request, limits: Limits) -> bytes:
    """Read the body; raise HTTPException as soon as it is known to exceed the limit, or if it takes too long."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.body_bytes:
        raise too_large(f"{int(announced):,}", limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise too_large(f"more than {limits.body_bytes:,}", limits)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_seconds:g} seconds: send the request again"
        raise HTTPException(408, message, {"Connection": "close"}) from None
    return bytes(body)


def too_large(size: str, limits: Limits) -> HTTPException:
    """Return the error for a body of this size."""
    return HTTPException(
        413, f"the body has {size} bytes, and at most {limits.body_bytes:,} are read: send less at a time"
    )


def object_of(text: str) -> dict[str, object]:
    """Decode a JSON object."""
    try:
        found = parse_json(text, once)
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise HTTPException(400, 'the body is not a JSON object: send {"q": ..., "source": ..., "target": ...}')
    return found


def form_of(text: str, what: str) -> dict[str, object]:
    """Decode a form."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), errors="strict")
    except ValueError as error:
        raise HTTPException(400, f"the {what} is not a form in UTF-8: {' '.join(str(error).split())}") from None
    return once(pairs)


def once(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Return fields by name; raise HTTPException for a field that is given twice, since one value would be lost."""
    fields: dict[str, object] = {}
    for name, value in pairs:
        if name in fields:
            raise HTTPException(400, f"{quote(name)} is given twice: send it once, and several texts as a list in JSON")
        fields[name] = value
    return fields


def quote(value: object) -> str:
    """Return a value as it is shown in an error, shortened if it is long."""
    text = ascii(value)
    if len(text) > 60:
        text = text[:60] + "..."
    return text


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

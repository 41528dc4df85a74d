"""JSON of files: how it is parsed, what each field must be, and the line that says which of them is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

MISSING = object()
"""The value of a field that an object does not have."""
Check = Callable[[Any, str], None]
"""Raises WrongFieldError for a value that is not what it must be; the text is the name of its field."""


def parse_json(text: str | bytes, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON, each object by `make_object`; raise ValueError also for what is nested too deeply for Python."""
    try:
        return json.loads(text, object_pairs_hook=make_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, check: Check = lambda found, field: None) -> Any:
    """Read a saved JSON file; raise ValueError where it is none, or not what `check` asks for."""
    found = parse_json(path.read_text(encoding="utf-8"))
    check(found, "")
    return found


def field_in(path: Path, *names: str | int) -> Any:
    """Return a field of a JSON file, by its name and those around it; None if it cannot be read, for any reason."""
    try:
        found = read_json(path)
        for name in names:
            found = found[name]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found


class WrongFieldError(ValueError):
    """A field has a value of another kind, or none."""

    def __init__(self, field: str, found: object, what: str) -> None:
        name = field or "it"
        if not name.isprintable():  # a line break in a name
            name = ascii(name)
        super().__init__(f"{name} is {_quote(found)}, and must be {what}")


def value(what: str, fits: Callable[[Any], bool]) -> Check:
    """Return the check of a single value."""

    def check(found: Any, field: str) -> None:
        if not fits(found):
            raise WrongFieldError(field, found, what)

    return check


def maybe(check: Check) -> Check:
    """Return the check of a field that may be missing, or null."""
    return lambda found, field: None if found is MISSING or found is None else check(found, field)


def each(check: Check) -> Check:
    """Return the check of a list and its items."""

    def check_items(found: Any, field: str) -> None:
        if not isinstance(found, list):
            raise WrongFieldError(field, found, "a list")
        for number, item in enumerate(found):
            check(item, f"{field}[{number}]")

    return check_items


def fields(checks: Mapping[str, Check], fits: Callable[[Any], bool] = lambda found: True, what: str = "") -> Check:
    """Return the check of an object: of its fields by their names or patterns, and of whether these fit each other.

    Other fields may be anything.
    """

    def check(found: Any, field: str) -> None:
        if not isinstance(found, dict):
            raise WrongFieldError(field, found, "an object of fields")
        for pattern, check_field in checks.items():
            names = [pattern]
            if "*" in pattern:
                names = [name for name in found if fnmatchcase(name, pattern)]
            for name in names:
                check_field(found.get(name, MISSING), f"{field}.{name}".removeprefix("."))
        if not fits(found):
            raise WrongFieldError(field, found, what)

    return check


def is_whole(found: object) -> bool:
    """Return whether a value of JSON is a whole number; true and false are not."""
    return isinstance(found, int) and not isinstance(found, bool)


def _quote(found: object) -> str:
    """Return a value as the file has it, shortened and in one line."""
    if found is MISSING:
        return "missing"
    try:
        text = json.dumps(found, ensure_ascii=False)
        if not text.isprintable():
            text = json.dumps(found)
    except RecursionError:
        return "a value of too many levels"
    if len(text) > 60:
        return f"{text[:57]}..."
    return text


TEXT = value("text", lambda found: isinstance(found, str))
OBJECT = fields({})
TEXTS = each(TEXT)

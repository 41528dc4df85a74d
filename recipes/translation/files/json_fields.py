"""JSON files: how they are parsed, what each field must be, and a one-line error for a field that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

MISSING = object()
"""Stands for the value of a field that an object does not have."""
Check = Callable[[Any, str], None]
"""Raises WrongFieldError for a value that is not what it must be; the second argument is the name of its field."""


def parse_json(text: str | bytes, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON, with `make_object` for each object; raise ValueError, even if it is nested too deeply for Python."""
    try:
        return json.loads(text, object_pairs_hook=make_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, check: Check = lambda found, field: None) -> Any:
    """Read a saved JSON file; raise ValueError if it is not JSON, or not what `check` requires."""
    found = parse_json(path.read_text(encoding="utf-8"))
    check(found, "")
    return found


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a new JSON file, indented for people."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def field_in(path: Path, *names: str | int) -> Any:
    """Return the field of a JSON file at a path of nested keys; None if it cannot be read, for any reason."""
    try:
        found = read_json(path)
        for name in names:
            found = found[name]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found


class WrongFieldError(ValueError):
    """A field has the wrong kind of value, or is missing."""

    def __init__(self, field: str, found: object, what: str) -> None:
        name = field or "it"
        if not name.isprintable():  # such as a name with a line break
            name = ascii(name)
        super().__init__(f"{name} is {_quote(found)}, but must be {what}")


def value(what: str, fits: Callable[[Any], bool]) -> Check:
    """Return a check for a single value."""

    def check(found: Any, field: str) -> None:
        if not fits(found):
            raise WrongFieldError(field, found, what)

    return check


def maybe(check: Check) -> Check:
    """Return a check for a field that may be missing or null."""
    return lambda found, field: None if found is MISSING or found is None else check(found, field)


def each(check: Check) -> Check:
    """Return a check for a list and its items."""

    def check_items(found: Any, field: str) -> None:
        if not isinstance(found, list):
            raise WrongFieldError(field, found, "a list")
        for number, item in enumerate(found):
            check(item, f"{field}[{number}]")

    return check_items


def fields(checks: Mapping[str, Check], fits: Callable[[Any], bool] = lambda found: True, what: str = "") -> Check:
    """Return a check for an object: for its fields, by names or patterns, and for whether they fit together.

    Other fields may be anything.
    """

    def check(found: Any, field: str) -> None:
        if not isinstance(found, dict):
            raise WrongFieldError(field, found, "an object")
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
    """Return whether a JSON value is a whole number; true and false are not."""
    return isinstance(found, int) and not isinstance(found, bool)


def _quote(found: object) -> str:
    """Return a value as it is in the file, shortened and on one line."""
    if found is MISSING:
        return "missing"
    try:
        text = json.dumps(found, ensure_ascii=False)
        if not text.isprintable():
            text = json.dumps(found)
    except RecursionError:
        return "a value nested too deeply"
    if len(text) > 60:
        return f"{text[:57]}..."
    return text


TEXT = value("text", lambda found: isinstance(found, str))
OBJECT = fields({})
TEXTS = each(TEXT)

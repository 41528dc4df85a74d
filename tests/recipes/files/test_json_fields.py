"""JSON of files that may be damaged, or say something else than they must."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.translation.files.json_fields import noted_in, parsed

UNREADABLE = {
    "not UTF-8": b'{"a": ["\xff"]}',
    "cut off": b'{"a": [3]',
    "nested too deeply": b"[" * 100_000,
    "another name": b'{"b": [3]}',
    "an empty list": b'{"a": []}',
    "a list": b"[[3]]",
    "null": b"null",
}


@pytest.mark.parametrize("content", [*UNREADABLE.values(), None, ...], ids=[*UNREADABLE, "no file", "a folder"])
def test_a_field_that_cannot_be_read_is_none_whatever_is_wrong(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    assert noted_in(path, "a", 0) is None


def test_a_field_is_named_from_the_outside_in(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text('{"a": [3, {"b": "ü"}]}', encoding="utf-8")
    assert noted_in(tmp_path / "facts.json", "a", 1, "b") == "ü"
    assert noted_in(tmp_path / "facts.json") == {"a": [3, {"b": "ü"}]}


def test_json_that_is_nested_too_deeply_is_none() -> None:
    with pytest.raises(ValueError, match="it is nested too deeply"):
        parsed("[" * 100_000)

"""What a block opens, makes, renames and flushes, as Python's audit hooks tell it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Event:
    """A change of the disk; `inside` are the files of a folder that is renamed."""

    what: str
    path: Path
    to: Path | None = None
    inside: tuple[Path, ...] = ()


_events: list[Event] | None = None
_files: list[Path] | None = None


def _note(name: str, arguments: tuple[Any, ...]) -> None:
    if _files is not None and name == "open" and isinstance(arguments[0], (str, os.PathLike)):
        _files.append(_absolute(arguments[0]))
    if _events is None:
        return
    if name == "open" and isinstance(arguments[0], (str, os.PathLike)) and arguments[2] & WRITES:
        _events.append(Event("opened", _absolute(arguments[0])))
    elif name == "os.mkdir":
        _events.append(Event("made", _absolute(arguments[0])))
    elif name == "os.rename":
        path, to = map(_absolute, arguments[:2])
        _events.append(Event("renamed", path, to, tuple(path.iterdir()) if path.is_dir() else ()))


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(path))


sys.addaudithook(_note)  # for good: Python cannot remove one


@contextmanager
def watched() -> Iterator[list[Event]]:
    """Collect the events of the block."""
    global _events
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        events.append(Event("flushed", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    events: list[Event] = []
    with mock.patch.object(os, "fsync", noted):
        _events = events
        try:
            yield events
        finally:
            _events = None


@contextmanager
def opened_files() -> Iterator[list[Path]]:
    """Collect the files that the block opens, once for each time."""
    global _files
    files: list[Path] = []
    _files = files
    try:
        yield files
    finally:
        _files = None

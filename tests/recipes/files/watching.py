"""What a block opens, makes, renames and flushes, as Python's audit hooks tell it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import recipes.translation

PRODUCT = os.path.dirname(recipes.translation.__file__)
STANDARD_LIBRARY = os.path.dirname(os.__file__)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Event:
    """A change of the disk; `late` is what a renamed file or folder holds that the disk may not have yet."""

    what: str
    path: Path
    to: Path | None = None
    late: tuple[Path, ...] = ()
    by_test: bool = False


_watches: list[tuple[list[Event], set[tuple[int, ...]]]] = []
"""The events of each block, and the files and folders as they were when they were flushed."""
_files: list[Path] | None = None


def _note(name: str, arguments: tuple[Any, ...]) -> None:
    if _files is not None and name == "open" and isinstance(arguments[0], (str, os.PathLike)):
        _files.append(_absolute(arguments[0]))
    for events, flushed in _watches:
        if name == "open" and isinstance(arguments[0], (str, os.PathLike)) and arguments[2] & WRITES:
            events.append(Event("opened", _absolute(arguments[0])))
        elif name == "os.mkdir":
            events.append(Event("made", _absolute(arguments[0])))
        elif name == "os.rename" and os.path.lexists(arguments[0]):
            path, to = map(_absolute, arguments[:2])
            whole = [path, *path.rglob("*")] if path.is_dir() else [path]
            late = tuple(each for each in whole if _state(each) not in flushed)
            events.append(Event("renamed", path, to, late, by_test=not _caller().startswith(PRODUCT)))


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(path))


sys.addaudithook(_note)  # for good: Python cannot remove one


def _caller() -> str:
    """The file that has called the standard library."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in (__file__, "<frozen os>") or frame.f_code.co_filename.startswith(
        STANDARD_LIBRARY
    ):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code.co_filename


def _state(file: Path | int) -> tuple[int, ...]:
    """A file or folder by its number, and by what a later change of it alters."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def watched() -> Iterator[list[Event]]:
    """Collect the events of the block."""
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(_state(descriptor))
        events.append(Event("flushed", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    events: list[Event] = []
    flushed: set[tuple[int, ...]] = set()
    with mock.patch.object(os, "fsync", noted):
        _watches.append((events, flushed))
        try:
            yield events
        finally:
            _watches.pop()


def not_on_the_disk(events: list[Event]) -> list[str]:
    """What a power failure could lose of the names that stand at the end: contents, or the names themselves."""
    wrong = []
    for number, event in enumerate(events):
        # What is hidden is complete or removed later, and a retired folder holds what others have put there
        if (
            event.to is None
            or event.by_test
            or any(part.startswith(".") for part in (event.to.name, event.path.parent.name))
        ):
            continue
        wrong += [f"{path} was renamed to {event.to} before it was flushed" for path in event.late]
        flushed = {each.path for each in events[number:] if each.what == "flushed"}
        if not flushed & {event.to.parent, event.to.parent.resolve()}:
            wrong.append(f"the name {event.to} was not flushed")
    return wrong


def done_by_two(rounds: int, work: Callable[[int], None], check: Callable[[], None]) -> None:
    """Let two threads, 1 and 2, do something at the same moment, again and again, and look at what is left."""
    both = threading.Barrier(2)

    def repeat(number: int) -> None:
        for _ in range(rounds):
            both.wait(60)
            work(number)
            both.wait(60)
            check()

    with ThreadPoolExecutor() as pool:
        # Both have ended then: an error of one leaves the other waiting for it, whose own error is not the reason
        raised = [done.exception() for done in [pool.submit(repeat, number) for number in (1, 2)]]
    for error in sorted(filter(None, raised), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error


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

"""What a training prints, written with timestamps to a file of its run as well as to the screen."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any

from recipes.translation.files.writing import adding_to, writing_to

LOG = "train.log"
"""The file in a run's folder."""
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Escape sequences that move a terminal's cursor or colour its text."""


class Copied:
    """A stream whose complete lines are also written to a file."""

    def __init__(self, stream: Any, file: IO[bytes]) -> None:
        self._stream = stream
        self._file = file
        self._rest = ""

    def write(self, text: str) -> int:
        """Write to the stream, and complete lines to the file; of a redrawn line only its last state."""
        written: int = self._stream.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            said = ANSI.sub("", line).rpartition("\r")[2]
            if said.strip():
                note(self._file, said)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def note(file: IO[bytes], line: str) -> None:
    """Write a line with the time; ignore errors, since a full disk must not end a training because of its log."""
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    with suppress(OSError):
        file.write(f"{now} {line}\n".encode(errors="backslashreplace"))
        file.flush()


def note_in(path: Path, text: str) -> None:
    """Add the lines of a text to a file, each with the time."""
    with writing_to(path), adding_to(path) as file:
        for line in text.splitlines():
            note(file, line)


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Within the block, append what is printed to the file at `path`, and any error that ends it; times are UTC."""
    with ExitStack() as held:
        with writing_to(path):
            file = held.enter_context(adding_to(path))
        held.enter_context(redirect_stdout(Copied(sys.stdout, file)))
        held.enter_context(redirect_stderr(Copied(sys.stderr, file)))
        try:
            yield
        except BaseException as error:
            note(file, f"error: {type(error).__name__}: {' '.join(str(error).split())}".rstrip(": "))
            if {entry.name for entry in path.parent.iterdir()} <= {path.name, ".lock"}:
                # Leave no file behind in a folder in which nothing else was written
                path.unlink()
            raise

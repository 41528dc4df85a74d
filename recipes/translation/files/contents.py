"""The SHA-256 of files, taken while they are read."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

Opened = Callable[[Path], io.BufferedReader]
"""Opens a file for reading its bytes."""


def opened(path: Path) -> io.BufferedReader:
    """Open a file for reading its bytes."""
    return path.open("rb")


class Contents:
    """The size and the SHA-256 of each file that `opened` has opened, once it is read to its end."""

    def __init__(self) -> None:
        self._files: dict[Path, _Noted] = {}

    def opened(self, path: Path) -> io.BufferedReader:
        """Open a file for reading its bytes, which are noted."""
        self._files[path] = _Noted(path)
        return io.BufferedReader(self._files[path], 1 << 16)

    @property
    def whole(self) -> bool:
        """Return whether any file was opened, and all were read to their ends."""
        return bool(self._files) and all(file.ended for file in self._files.values())

    def of(self, path: Path) -> tuple[int, bytes]:
        """Return the size and the SHA-256 of a file: as it was read, or else as it is."""
        file = self._files.get(path)
        if file is not None and file.ended:
            return file.size, file.digest.digest()
        with path.open("rb") as unread:
            digest = hashlib.file_digest(unread, "sha256").digest()
            return unread.tell(), digest


class _Noted(io.FileIO):
    """A file of which the SHA-256 is taken as its bytes pass."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.digest = hashlib.sha256()
        self.size = 0
        self.ended = False

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = super().readinto(buffer)
        self.digest.update(buffer[:count])
        self.size += count
        self.ended = count == 0
        return count

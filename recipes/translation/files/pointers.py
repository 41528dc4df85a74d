"""Pointers: small files that name numbered folders near them, and are replaced as a whole.

    $ cat runs/mine/best
    checkpoints/step-00000200

A pointer is a file rather than a symbolic link, since a link could lead out of the folder, not every file system has
links, and programs that copy folders disagree on whether to follow them.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from recipes.translation.errors import CheckpointError

NUMBERED = "checkpoints"
"""The folder that contains the numbered folders that a pointer can name."""
_NAME = re.compile(rf"{NUMBERED}/step-\d{{8,20}}")
_LONGEST = 1_000_000
"""The most bytes of a pointer that are read; each name has about thirty."""


def pointer_to(folders: list[Path]) -> bytes:
    """Return the contents of a pointer to numbered folders."""
    return "".join(f"{NUMBERED}/{folder.name}\n" for folder in folders).encode()


def named_folder(pointer: Path) -> Path | None:
    """Return the folder that a pointer names, None if there is no file; raise CheckpointError for any other file."""
    if not pointer.is_file():
        return None
    folders = named_folders(pointer)
    if len(folders) != 1:
        raise damaged_pointer_error(pointer)
    return folders[0]


def named_folders(pointer: Path) -> list[Path]:
    """Return the folders that a pointer to any number of folders names, in its order; none if there is no file."""
    if not pointer.is_file():
        return []
    if pointer.is_symlink():  # reading through a link is allowed, as for any file of the user's
        pointer = pointer.resolve()
    with pointer.open("rb") as file:
        names = file.read(_LONGEST).decode(errors="replace").splitlines()
    if not all(map(_NAME.fullmatch, names)):
        raise damaged_pointer_error(pointer)
    return [pointer.parent / name for name in names]


def damaged_pointer_error(pointer: Path) -> CheckpointError:
    """Return the error for a pointer that names anything other than folders."""
    return CheckpointError(
        f"{pointer} is damaged: its lines should name folders such as {NUMBERED}/step-00000200; restore it from a "
        f"copy, or write there the name of a folder that is in {pointer.parent / NUMBERED}"
    )


def through_pointer(path: Path) -> Path:
    """Resolve a path that leads through a pointer, as `best/config.yaml` does; return any other path unchanged."""
    with suppress(CheckpointError):
        if folder := named_folder(path.parent):
            return folder / path.name
    return path

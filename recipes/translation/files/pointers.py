"""A pointer: a small file that names numbered folders beside it, and is replaced as a whole.

    $ cat runs/mine/best
    checkpoints/step-00000200

It is a file and no symbolic link, since a link could lead out of the folder, not every file system has links, and
programs that copy folders disagree on whether to follow them.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from recipes.translation.errors import CheckpointError

NUMBERED = "checkpoints"
"""The folder with the numbered folders that a pointer can name."""
_NAME = re.compile(rf"{NUMBERED}/step-\d{{8,20}}")
_LONGEST = 1_000_000
"""Bytes of a pointer that are read: its names are of thirty."""


def pointer_to(folders: list[Path]) -> bytes:
    """Return the contents of a pointer to numbered folders."""
    return "".join(f"{NUMBERED}/{folder.name}\n" for folder in folders).encode()


def named_folder(pointer: Path) -> Path | None:
    """Return the folder that a pointer names; None without one. Raises CheckpointError for any other file."""
    if not pointer.is_file():
        return None
    folders = named_folders(pointer)
    if len(folders) != 1:
        raise damaged_pointer_error(pointer)
    return folders[0]


def named_folders(pointer: Path) -> list[Path]:
    """Return the folders that a pointer to any number of them names, in its order; none without one."""
    if not pointer.is_file():
        return []
    if pointer.is_symlink():  # which may be read, as any file of the user's
        pointer = pointer.resolve()
    with pointer.open("rb") as file:
        names = file.read(_LONGEST).decode(errors="replace").splitlines()
    if not all(map(_NAME.fullmatch, names)):
        raise damaged_pointer_error(pointer)
    return [pointer.parent / name for name in names]


def damaged_pointer_error(pointer: Path) -> CheckpointError:
    """Return the error for a pointer that names anything but folders."""
    return CheckpointError(
        f"{pointer} is damaged: its lines should name folders such as {NUMBERED}/step-00000200; restore it from a "
        f"copy, or write there the name of a folder that is in {pointer.parent / NUMBERED}"
    )


def through_pointer(path: Path) -> Path:
    """Return where a file is whose path leads through a pointer, as `best/config.yaml` does; else the path itself."""
    with suppress(CheckpointError):
        if folder := named_folder(path.parent):
            return folder / path.name
    return path

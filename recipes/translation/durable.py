"""A folder of files that is replaced as a whole, and proves on reading that every byte is the one written.

The files are written to a temporary folder beside the target, flushed to the disk, listed with their SHA-256 in
`manifest.json`, and only then renamed into place. A kill at any moment leaves the old folder or the new one.
Nothing here knows what the files hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, or does not fit what is to be read from it."""


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to write files into; when the block ends it has become `target`.

    If the block raises, `target` is left as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    new, previous = _beside(target, "new"), _beside(target, "previous")
    shutil.rmtree(new, ignore_errors=True)  # left by a process that was killed here
    new.mkdir()
    try:
        yield new
        _write_manifest(new)
        for path in [*new.iterdir(), new]:
            _flush(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    # A folder cannot be renamed onto a full one. Between the two renames below there is no `target`;
    # `whole_folder` then reads `previous`, which is the old one, whole.
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    new.rename(target)
    _flush(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def whole_folder(target: Path) -> Path | None:
    """The folder that holds what was last written to `target` as a whole; None where there is nothing."""
    for folder in (target, _beside(target, "previous")):
        if (folder / MANIFEST).is_file():
            return folder
    return None


def verified_folder(target: Path) -> Path:
    """The same, after every file was read and found to be what was written; CheckpointError otherwise."""
    folder = whole_folder(target)
    if folder is None:
        raise CheckpointError(f"there is no checkpoint at {target}")
    try:
        listed = json.loads((folder / MANIFEST).read_bytes())["files"]
        expected = {str(name): str(entry["sha256"]) for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged; restore the folder from a copy") from error
    for name, digest in expected.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing; restore the folder from a copy")
        if _sha256(path) != digest:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; restore the folder from a copy"
            )
    return folder


def remove_folder(target: Path) -> None:
    """Remove `target` and what an interrupted replacement may have left beside it."""
    for folder in (_beside(target, "new"), _beside(target, "previous"), target):
        (folder / MANIFEST).unlink(missing_ok=True)  # without it the folder no longer counts as a checkpoint
        shutil.rmtree(folder, ignore_errors=True)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def _write_manifest(folder: Path) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until the disk has it: a rename must not overtake the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

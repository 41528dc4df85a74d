"""A folder of files that is replaced as a whole, and proves on reading that every byte is the one written.

The files are written to a temporary folder beside the target, flushed to the disk, listed with their SHA-256 in
`manifest.json`, and only then renamed into place. A kill at any moment leaves the old folder or the new one.
What the manifest does not list was put there by someone else: it is never deleted. Nothing here knows what the files
hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MANIFEST = "manifest.json"


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, or does not fit what is to be read from it."""


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to write files into; when the block ends it has become `target`.

    If the block raises, `target` is left as it was. Files of others in `target` move to the new folder.

    Raises CheckpointError where `target` was not made here, or cannot be written.
    """
    check_replaceable(target)
    new, previous = _beside(target, "new"), _beside(target, "previous")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)  # left by a process that was killed here
        new.mkdir()
        yield new
        _write_manifest(new)
        for path in [*new.iterdir(), new]:
            _flush(path)
        # A folder cannot be renamed onto a full one. Between the two renames below there is no `target`;
        # `whole_folder` then reads `previous`, which is the old one, whole.
        if target.exists():
            _retire(previous, target)
            target.rename(previous)
        new.rename(target)
        _flush(target.parent)
        _retire(previous, target)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        kept = "; what it held is kept" if whole_folder(target) else ""
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}{kept}") from error
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Say in an OSError which file could not be written: a full disk's names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error


def check_replaceable(target: Path) -> None:
    """CheckpointError where there is something at `target` that was not made here; an empty folder is nothing."""
    if target.is_symlink():
        raise CheckpointError(
            f"{target} is a symbolic link, which cannot be replaced as a whole: put the folder itself there, or link "
            "the folder it is in"
        )
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is not a folder, and was not made here: move it away")
    if any(target.iterdir()):
        _listed(target)


def whole_folder(target: Path) -> Path | None:
    """The folder that holds what was last written to `target` as a whole; None where there is nothing."""
    folder = target if target.exists() else _beside(target, "previous")
    return folder if (folder / MANIFEST).is_file() else None


def verified_folder(target: Path) -> Path:
    """The same, after every file was read and found to be what was written; CheckpointError otherwise."""
    folder = whole_folder(target)
    if folder is None and not target.exists():
        raise CheckpointError(f"there is no checkpoint at {target}")
    folder = folder or target
    for name, digest in _listed(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing; restore the folder from a copy")
        if sha256(path) != digest:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; restore the folder from a copy"
            )
    return folder


def check_removable(target: Path) -> None:
    """CheckpointError where removing `target` would remove what was not written here."""
    check_replaceable(target)
    for folder in (target, _beside(target, "previous")):
        if foreign := _foreign(folder):
            raise CheckpointError(f"{foreign[0]} was not written here, and would be removed: move it away first")


def remove_folder(target: Path) -> None:
    """Remove `target` and what an interrupted replacement may have left beside it; see `check_removable`."""
    check_removable(target)
    _remove_own(_beside(target, "previous"))
    gone = _beside(target, "new")  # by a rename: a kill leaves a whole folder or none
    shutil.rmtree(gone, ignore_errors=True)
    if target.exists():
        target.rename(gone)
        shutil.rmtree(gone)


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def _listed(folder: Path) -> dict[str, str]:
    """The files of a folder and their SHA-256, as the manifest has them."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is damaged, or was not made here; restore it from a copy, or move it away"
        )
    try:
        entries = json.loads((folder / MANIFEST).read_bytes())["files"]
        listed = {str(name): str(entry["sha256"]) for name, entry in entries.items()}
        if any(Path(name).name != name for name in listed):
            raise ValueError("files outside the folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged; restore the folder from a copy, or move it away"
        ) from error
    return listed


def _foreign(folder: Path) -> list[Path]:
    """What lies in a folder and was not written here."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return []
    ours = {*_listed(folder), MANIFEST}
    return sorted(path for path in folder.iterdir() if path.name not in ours)


def _retire(old: Path, successor: Path) -> None:
    """Remove a folder that has a successor, to which files of others move."""
    for path in _foreign(old):
        if not (successor / path.name).exists():
            path.rename(successor / path.name)
    _remove_own(old)


def _remove_own(folder: Path) -> None:
    """Remove what was written here; the manifest goes last, since it says which files those are."""
    if not folder.is_dir():
        return
    if any(folder.iterdir()):
        for name in [*_listed(folder), MANIFEST]:
            (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # something of others is left in it
        folder.rmdir()


def _write_manifest(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
    usual = manifest.stat().st_mode  # as the umask has it; some libraries write files for their owner alone
    for path in paths:
        if path.stat().st_mode != usual:
            path.chmod(usual)


def _flush(path: Path) -> None:
    """Wait until the disk has it: a rename must not overtake the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

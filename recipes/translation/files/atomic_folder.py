"""Folders that are replaced as a whole, and whose files are verified when they are read.

The files are written to a temporary folder next to the target, flushed to the disk and listed with their SHA-256 in
`manifest.json`; only then is the folder renamed to the target. A process that is killed at any moment leaves the old
folder or the new one. Files that the manifest does not list belong to someone else, and are never deleted.

A folder can also be named by a pointer, a small file that is replaced as a whole; functions that read a folder accept
either:

    $ cat runs/mine/best
    checkpoints/step-00000200

A pointer is a file rather than a symbolic link, since a link could lead out of the folder, not every file system has
links, and programs that copy folders disagree on whether to follow them.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from recipes.translation.errors import CheckpointError
from recipes.translation.files.json_fields import TEXT, fields, read_json, write_json
from recipes.translation.files.writing import beside, by_name, claim, flush, move_into_place

MANIFEST = "manifest.json"
LISTED = fields({"files": fields({"*": fields({"sha256": TEXT})}, bool, "the names of files")})
"""The required form of the manifest."""
MODELS = ("best", "last", "averaged")
"""The models of a run that results can come from."""
NUMBERED = "checkpoints"
"""The folder that contains the numbered folders that a pointer can name."""
_NAME = re.compile(rf"{NUMBERED}/step-\d{{8,20}}")
_LONGEST = 1_000_000
"""The most bytes of a pointer that are read; each name has about thirty."""

Found = TypeVar("Found")


@contextmanager
def replaced_folder(target: Path, digests: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Yield an empty folder to write files to, which replaces `target` at the end of the block.

    If the block raises, `target` does not change. Other people's files in `target` are moved to the new folder. If two
    processes do this at once, one waits for the other, and the later one's folder stays. The block can add the SHA-256
    that it computed while writing files to `digests`, by file name; the other files are read again.

    Raises CheckpointError if `target` was not made by this function, or cannot be written.
    """
    target = by_name(target)
    new = beside(target, "new")
    previous = beside(target, "previous")
    check_itself(target, new, previous)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with claim(new, folder=True):
            check_replaceable(target)  # here, where no other process can rename it between two checks
            yield new
            # The manifest is written before the rename: a folder with a manifest is complete
            _write_manifest(new, digests or {})
            for path in [*new.iterdir(), new]:
                flush(path)
            # A folder cannot be renamed to one that is not empty. Between the two renames below there is no `target`;
            # `whole_folder` then returns `previous`, the complete old folder
            if target.exists():
                _retire(previous, target)  # left by a process that was killed before it could remove it
                target.rename(previous)
            move_into_place(new, target)
            _retire(previous, target)
    except OSError as error:
        message = f"{target} cannot be written: {error.strerror or error}"
        if whole_folder(target):
            message += "; its old contents are still there"
        raise CheckpointError(message) from error


def check_replaceable(target: Path) -> None:
    """Raise CheckpointError unless `target` is missing, an empty folder, or one made by `replaced_folder`."""
    check_itself(target, beside(target, "new"), beside(target, "previous"))
    try:
        has_files = any(target.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise CheckpointError(f"{target} is not a folder, and was not written by the recipe: move it away") from None
    if has_files:
        listed_files(target)


def check_itself(*paths: Path) -> None:
    """Raise CheckpointError for a symbolic link where a folder or a pointer is to be replaced."""
    for path in filter(Path.is_symlink, paths):
        raise CheckpointError(
            f"{path} is a symbolic link, which cannot be replaced as a whole: put the folder itself in its place, "
            "or link its parent folder"
        )


def whole_folder(target: Path) -> Path | None:
    """Return the folder with the last complete contents of `target`, or that it points to; None if there is none."""
    folder = target
    with suppress(CheckpointError):
        folder = named_folder(target) or target
    if not folder.exists():  # a process was killed between the two renames of `replaced_folder`
        folder = beside(folder, "previous")
    if not (folder / MANIFEST).is_file():
        return None
    return folder


def model_folder(named: str | Path, model: str = "best") -> Path:
    """Return the folder of a model, given itself or its run, without checking that there is a model in it."""
    folder = Path(named)
    if whole_folder(folder) is None:  # it is not a checkpoint itself, so it is the run that contains one
        folder = folder / model
    return folder


def verified_folder(target: Path, names: Collection[str] | None = None) -> Path:
    """Return `whole_folder(target)` after checking its files' hashes; raise CheckpointError if any is damaged.

    With `names`, only these files are checked, if they exist.
    """
    folder = whole_folder(target)
    if folder is None:
        if named := named_folder(target):
            raise CheckpointError(f"{target} names {named}, which is missing or incomplete: restore it from a copy")
        if not target.exists():
            raise CheckpointError(f"there is no checkpoint at {target}")
        folder = target
    listed = listed_files(folder)
    for name in listed if names is None else names:
        path = folder / name
        if name not in listed and not path.exists():
            continue
        if not path.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing; restore the folder from a copy")
        if listed.get(name) != sha256(path):
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; restore the folder from a copy"
            )
    return folder


def manifest_of(target: Path) -> bytes:
    """Return the complete folder's manifest, which distinguishes it from others; empty if it cannot be read."""
    with suppress(OSError):
        return ((whole_folder(target) or target) / MANIFEST).read_bytes()
    return b""


def read_consistently(
    target: Path, read: Callable[[], Found], state_of: Callable[[Path], object] = manifest_of
) -> Found:
    """Return what `read` reads in `target`, reading again if another process changes its state in the meantime."""
    while True:
        before = state_of(target)
        try:
            found = read()
        except (CheckpointError, OSError, ValueError):
            if state_of(target) == before:
                raise
            continue
        if state_of(target) == before:
            return found


def check_removable(target: Path) -> None:
    """Raise CheckpointError if `target` contains files that its manifest does not list."""
    check_replaceable(target)
    for folder in (target, beside(target, "previous")):
        if foreign := _foreign(folder):
            raise CheckpointError(
                f"{foreign[0]} was not written by the recipe, and would be removed: move it away first"
            )


def remove_folder(target: Path) -> None:
    """Remove `target` and the folders of an interrupted replacement; raises as `check_removable` does."""
    check_removable(target)
    _remove_own(beside(target, "previous"))
    gone = beside(target, "new")  # renamed first, so that a killed process leaves a complete folder or none
    shutil.rmtree(gone, ignore_errors=True)
    if target.exists():
        target.rename(gone)
        shutil.rmtree(gone)


def sha256(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def listed_files(folder: Path) -> dict[str, str]:
    """Read the names and hashes of the files that a folder's manifest lists."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is damaged, or was not written by the recipe; restore it from a copy, or "
            "move it away"
        )
    try:
        found = read_json(folder / MANIFEST, LISTED)
        listed = {name: entry["sha256"] for name, entry in found["files"].items()}
        if any(Path(name).name != name for name in listed):  # ../../file would be removed with the folder
            raise ValueError("files outside the folder")
    except ValueError as error:
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged; restore the folder from a copy, or move it away"
        ) from error
    return listed


def _foreign(folder: Path) -> list[Path]:
    """Return the files of a folder that its manifest does not list."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return []
    ours = {*listed_files(folder), MANIFEST}
    return sorted(path for path in folder.iterdir() if path.name not in ours)


def _retire(old: Path, successor: Path) -> None:
    """Remove a folder that was replaced, and move files that its manifest does not list to its successor."""
    for path in _foreign(old):
        if not (successor / path.name).exists():
            path.rename(successor / path.name)
    _remove_own(old)


def _remove_own(folder: Path) -> None:
    """Remove the listed files, and the manifest last, so that an interrupted removal can be completed."""
    if not folder.is_dir():
        return
    if any(folder.iterdir()):
        for name in [*listed_files(folder), MANIFEST]:
            (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # other files are left in it
        folder.rmdir()


def _write_manifest(folder: Path, known: Mapping[str, str]) -> None:
    paths = sorted(folder.iterdir())
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": known.get(path.name) or sha256(path)} for path in paths
    }
    manifest = folder / MANIFEST
    write_json(manifest, {"files": files})
    usual = manifest.stat().st_mode  # set by the umask; some libraries write files that only their owner can read
    for path in paths:
        if path.stat().st_mode != usual:
            path.chmod(usual)


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
        f"copy, or write into it the name of a folder in {pointer.parent / NUMBERED}"
    )


def through_pointer(path: Path) -> Path:
    """Resolve a path that leads through a pointer, as `best/config.yaml` does; return any other path unchanged."""
    with suppress(CheckpointError):
        if folder := named_folder(path.parent):
            return folder / path.name
    return path

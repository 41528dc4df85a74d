"""How files are written in a folder that may have come from elsewhere: whole or not at all, and never through a link.

A link in such a folder may lead to any of the user's files. A file is therefore written as a new `.<name>.new`, flushed
to the disk and then renamed, which replaces a link with the final name and never follows it. A link in place of the new
file, of a file that is appended to, or of a folder that is written into is an error. `atomic_folder` deals with folders
that are replaced as a whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Replace files in a folder, all by one process; at any moment each has either its old or its new contents.

    Two processes that do this at once take turns: the first file's `.new` file, which is claimed first and renamed
    last, is their lock.
    """
    with ExitStack() as held:
        for path, content in contents.items():
            with writing_to(path):
                descriptor = held.enter_context(claim(beside(path, "new")))
                with os.fdopen(descriptor, "wb", closefd=False) as file:
                    file.write(content)
                os.fsync(descriptor)
        for path in reversed(list(contents)):
            with writing_to(path):
                move_into_place(beside(path, "new"), path)


def replace_file(path: Path, content: bytes) -> None:
    """Replace one file."""
    replace_files({path: content})


def move_into_place(new: Path, path: Path) -> None:
    """Rename a new file or folder, which is already flushed, to `path`, and flush the name to the disk."""
    os.replace(new, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file or a folder's names to the disk: a rename must not reach the disk before the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def add_to(path: Path, content: bytes) -> None:
    """Append to a file, and flush it to the disk."""
    with writing_to(path), adding_to(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def adding_to(path: Path) -> IO[bytes]:
    """Open a file for reading and appending; create it if it is missing."""
    return os.fdopen(open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b")


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless it exists."""
    check_regular(path)
    path.mkdir(parents=True, exist_ok=True)


def open_regular(path: Path, flags: int) -> int:
    """Open a file as `os.open` does, but never a link; return its descriptor."""
    check_regular(path)
    # A link that is put there after the check is not followed either
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def check_regular(path: Path) -> None:
    """Raise OSError for a symbolic link, and for a pipe or a device, which would be waited for forever."""
    try:
        mode = path.lstat().st_mode  # a single look, since another process may rename it between two
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "is a symbolic link, which the recipe never writes through: remove it", str(path))
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "is not a regular file but a pipe or a device: move it away", str(path))


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError in the block; the error for a full disk has none."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:  # it names the link already
            raise
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error


@contextmanager
def claim(new: Path, *, folder: bool = False) -> Iterator[int]:
    """Make an empty file or folder for the block to fill and rename; remove it if the block does not rename it.

    Another process that wants it waits until then, if the file system has locks. Whatever a killed process left there
    is removed. Yields the descriptor.
    """
    while True:
        descriptor = _make(new, folder)
        try:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not is_at(new, descriptor):
                continue
            if any(new.iterdir()) if folder else os.fstat(descriptor).st_size:
                _remove(new, folder)
                continue
            try:
                yield descriptor
            finally:
                if is_at(new, descriptor):  # after the rename, what is there belongs to another process
                    with suppress(OSError):  # it would hide an error of the block
                        _remove(new, folder)
            return
        finally:
            os.close(descriptor)


def _make(new: Path, folder: bool) -> int:
    if not folder:
        return open_regular(new, os.O_RDWR | os.O_CREAT)
    while True:
        with suppress(FileExistsError):
            new.mkdir(parents=True)
        with suppress(FileNotFoundError):  # another process has renamed it since
            return open_regular(new, os.O_RDONLY | os.O_DIRECTORY)


def _remove(new: Path, folder: bool) -> None:
    if folder:
        shutil.rmtree(new)
    else:
        new.unlink(missing_ok=True)


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether `path` is still the open file or folder: another process may have renamed or removed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False


def beside(target: Path, what: str) -> Path:
    """Return the hidden path next to a file or folder that holds its `new` or `previous` contents."""
    target = by_name(target)
    return target.with_name(f".{target.name}.{what}")


def by_name(target: Path) -> Path:
    """Return the path without `.` and `..`, which have no siblings and may lead through the folder itself."""
    if target.name and ".." not in target.parts:
        return target
    if target.name in ("", ".."):
        return target.resolve()
    # The last name is not resolved, since it may be a symbolic link
    return target.parent.resolve() / target.name

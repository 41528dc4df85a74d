"""A lock that lets only one process at a time write to a run's folder.

It uses `flock`, which the system releases when the process ends, even if it is killed. The file names the process that
holds the lock.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recipes.translation.errors import CheckpointError
from recipes.translation.files.writing import flush, is_at, open_regular, writing_to

PATIENCE = 2.0
"""Seconds to wait for a process that is about to end."""
_held: set[int] = set()


@contextmanager
def sole_writer(run: Path) -> Iterator[None]:
    """Lock `run` within the block; raise CheckpointError, naming the other process, if it is already locked."""
    made = not run.exists()
    above = next(folder for folder in run.absolute().parents if folder.exists())
    run.mkdir(parents=True, exist_ok=True)
    for folder in run.absolute().parents if made else ():
        with suppress(OSError):  # some file systems cannot flush folders
            flush(folder)
        if folder == above:
            break
    path = run / ".lock"
    descriptor = _open_locked(path, run)
    _held.add(descriptor)
    try:
        with writing_to(path):
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        if descriptor in _held:
            _held.discard(descriptor)
            with suppress(OSError):  # it would hide an error of the block
                path.unlink()  # before unlocking: afterwards the file might be another process's
            os.close(descriptor)
        if made:
            with suppress(OSError):  # it is no longer empty
                run.rmdir()


def _open_locked(path: Path, run: Path) -> int:
    """Open and lock the file at `path`; return its descriptor."""
    deadline = time.monotonic() + PATIENCE
    while True:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Otherwise the file was removed between opening and locking it: try again with the new one
            if is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.read(descriptor, 1_000).decode(errors="replace").strip() or "another process"
                os.close(descriptor)
                raise CheckpointError(
                    f"{holder} is writing to {run}: wait until it ends, stop it, or choose another --run"
                ) from None
        except OSError as error:  # some network file systems have no locks
            print(
                f"{path} cannot be locked ({error.strerror}): make sure that nothing else writes to {run}",
                file=sys.stderr,
            )
            return descriptor
        os.close(descriptor)
        time.sleep(0.05)


def _let_go_in_a_child() -> None:
    """Release the lock in a forked worker, which may outlive its parent by seconds."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_a_child)

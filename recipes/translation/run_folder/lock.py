"""One writer for a run's folder at a time.

The system holds the lock for as long as the process lives (`flock`), so that one left behind by a process that was
killed is free at once; the file says who has it.
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

from recipes.translation.atomic_folder import CheckpointError, writing_to

PATIENCE = 2.0
"""Seconds to wait for a process that is just ending."""
_held: set[int] = set()


@contextmanager
def sole_writer(run: Path) -> Iterator[None]:
    """Within the block no other process writes into `run`; CheckpointError, which names it, where one does already."""
    made = not run.exists()
    run.mkdir(parents=True, exist_ok=True)
    path = run / ".lock"
    descriptor = _locked(path, run)
    _held.add(descriptor)
    try:
        with writing_to(path):
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        if descriptor in _held:
            _held.discard(descriptor)
            path.unlink(missing_ok=True)  # while it is locked: nobody else's file is removed
            os.close(descriptor)
        if made:
            with suppress(OSError):  # something was written
                run.rmdir()


def _locked(path: Path, run: Path) -> int:
    """An open file that is locked, and is still the one at `path`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.read(descriptor, 1_000).decode(errors="replace").strip() or "another process"
                os.close(descriptor)
                raise CheckpointError(
                    f"{holder} is writing into {run}: wait until it has ended, stop it, or choose another --run"
                ) from None
        except OSError as error:  # as some network file systems are set up
            print(f"{path} cannot be locked ({error.strerror}): let nothing else write into {run}", file=sys.stderr)
            return descriptor
        os.close(descriptor)
        time.sleep(0.05)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the file is still there: the one who had it may have removed it in between."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _let_go_in_a_child() -> None:
    """A forked worker, which may outlive its parent by seconds, must not keep the lock."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_a_child)

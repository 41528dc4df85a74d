"""Call a function in a process of its own: it may end that process, or have its peak measured."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

RELEASE_FROM = 2**20
"""Bytes from which on freed blocks go back to the system at once in a new process: what is resident is live."""


class EndedError(Exception):
    """The process has no result; the message says what became of it."""


def apart(function: Callable[..., Any], x: Any, *, is_fork: bool = False, silence: float | None = None) -> Any:
    """Return `function(x)` of a fork, or of a new process, which finds an implementation by its name.

    Raises EndedError if the process ends without a result, or is silent for so many seconds.
    """
    context: Any = multiprocessing.get_context("fork" if is_fork else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    sent = (function, x) if is_fork else pickle.dumps((function, x))
    process = context.Process(target=_call, args=(theirs, sent), daemon=True)
    with patch.dict(os.environ, {} if is_fork else {"MALLOC_MMAP_THRESHOLD_": str(RELEASE_FROM)}):
        process.start()
    theirs.close()
    said = f"gave nothing: a new process does not find {getattr(x, 'adapter', x)!r}; name it as module:object"
    said += ' (a script also needs the usual if __name__ == "__main__":)'
    try:
        for _ in ("found", "result"):
            if not ours.poll(silence):
                said = f"gave no answer in {silence} s"
                break
            result = ours.recv()
            # From now on the pipe ends without an answer only if the process does
            said = "ends the process"
        else:
            return result
    except EOFError:
        process.join()
        said += f" ({process.exitcode})" if said == "ends the process" else ""
    finally:
        process.kill()
    raise EndedError(said)


def _call(pipe: Connection, sent: Any) -> None:
    """Say that everything was found, and then send the result."""
    function, x = pickle.loads(sent) if isinstance(sent, bytes) else sent
    pipe.send("found")
    pipe.send(function(x))

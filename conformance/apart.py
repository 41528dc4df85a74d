"""Call a function in a process of its own, which it may end, or whose peak memory is measured."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class EndedError(Exception):
    """The process returned no result; the message says what became of it."""


def apart(function: Callable[..., Any], x: Any, *, is_fork: bool = False, silence: float | None = None) -> Any:
    """Return `function(x)` from a fork, or from a new process, which finds an implementation by its name.

    Raises EndedError if the process ends without a result, or is silent for `silence` seconds.
    """
    # The fork server has computed nothing yet, and has imported torch once for all new processes
    context: Any = multiprocessing.get_context("fork" if is_fork else "forkserver")
    if not is_fork:
        context.set_forkserver_preload(["conformance"])
    ours, theirs = context.Pipe(duplex=False)
    sent = (function, x) if is_fork else pickle.dumps((function, x))
    process = context.Process(target=_call, args=(theirs, sent), daemon=True)
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
    """Report that everything was found, then send the result."""
    function, x = pickle.loads(sent) if isinstance(sent, bytes) else sent
    pipe.send("found")
    pipe.send(function(x))

"""Run functions in real ranks over gloo: processes that are forked once and called many times.

    def work(rank, world, x): ...          # a module-level function; runs in every rank, returns something picklable
    results = ranks(2, work, x)            # [rank 0's, rank 1's]

All assertions belong in the parent process. If a rank fails or does not answer in time, all processes of the pool are
killed, because a rank's next collective could be matched with an earlier one of a different rank; the next call starts
new processes. A rank sees the modules that could be imported when it was forked. It ignores, shows or raises warnings
as the parent does at the time of the call. On a machine with an accelerator, or if autograd would refuse to work in a
fork, the ranks are forked from a server process, so that a script needs the usual `if __name__ == "__main__":` around
its calls.

It needs `fork`, so Linux or macOS. Importing this file does not import torch, because the pytest plugin uses it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from seqpar.testing.forks import autograd_works_in_a_fork

TIMEOUT = 60.0
"""The longest time in seconds between two answers to a call."""
COLLECTIVE_TIMEOUT = 20.0
"""The longest time in seconds for a collective; shorter, so that its own error message arrives before the call's."""
START = b"start"
"""The message after which a rank calls the function that it has loaded."""


class RankError(AssertionError):
    """A rank raised an error; the message contains every failed rank's traceback."""


def unequal_cuts(length: int, world: int) -> list[int]:
    """Return where to cut a length into a part for each rank r: 1 each, plus a share of the rest proportional to r.

    Example:
        >>> from seqpar.testing.ranks import unequal_cuts
        >>> unequal_cuts(5, world=2)  # rank 0 has the first, rank 1 the other four
        [0, 1, 5]
    """
    rest = length - world
    return [rank + rest * rank * (rank - 1) // (world * (world - 1)) for rank in range(world + 1)]


class Pool:
    """A pool of `world` forked processes in one gloo group.

    Example:
        >>> import operator
        >>> from seqpar.testing.ranks import Pool
        >>> pool = Pool(2)
        >>> pool.call(operator.add)  # rank + world
        [2, 3]
        >>> pool.close()
    """

    def __init__(self, world: int) -> None:
        context = _context()
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, self.folder.name, theirs), daemon=True)
            process.start()
            # With its last copy in the rank, the pipe closes when the rank ends
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `function(rank, world, *arguments, **keywords)` in every rank; return the results in rank order."""
        # Pickled once, so that all ranks get the same bytes and an error is raised before any of them starts
        message = pickle.dumps((function, arguments, keywords, warnings.filters))
        # Each rank first loads the function's modules, and none starts before all have: on a busy machine one may need
        # longer for this than another rank's collective would wait
        self._answers(message)
        return self._answers(START)

    def _answers(self, message: bytes) -> list[Any]:
        """Send a message to every rank; return their answers in rank order."""
        for pipe in self.pipes:
            pipe.send_bytes(message)
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < len(self.pipes):
            ready = wait([p for i, p in enumerate(self.pipes) if i not in answers], TIMEOUT)
            if not ready:
                silent = sorted(set(range(len(self.pipes))) - set(answers))
                raise RankError(f"ranks {silent} were silent for {TIMEOUT} s")
            for rank in [i for i, p in enumerate(self.pipes) if p in ready]:
                try:
                    answers[rank] = pickle.loads(self.pipes[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(1)
                    answers[rank] = (False, f"the process ended with {self.processes[rank].exitcode}")
        failed = {rank: text for rank, (fine, text) in sorted(answers.items()) if not fine}
        if failed:
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in failed.items()))
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def close(self) -> None:
        """Kill the processes."""
        for process in self.processes:
            process.kill()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()


def _context() -> Any:
    """Return how to start the ranks: by forking this process or, if a fork could not work, one without threads.

    CUDA refuses a fork of a process that has used it, and so may autograd.
    """
    import torch

    if not torch.accelerator.is_available() and autograd_works_in_a_fork():
        return get_context("fork")
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    return context


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    """Join the group and answer calls until the parent closes the pipe."""
    import torch

    # Before anything else: the parent's thread pool did not survive the fork, and waiting for it would never end
    torch.set_num_threads(1)
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    # As torchrun does; accelerate warns if it is not set
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    store = FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT)
    )
    loaded: Any = None
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            # Skip the parent's exit handlers, such as pytest's, which the fork has copied
            os._exit(0)
        try:
            result = None
            if message == START:
                function, arguments, keywords, filters = loaded
                with warnings.catch_warnings():
                    warnings.resetwarnings()
                    warnings.filters.extend(filters)  # type: ignore[attr-defined]
                    result = function(rank, world, *arguments, **keywords)
            else:
                loaded = pickle.loads(message)
            answer = pickle.dumps((True, result))
        # SystemExit and KeyboardInterrupt too: the parent must be told however the call ends
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


_pools: dict[int, Pool] = {}


def ranks(world: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
    """Return `[function(rank, world, *arguments, **keywords) for rank in range(world)]`, each from its own process.

    The processes form one gloo group (`torch.distributed` is initialised in each) and stay alive between calls.

    Args:
        world: the number of ranks.
        function: a module-level function, which a rank can find by its name.
        arguments, keywords: its arguments. They must be picklable, and so must its result.

    Raises:
        RankError: a rank raised an error (the message contains every failed rank's traceback), died, or did not answer
            for `TIMEOUT` seconds.

    Example:
        >>> import operator
        >>> from seqpar.testing.ranks import ranks
        >>> ranks(2, operator.add)  # rank + world
        [2, 3]
    """
    if world not in _pools:
        _pools[world] = Pool(world)
    try:
        return _pools[world].call(function, *arguments, **keywords)
    except BaseException:
        _pools.pop(world).close()
        raise


@atexit.register
def close_all() -> None:
    """Close every pool."""
    for pool in _pools.values():
        with contextlib.suppress(Exception):
            pool.close()
    _pools.clear()

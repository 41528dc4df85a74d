"""The pool itself: real processes, real collectives, failures that arrive whole."""

import importlib
import os
import signal
import sys
import threading
import warnings

import pytest
import torch
import torch.distributed as dist

from seqpar.testing import ranks as module
from seqpar.testing.ranks import RankError, ranks


def sum_of_ranks(rank, world, factor):
    x = torch.tensor([float(rank * factor)])
    dist.all_reduce(x)
    return x.item(), os.getpid()


def fails_on_one(rank, world, bad):
    if rank == bad:
        raise KeyError("only here")
    return rank


def test_ranks_are_processes_of_their_own_that_stay_alive():
    first, second = ranks(3, sum_of_ranks, 2), ranks(3, sum_of_ranks, 10)
    assert [v for v, _ in first] == [6, 6, 6]
    assert [v for v, _ in second] == [30, 30, 30]
    assert [p for _, p in first] == [p for _, p in second]
    assert len({os.getpid(), *(p for _, p in first)}) == 4


class OnlyHere:
    """What the process that made it can send, and another one cannot load."""

    def __reduce__(self):
        return load_in, (os.getpid(),)


def load_in(process):
    if process != os.getpid():
        raise ValueError("made in another process")


def only_in_a_rank(rank, world):
    return OnlyHere()


def test_a_result_that_cannot_be_loaded_is_an_error_and_the_next_call_has_a_new_pool():
    with pytest.raises(ValueError, match="made in another process"):
        ranks(2, only_in_a_rank)
    assert [value for value, _ in ranks(2, sum_of_ranks, 2)] == [2, 2]


def interrupted(pipes, timeout):
    raise KeyboardInterrupt


def test_after_an_interrupt_the_next_call_has_a_new_pool(monkeypatch):
    monkeypatch.setattr(module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks(2, returns_its_rank)
    monkeypatch.undo()
    assert [value for value, _ in ranks(2, sum_of_ranks, 2)] == [2, 2]


def leaves(rank, world):
    sys.exit(f"rank {rank} of {world} leaves")


def test_a_rank_that_leaves_says_where():
    with pytest.raises(RankError, match=r"rank 0: (.|\n)* in leaves\n(.|\n)*SystemExit: rank 0 of 2 leaves"):
        ranks(2, leaves)


def test_a_failure_names_the_rank_and_the_next_call_has_a_new_pool():
    before = ranks(2, sum_of_ranks, 1)
    with pytest.raises(RankError, match=r"rank 1: (.|\n)*KeyError: 'only here'"):
        ranks(2, fails_on_one, 1)
    after = ranks(2, sum_of_ranks, 1)
    assert after[0][0] == 1
    assert {p for _, p in before}.isdisjoint(p for _, p in after)


def test_a_rank_that_ends_before_it_reads_its_call_is_named():
    """Its end of the pipe is reset then, not closed."""
    pool = module.Pool(2)
    pool.call(sum_of_ranks, 1)
    stopped = pool.processes[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    timer = threading.Timer(0.5, stopped.kill)
    timer.start()
    with pytest.raises(RankError, match="rank 1: the process ended with -9"):
        pool.call(returns_its_rank)
    pool.close()


def returns_its_rank(rank, world):
    return rank


def warns(rank, world):
    warnings.warn("so be it", UserWarning, stacklevel=1)


def test_warnings_are_errors_in_a_rank_where_they_are_in_the_test_that_calls_it():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ranks(2, warns)
    with pytest.raises(RankError, match="UserWarning: so be it"):
        ranks(2, warns)


def timeout_of_the_group(rank, world):
    return dist.group.WORLD._get_backend(dist.group.WORLD._device_types[0]).options._timeout.total_seconds()


def test_none_starts_before_all_have_loaded_the_function(monkeypatch):
    monkeypatch.setattr(module, "COLLECTIVE_TIMEOUT", 3.0)
    slow = "tests.conformance.loaded_slowly"
    sys.modules.pop(slow, None)
    pool = module.Pool(2)
    pool.call(returns_its_rank)  # so that the ranks are there before this process loads the file
    assert pool.call(importlib.import_module(slow).sum_of_ranks) == [1.0, 1.0]
    pool.close()


def stops_on_one(rank, world):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return rank


def test_a_collective_waits_20_seconds_and_a_call_60():
    assert ranks(2, timeout_of_the_group) == [20.0, 20.0]
    assert (module.COLLECTIVE_TIMEOUT, module.TIMEOUT) == (20.0, 60.0)


def test_a_silent_rank_is_named_with_the_time_and_the_next_call_has_new_ranks(monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.5)
    with pytest.raises(RankError, match=r"^ranks \[1\] were silent for 0.5 s$"):
        ranks(2, stops_on_one)
    monkeypatch.undo()
    assert ranks(2, timeout_of_the_group) == [20.0, 20.0]

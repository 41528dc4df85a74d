"""The processes of one run: how they find each other, who speaks, and what the others learn when one fails.

`torchrun` (or anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as `mp.spawn` scripts do) starts
the processes; without it there is one. Rank 0 alone reads and writes the run's folder and prints.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.rendezvous import rendezvous

from recipes.translation.processes.stop import OtherRankError
from recipes.translation.settings.config import ConfigError
from seqpar.distributed.collectives import broadcast_object, check_agreement, gather_numbers, gather_objects

T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long a rank waits where another one works alone: subword models, reading data. (A process that ends is noticed at
once; for rank 0 to save, the others wait as long as for a step.)"""
_joins = itertools.count()
"""How often this process has joined the others, which all of them do alike: it names keys that are never used again."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Among those of this machine."""
    local_world: int = 1
    group: ProcessGroup | None = None
    """All ranks, over the CPU, with PATIENCE."""
    prompt: ProcessGroup | None = None
    """The same with the timeout of the settings: for what ranks do side by side."""

    @property
    def speaks(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def in_step(self) -> Ranks:
        """The same ranks, which wait for each other no longer than the settings say: for steps and validations."""
        return replace(self, group=self.prompt)

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank; where that fails, every rank raises."""
        made = self.together(lambda: make() if self.speaks else None)
        return broadcast_object(made, 0, self.group)  # type: ignore[no-any-return]

    def together(self, work: Callable[[], T]) -> T:
        """What each rank makes by itself; where one fails, every rank raises its error, which names it."""
        failed, made = None, None
        try:
            made = work()
        except Exception as error:
            if self.world == 1:
                raise
            failed = error
        errors = gather_objects(None if failed is None else _portable(failed), self.group)
        if any(errors):
            self._raise_first(errors, failed)
        return made  # type: ignore[return-value]

    def _raise_first(self, errors: list[tuple[type[Exception], str] | None], own: Exception | None) -> None:
        rank, (kind, message) = next((rank, error) for rank, error in enumerate(errors) if error)
        text = f"rank {rank}: {message}" if rank else message
        if self.speaks:
            raise kind(text) from own
        raise OtherRankError(text) from own

    def agree(self, facts: Mapping[str, object]) -> None:
        """ConfigError, which names facts, values and ranks, unless every rank has the same."""

        def check() -> None:
            try:
                check_agreement(facts, self.group)
            except RuntimeError as error:
                raise ConfigError(str(error)) from error

        self.together(check)

    def stopped_by(self, noted: signal.Signals | None) -> signal.Signals | None:
        """The signal that any rank has noted: all ranks stop after the same step."""
        number = max(row[0] for row in gather_numbers([noted or 0], self.prompt))
        return signal.Signals(number) if number else None


ALONE = Ranks()
"""One process."""


@contextmanager
def joined(timeout: float) -> Iterator[Ranks]:
    """The ranks of this run, in one group; one process where none others were started.

    A group that is there already is used, and left. Within the block only rank 0's output is seen. If the block raises
    on one rank, the others, whose collectives then fail, raise OtherRankError with that rank's message.

    Args:
        timeout: seconds a rank waits in a step for one that does not come.

    Raises:
        ConfigError: ranks that do not all arrive in time.
    """
    ours = not dist.is_initialized()
    if ours and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    if ours:
        _begin()
    world, rank = dist.get_world_size(), dist.get_rank()
    ranks = Ranks(
        rank,
        world,
        int(os.environ.get("LOCAL_RANK", rank)),
        int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        dist.new_group(backend="gloo", timeout=PATIENCE),
        dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)),
    )
    if ours and "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it; other launchers leave every rank all cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks.local_world))
    failure = f"failure/{next(_joins)}"
    try:
        with _silent(not ranks.speaks):
            yield ranks
    except OtherRankError:
        raise
    except Exception as error:
        _raise_first_cause(ranks, failure, error)
        raise
    finally:
        if ours:
            with suppress(Exception):
                dist.destroy_process_group()


def _begin() -> None:
    """Join the default group; each attempt under keys of its own, or a restarted one would find a dead one's."""
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_joins)}"
    try:
        store, rank, world = next(iter(rendezvous("env://", timeout=timedelta(minutes=10))))
        dist.init_process_group(
            "gloo",
            store=dist.distributed_c10d.PrefixStore(attempt, store),
            rank=rank,
            world_size=world,
            timeout=PATIENCE,
        )
    except (ValueError, RuntimeError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']} did not meet the others at {where}: {error}; "
            "start every process with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"
        ) from error


@contextmanager
def _silent(silent: bool) -> Iterator[None]:
    if not silent:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _portable(error: Exception) -> tuple[type[Exception], str]:
    """What can be sent to another process and made again there."""
    try:
        type(error)(str(error))
    except Exception:
        return RuntimeError, f"{type(error).__name__}: {error}"
    return type(error), str(error)


def _raise_first_cause(ranks: Ranks, key: str, error: Exception) -> None:
    """Leave this failure's cause for the others; raise OtherRankError if another rank's was first."""
    lost = isinstance(error, dist.DistError) or "gloo" in str(error)
    own = f"{ranks.rank} {type(error).__name__}: {error}"
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        first = store.compare_set(key, "", own).decode()
    except Exception:  # it was in the process that failed
        first = "0 ended"
    rank, _, message = first.partition(" ")
    if int(rank) != ranks.rank and not (ranks.speaks and own.endswith(message)):  # or all have the same to say
        raise OtherRankError(f"rank {rank} failed first: {message}") from error
    if lost:
        said = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]
        raise OtherRankError(f"rank {ranks.rank} lost another one, which ended or did not come: {said}") from error

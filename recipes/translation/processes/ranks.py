"""The processes of a run: how they join, which of them writes, and which error the others raise when one fails.

They are started by `torchrun`, or by anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, such as an
`mp.spawn` script; otherwise there is one process. Only rank 0 reads and writes the run's folder and prints.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.rendezvous import rendezvous

from recipes.translation.errors import ConfigError, OtherRankError
from seqpar.distributed.collectives import broadcast_object, check_agreement, gather_numbers, gather_objects

T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long a rank waits while another works alone, making subword models or reading data. A process that ends is
noticed at once. While rank 0 saves a checkpoint, the timeout for steps applies."""
UNUSED_TAG = 1
"""A tag that no rank ever sends with."""
_joins = itertools.count()
"""Counts how often this process has joined the others. All ranks have the same count, so it makes keys unique."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of processes, and their groups."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """The rank among the processes of this machine."""
    local_world: int = 1
    group: ProcessGroup | None = None
    """All ranks, over gloo, with the timeout PATIENCE: for work before and after the steps, and for the thread that
    saves during them."""
    step_group: ProcessGroup | None = None
    """All ranks, over gloo, with the timeout in the settings: for work that all ranks do at the same time."""
    gloo_groups: list[ProcessGroup] = field(default_factory=list)
    """Every gloo group of the run that this process belongs to: their connections show whether a rank was lost."""

    meet: Callable[[], None] = lambda: None
    """Called before ranks that have worked on their own exchange their results: if a model is sharded, those that have
    finished help the others until all have."""

    @property
    def is_main(self) -> bool:
        """Return whether this is the rank that writes and prints."""
        return self.rank == 0

    def for_steps(self) -> Ranks:
        """Return the same ranks with the timeout in the settings, for steps and validations."""
        return replace(self, group=self.step_group)

    def run_on_main(self, make: Callable[[], T]) -> T:
        """Return, on every rank, what rank 0 makes; if that fails, every rank raises."""
        return self.share(make, lambda made: made)

    def share(self, make: Callable[[], T], portable: Callable[[T], T]) -> T:
        """Return what rank 0 makes and, on other ranks, what `portable` leaves of it; if it fails, all ranks raise."""
        # First all ranks learn whether it failed: a rank waiting in the broadcast could not hear of an error
        made = self.run_on_all(lambda: make() if self.is_main else None)
        if self.is_main:
            broadcast_object(portable(made), 0, self.group)  # type: ignore[arg-type]
            return made  # type: ignore[return-value]
        return broadcast_object(None, 0, self.group)  # type: ignore[no-any-return]

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Return what this rank makes; if any rank fails, every rank raises an error that names it."""
        if self.world == 1:
            return work()
        failed = None
        report = None
        made = None
        try:
            made = work()
        except Exception as error:
            failed = error
            report = _portable(error)
        # A rank that failed takes part as well: the others are waiting in this collective
        errors = gather_objects(report, self.group)
        if any(errors):
            self._raise_first(errors, failed)
        return made  # type: ignore[return-value]

    @contextmanager
    def enter_on_main(self, make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Within the block, hold the context that rank 0 makes; if it cannot be entered, every rank raises."""
        with ExitStack() as held:
            # On all ranks, so that none waits for a rank 0 that has raised
            self.run_on_all(lambda: held.enter_context(make() if self.is_main else nullcontext()))
            yield

    def _raise_first(self, errors: list[tuple[type[Exception], str] | None], own: Exception | None) -> None:
        rank, (kind, message) = next((rank, error) for rank, error in enumerate(errors) if error)
        if rank > 0:
            message = f"rank {rank}: {message}"
        # One rank speaks for all: only rank 0 raises the error's own type, which the command line prints
        if self.is_main:
            raise kind(message) from own
        raise OtherRankError(message) from own

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raise ConfigError, naming facts, values and ranks, unless every rank has the same facts."""

        def check() -> None:
            try:
                check_agreement(facts, self.group)
            except RuntimeError as error:
                raise ConfigError(str(error)) from error

        self.run_on_all(check)

    def tensors_of_main(
        self, tensors: Mapping[str, Tensor], described: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that rank 0 has, one after another and on every rank, with their names.

        They have the shapes, dtypes and order of `described`; `tensors` may be empty on other ranks.
        """
        for name, like in described.items():
            if self.is_main:
                tensor = tensors[name].to(like.dtype).contiguous()
            else:
                tensor = torch.empty(like.shape, dtype=like.dtype)
            if self.world > 1:
                dist.broadcast(tensor, group=self.group, group_src=0)
            yield name, tensor

    def main_says(self, value: bool) -> bool:
        """Return, on every rank, what rank 0 says; all ranks ask between the same steps."""
        return bool(gather_numbers([value], self.step_group)[0][0])

    def stop_signal(self, noted: signal.Signals | None) -> signal.Signals | None:
        """Return the signal that any rank has noted, so that all ranks stop after the same step."""
        number = max(row[0] for row in gather_numbers([noted or 0], self.step_group))
        return signal.Signals(number) if number else None


ALONE = Ranks()
"""The only process of a run."""


@contextmanager
def join_ranks(timeout: float) -> Iterator[Ranks]:
    """Join the ranks of this run; without others, this process is the only rank.

    An existing default group is used, and not destroyed afterwards. Inside the block only rank 0 prints. If the block
    raises on one rank, the collectives of the others fail, and they raise OtherRankError with that rank's message.

    Args:
        timeout: seconds that a rank waits for another in a step.

    Raises:
        ConfigError: if the ranks do not all join in time.
    """
    ours = not dist.is_initialized()
    if ours and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    if ours:
        _begin()
    world = dist.get_world_size()
    rank = dist.get_rank()
    # gloo even if the gradients go over NCCL, since objects and signals are exchanged between CPUs
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    step_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    ranks = Ranks(
        rank,
        world,
        int(os.environ.get("LOCAL_RANK", rank)),
        int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        group,
        step_group,
        [group, step_group],
    )
    if ours and "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it; other launchers let every rank use all cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks.local_world))
    failure = f"failure/{next(_joins)}"  # the key under which the first rank that fails stores why
    try:
        with ExitStack() as silent:
            if not ranks.is_main:
                nowhere = silent.enter_context(open(os.devnull, "w"))
                silent.enter_context(redirect_stdout(nowhere))
                silent.enter_context(redirect_stderr(nowhere))
            yield ranks
    except OtherRankError:
        raise
    except Exception as error:
        _raise_first_cause(ranks, failure, error)
        raise
    finally:
        if ours:
            with suppress(Exception):  # it would hide the error that ends the run
                dist.destroy_process_group()


def _begin() -> None:
    """Join the default group under keys for this attempt only: the store may still have those of a failed attempt."""
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
            f"rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']} could not join the others at {where}: "
            f"{error}; start every process with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"
        ) from error


def _portable(error: Exception) -> tuple[type[Exception], str]:
    """Return an error's type and message in a form that another process can raise again."""
    try:
        type(error)(str(error))
    except Exception:
        return RuntimeError, f"{type(error).__name__}: {error}"
    return type(error), str(error)


def _raise_first_cause(ranks: Ranks, key: str, error: Exception) -> None:
    """Store this failure for the other ranks; raise OtherRankError if another rank failed first or was lost."""
    what = f"failed first: {type(error).__name__}: {error}"
    lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _has_lost_a_rank(ranks))
    if lost:
        reason = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]  # without gloo's source file and advice
        what = f"lost contact with another process, which ended or never joined: {reason}"
    store = dist.distributed_c10d._get_default_store()
    try:
        first = store.compare_set(key, "", f"{ranks.rank} {what}").decode()
    except Exception:  # the store was in rank 0's process, which has ended
        first = "0 ended"
    rank, _, theirs = first.partition(" ")
    own = int(rank) == ranks.rank
    same = ranks.is_main and theirs == what  # an error that all ranks raise is rank 0's own
    if lost or not (own or same):
        raise OtherRankError(f"rank {first}") from error


def _has_lost_a_rank(ranks: Ranks) -> bool:
    """Return whether any connection to another rank is closed.

    The type of an error does not tell: for a lost connection gloo raises a plain RuntimeError (with DDP, from inside
    autograd's backward), as torch does for anything else. The connections do tell. gloo closes one when the process at
    its other end is gone or a collective times out, and from then on refuses to receive through it. On an open
    connection the call only posts a receive, and returns at once; no message ever comes.
    """
    for group in ranks.gloo_groups:
        for other in range(group.size()):
            if other == group.rank():
                continue
            try:
                group.recv([torch.empty(1)], other, UNUSED_TAG)
            except RuntimeError:
                return True
    return False

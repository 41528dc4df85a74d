"""The layout of processes: what fits, what each one gets, and what is said where nothing fits."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections import Counter
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data.batches import Steps, TokenBatches, batches_of_rank
from recipes.translation.errors import ConfigError
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.settings.config import LayoutConfig, TrainingConfig
from recipes.translation.training.layout import axes_of
from recipes.translation.training.machine import devices_of

AXES = st.integers(1, 4)


@given(AXES, AXES, AXES)
def test_what_the_other_axes_leave_goes_to_the_data(data: int, shard: int, vocab: int) -> None:
    given = LayoutConfig(shard=shard, vocab=vocab)
    assert axes_of(given, data * shard * vocab) == (data, shard, vocab)


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        (
            LayoutConfig(data=3),
            2,
            "data 3 x shard 1 x vocab 1 needs 3 processes, but 2 were started",
        ),
        (LayoutConfig(shard=2, vocab=2), 6, "needs 4 processes, but 6 were started"),
        (
            LayoutConfig(vocab=2),
            1,
            "but 1 was started: start 2, for example with torchrun --nproc-per-node 2, or change",
        ),
    ],
)
def test_another_number_of_processes_is_refused_with_both_numbers(
    layout: LayoutConfig, world: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        axes_of(layout, world)


def test_one_process_has_every_gpu_or_two_replicas_on_the_cpu() -> None:
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    assert devices_of(TrainingConfig(), ALONE) == (gpus or [torch.device("cpu")] * 2)


def test_each_of_several_processes_has_one_device() -> None:
    second = Ranks(rank=3, world=4, local_rank=1, local_world=2)
    assert len(devices_of(TrainingConfig(), second)) == 1
    assert devices_of(TrainingConfig(devices=("cpu", "cpu")), second) == [torch.device("cpu")]
    with pytest.raises(ConfigError, match=r"training\.devices names 1, but 2 processes run on this machine"):
        devices_of(TrainingConfig(devices="cpu"), second)


@given(st.lists(st.lists(st.integers(), max_size=9), max_size=9), st.integers(1, 5))
def test_every_sentence_of_a_step_falls_to_exactly_one_data_rank(batches: list[list[int]], data_ranks: int) -> None:
    parts = [batches_of_rank(batches, rank, data_ranks) for rank in range(data_ranks)]
    given = Counter(index for batch in batches for index in batch)
    assert Counter(index for part in parts for batch in part for index in batch) == given
    sizes = [sum(map(len, part)) for part in parts]
    if len({len(batch) for batch in batches}) <= 1 and batches:  # as evenly as whole sentences allow
        assert max(sizes) - min(sizes) <= max(1, len(batches) % data_ranks)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**16))
def test_an_epoch_has_every_pair_once_over_all_processes_its_tail_included(
    pairs: int, accumulate: int, data_ranks: int, seed: int
) -> None:
    sentences = [[4] * (1 + index % 7) for index in range(pairs)]
    batches = TokenBatches(sentences, sentences, batch_tokens=20, seed=seed)
    seen: Counter[int] = Counter()
    epochs = 2 * accumulate  # after which a step ends with the epoch, whatever its length
    for rank in range(data_ranks):
        steps = Steps(batches, accumulate, rank, data_ranks, torch.device("cpu"))._indices(0, 0)
        for position, mine in steps:
            seen.update(index for batch in mine for index in batch)
            if position == (epochs - 1, len(batches)):
                break
    assert seen == Counter(dict.fromkeys(range(pairs), epochs))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_position_in_the_data_goes_on_where_it_was(accumulate: int) -> None:
    """From every position of three epochs, for as long."""
    sentences = [[4] * (1 + index % 7) for index in range(50)]
    batches = TokenBatches(sentences, sentences, batch_tokens=30, seed=0)
    steps = Steps(batches, accumulate, 0, 1, torch.device("cpu"))
    made = list(islice(steps._indices(0, 0), 6 * len(batches) // accumulate))
    assert made[-1][0][0] >= 5
    for done, ((epoch, batch), _) in enumerate(made[: len(made) // 2], start=1):
        assert list(islice(steps._indices(epoch, batch), len(made) - done)) == made[done:]
    first = steps.after(0, 0)
    for _ in range(5):
        (epoch, done), _ = next(first)
    position, expected = next(first)
    again, found = next(steps.after(epoch, done))
    assert position == again
    assert all(
        torch.equal(a, b) for one, other in zip(expected, found, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_worker_processes_make_the_same_batches() -> None:
    """As for a GPU, but for the pinned memory, which needs one."""
    sentences = [[4 + index % 5] * (1 + index % 7) for index in range(50)]
    batches = TokenBatches(sentences, sentences, batch_tokens=30, seed=0)
    steps = Steps(batches, 2, 0, 1, torch.device("cpu"))
    expected = steps.after(0, 0)
    steps.workers = 2
    made = steps.after(0, 0)
    for _ in range(6):
        (position, ours), (other, theirs) = next(made), next(expected)
        assert tuple(position) == tuple(other)
        assert all(
            torch.equal(a, b) for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True)
        )


def test_worker_processes_end_by_a_sigterm_of_their_parent_alone() -> None:
    """Slurm sends it, a terminal Ctrl-C, to every process of a job; a step that is to be saved needs its batches."""
    sentences = [[4 + index % 5] * (1 + index % 7) for index in range(50)]
    steps = Steps(TokenBatches(sentences, sentences, batch_tokens=30, seed=0), 2, 0, 1, torch.device("cpu"))
    steps.workers = 2
    of_earlier_tests = multiprocessing.active_children()
    made = steps.after(0, 0)
    workers = [child for child in multiprocessing.active_children() if child not in of_earlier_tests]
    assert len(workers) == 2
    for worker in workers:  # which may not have run a line yet
        subprocess.run(["kill", "-INT", str(worker.pid)], check=True)
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    for _ in range(8):
        next(made)
    assert all(worker.is_alive() for worker in workers)
    for worker in workers:
        worker.terminate()
        worker.join(timeout=20)
    assert [worker.exitcode for worker in workers] == [0, 0]

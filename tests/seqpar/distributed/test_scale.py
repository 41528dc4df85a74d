"""What one rank sends, in worlds that are not there: in a process of its own, for the default group is global."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from conformance.apart import apart

WORLDS = (8, 512)
CHUNKS = ("1", "4", "16")
ONE_NUMBER = 8
"""Bytes of an int64, as ranks tell each other what they have."""


@functools.cache
def counts() -> dict[str, Any]:
    """layout -> world -> chunks -> collectives and bytes."""
    return apart(counts_on_one_thread, WORLDS)  # type: ignore[no-any-return]


def counts_on_one_thread(worlds: tuple[int, ...]) -> dict[str, Any]:
    from benchmarks import scale  # here, for it loads FSDP

    torch.set_num_threads(1)
    return scale.counts(worlds)


def sent(layout: str, world: int, chunks: str) -> tuple[dict[str, int], int]:
    step = counts()[layout][str(world)][chunks]
    return step["collectives"], step["size"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layout", ["DDP", "FSDP2", "HSDP", "data x sequence"])
def test_chunks_cost_no_collective_where_each_rank_has_all_classes(layout: str, world: int) -> None:
    assert sent(layout, world, "1") == sent(layout, world, "4") == sent(layout, world, "16")


@pytest.mark.parametrize("world", WORLDS)
def test_a_split_vocabulary_costs_one_all_gather_a_chunk_and_one_all_reduce_of_the_hidden_gradient(world: int) -> None:
    for chunks in CHUNKS:
        # one more all-gather is the check of the ranks' parts
        assert sent("vocabulary", world, chunks)[0] == {"all-reduce": 1, "all-gather": int(chunks) + 1}
        # over the data ranks further: DDP's bucket, the step's loss, and an all-gather of the step's tokens
        expected = {"all-reduce": 3, "all-gather": int(chunks) + 2}
        assert sent("data x vocabulary", world, chunks)[0] == expected


@pytest.mark.parametrize("layout", ["vocabulary", "data x vocabulary"])
def test_a_split_vocabulary_sends_the_same_bytes_whatever_the_chunk(layout: str) -> None:
    for world in WORLDS:
        assert len({sent(layout, world, chunks)[1] for chunks in CHUNKS}) == 1


@pytest.mark.parametrize("layout", ["DDP", "FSDP2", "HSDP", "vocabulary", "data x vocabulary", "data x sequence"])
def test_the_number_of_collectives_does_not_grow_with_the_ranks(layout: str) -> None:
    for chunks in CHUNKS:
        small, large = (sent(layout, world, chunks)[0] for world in WORLDS)
        assert small == large


@pytest.mark.parametrize(("layout", "of_rows"), [("DDP", 0), ("FSDP2", 0), ("vocabulary", 64 * 5 * 4)])
def test_bytes_grow_by_a_few_numbers_a_rank_and_by_nothing_else(layout: str, of_rows: int) -> None:
    """With a split vocabulary also by five float32 numbers of each row, which every rank has from every other."""
    small, large = (sent(layout, world, "4")[1] for world in WORLDS)
    assert large - small == (WORLDS[1] - WORLDS[0]) * (3 * ONE_NUMBER + of_rows)

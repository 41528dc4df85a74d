"""Token batches: nothing is lost, nothing exceeds the budget, and chance depends on (seed, epoch) alone."""

import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data import batches as batches_module
from recipes.translation.data.batches import TokenBatches, order_of
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.data.token_store import IDS, Flat
from recipes.translation.settings.config import DataConfig, SubwordConfig
from recipes.translation.text.subwords import BOS, EOS, PAD, Subwords, train_subwords


@pytest.fixture(scope="module", autouse=True)
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches_module, "SLICE", 7)
        yield


lengths = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=80)


def corpus(sizes: list[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Sentences of the given lengths, none of whose ids is a special one."""
    return [[4 + n % 9] * s for n, (s, _) in enumerate(sizes)], [[5 + n % 7] * t for n, (_, t) in enumerate(sizes)]


def ordinary(count: int) -> tuple[list[list[int]], list[list[int]]]:
    rng = random.Random(0)
    sizes = [(max(1, round(rng.gauss(15, 6))), 0) for _ in range(count)]
    return corpus([(s, max(1, round(s + rng.gauss(0, 2)))) for s, _ in sizes])


@given(lengths, st.integers(1, 200), st.integers(0, 3), st.integers(0, 5))
def test_every_pair_stands_in_every_epoch_exactly_once(
    sizes: list[tuple[int, int]], budget: int, seed: int, epoch: int
) -> None:
    batches = TokenBatches(*corpus(sizes), batch_tokens=budget, seed=seed).epoch(epoch)
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    assert all(batches)


@given(lengths, st.integers(1, 200), st.integers(0, 5))
def test_no_batch_of_several_rows_exceeds_the_budget_on_either_side(
    sizes: list[tuple[int, int]], budget: int, epoch: int
) -> None:
    batches = TokenBatches(*corpus(sizes), batch_tokens=budget, seed=1)
    for indices in batches.epoch(epoch):
        batch = batches.batch(indices)
        assert len(indices) == 1 or max(batch.src.numel(), batch.tgt_out.numel()) <= budget


@given(lengths, st.integers(1, 200), st.integers(0, 5))
def test_the_batches_are_those_of_pairs_sorted_and_cut_one_by_one(
    sizes: list[tuple[int, int]], budget: int, epoch: int
) -> None:
    rng = numpy.random.default_rng([3, epoch])
    ties = rng.random(len(sizes))

    def key(index: int) -> tuple[int, int, float]:
        source, target = sizes[index]
        return -target, source if target % 2 == 0 else -source, ties[index]  # the end symbol makes an even length odd

    expected: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(sizes)), key=key):
        length = max(sizes[index]) + 1
        longest = max(longest, length)
        if not expected or (len(expected[-1]) + 1) * longest > budget:
            expected.append([])
            longest = length
        expected[-1].append(index)
    if expected:
        expected = [expected[number] for number in rng.permutation(len(expected))]
    assert list(TokenBatches(*corpus(sizes), batch_tokens=budget, seed=3).epoch(epoch)) == expected


@given(lengths, st.integers(1, 200), st.integers(0, 9))
def test_every_epoch_has_the_same_number_of_batches(sizes: list[tuple[int, int]], budget: int, epoch: int) -> None:
    batches = TokenBatches(*corpus(sizes), batch_tokens=budget, seed=0)
    assert len(batches.epoch(epoch)) == len(batches)


@given(lengths, st.integers(0, 30))
def test_pairs_longer_than_the_limit_are_dropped_and_counted(sizes: list[tuple[int, int]], limit: int) -> None:
    batches = TokenBatches(*corpus(sizes), batch_tokens=64, seed=0, max_length=limit)
    kept = [index for index, (source, target) in enumerate(sizes) if max(source, target) <= limit]
    assert sorted(index for batch in batches.epoch(0) for index in batch) == kept
    assert batches.dropped == len(sizes) - len(kept)


def test_a_pair_larger_than_the_budget_is_a_batch_of_its_own() -> None:
    batches = TokenBatches(*corpus([(3, 3), (90, 2), (3, 4), (2, 90)]), batch_tokens=20, seed=0)
    assert [1] in batches.epoch(0)
    assert [3] in batches.epoch(0)


def test_epochs_differ_in_the_order_and_in_the_company() -> None:
    batches = TokenBatches(*ordinary(2_000), batch_tokens=512, seed=3)
    first, second = batches.epoch(0), batches.epoch(1)
    assert first != second
    assert not {frozenset(batch) for batch in first} >= {frozenset(batch) for batch in second}
    together = {(a, b) for batch in first for a in batch for b in batch if a < b}
    again = {(a, b) for batch in second for a in batch for b in batch if a < b}
    assert len(together & again) < 0.9 * len(together)


def test_the_longest_sentences_are_the_first_of_their_batches_whatever_their_product() -> None:
    """50,000 x 50,000 is more than 32 bits hold."""
    lengths = [3, 50_000, 4, 49_999]
    sides = [[range(length) for length in lengths]] * 2
    batches = TokenBatches(*sides, batch_tokens=100_002, seed=0)
    assert sorted(map(sorted, batches.epoch(0))) == [[0, 2], [1, 3]]


def test_batches_do_not_come_sorted_by_length() -> None:
    batches = TokenBatches(*ordinary(2_000), batch_tokens=512, seed=0)
    widths = [max(len(batches.targets[index]) for index in batch) for batch in batches.epoch(0)]
    assert widths not in (sorted(widths), sorted(widths, reverse=True))


def test_chance_depends_on_seed_and_epoch_alone() -> None:
    sides = ordinary(500)
    expected = list(TokenBatches(*sides, batch_tokens=256, seed=7).epoch(4))
    torch.manual_seed(99)
    random.seed(99)
    numpy.random.seed(99)
    states = random.getstate(), torch.get_rng_state()
    batches = TokenBatches(*sides, batch_tokens=256, seed=7)
    batches.epoch(2)
    assert list(batches.epoch(4)) == expected
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert list(TokenBatches(*sides, batch_tokens=256, seed=8).epoch(4)) != expected


def test_a_batch_holds_its_rows_between_start_and_end() -> None:
    batch = TokenBatches([[7, 8], [9]], [[4], [5, 6, 7]], batch_tokens=100, seed=0).batch([1, 0])
    assert batch.src.tolist() == [[9, EOS, PAD], [7, 8, EOS]]
    assert batch.tgt_in.tolist() == [[BOS, 5, 6, 7], [BOS, 4, PAD, PAD]]
    assert batch.tgt_out.tolist() == [[5, 6, 7, EOS], [4, EOS, PAD, PAD]]
    assert {tensor.dtype for tensor in batch} == {torch.int64}
    assert batch.tokens == 6


def padding_fraction(batches: TokenBatches, epoch: int) -> float:
    """The fraction of all source and target cells of an epoch that is padding."""
    made = [batches.batch(indices) for indices in batches.epoch(epoch)]
    cells = torch.cat([side.flatten() for batch in made for side in (batch.src, batch.tgt_out)])
    return (cells == PAD).double().mean().item()


def test_ordinary_sentences_are_padded_little() -> None:
    assert padding_fraction(TokenBatches(*ordinary(20_000), batch_tokens=2_048, seed=0), 0) < 0.08


def test_a_long_pair_does_not_make_the_batches_after_it_small() -> None:
    sizes = [(400, 60), *[(9, 10)] * 2_000]  # the long source comes first, for its target is the longest
    batches = TokenBatches(*corpus(sizes), batch_tokens=4_096, seed=0)
    cells = sorted(len(batch) * 11 for batch in batches.epoch(0) if 0 not in batch)
    assert cells[1] >= 0.99 * 4_092  # all but the last are full
    assert len(batches) <= 8


def test_batches_are_filled_before_the_next_one_is_begun() -> None:
    batches = TokenBatches(*ordinary(3_000), batch_tokens=512, seed=0)
    longest = [
        max(max(len(batches.sources[index]), len(batches.targets[index])) + 1 for index in batch)
        for batch in batches.epoch(0)
    ]
    full = [(len(batch) + 2) * width > 512 for batch, width in zip(batches.epoch(0), longest, strict=True)]
    assert sum(full) > 0.9 * len(full)


def test_nothing_gives_no_batches() -> None:
    batches = TokenBatches([], [], batch_tokens=10, seed=0)
    assert (len(batches), batches.epoch(0), batches.dropped) == (0, [], 0)


@pytest.mark.parametrize(
    ("sides", "budget", "message"), [(([[4]], []), 10, "got 1 and 0"), (([[4]], [[4]]), 0, "at least 1, got 0")]
)
def test_impossible_input_is_refused(sides: tuple[list[list[int]], list[list[int]]], budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBatches(*sides, batch_tokens=budget, seed=0)


@pytest.mark.data
def test_multi30k_has_at_most_five_percent_padding(tmp_path: Path) -> None:
    folder = os.environ["SEQPAR_DATA"] + "/multi30k"
    pairs = load_pairs(DataConfig(format="text", path=folder, train=("train.en.gz", "train.de.gz")), "train")
    train_subwords([side for pair in pairs[::4] for side in pair], tmp_path / "joint", SubwordConfig(vocab_size=8_000))
    subwords = Subwords.load(tmp_path / "joint.model")
    sides = [subwords.encode([pair[side] for pair in pairs]) for side in (0, 1)]
    batches = TokenBatches(*sides, batch_tokens=4_096, seed=1, max_length=256)
    assert batches.dropped == 0
    assert max(padding_fraction(batches, epoch) for epoch in range(3)) <= 0.05


def test_equal_random_numbers_are_in_the_order_of_a_stable_sort() -> None:
    """The fastest sort is not stable, and where it is not depends on the processor."""
    ties = numpy.random.default_rng(1).integers(50, size=2_000) / 50
    assert (order_of(ties) == numpy.argsort(ties, kind="stable")).all()
    apart = numpy.random.default_rng(1).random(2_000)
    assert (order_of(apart) == numpy.argsort(apart, kind="stable")).all()


def test_lengths_of_pairs_that_are_left_out_take_no_memory() -> None:
    """A table has a number for each length of one side beside each of the other."""
    draw = numpy.random.default_rng(1)
    lengths = [flat_of(draw.integers(1, 20_000, 20_000)) for _ in range(2)]
    tracemalloc.start()
    batches = TokenBatches(*lengths, batch_tokens=4_096, seed=1, max_length=256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < len(batches.pairs_short_enough) < 20
    assert peak < 20e6


def flat_of(lengths: numpy.ndarray) -> Flat[list[int]]:
    """Sentences of these lengths, whose ids take no memory."""
    return Flat(numpy.broadcast_to(numpy.int32(5), int(lengths.sum())), numpy.cumsum(lengths), IDS)

"""Mixing: shares by weight and temperature, every pair in turn, and chance by (seed, epoch) alone."""

from __future__ import annotations

from collections import Counter

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data.batches import Steps, TokenBatches
from recipes.translation.data.mixing import Mixture

corpora = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), min_size=1, max_size=4).filter(
    lambda each: any(size and weight for size, weight in each)
)


def mixed(sizes: list[int], weights: list[float], temperature: float = 1.0, **options: int) -> TokenBatches:
    """Sentences of one to seven subwords; the first subword tells the pair."""
    ids = [[4 + n, *[4] * (n % 7)] for n in range(sum(sizes))]
    mixture = Mixture(sizes, weights, temperature, options.get("seed", 1))
    return TokenBatches(ids, ids, **{"batch_tokens": 20, "seed": 1, **options}, mixture=mixture)


@given(corpora, st.sampled_from([1.0, 2.0, 5.0]))
def test_the_shares_are_those_of_the_formula_to_within_one_pair(
    given: list[tuple[int, int]], temperature: float
) -> None:
    sizes, weights = ([size for size, _ in given], [float(weight) for _, weight in given])
    counts = Mixture(sizes, weights, temperature, 1).counts(numpy.arange(sum(sizes)))
    total = sum(size for size, weight in given if weight)
    assert sum(counts) == total
    shares = [weight * size ** (1 / temperature) if size else 0.0 for size, weight in given]
    exact = [total * share / sum(shares) for share in shares]
    # A corpus with a share below one pair may take one from a larger corpus
    small = sum(0 < share < 1 for share in exact)
    for count, share in zip(counts, exact, strict=True):
        assert share - 1 - small < count < share + 1
        assert count == 0 or share > 0
        if small == 0:
            assert abs(count - share) < 1


@given(corpora, st.integers(0, 3))
def test_no_pair_is_used_twice_before_all_pairs_of_its_corpus_are_used(given: list[tuple[int, int]], seed: int) -> None:
    sizes, weights = ([size for size, _ in given], [float(weight) for _, weight in given])
    mixture = Mixture(sizes, weights, 2.0, seed)
    used: Counter[int] = Counter()
    for epoch in range(4):
        used.update(mixture.draw_epoch(epoch, numpy.arange(sum(sizes))).tolist())
        start = 0
        for size in sizes:
            times = [used[pair] for pair in range(start, start + size)]
            assert max(times, default=0) - min(times, default=0) <= 1
            start += size


def test_an_epoch_has_the_pairs_that_the_mixture_draws_and_no_pair_above_max_length() -> None:
    batches = mixed([30, 60], [3.0, 1.0], max_length=5)
    short = [n for n in range(90) if n % 7 < 5]
    drawn = batches.epoch(2)
    of_epoch = sorted(pair for batch in drawn for pair in batch)
    assert set(of_epoch) <= set(short)
    # 3 x 22 to 1 x 43 of the 65 short pairs
    assert Counter(pair < 30 for pair in of_epoch) == {True: 39, False: 26}
    assert batches.dropped == 25


def test_the_batches_of_every_epoch_are_within_the_budget_and_full() -> None:
    sizes = [40, 40]
    ids = [[4] * (2 if n < 40 else 1 + n % 9) for n in range(80)]
    batches = TokenBatches(ids, ids, batch_tokens=20, seed=1, mixture=Mixture(sizes, [3.0, 1.0], 1.0, 1))
    for epoch in range(12):
        cells = [len(batch) * max(len(ids[pair]) + 1 for pair in batch) for batch in batches.epoch(epoch)]
        assert max(cells) <= 20
        assert batches.count(epoch) == len(cells)
        assert sum(cells) > 0.7 * 20 * len(cells)


def test_epochs_differ_and_depend_on_seed_and_epoch_alone() -> None:
    batches = mixed([20, 40], [2.0, 1.0])
    expected = list(batches.epoch(3))
    assert list(batches.epoch(1)) != expected
    assert list(mixed([20, 40], [2.0, 1.0]).epoch(3)) == expected
    assert list(mixed([20, 40], [2.0, 1.0], seed=2).epoch(3)) != expected


def test_a_run_resumes_in_the_middle_of_an_epoch_of_a_mixture() -> None:
    def steps(epoch: int, done: int, count: int) -> list[object]:
        after = Steps(mixed([20, 40], [2.0, 1.0]), 3, 0, 2, torch.device("cpu")).after(epoch, done)
        found = (next(after) for _ in range(count))
        return [(position, [batch.src.tolist() for batch in batches]) for position, batches in found]

    whole = steps(0, 0, 20)
    for taken in (1, 5, 13):
        epoch, done = whole[taken - 1][0]
        assert steps(epoch, done, 20 - taken) == whole[taken:]


def test_without_weights_and_temperature_a_mixture_draws_every_pair_once() -> None:
    drawn = Mixture([5, 9], [1.0, 1.0], 1.0, 1).draw_epoch(7, numpy.arange(14))
    assert sorted(drawn.tolist()) == list(range(14))


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    weights=st.lists(st.sampled_from([0.0, 1e-6, 0.2, 1.0, 50.0]), min_size=6, max_size=6),
    temperature=st.sampled_from([1.0, 5.0]),
)
def test_every_corpus_with_a_weight_has_a_pair_in_each_epoch(
    sizes: list[int], weights: list[float], temperature: float
) -> None:
    weights = weights[: len(sizes)]
    counts = Mixture(sizes, weights, temperature, 1).counts(numpy.arange(sum(sizes)))
    drawn = [size > 0 and weight > 0 for size, weight in zip(sizes, weights, strict=True)]
    assert [count > 0 for count in counts] == drawn
    assert sum(counts) == sum(size for size, one in zip(sizes, drawn, strict=True) if one)

"""A strategy draws all of the range that it is said to have, and nothing else."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from seqpar.testing import assert_same_loss, comparison, plain_loss, strategies
from seqpar.testing.ranks import unequal_cuts

pytestmark = pytest.mark.unswitched


def drawn_by(strategy, examples):
    """What a strategy draws, the same in every run."""
    found = []

    @settings(max_examples=examples, database=None, derandomize=True, deadline=None, phases=[Phase.generate])
    @given(strategy)
    def draw(drawn):
        found.append(drawn)

    draw()
    return found


UNCUT = {"chunk_tokens": None, "chunk_size": None}
DRAWN = {
    "shapes": (strategies.shapes(2, 2), [(1, 1), (1, 2), (2, 1), (2, 2)]),
    "lengths": (strategies.lengths(2, 1), [[0, 0], [0, 1], [1, 0], [1, 1]]),
    "devices": (strategies.device_lists(most=2), [None, ["cpu"], ["cpu", "cpu"]]),
    "chunks": (
        strategies.chunkings(1, 2),
        [UNCUT, *(UNCUT | {"chunk_tokens": n} for n in range(1, 5)), *(UNCUT | {"chunk_size": n} for n in range(1, 5))],
    ),
    "splits": (strategies.vocabulary_splits(3, 2), [[0, 3], [1, 2], [2, 1], [3, 0]]),
    "splits without an empty part": (strategies.vocabulary_splits(4, 3, 1), [[1, 1, 2], [1, 2, 1], [2, 1, 1]]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_strategy_draws_all_of_its_range_and_nothing_else(name):
    strategy, wanted = DRAWN[name]
    found = drawn_by(strategy, 60)
    assert all(one in wanted for one in found)
    assert all(one in found for one in wanted)


def test_cases_have_all_sizes_that_they_are_said_to_have_and_no_others():
    found = drawn_by(strategies.cases(), 250)
    assert {case.vocab_size for case in found} == {*range(2, 14)}
    assert {case.batch for case in found} == {*range(1, 8)}
    assert {case.time for case in found} == {*range(1, 10)}
    assert {case.width for case in found} == {*range(1, 7)}
    assert {case.devices for case in found} == {*range(10)}
    assert {case.upstream for case in found} == {1.0, 1 / 7, -3.0, 0.0, 1e4}
    assert {case.padding_share for case in found} == {0.0, 0.3, 0.8, 1.0}
    assert {case.padding for case in found if not 0 <= case.padding < case.vocab_size} == {-100}
    assert any(case.padding == case.vocab_size - 1 for case in found)
    assert any(case.padding == 0 for case in found)
    for case in drawn_by(strategies.cases(padding_is_a_class=True), 40):
        assert 0 <= case.padding < case.vocab_size >= 3
    for case in found[:50]:
        ignored = case.targets() == case.padding
        assert case.padding_share or not ignored.any()
        assert case.padding_share < 1 or ignored.all()
        assert case.targets()[~ignored].lt(case.vocab_size).all()


@given(st.data(), st.sampled_from([2, 3, 5]), st.booleans())
def test_with_ranks_the_targets_can_be_divided_among_them(data, ranks, of_a_case):
    """Every rank has a sentence, not all have equally many tokens, and at most one target is another one for that."""
    if of_a_case:
        case = data.draw(strategies.cases(ranks=ranks))
        target, plain, padding = case.targets(), replace(case, ranks=1).targets(), case.padding
    else:
        shape, padding = data.draw(strategies.shapes(ranks=ranks)), 0
        target = data.draw(strategies.targets(shape, 11, padding=padding, ranks=ranks))
        plain = target
    cuts = unequal_cuts(len(target), ranks)
    counts = [int((target[first:end] != padding).sum()) for first, end in itertools.pairwise(cuts)]
    assert len(target) >= ranks
    assert len({*counts}) > 1
    assert (target != plain).sum() <= 1


@pytest.mark.parametrize(("length", "world", "cuts"), [(2, 2, [0, 1, 2]), (5, 2, [0, 1, 5]), (9, 3, [0, 1, 4, 9])])
def test_a_length_is_cut_unequally_and_every_rank_has_a_part(length, world, cuts):
    assert unequal_cuts(length, world) == cuts


def half(*given):
    return plain_loss(*given) / 2


@settings(max_examples=5, database=None, derandomize=True, deadline=None)
@given(st.data())
def test_what_is_drawn_with_ranks_is_proved_over_ranks(data):
    case = data.draw(strategies.cases(ranks=2, padding_is_a_class=True))
    criterion = data.draw(strategies.criteria(case.vocab_size, padding=case.padding))
    head = nn.Linear(case.width, case.vocab_size), criterion
    assert_same_loss(*head, case.hidden(), case.targets(), ranks=2)


@pytest.mark.parametrize("ranks", [None, 2])
def test_hypothesis_looks_for_the_smallest_failure_and_the_cause_is_looked_for_once(ranks, monkeypatch):
    looked, tried = [], []

    def counted(self, compared, evidence=comparison.Comparison._evidence):
        looked.append(self)
        return evidence(self, compared)

    monkeypatch.setattr(comparison.Comparison, "_evidence", counted)

    phases = [Phase.generate, Phase.shrink][: 2 - (ranks is not None)]

    @settings(max_examples=20, database=None, derandomize=True, deadline=None, phases=phases)
    @given(st.data())
    def wrong(data):
        shape = data.draw(strategies.shapes(ranks=ranks or 1))
        target = data.draw(strategies.targets(shape, 5, ranks=ranks or 1))
        tried.append(target)
        criterion = nn.CrossEntropyLoss(reduction="sum")
        assert_same_loss(nn.Linear(3, 5), criterion, torch.ones(*shape, 3), target, loss=half, ranks=ranks)

    with pytest.raises(AssertionError, match=r"Likely cause: accumulation: all gradients are 1/[24] of") as caught:
        wrong()
    assert "Smallest part" not in str(caught.value)
    assert len(tried) > 1
    # Ranks, if any, look for it in their own processes
    assert len(looked) == (ranks is None)

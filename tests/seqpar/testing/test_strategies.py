"""A strategy draws all of the range that it is said to have, and nothing else."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

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


def pairs(*numbers):
    """All rows of two of these numbers, as targets or masks are drawn."""
    return [[[*pair]] for pair in itertools.product(numbers, repeat=2)]


DRAWN = {
    "shapes": (strategies.shapes(2, 2), [(1, 1), (1, 2), (2, 1), (2, 2)]),
    "shapes for ranks": (strategies.shapes(4, 1, ranks=3), [(3, 1), (4, 1)]),
    "shapes for more ranks than sentences": (strategies.shapes(2, 1, ranks=3), [(3, 1)]),
    "masks": (strategies.masks((1, 2)).map(Tensor.tolist), pairs(True, False)),
    "targets": (strategies.targets((1, 2), 2).map(Tensor.tolist), pairs(0, 1, -100)),
    "targets with a class of padding": (strategies.targets((1, 2), 3, 0).map(Tensor.tolist), pairs(0, 1, 2)),
    "targets with the last class as padding": (strategies.targets((1, 2), 2, 1).map(Tensor.tolist), pairs(0, 1)),
    "other devices": (strategies.device_lists("meta", 1), [None, ["meta"]]),
    "splits of one class": (strategies.vocabulary_splits(1, 3), [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    "lengths": (strategies.lengths(2, 1), [[0, 0], [0, 1], [1, 0], [1, 1]]),
    "devices": (strategies.device_lists(most=2), [None, ["cpu"], ["cpu", "cpu"]]),
    "chunks": (
        strategies.chunkings(2, 1),
        [UNCUT, *(UNCUT | {"chunk_tokens": n} for n in range(1, 5)), *(UNCUT | {"chunk_size": n} for n in range(1, 4))],
    ),
    "splits": (strategies.vocabulary_splits(3, 2), [[0, 3], [1, 2], [2, 1], [3, 0]]),
    "splits without an empty part": (strategies.vocabulary_splits(4, 3, 1), [[1, 1, 2], [1, 2, 1], [2, 1, 1]]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_strategy_draws_all_of_its_range_and_nothing_else(name):
    strategy, wanted = DRAWN[name]
    # Many, because hypothesis draws other examples where other modules are loaded
    found = drawn_by(strategy, 400)
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


@given(st.data(), st.integers(2, 9), st.integers(1, 4), st.sampled_from([0, 1]))
def test_every_class_is_on_one_rank(data, classes, world, least):
    split = data.draw(strategies.vocabulary_splits(classes + world, world, least))
    assert sum(split) == classes + world
    assert len(split) == world
    assert min(split) >= least


@given(strategies.cases(padding_is_a_class=True))
def test_only_masked_targets_are_the_padding(case):
    assert (replace(case, padding_share=0.0).targets() != case.padding).all()
    assert (replace(case, padding_share=1.0).targets() == case.padding).all()


def test_masks_are_padded_at_the_ends_of_sentences_or_anywhere():
    ends, elsewhere = [], []
    for mask in drawn_by(strategies.masks((4, 9)), 60):
        length = mask.sum(1)
        padded = torch.equal(mask, torch.arange(9) < length.unsqueeze(1))
        ends.append(padded and 0 in length and bool((length % 9).any()))
        elsewhere.append(not padded)
    assert any(ends)
    assert any(elsewhere)


@pytest.mark.parametrize(
    ("padding", "conventions"), [(0, {"torch", "fairseq", "harvard"}), (-100, {"torch", "fairseq"})]
)
def test_criteria_are_of_every_kind_with_every_smoothing_and_ignore_the_padding(padding, conventions):
    found = drawn_by(strategies.criteria(4, padding), 150)
    torchs = [one for one in found if isinstance(one, nn.CrossEntropyLoss)]
    smoothing = [one for one in found if type(one).__name__ == "LabelSmoothing"]
    assert any(type(one).__name__ == "CrossEntropy" for one in found)
    kinds = {(one.weight is None, one.label_smoothing) for one in torchs}
    assert kinds == {*itertools.product([True, False], [0.0, 0.1, 0.9])}
    kinds = {(one.smoothing_convention, one.label_smoothing) for one in smoothing}
    assert kinds == {*itertools.product(conventions, [0.0, 0.1, 0.9])}
    assert {one.ignore_index for one in found} == {padding}
    weights = [one.weight.tolist() for one in torchs if one.weight is not None]
    assert {one.weight.dtype for one in torchs if one.weight is not None} == {torch.float64}
    assert weights[0] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_a_case_has_numbers_of_its_own_in_float64_and_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    found = drawn_by(strategies.cases(max_devices=2), 80)
    drawn_by(strategies.targets((3, 4), 5), 5)
    assert {case.devices for case in found} == {0, 1, 2}
    assert len({case.seed for case in found}) > 10
    assert {(case.device_list("meta") or [""])[-1] for case in found} == {"", "meta"}
    assert any((case.chunk_tokens or 0) > 10 for case in found)
    case = replace(found[0], batch=3, time=5, width=4, padding_share=0.3)
    other = replace(case, seed=case.seed + 1)
    for of in (strategies.Case.hidden, strategies.Case.targets):
        assert torch.equal(of(case), of(case))
        assert not torch.equal(of(case), of(other))
    assert not torch.equal(case.hidden(), case.hidden().float().double())
    assert torch.equal(torch.get_rng_state(), before)


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
    were = [int((plain[first:end] != padding).sum()) for first, end in itertools.pairwise(cuts)]
    assert (target != plain).sum() == (len({*were}) == 1)


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

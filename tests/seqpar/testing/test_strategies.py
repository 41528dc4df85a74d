"""A strategy draws all of the range that it is said to have, and nothing else."""

import pytest
from hypothesis import Phase, given, settings

from seqpar.testing import strategies

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

"""Phrases that must occur: the automaton, the division of the beam, and the search against all translations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import (
    DeadEndError,
    ForcedPrefixes,
    MinimumLength,
    NoRepeatedNgrams,
    Phrase,
    beam_search,
    constrained_beam_search,
)
from models.constrained_search import Candidate, Live, choose_hypotheses
from models.constraints import Constraints, allot
from tests.models.examples import BOS, EOS, PAD, batch, pad_to, random_batch, small_transformer
from tests.models.plain_search import every_hypothesis, plain_beam_search, same

MODELS = [small_transformer(seed + 10, vocab=7, spread=1.2, norm=norm) for seed in range(2) for norm in ("pre", "post")]
search = partial(constrained_beam_search, bos=BOS, eos=EOS)


def contains(tokens: Sequence[int], phrase: Phrase, boundaries: Sequence[int]) -> bool:
    """The definition: somewhere the tokens are the phrase's, and a whole one is followed by a boundary or nothing."""
    size = len(phrase.tokens)
    for at in range(len(tokens) - size + 1):
        if list(tokens[at : at + size]) == list(phrase.tokens):
            rest = tokens[at + size :]
            if not phrase.whole or not rest or rest[0] in boundaries:
                return True
    return False


def phrases(tokens: st.SearchStrategy[int], most: int, length: int) -> st.SearchStrategy[list[Phrase]]:
    one = st.builds(Phrase, st.lists(tokens, min_size=1, max_size=length), st.booleans())
    return st.lists(one, max_size=most)


@settings(deadline=None, max_examples=100)
@given(
    some=phrases(st.integers(3, 5), 3, 4),
    boundaries=st.sets(st.integers(3, 5)),
    tokens=st.lists(st.integers(3, 5), max_size=14),
)
def test_the_automaton_knows_after_each_token_which_phrases_are_missing(
    some: list[Phrase], boundaries: set[int], tokens: list[int]
) -> None:
    constraints = Constraints(some, sorted(boundaries))
    state = constraints.start
    for length in range(len(tokens) + 1):
        prefix = tokens[:length]
        missing = tuple(n for n, one in enumerate(some) if not contains(prefix, one, sorted(boundaries)))
        assert constraints.unmet_phrases(state) == missing
        assert (constraints.count_met(state) == constraints.total) == (not missing)
        # Whatever brings a phrase nearer than any other token is wanted
        for token in range(3, 6):
            if constraints.count_met(constraints.after(state, token)) > constraints.count_met(state):
                assert token in constraints.wanted_tokens(state)
        if length < len(tokens):
            state = constraints.after(state, tokens[length])


@given(candidates=st.lists(st.integers(0, 9), min_size=1, max_size=7), beam=st.integers(1, 20))
def test_the_beam_is_divided_evenly_and_no_slot_is_lost(candidates: list[int], beam: int) -> None:
    slots = allot(candidates, beam)
    assert sum(slots) == min(beam, sum(candidates))
    share = beam // len(candidates)
    assert all(min(share, count) <= got <= count for got, count in zip(slots, candidates, strict=True))


def test_spare_slots_go_to_the_nearest_bank_and_first_to_the_fuller_one() -> None:
    assert allot([9, 9, 9], 8) == [2, 2, 4]
    assert allot([9, 0, 9], 6) == [2, 0, 4]
    assert allot([9, 9, 0, 0], 8) == [2, 6, 0, 0]
    assert allot([0, 9, 1, 9], 4) == [0, 2, 1, 1]


@pytest.mark.parametrize(
    ("some", "boundaries"),
    [
        ([Phrase([3, 3])], []),
        ([Phrase([4]), Phrase([3, 4, 3])], []),
        ([Phrase([4, 3]), Phrase([3, 4])], []),
        ([Phrase([3], whole=True), Phrase([4, 4])], [4]),
        ([Phrase([4, 3], whole=True)], []),
        ([Phrase([4, 4], whole=True), Phrase([4])], [3]),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_a_wide_beam_finds_the_best_of_all_translations_that_contain_the_phrases(
    seed: int, some: list[Phrase], boundaries: list[int]
) -> None:
    model, src, limit = small_transformer(seed, vocab=5, spread=1.5), [3, 4, 4], 6
    (found,) = search(model, torch.tensor([src]), [some], boundaries=boundaries, beam=100, n_best=6, max_length=limit)
    expected = [
        one
        for one in every_hypothesis(model, src, limit, 0.6)
        if all(contains(one.tokens, phrase, boundaries) for phrase in some)
    ]
    finished = [one for one in found if len(one.tokens) < limit]
    same([finished], [expected[:6]])
    assert not any(one.unmet for one in found[: len(expected)])


@settings(deadline=None, max_examples=20)
@given(
    which=st.integers(0, len(MODELS) - 1),
    src=batch(vocab=7),
    beam=st.integers(2, 9),
    data=st.data(),
)
def test_each_translation_contains_its_own_phrases_or_says_which_it_lacks(
    which: int, src: list[list[int]], beam: int, data: st.DataObject
) -> None:
    some = [data.draw(phrases(st.integers(3, 6), 3, 2)) for _ in src]
    boundaries, limits = [3, 5], [data.draw(st.integers(1, 9)) for _ in src]
    ask = partial(search, MODELS[which], boundaries=boundaries, beam=beam, n_best=2)
    together = ask(pad_to(src, 6), some, max_length=limits)
    for one, wanted, limit, found in zip(src, some, limits, together, strict=True):
        for hypothesis in found:
            missing = tuple(n for n, each in enumerate(wanted) if not contains(hypothesis.tokens, each, boundaries))
            assert hypothesis.unmet == missing
            assert not missing or len(hypothesis.tokens) == limit
        (alone,) = ask(torch.tensor([one]), [wanted], max_length=limit)
        assert [h.tokens for h in found] == [h.tokens for h in alone]
        assert [h.score for h in found] == pytest.approx([h.score for h in alone], rel=1e-10)


@settings(deadline=None, max_examples=12)
@given(which=st.integers(0, len(MODELS) - 1), src=batch(vocab=7), beam=st.integers(1, 4), limit=st.integers(1, 8))
def test_without_phrases_it_is_beam_search(which: int, src: list[list[int]], beam: int, limit: int) -> None:
    model, ids = MODELS[which], pad_to(src, 6)
    found = search(model, ids, [[]] * len(src), beam=beam, n_best=beam, max_length=limit)
    expected = [plain_beam_search(model, one, beam, beam, 0.6, limit) for one in src]
    same(found, expected)
    assert not any(one.unmet for row in found for one in row)


def test_phrases_that_the_model_finds_improbable_are_in_the_translation_all_the_same() -> None:
    model = small_transformer(5, vocab=40, spread=1.5)
    src = random_batch(3, vocab=40)
    wanted = [[Phrase([17, 23]), Phrase([39])], [Phrase([8])], [], [Phrase([30, 31, 32])], [Phrase([5, 5])]]
    free = beam_search(model, src, bos=BOS, eos=EOS, beam=8)
    held = search(model, src, wanted, beam=8)
    for some, without, found in zip(wanted, free, held, strict=True):
        assert found[0].unmet == ()
        assert all(contains(found[0].tokens, phrase, []) for phrase in some)
        assert not some or not all(contains(without[0].tokens, phrase, []) for phrase in some)


def test_phrases_that_do_not_fit_come_back_as_missing() -> None:
    wanted = [[Phrase([3]), Phrase([3, 4, 5, 6])], [Phrase([3])]]
    found = search(MODELS[0], torch.tensor([[3, 4], [5, 6]]), wanted, beam=6, n_best=6, max_length=[3, 8])
    # The whole of the first phrase, and as much of the second as three steps allow
    assert (found[0][0].tokens, found[0][0].unmet) == ([3, 4, 5], (1,))
    constraints = Constraints(wanted[0])
    met = []
    for hypothesis in found[0]:
        state = constraints.start
        for token in hypothesis.tokens:
            state = constraints.after(state, token)
        met.append(constraints.count_met(state))
    assert len(set(met)) > 1
    assert met == sorted(met, reverse=True)
    assert found[1][0].unmet == ()


def test_an_ending_competes_with_the_hypotheses_that_have_met_as_much() -> None:
    constraints = Constraints([Phrase([3])])
    met = constraints.after(constraints.start, 3)
    live = [Live(-0.1, [5], constraints.start, 0), Live(-2.0, [3], met, 0)]
    candidates = [Candidate(-0.3, 0, 4), Candidate(-0.4, 0, 5), Candidate(-2.5, 1, EOS), Candidate(-2.6, 1, 4)]
    ended, alive = choose_hypotheses(constraints, live, candidates, EOS, beam=2)
    # One slot for each number of tokens met: the end is the best that has met one
    assert [one.tokens for one in ended] == [[3]]
    assert [one.tokens for one in alive] == [[5, 4], [3, 4]]
    assert [one.parent for one in alive] == [0, 1]


def test_rules_hold_beside_phrases() -> None:
    src, start = torch.tensor([[3, 4, 5]]), [6, 6]
    rules = [MinimumLength(5, EOS), ForcedPrefixes([start])]
    (found,) = search(MODELS[0], src, [[Phrase([4, 3])]], beam=10, n_best=3, rules=rules, max_length=9)
    for one in found:
        assert one.tokens[:2] == start
        assert len(one.tokens) >= 5
        assert contains(one.tokens, Phrase([4, 3]), [])
    with pytest.raises(DeadEndError, match=r"src\[0\]"):
        search(MODELS[0], src, [[]], rules=[ForcedPrefixes([[4, 4]]), NoRepeatedNgrams(1)], max_length=9)


@pytest.mark.parametrize(
    ("wanted", "changes", "message"),
    [
        ([[]] * 4, {}, "phrases were given for 4 sentences, not for 5"),
        ([[], [Phrase([])], [], [], []], {}, r"phrase 0 of src\[1\] is empty"),
        ([[], [], [], [], [Phrase([3]), Phrase([7])]], {}, r"phrase 1 of src\[4\] contains token 7, outside the voc"),
        *(([[Phrase([3, it])], [], [], [], []], {}, "padding, start or end symbol") for it in (PAD, BOS, EOS)),
        ([[]] * 5, {"boundaries": [9]}, "boundaries contains token 9"),
        ([[]] * 5, {"beam": 0}, "beam is 0, below 1"),
        ([[]] * 5, {"n_best": 11}, r"n_best is 11, outside \[1, beam 10\]"),
        ([[]] * 5, {"rules": [MinimumLength(20, EOS)], "max_length": 9}, "minimum length is 20"),
    ],
)
def test_constraints_that_cannot_work_are_an_error(
    wanted: list[list[Phrase]], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        search(MODELS[0], random_batch(1, vocab=7), wanted, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_models_keep_constraints(dtype: torch.dtype) -> None:
    model, src = small_transformer(5, vocab=7).to(dtype), random_batch(1, vocab=7)
    found = search(model, src, [[Phrase([3, 4])]] * 5)
    assert all(contains(row[0].tokens, Phrase([3, 4]), []) for row in found)
    # Sums of log-probabilities are not rounded to the model's dtype
    rules = [MinimumLength(4, EOS)]
    free = beam_search(model, src, bos=BOS, eos=EOS, beam=3, rules=rules)
    same(search(model, src, [[]] * 5, beam=3, rules=rules), free, rel=1e-5)


def test_an_ensemble_keeps_constraints_and_scores_with_the_mean_probability() -> None:
    models = [small_transformer(seed, vocab=5, spread=1.5) for seed in (1, 2)]
    (found,) = search(models, torch.tensor([[3, 4]]), [[Phrase([4, 3])]], beam=60, n_best=4, max_length=5)
    expected = [one for one in every_hypothesis(models, [3, 4], 5, 0.6) if contains(one.tokens, Phrase([4, 3]), [])]
    same([found], [expected[:4]])


def test_an_empty_batch_is_translated() -> None:
    assert search(MODELS[0], torch.zeros(0, 3, dtype=torch.long), []) == []

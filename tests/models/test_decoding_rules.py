"""What a search follows beside the probabilities: rules, length normalisation, and numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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
    greedy,
    length_normaliser,
    sample,
)
from models.decoding_rules import Rule
from tests.models.examples import BOS, EOS, PAD, pad_to, random_batch, small_transformer
from tests.models.plain_search import Allowed, every_hypothesis, plain_beam_search, same

MODELS = [small_transformer(seed + 10, vocab=7, spread=1.2, norm=norm) for seed in range(2) for norm in ("pre", "post")]
TOKENS = st.lists(st.integers(3, 6), max_size=3)
SOURCES = st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=5), min_size=1, max_size=3)


def keeps(minimum: int, size: int, start: list[int]) -> Allowed:
    """What the rules allow, from their description."""

    def allowed(prefix: list[int], token: int) -> bool:
        if len(prefix) < len(start) and token != start[len(prefix)]:
            return False
        if token == EOS:
            return len(prefix) >= minimum
        longer = [*prefix, token]
        ngrams = [tuple(longer[at : at + size]) for at in range(len(longer) - size + 1)]
        return size == 0 or len(set(ngrams)) == len(ngrams)

    return allowed


def rules_of(minimum: int, size: int, starts: list[list[int]]) -> list[Rule]:
    repeats: list[Rule] = [NoRepeatedNgrams(size)] if size else []
    return [MinimumLength(minimum, EOS), *repeats, ForcedPrefixes(starts)]


@settings(deadline=None, max_examples=25)
@given(
    which=st.integers(0, len(MODELS) - 1),
    src=SOURCES,
    beam=st.integers(1, 4),
    minimum=st.integers(0, 4),
    size=st.sampled_from([0, 2, 3]),
    data=st.data(),
)
def test_the_search_under_rules_is_a_plain_one_that_tests_every_token(
    which: int, src: list[list[int]], beam: int, minimum: int, size: int, data: st.DataObject
) -> None:
    # Distinct tokens, so that no beginning repeats an n-gram
    starts = [list(dict.fromkeys(data.draw(TOKENS))) for _ in src]
    search = partial(beam_search, MODELS[which], bos=BOS, eos=EOS, beam=beam, n_best=beam, length_penalty=1.0)
    found = search(pad_to(src, 6), rules=rules_of(minimum, size, starts), max_length=6)
    expected = [
        plain_beam_search(MODELS[which], one, beam, beam, 1.0, 6, allowed=keeps(minimum, size, start))
        for one, start in zip(src, starts, strict=True)
    ]
    same(found, expected)
    if beam == 1:
        assert [row[0].tokens for row in found] == greedy(
            MODELS[which], pad_to(src, 6), bos=BOS, eos=EOS, rules=rules_of(minimum, size, starts), max_length=6
        )


@pytest.mark.parametrize(("minimum", "size", "start"), [(3, 0, []), (0, 1, []), (0, 2, [4]), (2, 2, [3, 4])])
def test_a_wide_beam_finds_the_best_of_all_translations_that_keep_the_rules(
    minimum: int, size: int, start: list[int]
) -> None:
    model, src = small_transformer(1, vocab=5, spread=1.5), [3, 4, 4]
    rules = rules_of(minimum, size, [start])
    found = beam_search(model, torch.tensor([src]), bos=BOS, eos=EOS, beam=40, n_best=8, rules=rules, max_length=5)
    expected = every_hypothesis(model, src, 5, 0.6, allowed=keeps(minimum, size, start))
    finished = min(8, len(expected))
    same([found[0][:finished]], [expected[:finished]])


def test_a_forbidden_token_keeps_its_share_of_the_probability() -> None:
    model, src = small_transformer(1, vocab=5), torch.tensor([[3, 4]])
    free, held = (
        beam_search(model, src, bos=BOS, eos=EOS, beam=40, n_best=4, rules=rules, length_penalty=0.0, max_length=3)[0]
        for rules in ([], [MinimumLength(2, EOS)])
    )
    scores = {tuple(hypothesis.tokens): hypothesis.score for hypothesis in free}
    shared = [hypothesis for hypothesis in held if tuple(hypothesis.tokens) in scores]
    assert shared
    assert all(h.score == pytest.approx(scores[tuple(h.tokens)], rel=1e-12) for h in shared)


def test_a_forced_token_is_found_however_improbable_it_is() -> None:
    model, starts = small_transformer(1, vocab=40), [[token, 42 - token] for token in range(3, 40)]
    src = torch.tensor([[3, 4]] * len(starts))
    for beam in (1, 3):
        found = beam_search(
            model, src, bos=BOS, eos=EOS, beam=beam, rules=[ForcedPrefixes(starts)], length_penalty=0.0, max_length=3
        )
        assert [row[0].tokens[:2] for row in found] == starts


def test_the_first_token_of_a_vocabulary_can_be_forced() -> None:
    logits = torch.zeros(2, 4)
    ForcedPrefixes([[0], []]).forbid(logits, torch.zeros(2, 1, dtype=torch.long), torch.tensor([0, 1]))
    assert logits.isfinite().tolist() == [[True, False, False, False], [True] * 4]


def test_under_rules_a_sentence_is_translated_as_it_is_alone() -> None:
    model, src = MODELS[0], random_batch(2, vocab=7)
    starts = [[3], [], [6, 5], [4, 4, 4], [5]]
    together = beam_search(
        model, src, bos=BOS, eos=EOS, rules=[MinimumLength(3, EOS), ForcedPrefixes(starts)], max_length=[5, 9, 4, 7, 8]
    )
    for row, (start, limit) in enumerate(zip(starts, [5, 9, 4, 7, 8], strict=True)):
        rules: list[Rule] = [MinimumLength(3, EOS), ForcedPrefixes([start])]
        alone = beam_search(model, src[[row]], bos=BOS, eos=EOS, rules=rules, max_length=limit)
        same([together[row]], alone)
        assert together[row][0].tokens[: len(start)] == start


def test_where_the_rules_forbid_every_token_the_sentence_is_named() -> None:
    model, src = small_transformer(1, vocab=5), pad_to([[3], [4, 4]], 2)
    # Two tokens, neither of them twice, make no translation of three
    rules: list[Rule] = [MinimumLength(3, EOS), NoRepeatedNgrams(1)]
    for search in (greedy, beam_search, partial(sample, seeds=[1, 2])):
        with pytest.raises(DeadEndError, match=r"leave src\[0\] without a translation") as caught:
            search(model, src, bos=BOS, eos=EOS, rules=rules)
        assert caught.value.sentence == 0
    # The second sentence alone: its given beginning contains what the other rule forbids
    starts = ForcedPrefixes([[3], [4, 3, 4]])
    for search in (greedy, beam_search, partial(sample, seeds=[1, 2])):
        with pytest.raises(DeadEndError, match=r"src\[1\]"):
            search(model, src, bos=BOS, eos=EOS, rules=[starts, NoRepeatedNgrams(1)], max_length=9)


def test_a_hypothesis_without_continuation_leaves_the_others_in_the_beam() -> None:
    model, src = small_transformer(1, vocab=5, spread=1.5), [3, 4]
    allowed = keeps(2, 1, [])
    found = beam_search(
        model,
        torch.tensor([src]),
        bos=BOS,
        eos=EOS,
        beam=20,
        n_best=20,
        rules=[MinimumLength(2, EOS), NoRepeatedNgrams(1)],
        max_length=6,
    )
    assert sorted(h.tokens for h in found[0]) == [[3, 4], [4, 3]]
    same(found, [every_hypothesis(model, src, 6, 0.6, allowed=allowed)])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (MinimumLength(8, EOS), r"minimum length is 8, but src\[0\] has 8 steps"),
        (MinimumLength(2, 5), "rule's end symbol is 5, the search's 2"),
        (ForcedPrefixes([[3]] * 4), "4 prefixes were given for 5 sentences"),
        (ForcedPrefixes([[3], [], [], [3] * 8, []]), r"prefix of src\[3\] has 8 tokens, but the sentence has 8 steps"),
        (ForcedPrefixes([[], [7], [], [], []]), r"prefix of src\[1\] contains token 7, outside the vocabulary of 7"),
        (ForcedPrefixes([[], [], [-1], [], []]), "token -1, outside the vocabulary"),
        *((ForcedPrefixes([[], [], [], [], [3, it]]), "padding, start or end symbol") for it in (PAD, BOS, EOS)),
    ],
)
def test_a_rule_that_no_translation_can_keep_is_refused(rule: Rule, message: str) -> None:
    for search in (greedy, beam_search, partial(sample, seeds=[0] * 5)):
        with pytest.raises(ValueError, match=message):
            search(MODELS[0], random_batch(1, vocab=7), bos=BOS, eos=EOS, rules=[rule], max_length=8)


def test_rules_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="minimum length is -1, below 0"):
        MinimumLength(-1, EOS)
    with pytest.raises(ValueError, match="size of n-grams is 0, below 1"):
        NoRepeatedNgrams(0)


def test_by_length_scores_with_penalty_1_are_mean_log_probabilities() -> None:
    assert length_normaliser(7, 1.0, "length") == 7
    assert length_normaliser(9, 0.5, "length") == 3
    assert length_normaliser(1, 3.0, "length") == length_normaliser(30, 0.0, "length") == 1
    assert length_normaliser(7, 1.0, "gnmt") == length_normaliser(7, 1.0) == 2


def test_the_default_is_gnmts() -> None:
    src = random_batch(1)
    found = [
        beam_search(small_transformer(3), src, bos=BOS, eos=EOS, length_penalty=2.0, **given)
        for given in ({}, {"length_norm": "gnmt"}, {"length_norm": "length"})  # type: ignore[arg-type]
    ]
    assert found[0] == found[1] != found[2]


def test_an_unknown_normalisation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="length_norm is 'wu': it must be gnmt or length"):
        beam_search(small_transformer(3), random_batch(1), bos=BOS, eos=EOS, length_norm="wu")  # type: ignore[arg-type]


SRC = pad_to([[5, 6, EOS], [7, 3, 4, EOS]], 4)
SEARCHES: dict[str, Callable[..., Any]] = {
    "greedy": greedy,
    "beam": partial(beam_search, beam=3),
    "constrained": partial(constrained_beam_search, phrases=[[Phrase((4,))], []], beam=3),
    "sampled": partial(sample, seeds=[0, 1], samples=2),
    "top-k": partial(sample, seeds=[0, 1], top_k=3),
    "nucleus": partial(sample, seeds=[0, 1], top_p=0.5),
}


@pytest.fixture(params=[200, 2**20], ids=["in blocks", "at once"], autouse=True)
def logits_bytes(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.candidates.LOGITS_BYTES", request.param)
        yield


@pytest.mark.parametrize(
    ("weight", "row", "value", "sentence"),
    [
        ("generator.bias", 140, math.nan, 0),
        ("generator.bias", 140, math.inf, 0),
        ("src_embed.lookup.weight", 7, math.nan, 1),  # only the second sentence has this token
    ],
)
@pytest.mark.parametrize("name", SEARCHES)
def test_a_logit_that_is_not_finite_is_an_error_that_names_the_sentence(
    name: str, weight: str, row: int, value: float, sentence: int
) -> None:
    model = small_transformer(vocab=150, tie="none")
    with torch.no_grad():
        model.get_parameter(weight)[row] = value
    said = rf"^src\[{sentence}\]: the model's logits are nan or inf: .* or try float32$"
    with pytest.raises(FloatingPointError, match=said):
        SEARCHES[name](model, SRC, bos=BOS, eos=EOS)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_token_whose_bias_is_minus_infinity_never_comes_and_is_no_error(name: str) -> None:
    model = small_transformer(vocab=150, tie="none")
    with torch.no_grad():
        model.generator.bias[6] = -math.inf
    for row in SEARCHES[name](model, SRC, bos=BOS, eos=EOS):
        for tokens in [row] if name == "greedy" else [found.tokens for found in row]:
            assert len(tokens) > 0
            assert 6 not in tokens


@pytest.mark.parametrize("allowed", [[], [0], [BOS], [0, BOS]])
@pytest.mark.parametrize("name", SEARCHES)
def test_a_model_whose_bias_leaves_no_token_is_one_error_in_every_search(name: str, allowed: list[int]) -> None:
    model = small_transformer(vocab=150, tie="none")
    with torch.no_grad():
        kept = model.generator.bias[allowed].clone()
        model.generator.bias.fill_(-math.inf)
        model.generator.bias[allowed] = kept
    with pytest.raises(DeadEndError, match=r"^the rules leave src\[0\] without a translation: .* bias of -inf"):
        SEARCHES[name](model, SRC, bos=BOS, eos=EOS)

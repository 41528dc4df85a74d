"""Sampling: a token is drawn with its probability, among those that the options leave."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import MinimumLength, greedy, sample
from models.sampling import BELOW_ONE, NUCLEUS, draw, find_quantile, first_exceeding, most_probable
from tests.models.examples import BOS, EOS, PAD, batch, pad_to, random_batch, small_transformer
from tests.models.plain_search import next_log_probabilities, total_of

MODEL = small_transformer(2, vocab=7, spread=1.2)


def truncated(logp: list[float], temperature: float, top_k: int | None, top_p: float) -> list[float]:
    """The distribution to sample from, as the papers describe it: one token after the other."""
    weights = {token: math.exp(value / temperature) for token, value in enumerate(logp)}
    order = sorted(weights, key=lambda token: -weights[token])[:top_k]
    total = sum(weights[token] for token in order)
    kept: dict[int, float] = {}
    for token in order:
        if sum(kept.values()) >= top_p:
            break
        kept[token] = weights[token] / total
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(logp))]


@settings(deadline=None, max_examples=40)
@given(
    logits=st.lists(
        st.integers(-32, 32).map(lambda eighths: eighths / 8) | st.just(-math.inf), min_size=1, max_size=9, unique=True
    ).filter(lambda row: max(row) > -math.inf),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, 10),
    top_p=st.sampled_from([0.05, 0.4, 0.77, 0.95, 1.0]),
)
def test_evenly_spaced_uniform_numbers_draw_each_token_as_often_as_it_is_probable(
    logits: list[float], temperature: float, top_k: int | None, top_p: float
) -> None:
    count = 2_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    rows = torch.tensor(logits, dtype=torch.float64).expand(count, -1)
    drawn = Counter(draw(rows, uniform, temperature, top_k, top_p).tolist())
    for token, probability in enumerate(truncated(logits, temperature, top_k, top_p)):
        # A token's part of [0, 1) contains its length times `count` of the points, give or take one
        assert abs(drawn[token] - probability * count) <= 1 + 1e-6
        assert probability > 0 or not drawn[token]


@pytest.mark.parametrize(
    ("top_p", "nucleus"), [(0.25, 1), (0.25 + 2**-30, 2), (0.5 - 2**-30, 2), (0.5, 2), (0.5 + 2**-30, 3), (0.75, 3)]
)
def test_a_nucleus_that_reaches_p_exactly_has_no_token_more(top_p: float, nucleus: int) -> None:
    """Of four tokens of probability 1/4."""
    uniform = torch.linspace(0, 1 - 2**-53, 64, dtype=torch.float64)
    found = draw(torch.zeros(64, 4, dtype=torch.float64), uniform, 1.0, None, top_p)
    assert len(set(found.tolist())) == nucleus


def test_no_uniform_number_draws_a_token_without_probability() -> None:
    logits = torch.tensor([[-math.inf, 0.3, 1.7, -math.inf]], dtype=torch.float64)
    assert draw(logits, torch.tensor([0.0], dtype=torch.float64), 1.0, None, 1.0).item() == 1
    assert draw(logits, torch.tensor([1 - 2**-53], dtype=torch.float64), 1.0, None, 1.0).item() == 2


@pytest.mark.parametrize("improbable", [2.0**-30, 2.0**-50])
@pytest.mark.parametrize("token", [1, 70, 4_000])
def test_a_token_is_drawn_however_improbable_it_is_beside_the_others(token: int, improbable: float) -> None:
    """In float32, 1 plus its probability is 1: within a block of the vocabulary, and over the blocks."""
    p = torch.zeros(1, 4_100)
    p[0, 0], p[0, token] = 1.0, improbable
    for uniform, expected in ((1 - improbable / 2, token), (1 - 2 * improbable, 0)):
        assert first_exceeding(p, torch.tensor([uniform], dtype=torch.float64)).item() == expected


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, None, 1.0), (2.0, 3, 0.9)])
def test_whole_translations_have_their_probability(temperature: float, top_k: int | None, top_p: float) -> None:
    model, src, count, limit = small_transformer(4, vocab=6), [3, 5], 2_000, 3
    expected: dict[tuple[int, ...], float] = {}
    real = [token for token in range(6) if token not in (PAD, BOS, EOS)]
    distribution = {}
    for length in range(limit):
        for prefix in itertools.product(real, repeat=length):
            logp = next_log_probabilities([model], src, list(prefix))
            logp[PAD] = logp[BOS] = -math.inf
            distribution[prefix] = truncated(logp, temperature, top_k, top_p)
    for length in range(limit + 1):
        for tokens in itertools.product(real, repeat=length):
            ids = [*tokens, EOS][:limit]
            steps = [distribution[tokens[:step]][token] for step, token in enumerate(ids)]
            expected[tokens] = math.prod(steps)
    assert sum(expected.values()) == pytest.approx(1)
    (found,) = sample(
        model,
        torch.tensor([src]),
        bos=BOS,
        eos=EOS,
        seeds=[1],
        samples=count,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_length=limit,
    )
    drawn = Counter(tuple(hypothesis.tokens) for hypothesis in found)
    possible = [tokens for tokens, probability in expected.items() if probability > 0]
    assert set(drawn) <= set(possible)
    statistic = sum((drawn[one] - count * expected[one]) ** 2 / (count * expected[one]) for one in possible)
    freedom = len(possible) - 1
    # Chi-square, mean `freedom` and variance twice that: four standard deviations, always with the same seed
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@settings(deadline=None, max_examples=15)
@given(src=batch(vocab=7), extra=st.integers(0, 2), samples=st.integers(1, 3), data=st.data())
def test_a_sentences_samples_depend_on_its_seed_alone(
    src: list[list[int]], extra: int, samples: int, data: st.DataObject
) -> None:
    seeds = data.draw(st.lists(st.integers(), min_size=len(src), max_size=len(src)))
    together = sample(MODEL, pad_to(src, 6 + extra), bos=BOS, eos=EOS, seeds=seeds, samples=3, temperature=1.5)
    for one, seed, drawn in zip(src, seeds, together, strict=True):
        (alone,) = sample(MODEL, torch.tensor([one]), bos=BOS, eos=EOS, seeds=[seed], samples=samples, temperature=1.5)
        assert [h.tokens for h in alone] == [h.tokens for h in drawn[:samples]]


def test_the_samples_of_a_sentence_differ_and_so_do_those_of_two_seeds() -> None:
    src = torch.tensor([[3, 4, 5]] * 2)
    found = sample(MODEL, src, bos=BOS, eos=EOS, seeds=[1, 2], samples=8, temperature=2.0)
    tokens = [[tuple(h.tokens) for h in row] for row in found]
    assert len(set(tokens[0])) > 4
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("truncation", [{}, {"temperature": 0.4}, {"top_k": 2}, {"top_p": 0.6}])
def test_scores_are_log_probabilities_under_the_model_whatever_was_truncated(truncation: dict[str, float]) -> None:
    src, limit = [[3, 4, 5], [6]], 5
    rules = [MinimumLength(2, EOS)]
    found = sample(
        MODEL,
        pad_to(src, 4),
        bos=BOS,
        eos=EOS,
        seeds=[3, 4],
        samples=4,
        rules=rules,
        max_length=limit,
        **truncation,  # type: ignore[arg-type]
    )
    for one, row in zip(src, found, strict=True):
        for hypothesis in row:
            assert hypothesis.log_probability == pytest.approx(total_of([MODEL], one, hypothesis, limit), rel=1e-12)
            assert hypothesis.score == hypothesis.log_probability
            assert len(hypothesis.tokens) >= 2


def test_from_the_most_probable_token_alone_sampling_is_greedy() -> None:
    src = random_batch(1, vocab=7)
    expected = greedy(MODEL, src, bos=BOS, eos=EOS)
    for truncation in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-4}):
        found = sample(MODEL, src, bos=BOS, eos=EOS, seeds=range(5), **truncation)  # type: ignore[arg-type]
        assert [[one.tokens for one in row] for row in found] == [[tokens] for tokens in expected]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0, not above 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0, below 1"),
        ({"top_p": 0.0}, r"top_p is 0.0, outside \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p is 1.5, outside"),
        ({"samples": 0}, "samples is 0, below 1"),
        ({"seeds": [1, 2]}, "2 seeds were given for 5 sentences"),
        ({"max_length": 0}, "max_length is 0"),
    ],
)
def test_sampling_that_cannot_work_is_an_error(settings: dict[str, object], message: str) -> None:
    arguments = {"seeds": [0] * 5, **settings}
    with pytest.raises(ValueError, match=message):
        sample(MODEL, random_batch(1, vocab=7), bos=BOS, eos=EOS, **arguments)  # type: ignore[arg-type]


def test_the_largest_number_below_1_is_not_rounded_to_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """From which no token would be drawn."""
    monkeypatch.setattr("random.Random.random", lambda self: BELOW_ONE)
    ((found,),) = sample(MODEL, torch.tensor([[3, 4]]), bos=BOS, eos=EOS, seeds=[0], max_length=3)
    assert math.isfinite(found.score)


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (None, 0.1), (None, 0.99)])
def test_truncated_probabilities_are_in_float64(top_k: int | None, top_p: float) -> None:
    """With top_p 0.1 the most probable tokens suffice, with 0.99 the whole vocabulary is sorted."""
    logits = torch.linspace(0, 1, 4 * NUCLEUS).expand(2, -1)
    found, tokens = most_probable(logits, top_k, top_p)
    expected = logits.double().sort(-1, descending=True).values[:, : top_k or tokens.size(1)]
    total = expected if top_k else logits.double()
    expected = (expected - total.logsumexp(-1, keepdim=True)).exp()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-6 if top_p == 0.1 else 1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_models_are_sampled(dtype: torch.dtype) -> None:
    model, src = small_transformer(5, vocab=7).to(dtype), random_batch(1, vocab=7)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        found = sample(model, src, bos=BOS, eos=EOS, seeds=range(5), top_p=0.9)
    assert all(math.isfinite(row[0].score) for row in found)


def test_the_defaults_are_those_that_are_documented() -> None:
    """On random sentences, for which each other default would find something else."""
    src = random_batch(3, 16, vocab=7)
    documented: dict[str, Any] = {"samples": 1, "temperature": 1.0, "top_k": None, "top_p": 1.0}
    found = sample(MODEL, src, bos=BOS, eos=EOS, seeds=range(16))
    assert found == sample(MODEL, src, bos=BOS, eos=EOS, seeds=range(16), **documented)
    for other in ({"samples": 2}, {"temperature": 2.0}, {"top_k": 1}, {"top_p": 0.5}):
        assert found != sample(MODEL, src, bos=BOS, eos=EOS, seeds=range(16), **documented | other), other


def test_an_empty_batch_has_no_samples() -> None:
    assert sample(MODEL, torch.zeros(0, 3, dtype=torch.long), bos=BOS, eos=EOS, seeds=[]) == []


RARE = 1e-9
VOCAB = 200_000


def rare_but_one(frequent: int) -> torch.Tensor:
    """Float32 logits of a vocabulary in which every token but one has probability RARE."""
    logits = torch.full((VOCAB,), math.log(RARE), dtype=torch.float64)
    logits[frequent] = math.log1p(-RARE * (VOCAB - 1))
    return logits.float()


def drawn(logits: torch.Tensor, uniform: numpy.ndarray) -> numpy.ndarray:
    """Draw a token for each of the numbers, from the same distribution."""
    return draw(logits.expand(len(uniform), -1), torch.from_numpy(uniform), 1.0, None, 1.0).numpy()


def test_rare_tokens_before_the_frequent_one_are_drawn_at_the_middle_of_their_parts() -> None:
    tokens = numpy.array([0, 1, 63, 64, 65, 127, 9_999, 123_456, VOCAB - 65, VOCAB - 2])
    found = drawn(rare_but_one(VOCAB - 1), (tokens + 0.5) * RARE)
    assert found.tolist() == tokens.tolist()


@pytest.mark.parametrize("frequent", [0, 64, 100_030])
def test_rare_tokens_behind_the_frequent_one_are_each_drawn_as_often(frequent: int) -> None:
    logits = rare_but_one(frequent)
    # Four points for each token, beginning inside the block of the frequent one
    weights = numpy.exp(logits.double().numpy())
    before = (weights[: frequent + 1].sum()) / weights.sum()
    found = drawn(logits, before + 2e-7 + numpy.arange(120) * RARE / 4)
    counts = numpy.bincount(found - found[0])
    assert found[0] > frequent
    assert len(counts) in (30, 31)
    assert set(counts[1:-1]) <= {3, 4, 5}


@settings(deadline=None, max_examples=60)
@given(
    some=st.lists(st.sampled_from([0, 0, 1, 7, 1_000_000]), min_size=1, max_size=40).filter(any),
    times=st.integers(1, 6),
    data=st.data(),
)
def test_no_token_of_probability_0_is_drawn_and_every_other_within_its_part(
    some: list[int], times: int, data: st.DataObject
) -> None:
    weights = some * times  # several blocks, of which the last is not whole
    ends = numpy.cumsum(numpy.array(weights))
    total = int(ends[-1])
    border = data.draw(st.sampled_from(ends.tolist())) / total
    edges = [0.0, BELOW_ONE, min(border, BELOW_ONE), math.nextafter(border, 0)]
    real = numpy.flatnonzero(weights)
    # In the middle of each token's part
    inside = (ends[real] - numpy.array(weights)[real] / 2) / total
    uniform = torch.tensor([*edges, *inside], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        p = (torch.tensor(weights, dtype=torch.float64) / total).to(dtype).expand(len(uniform), -1)
        found = first_exceeding(p, uniform)
        assert all(weights[token] for token in found.tolist())
        if dtype == torch.float64:
            assert found[len(edges) :].tolist() == real.tolist()


def test_the_part_of_an_entry_below_u_is_below_one_though_differences_are_rounded() -> None:
    random = torch.Generator().manual_seed(1)
    # A sum below 2 of a number below 1 and one above: the difference has fewer digits than the number subtracted
    p = torch.tensor([0.5, 1.0]) + torch.rand(1_000, 2, dtype=torch.float64, generator=random) / 4
    index, part = find_quantile(p, torch.full((len(p), 1), BELOW_ONE, dtype=torch.float64))
    assert bool((index == 1).all())
    assert bool((part < 1).all())


@settings(deadline=None, max_examples=40)
@given(
    vocab=st.integers(129, 400),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.5, 3.0, 12.0]),
    temperature=st.sampled_from([0.4, 1.0, 2.0]),
    truncation=st.sampled_from([(2, 1.0), (1, 0.9), (2, 0.6), (None, 0.2), (None, 0.7), (None, 0.999)]),
)
def test_truncated_draws_are_those_of_a_sort_of_the_whole_vocabulary(
    vocab: int, seed: int, spread: float, temperature: float, truncation: tuple[int | None, float]
) -> None:
    top_k, top_p = truncation
    random = numpy.random.default_rng(seed)
    logits = random.normal(0, spread, (5, vocab))
    logits[:, random.integers(0, vocab, 3)] = -math.inf
    uniform = random.random(5)
    expected = []
    for row, u in zip(logits, uniform, strict=True):
        order = numpy.argsort(-row)[:top_k]
        p = numpy.exp((row[order] - row.max()) / temperature)
        p /= p.sum()
        p[numpy.cumsum(p) - p >= top_p] = 0
        expected.append(order[numpy.searchsorted(numpy.cumsum(p), u * p.sum(), side="right")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.sampling.NUCLEUS", 2)
        found = draw(torch.from_numpy(logits), torch.from_numpy(uniform), temperature, top_k, top_p)
    assert found.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lowest_temperatures_draw_the_most_probable_token(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 3e5, 2.0, -math.inf]], dtype=dtype)
    for temperature in (1e-300, 1e-46, 1e-20):
        assert draw(logits, torch.tensor([0.5], dtype=torch.float64), temperature, None, 1.0).item() == 1

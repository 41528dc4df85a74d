"""A token is drawn with its probability, however improbable, in vocabularies of any size; and never at 0."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.sampling import BELOW_ONE, draw, first_exceeding, found_at

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
    index, part = found_at(p, torch.full((len(p), 1), BELOW_ONE, dtype=torch.float64))
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

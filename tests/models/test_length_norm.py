"""The two length normalisations: GNMT's, and division by a power of the length as in fairseq."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import beam_search, length_normaliser
from tests.models.examples import BOS, EOS, pad_to, random_batch, sentence, small_transformer
from tests.models.plain_search import every_hypothesis, plain_beam_search, same

MODELS = [small_transformer(seed + 10, vocab=7, spread=1.2, norm=norm) for seed in range(2) for norm in ("pre", "post")]


@pytest.mark.parametrize("n_best", [1, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(2))
@torch.no_grad()
def test_a_wide_beam_finds_the_best_of_all_hypotheses_by_their_length(seed: int, alpha: float, n_best: int) -> None:
    model = small_transformer(seed, vocab=5, spread=1.5, norm="post" if seed % 2 else "pre")
    src = [[3, 4, 4], [4], [3, 3]]
    actual = beam_search(
        model,
        pad_to(src, 4),
        bos=BOS,
        eos=EOS,
        beam=40,
        length_penalty=alpha,
        length_norm="length",
        n_best=n_best,
        max_length=5,
    )
    same(actual, [every_hypothesis(model, one, 5, alpha, "length")[:n_best] for one in src])


@settings(deadline=None, max_examples=20)
@given(
    which=st.integers(0, len(MODELS) - 1),
    src=sentence(vocab=7),
    beam=st.integers(1, 4),
    data=st.data(),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 3.0]),
    limit=st.integers(1, 10),
)
def test_the_search_by_length_is_a_plain_uncached_one_that_never_stops_early(
    which: int, src: list[int], beam: int, data: st.DataObject, alpha: float, limit: int
) -> None:
    model, n_best = MODELS[which], data.draw(st.integers(1, beam))
    actual = beam_search(
        model,
        torch.tensor([src]),
        bos=BOS,
        eos=EOS,
        beam=beam,
        n_best=n_best,
        length_penalty=alpha,
        length_norm="length",
        max_length=limit,
    )
    same(actual, [plain_beam_search(model, src, beam, n_best, alpha, limit, "length")])


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

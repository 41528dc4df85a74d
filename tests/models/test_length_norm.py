"""The two length normalisations: GNMT's, and division by a power of the length as in fairseq."""

from __future__ import annotations

import pytest

from models import beam_search, length_normaliser
from tests.models.examples import BOS, EOS, random_batch, small_transformer


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

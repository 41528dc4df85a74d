"""A model whose logits are nan or inf is an error in every search, and no translation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from models import DeadEndError, Phrase, beam_search, constrained_beam_search, greedy, sample
from tests.models.examples import BOS, EOS, pad_to, small_transformer

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


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", SEARCHES)
def test_a_logit_that_is_not_finite_is_an_error(name: str, value: float) -> None:
    model = small_transformer(vocab=150, tie="none")
    with torch.no_grad():
        model.generator.bias[140] = value
    with pytest.raises(FloatingPointError, match=r"^src\[0\]: the model's logits are nan or inf: .* or try float32$"):
        SEARCHES[name](model, SRC, bos=BOS, eos=EOS)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_error_names_the_sentence(name: str) -> None:
    model = small_transformer(vocab=150, tie="none")
    with torch.no_grad():
        model.src_embed.lookup.weight[7] = math.nan  # only the second sentence has this token
    with pytest.raises(FloatingPointError, match=r"^src\[1\]: "):
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

"""An ensemble translates with the mean of its models' probabilities; one model is an ensemble of one."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models import (
    EncoderDecoder,
    Phrase,
    beam_search,
    constrained_beam_search,
    evaluating,
    greedy,
    make_transformer,
    sample,
)
from models.ensemble import logits_of
from tests.models.examples import BOS, EOS, TINY, batch, pad_to, random_batch, small_decoder_only, small_transformer
from tests.models.plain_search import plain_beam_search, same, total_of

# Models of different sizes and kinds: they share the vocabulary and nothing else
MODELS = [
    small_transformer(10, vocab=7, spread=1.2),
    small_transformer(11, vocab=7, spread=1.2, norm="post", d_model=8, d_ff=12, heads=2),
    small_decoder_only(12, vocab=7, spread=2.0, d_model=8, d_ff=8, heads=2, decoder_layers=1),
]


@settings(deadline=None, max_examples=12)
@given(
    src=batch(vocab=7),
    size=st.integers(2, 3),
    beam=st.integers(1, 3),
    limit=st.integers(1, 7),
)
def test_an_ensemble_searches_with_the_mean_of_its_models_probabilities(
    src: list[list[int]], size: int, beam: int, limit: int
) -> None:
    models, ids = MODELS[:size], pad_to(src, max(map(len, src)))
    found = beam_search(models, ids, bos=BOS, eos=EOS, beam=beam, n_best=beam, max_length=limit)
    same(found, [plain_beam_search(models, one, beam, beam, 0.6, limit) for one in src])
    if beam == 1:
        assert [row[0].tokens for row in found] == greedy(models, ids, bos=BOS, eos=EOS, max_length=limit)


def test_its_logits_are_the_logarithm_of_the_mean_probability() -> None:
    hidden = [torch.randn(4, model.generator.in_features, dtype=torch.float64) for model in MODELS]
    with torch.no_grad():
        mean = sum(model.generator(one).softmax(-1) for model, one in zip(MODELS, hidden, strict=True)) / 3
        torch.testing.assert_close(logits_of(MODELS, hidden), mean.log(), rtol=1e-13, atol=1e-13)
        # Far apart, where the sum of the probabilities would be 0 in floating point
        far = [one * 300 for one in hidden]
        assert logits_of(MODELS, far).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2])
def test_logits_are_in_float32_or_wider_and_not_rounded_again(dtype: torch.dtype, size: int) -> None:
    models = [copy.deepcopy(model).to(dtype) for model in MODELS[:size]]
    hidden = [torch.randn(4, model.generator.in_features, dtype=dtype) for model in models]
    with torch.no_grad():
        found = logits_of(models, hidden)
        exact = [model.generator(one).double() for model, one in zip(models, hidden, strict=True)]
    expected = exact[0] if size == 1 else sum(one.softmax(-1) for one in exact).div(2).log()
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_samples_of_an_ensemble_are_scored_by_the_ensemble() -> None:
    (found,) = sample(MODELS, torch.tensor([[3, 4]]), bos=BOS, eos=EOS, seeds=[5], samples=6, max_length=4)
    for hypothesis in found:
        assert hypothesis.score == pytest.approx(total_of(MODELS, [3, 4], hypothesis, 4), rel=1e-12)


def test_sentences_with_phrases_and_without_share_a_batch_of_an_ensemble_of_two_kinds() -> None:
    src, phrases = [[3, 4], [5, 6, 3], [6]], [[Phrase([4, 3]), Phrase([5])], [], [Phrase([6])]]
    search = partial(constrained_beam_search, MODELS[1:], bos=BOS, eos=EOS, beam=6, n_best=2)
    together = search(pad_to(src, 4), phrases, max_length=8)
    for one, some, found in zip(src, phrases, together, strict=True):
        (alone,) = search(torch.tensor([one]), [some], max_length=8)
        assert [(h.tokens, h.unmet) for h in found] == [(h.tokens, h.unmet) for h in alone]
        for hypothesis in found:
            assert hypothesis.log_probability == pytest.approx(total_of(MODELS[1:], one, hypothesis, 8), rel=1e-12)


def test_one_model_in_a_list_and_a_model_beside_itself_search_as_it_does_alone() -> None:
    model, src = MODELS[0], random_batch(1, vocab=7)
    alone = beam_search(model, src, bos=BOS, eos=EOS, n_best=2)
    assert beam_search([model], src, bos=BOS, eos=EOS, n_best=2) == alone
    same(beam_search([model, model], src, bos=BOS, eos=EOS, n_best=2), alone)


def test_every_model_of_an_ensemble_is_evaluated_and_left_as_it_was() -> None:
    models = [small_transformer(seed, vocab=7, dropout=0.5).train() for seed in range(2)]
    with evaluating(models):
        assert not any(module.training for model in models for module in model.modules())
    assert all(module.training for model in models for module in model.modules())


def test_ctrl_c_while_the_modes_change_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_transformer(vocab=7, dropout=0.5).train()
    model.encoder.eval()
    before = [module.training for module in model.modules()]

    def interrupted(self: nn.Module, mode: bool = True) -> nn.Module:
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as planted:
            planted.setattr(type(model.generator), "train", interrupted)
            with pytest.raises(KeyboardInterrupt):
                greedy(model, random_batch(1, vocab=7), bos=BOS, eos=EOS)
        assert [module.training for module in model.modules()] == before
        greedy(model, random_batch(1, vocab=7), bos=BOS, eos=EOS)
        assert [module.training for module in model.modules()] == before


def untied(source: int, target: int, pad: int = 0) -> EncoderDecoder:
    """A model whose vocabularies and padding id are chosen one by one."""
    return make_transformer(replace(TINY, tie="none"), source, target, pad).double()


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "the ensemble has no models"),
        ([MODELS[0], small_transformer(vocab=8)], "model 1 of the ensemble has source vocabulary 8, model 0 has 7"),
        ([MODELS[0], untied(7, 8)], "model 1 of the ensemble has target vocabulary 8, model 0 has 7"),
        ([MODELS[0], untied(7, 7, pad=3)], "model 1 of the ensemble has padding id 3, model 0 has 0"),
        (
            [MODELS[0], MODELS[1], small_transformer(vocab=7).to("meta")],
            "model 2 of the ensemble has device meta, model 0 has cpu",
        ),
    ],
)
def test_models_that_do_not_belong_together_are_refused(models: list[EncoderDecoder], message: str) -> None:
    for search in (greedy, beam_search):
        with pytest.raises(ValueError, match=message):
            search(models, random_batch(1, vocab=7), bos=BOS, eos=EOS)

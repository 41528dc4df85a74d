"""What decoding promises: the cache changes nothing, the beam finds the best, a batch is its sentences."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import (
    EncoderDecoder,
    Phrase,
    beam_search,
    constrained_beam_search,
    default_limit,
    greedy,
    length_normaliser,
    padding_mask,
)
from models.attention import KeyValues
from models.cache import LayerCache
from models.hypotheses import LengthNorm
from tests.models.examples import BOS, EOS, PAD, batch, pad_to, random_batch, sentence, small_transformer
from tests.models.plain_search import best_first, every_total, plain_beam_search, same, total_of

LENGTH_NORMS: list[LengthNorm] = ["gnmt", "length"]
MODELS = [small_transformer(seed, norm=norm, spread=2.0) for seed in range(2) for norm in ("pre", "post")]
ENDING = [small_transformer(seed + 10, vocab=7, spread=1.2, norm=norm) for seed in range(2) for norm in ("pre", "post")]
model_index = st.integers(0, len(MODELS) - 1)


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5], [2, 3, 5], [4], [1, 3]])
@pytest.mark.parametrize("model", MODELS)
def test_cached_hidden_states_are_the_uncached_ones(model: EncoderDecoder, cuts: list[int]) -> None:
    src, tgt = random_batch(1), random_batch(2)
    mask, memory = padding_mask(src, PAD), model.encode(src)
    expected, cache = model.decode(memory, mask, tgt), model.decoder.empty_cache()
    for start, stop in itertools.pairwise([0, *cuts, 6]):
        assert cache.length == start
        hidden = model.decode(memory, mask, tgt[:, start:stop], cache=cache)
        torch.testing.assert_close(hidden, expected[:, start:stop], rtol=1e-12, atol=1e-12)


def test_beams_share_their_sentences_memory_as_if_it_were_repeated() -> None:
    model, src, tgt = MODELS[0], random_batch(1), torch.randint(3, 11, (15, 4))
    mask, memory = padding_mask(src, PAD), model.encode(src)
    repeated = model.decode(memory.repeat_interleave(3, 0), mask.repeat_interleave(3, 0), tgt)
    torch.testing.assert_close(model.decode(memory, mask, tgt), repeated, rtol=1e-12, atol=1e-12)


def uncached_greedy(model: EncoderDecoder, src: list[int], limit: int) -> list[int]:
    """One sentence, the whole prefix decoded again at each step."""
    prefix = [BOS]
    with torch.no_grad():
        for _ in range(limit):
            logits = model.generator(model(torch.tensor([src]), torch.tensor([prefix])))[0, -1]
            logits[[PAD, BOS]] = -math.inf
            token = int(logits.argmax())
            if token == EOS:
                break
            prefix.append(token)
    return prefix[1:]


@settings(deadline=None, max_examples=25)
@given(which=model_index, src=batch(), extra=st.integers(0, 3), limit=st.integers(1, 12))
def test_greedy_is_the_uncached_argmax_of_each_sentence_alone(
    which: int, src: list[list[int]], extra: int, limit: int
) -> None:
    model, width = MODELS[which], max(map(len, src)) + extra
    actual = greedy(model, pad_to(src, width), bos=BOS, eos=EOS, max_length=limit)
    assert actual == [uncached_greedy(model, one, limit) for one in src]


@settings(deadline=None, max_examples=25)
@given(which=model_index, src=batch(), alpha=st.sampled_from([0.0, 0.6, 1.0]))
def test_beam_1_is_greedy(which: int, src: list[list[int]], alpha: float) -> None:
    model, ids = MODELS[which], pad_to(src, max(map(len, src)))
    best = beam_search(model, ids, bos=BOS, eos=EOS, beam=1, length_penalty=alpha)
    assert [row[0].tokens for row in best] == greedy(model, ids, bos=BOS, eos=EOS)


@settings(deadline=None, max_examples=20)
@given(which=model_index, src=batch(), extra=st.integers(0, 3), beam=st.integers(2, 5))
def test_a_batch_is_translated_as_its_sentences_alone(which: int, src: list[list[int]], extra: int, beam: int) -> None:
    model, ids = MODELS[which], pad_to(src, max(map(len, src)) + extra)
    together = beam_search(model, ids, bos=BOS, eos=EOS, beam=beam, n_best=2)
    alone = [beam_search(model, torch.tensor([one]), bos=BOS, eos=EOS, beam=beam, n_best=2)[0] for one in src]
    same(together, alone)


@settings(deadline=None, max_examples=60)
@given(
    which=model_index,
    src=sentence(vocab=7),
    beam=st.integers(1, 4),
    data=st.data(),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 3.0]),
    norm=st.sampled_from(LENGTH_NORMS),
    limit=st.integers(1, 10),
)
def test_the_search_is_a_plain_uncached_one_that_never_stops_early(
    which: int, src: list[int], beam: int, data: st.DataObject, alpha: float, norm: LengthNorm, limit: int
) -> None:
    model, n_best = ENDING[which], data.draw(st.integers(1, beam))
    actual = beam_search(
        model,
        torch.tensor([src]),
        bos=BOS,
        eos=EOS,
        beam=beam,
        n_best=n_best,
        length_penalty=alpha,
        length_norm=norm,
        max_length=limit,
    )
    same(actual, [plain_beam_search(model, src, beam, n_best, alpha, limit, norm)])


def test_beams_that_change_places_take_their_histories_along() -> None:
    model, src = ENDING[0], [4, 4, 3, 3, 6, 5]
    found = beam_search(model, torch.tensor([src]), bos=BOS, eos=EOS, beam=4, max_length=6)
    same(found, [plain_beam_search(model, src, beam=4, n_best=1, alpha=0.6, limit=6)])


def test_a_better_hypothesis_that_ends_later_is_waited_for() -> None:
    model, src = MODELS[2], [6, 4, 3, 5, 3, 3]
    found = beam_search(model, torch.tensor([src]), bos=BOS, eos=EOS, beam=3, length_penalty=3.0, max_length=6)
    same(found, [plain_beam_search(model, src, beam=3, n_best=1, alpha=3.0, limit=6)])


@pytest.mark.parametrize("which", range(len(ENDING)))
def test_in_float32_it_finds_what_the_plain_search_finds(which: int) -> None:
    model = copy.deepcopy(ENDING[which]).float()
    for change in (1.0, -1.0):  # weights that changed since the last search are seen
        with torch.no_grad():
            model.generator.weight *= change
        src = [[3, 4, 5, 6], [5], [6, 3, 3]]
        found = beam_search(model, pad_to(src, 5), bos=BOS, eos=EOS, beam=3, n_best=2, max_length=8)
        expected = [plain_beam_search(model, one, 3, 2, 0.6, 8) for one in src]
        same(found, expected, rel=1e-5)


def test_beams_that_died_leave_the_cache_and_change_nothing() -> None:
    model, src, tgt = MODELS[0], random_batch(1), torch.randint(3, 11, (5, 9))
    memory, mask = model.encode(src), padding_mask(src, PAD)
    cache, parents = model.decoder.empty_cache(), torch.zeros(5, 4, dtype=torch.long)
    expected = model.decode(memory, mask, tgt)
    with torch.no_grad():
        for step in range(9):
            tokens = tgt[:, step].repeat_interleave(1 if step == 0 else 4)
            hidden = model.decode(memory, mask, tokens[:, None], cache=cache).view(5, -1, expected.size(2))
            torch.testing.assert_close(hidden, expected[:, [step]].expand_as(hidden), rtol=1e-12, atol=1e-12)
            cache.reorder(parents)  # every beam continues the first: of each step one slot lives
            assert cache.visible is not None
            assert step + 1 <= cache.visible.size(2) < 2 * (step + 1) + 4
    assert cache.length == 9


def test_a_mask_beside_a_cache_is_refused() -> None:
    model, src = MODELS[0], random_batch(1)
    with pytest.raises(ValueError, match="tgt_mask was given with a cache"):
        model.decode(model.encode(src), None, src, torch.ones(1, 1, 6, 6).bool(), cache=model.decoder.empty_cache())


SHORT = [[3, 4, 4], [4], [3, 3]]


@cache
def all_totals(seed: int) -> tuple[EncoderDecoder, list[list[tuple[list[int], float]]]]:
    """A model, and every translation of the short sources: no setting of a search changes them."""
    model = small_transformer(seed, vocab=5, spread=1.5, norm="post" if seed % 2 else "pre")
    return model, [every_total(model, one, 5) for one in SHORT]


@pytest.mark.parametrize("n_best", [1, 8])
@pytest.mark.parametrize("norm", LENGTH_NORMS)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.5])
@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_a_wide_beam_finds_the_best_of_all_hypotheses(seed: int, alpha: float, norm: LengthNorm, n_best: int) -> None:
    model, totals = all_totals(seed)
    actual = beam_search(
        model,
        pad_to(SHORT, 4),
        bos=BOS,
        eos=EOS,
        beam=40,
        length_penalty=alpha,
        length_norm=norm,
        n_best=n_best,
        max_length=5,
    )
    same(actual, [best_first(each, alpha, norm)[:n_best] for each in totals])


@settings(deadline=None, max_examples=20)
@given(which=model_index, src=batch(), n_best=st.integers(1, 4), alpha=st.sampled_from([0.0, 0.6, 1.5]))
def test_n_best_are_that_many_distinct_and_scored_as_the_model_scores_them(
    which: int, src: list[list[int]], n_best: int, alpha: float
) -> None:
    model, ids, limit = MODELS[which], pad_to(src, max(map(len, src))), 9
    found = beam_search(model, ids, bos=BOS, eos=EOS, beam=4, n_best=n_best, length_penalty=alpha, max_length=limit)
    for one, hypotheses in zip(src, found, strict=True):
        assert len(hypotheses) == n_best
        assert len({tuple(hypothesis.tokens) for hypothesis in hypotheses}) == n_best
        assert not {PAD, BOS, EOS} & {token for h in hypotheses for token in h.tokens}
        finished = [hypothesis.score for hypothesis in hypotheses if len(hypothesis.tokens) < limit]
        assert finished == sorted(finished, reverse=True)
        for hypothesis in hypotheses:
            norm = length_normaliser(min(len(hypothesis.tokens) + 1, limit), alpha)
            assert hypothesis.score == pytest.approx(total_of([model], one, hypothesis, limit) / norm, rel=1e-11)


def never_ending() -> EncoderDecoder:
    model = small_transformer(3)
    with torch.no_grad():
        model.generator.bias[EOS] = -1e4
    return model


def test_unfinished_hypotheses_are_returned_at_the_limit() -> None:
    src = pad_to([[3, 4, 5], [6]], 3)
    for limit, lengths in ((None, [16, 12]), (4, [4, 4])):
        assert [len(row) for row in greedy(never_ending(), src, bos=BOS, eos=EOS, max_length=limit)] == lengths
        found = beam_search(never_ending(), src, bos=BOS, eos=EOS, n_best=3, max_length=limit)
        assert [[len(h.tokens) for h in row] for row in found] == [[length] * 3 for length in lengths]
        assert all(row == sorted(row, key=lambda h: -h.score) for row in found)


@pytest.mark.parametrize(
    "limit", [2.5, [2, 2.5], torch.tensor([2, 2]), torch.empty((), dtype=torch.long, device="meta")]
)
def test_a_limit_that_is_not_whole_is_an_error(limit: object) -> None:
    """A search ends at the step that equals the limit, which would never come."""
    with pytest.raises(TypeError, match=r"max_length(\[\d\])? is .*; it must be a whole number"):
        greedy(MODELS[0], pad_to([[3, 4], [6]], 2), bos=BOS, eos=EOS, max_length=limit)  # type: ignore[arg-type]


def test_each_sentence_may_have_a_limit_of_its_own() -> None:
    src = pad_to([[3, 4, 5], [6], [4, 4]], 4)
    assert [len(row) for row in greedy(never_ending(), src, bos=BOS, eos=EOS, max_length=[2, 7, 1])] == [2, 7, 1]
    found = beam_search(never_ending(), src, bos=BOS, eos=EOS, n_best=2, max_length=[2, 7, 1])
    assert [[len(h.tokens) for h in row] for row in found] == [[2, 2], [7, 7], [1, 1]]


def test_the_limit_without_max_length_is_the_one_that_default_limit_tells() -> None:
    src = [[3, 4, 5], [6]]
    found = greedy(never_ending(), pad_to(src, 5), bos=BOS, eos=EOS)
    assert [len(row) for row in found] == [default_limit(len(one)) for one in src] == [16, 12]


@pytest.mark.parametrize(
    ("search", "beam", "sentences"),
    [(beam_search, 4, 16), (partial(constrained_beam_search, phrases=[[Phrase([3, 4])], *[[]] * 5]), 10, 6)],
)
def test_the_defaults_of_a_beam_search_are_those_that_are_documented(
    search: Callable[..., object], beam: int, sentences: int
) -> None:
    """On random sentences, for which each other default would find something else."""
    model, src = small_transformer(3, spread=2.0).eval(), random_batch(3, sentences)
    documented: dict[str, Any] = {"beam": beam, "length_penalty": 0.6, "length_norm": "gnmt", "n_best": 1}
    found = search(model, src, bos=BOS, eos=EOS)
    assert found == search(model, src, bos=BOS, eos=EOS, **documented)
    others = ({"beam": beam + 1}, {"beam": beam - 1}, {"length_penalty": 1.0}, {"length_norm": "length"}, {"n_best": 2})
    for other in others:
        assert found != search(model, src, bos=BOS, eos=EOS, **documented | other), other


def test_a_finished_hypothesis_goes_before_an_unfinished_one() -> None:
    model = small_transformer(3)
    with torch.no_grad():
        model.generator.weight[EOS] = 0
        model.generator.bias[EOS] = 0.5
    found = beam_search(model, torch.tensor([[3, 4]]), bos=BOS, eos=EOS, beam=6, n_best=6, max_length=2)[0]
    finished = [len(hypothesis.tokens) < 2 for hypothesis in found]
    assert True in finished
    assert False in finished
    assert finished == sorted(finished, reverse=True)


def test_padding_and_start_are_never_output() -> None:
    model, src = small_transformer(4, tie="none"), random_batch(3)
    with torch.no_grad():
        model.generator.bias[[PAD, BOS]] = 50.0
    outputs = greedy(model, src, bos=BOS, eos=EOS)
    outputs += [h.tokens for row in beam_search(model, src, bos=BOS, eos=EOS, n_best=4) for h in row]
    assert any(outputs)
    assert not {PAD, BOS} & set(itertools.chain(*outputs))


@pytest.mark.parametrize("training", [True, False])
def test_decoding_leaves_modes_and_gradients_as_they_were(training: bool) -> None:
    model, src = small_transformer(dropout=0.5).train(training), random_batch(1)
    model.encoder.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert greedy(model, src, bos=BOS, eos=EOS) == greedy(model, src, bos=BOS, eos=EOS), "dropout was on"
    first, second = (beam_search(model, src, bos=BOS, eos=EOS) for _ in range(2))
    same(first, second)
    with pytest.raises(IndexError):
        greedy(model, src + 1000, bos=BOS, eos=EOS)
    assert [module.training for module in model.modules()] == modes
    model(src, src).sum().backward()


def test_an_all_padding_source_and_an_empty_batch_are_decoded() -> None:
    src = torch.zeros(2, 3, dtype=torch.long)
    assert [len(row) for row in beam_search(MODELS[0], src, bos=BOS, eos=EOS, n_best=2)] == [2, 2]
    assert greedy(MODELS[0], src[:0], bos=BOS, eos=EOS) == []
    assert beam_search(MODELS[0], src[:0], bos=BOS, eos=EOS) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_models_decode(dtype: torch.dtype) -> None:
    model = small_transformer(5).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        found = beam_search(model, random_batch(1), bos=BOS, eos=EOS)
    assert all(math.isfinite(row[0].score) for row in found)


def test_scores_are_divided_by_the_gnmt_length_penalty() -> None:
    assert length_normaliser(1, 0.6) == 1
    assert length_normaliser(7, 1.0) == 2
    assert length_normaliser(30, 0.0) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam": 0}, "beam is 0, below 1"),
        ({"beam": 2, "n_best": 3}, r"n_best is 3, outside \[1, beam 2\]"),
        ({"length_penalty": -1.0}, r"length_penalty is -1.0, below 0"),
        ({"max_length": 0}, "max_length is 0, below 1"),
        ({"max_length": [3, 1, 4, 0, 5]}, r"max_length\[3\] is 0, below 1"),
        ({"max_length": [3, 1]}, "max_length has 2 entries for 5 sentences"),
    ],
)
def test_a_search_that_cannot_work_is_an_error(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beam_search(MODELS[0], random_batch(1), bos=BOS, eos=EOS, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("sentences", [1, 25])
def test_sources_without_tokens_are_decoded_in_a_batch_of_any_size(sentences: int) -> None:
    src = torch.zeros(sentences, 0, dtype=torch.long)
    alone = greedy(ENDING[0], src[:1], bos=BOS, eos=EOS, max_length=4)
    assert greedy(ENDING[0], src, bos=BOS, eos=EOS, max_length=4) == alone * sentences


def test_with_a_cache_the_memory_is_read_at_the_first_step_alone() -> None:
    model, src, tgt = small_transformer(), random_batch(1), random_batch(2)
    memory, mask, cache = model.encode(src), padding_mask(src, PAD), model.decoder.empty_cache()
    expected = model.decode(memory, mask, tgt)
    found = [model.decode(memory, mask, tgt[:, :1], cache=cache)]
    found += [model.decode(torch.full_like(memory, 7.0), mask, tgt[:, [step]], cache=cache) for step in range(1, 6)]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-12, atol=1e-12)
    assert all(layer.memory is not None and layer.memory.keys.is_contiguous() for layer in cache.layers)


def test_a_thousand_steps_move_what_is_kept_ten_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.cache.FIRST_ROOM", 2)
    layer, places = LayerCache(), set()
    steps = torch.randn(1_000, 2, 1, 3, 1, 4).unbind()
    for keys, values in steps:
        kept = layer.extend(KeyValues(keys, values))
        places.add(kept.keys.data_ptr())
    assert len(places) <= 10
    assert torch.equal(kept.keys, torch.cat([keys for keys, _ in steps], 2))
    assert torch.equal(kept.values, torch.cat([values for _, values in steps], 2))


def test_no_steps_leave_a_cache_as_it_was() -> None:
    model, src, tgt = small_transformer(), random_batch(1), random_batch(2)
    memory, mask, cache = model.encode(src), padding_mask(src, PAD), model.decoder.empty_cache()
    parts = (tgt[:, :0], tgt[:, :2], tgt[:, :0], tgt[:, 2:])
    found = [model.decode(memory, mask, steps, cache=cache) for steps in parts]
    torch.testing.assert_close(torch.cat(found, 1), model.decode(memory, mask, tgt), rtol=1e-12, atol=1e-12)


def test_a_gradient_through_earlier_steps_of_a_cache_is_refused_by_torch_and_that_of_one_call_is_right() -> None:
    model, src, tgt = small_transformer(), random_batch(1), random_batch(2)
    parameters = [each for name, each in model.named_parameters() if name.startswith("decoder")]
    memory, mask = model.encode(src).detach(), padding_mask(src, PAD)
    expected = torch.autograd.grad(model.decode(memory, mask, tgt).square().sum(), parameters)
    cache = model.decoder.empty_cache()
    hidden = model.decode(memory, mask, tgt, cache=cache)
    for one, other in zip(
        torch.autograd.grad(hidden.square().sum(), parameters, retain_graph=True), expected, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    model.decode(memory, mask, tgt[:, :1], cache=cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(hidden.square().sum(), parameters)

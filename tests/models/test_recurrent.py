"""The LSTM model: against a loop over single steps, and through the searches and the loss of the other models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import seqpar
from models import RecurrentConfig, beam_search, greedy, make_recurrent, padding_mask
from models.alignment import attention_weights
from models.recurrent import RecurrentEncoderDecoder
from seqpar.testing import assert_same_loss
from tests.models.examples import assert_loss_over_replicas_is_plain

PAD, BOS, EOS = 0, 2, 3
TINY = RecurrentConfig(d_model=6, encoder_layers=1, decoder_layers=1, dropout=0.0, tie="none")
WORDS = st.lists(st.integers(4, 10), max_size=5)


def model_of(config: RecurrentConfig = TINY, vocab: int = 11, seed: int = 0) -> RecurrentEncoderDecoder:
    torch.manual_seed(seed)
    model = make_recurrent(config, vocab, vocab).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def padded(sentences: list[list[int]]) -> Tensor:
    width = max(map(len, sentences))
    return torch.tensor([[*ids, *[PAD] * (width - len(ids))] for ids in sentences])


def by_hand(model: RecurrentEncoderDecoder, source: list[int], target: list[int]) -> tuple[Tensor, Tensor]:
    """The equations of Luong et al. for one sentence and one layer, step by step: hidden states and attention."""

    def cell(lstm: nn.LSTM, end: str, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        weights = {name: getattr(lstm, f"{name}{end}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
        gates = F.linear(x, weights["weight_ih"], weights["bias_ih"])
        gates = gates + F.linear(h, weights["weight_hh"], weights["bias_hh"])
        i, f, g, o = gates.chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    width = model.generator.in_features
    words = [model.src_embed.lookup.weight[token] * width**0.5 for token in source]
    directions = []
    for end, order in (("_l0", 1), ("_l0_reverse", -1)):
        h = c = words[0].new_zeros(width // 2)
        states = []
        for x in words[::order]:
            h, c = cell(model.encoder.lstm, end, x, h, c)
            states.append(h)
        directions.append(states[::order])
    memory = torch.stack([torch.cat(pair) for pair in zip(*directions, strict=True)])
    h = model.decoder.start(memory.mean(0)).tanh()
    c = torch.zeros_like(h)
    outputs = []
    attended = []
    for token in target:
        h, c = cell(model.decoder.lstm, "_l0", model.tgt_embed.lookup.weight[token] * width**0.5, h, c)
        weights = (memory @ model.decoder.score(h)).softmax(-1)
        outputs.append(model.decoder.output(torch.cat((weights @ memory, h))).tanh())
        attended.append(weights)
    return torch.stack(outputs), torch.stack(attended)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_every_step_is_that_of_the_published_equations(lengths: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        tuple(torch.randint(4, 11, (length,), generator=generator).tolist() for length in pair) for pair in lengths
    ]
    model = model_of(seed=seed).eval()
    hidden = model(padded([source for source, _ in pairs]), padded([target for _, target in pairs]))
    for row, (source, target) in enumerate(pairs):
        torch.testing.assert_close(
            hidden[row, : len(target)], by_hand(model, source, target)[0], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("layers", [1, 2])
def test_decoding_step_by_step_is_decoding_at_once(layers: int) -> None:
    model = model_of(replace(TINY, encoder_layers=layers, decoder_layers=layers)).eval()
    src, tgt = padded([[4, 5, 6], [7, 8]]), torch.tensor([[BOS, 5, 6, 7], [BOS, 9, 9, 4]])
    memory = model.encode(src)
    mask = padding_mask(src, PAD)
    cache = model.decoder.empty_cache()
    steps = [model.decode(memory, mask, tgt[:, [step]], cache=cache) for step in range(4)]
    assert cache.length == 4
    torch.testing.assert_close(torch.cat(steps, 1), model(src, tgt), rtol=1e-12, atol=1e-12)


def best_by_enumeration(model: RecurrentEncoderDecoder, source: list[int], steps: int) -> tuple[list[int], float]:
    """The most probable translation of at most `steps` steps that ends, of all there are."""
    finished: list[tuple[list[int], float]] = []
    live: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(steps):
        longer = []
        for tokens, score in live:
            hidden = model(torch.tensor([source]), torch.tensor([[BOS, *tokens]]))[0, -1]
            log_p = model.generator(hidden).log_softmax(-1).tolist()
            finished.append((tokens, score + log_p[EOS]))
            longer += [
                ([*tokens, token], score + log_p[token]) for token in range(len(log_p)) if token not in (0, 2, 3)
            ]
        live = longer
    return max(finished, key=lambda pair: pair[1])


@torch.no_grad()
def test_a_wide_beam_finds_the_most_probable_translation_of_every_sentence() -> None:
    model = model_of(replace(TINY, decoder_layers=2), vocab=7, seed=3).eval()
    sources = [[4, 5, 6, EOS], [6, 5, EOS], [4, 4, EOS]]
    found = beam_search(model, padded(sources), bos=BOS, eos=EOS, beam=64, length_penalty=0.0, max_length=4)
    for source, (best, *_) in zip(sources, found, strict=True):
        tokens, score = best_by_enumeration(model, source, 4)
        assert best.tokens == tokens
        assert best.score == pytest.approx(score, rel=1e-12)


def test_greedy_is_a_beam_of_one_and_a_sentence_its_own() -> None:
    model = model_of(seed=5).eval()
    sources = [[4, 5, 6, EOS], [6, EOS], [9, 8, 7, 6, 5, EOS]]
    together = greedy(model, padded(sources), bos=BOS, eos=EOS)
    assert together == [greedy(model, torch.tensor([source]), bos=BOS, eos=EOS)[0] for source in sources]
    beams = beam_search(model, padded(sources), bos=BOS, eos=EOS, beam=1)
    assert together == [hypotheses[0].tokens for hypotheses in beams]


def test_the_loss_over_replicas_is_the_plain_loss() -> None:
    model = model_of(replace(TINY, tie="all"))
    src, tgt = padded([[4, 5, 6], [7, 8], [9]]), padded([[BOS, 5, 6], [BOS, 9], [BOS, 4]])
    target = padded([[5, 6, EOS], [9, EOS], [4, EOS]])
    assert_loss_over_replicas_is_plain(model, src, tgt, target)


def test_the_engine_agrees_on_its_hidden_states() -> None:
    model = model_of()
    hidden = model(padded([[4, 5], [6]]), padded([[BOS, 5], [BOS]])).detach()
    target = padded([[5, EOS], [EOS]])
    assert_same_loss(model.generator, seqpar.LabelSmoothing(0.1, "torch", ignore_index=PAD), hidden, target)


def test_masks_that_an_lstm_cannot_obey_are_refused() -> None:
    model = model_of()
    src, tgt = padded([[4, 5], [6]]), torch.tensor([[BOS], [BOS]])
    with pytest.raises(ValueError, match="src_mask differs from padding_mask"):
        model(src, tgt, torch.ones(2, 1, 1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="tgt_mask was given"):
        model(src, tgt, None, torch.ones(1, 1, 1, 1, dtype=torch.bool))


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), st.integers(0, 9))
def test_its_alignment_weights_are_the_attention_computed_by_hand(
    pairs: list[tuple[list[int], list[int]]], seed: int
) -> None:
    model = model_of(replace(TINY, dropout=0.5), seed=seed)
    both = [([*source, EOS], [BOS, *target]) for source, target in pairs]
    found = attention_weights(model, *(padded(list(side)) for side in zip(*both, strict=True)))
    assert model.training
    with torch.no_grad():
        for row, (source, target) in zip(found, both, strict=True):
            expected = by_hand(model, source, target)[1]
            torch.testing.assert_close(row[: len(target), : len(source)], expected, rtol=1e-12, atol=1e-14)
            assert not row[:, len(source) :].any()  # padding
    torch.testing.assert_close(found.sum(2), torch.ones(found.shape[:2], dtype=found.dtype), rtol=1e-12, atol=0)


def test_alignments_are_refused_where_there_is_no_attention() -> None:
    src, tgt = torch.tensor([[4, 5]]), torch.tensor([[BOS]])
    assert torch.equal(attention_weights(model_of(), src, tgt, 0), attention_weights(model_of(), src, tgt))
    for layer in (-1, 1):
        with pytest.raises(ValueError, match=f"layer is {layer}, but an LSTM attends to the source once, after"):
            attention_weights(model_of(replace(TINY, decoder_layers=2)), src, tgt, layer)
    with pytest.raises(ValueError, match="src has 1 sentences, tgt 2"):
        attention_weights(model_of(), src, tgt.expand(2, 1))
    assert attention_weights(model_of(), src[:0], tgt[:0]).shape == (0, 1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 5}, "d_model 5 is odd.*choose 4 or 6"),
        ({"decoder_layers": 0}, "decoder_layers is 0, below 1"),
        ({"dropout": 1.0}, "dropout is 1.0, outside"),
        ({"tie": "both"}, "tie is 'both': choose one of none, target, all"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(("sentences", "steps"), [(0, 3), (2, 0), (0, 0)])
def test_no_sentences_and_no_steps_have_empty_hidden_states(sentences: int, steps: int) -> None:
    model, src = model_of(replace(TINY, decoder_layers=2)), torch.randint(4, 11, (sentences, 5))
    tgt = torch.randint(4, 11, (sentences, steps))
    hidden = model(src, tgt)
    assert hidden.shape == (sentences, steps, TINY.d_model)
    assert attention_weights(model, src, tgt).shape == (sentences, steps, 5)
    hidden.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_on_every_cpu(dtype: torch.dtype) -> None:
    """Also where oneDNN has no LSTM in low precision; sequences of one length are those that it would take."""
    model = model_of(replace(TINY, decoder_layers=2), seed=5).float()
    src, tgt = padded([[4, 5, EOS], [6, 5, EOS]]), padded([[BOS, 5], [BOS, 9]])
    with torch.autocast("cpu", dtype):
        hidden = model(src, tgt)
        attended = attention_weights(model, src, tgt)
    torch.testing.assert_close(hidden.float(), model(src, tgt), rtol=0, atol=10 * torch.finfo(dtype).eps)
    torch.testing.assert_close(
        attended.float(), attention_weights(model, src, tgt), rtol=0, atol=10 * torch.finfo(dtype).eps
    )
    hidden.sum().backward()
    assert all(weight.grad is not None for weight in model.encoder.lstm.parameters())

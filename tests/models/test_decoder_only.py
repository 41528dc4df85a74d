"""The decoder-only model: packed pairs against each pair alone in torch's layers, and searches against plain ones."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import seqpar
from models import (
    ForcedPrefixes,
    MinimumLength,
    NoRepeatedNgrams,
    Phrase,
    beam_search,
    constrained_beam_search,
    greedy,
    make_decoder_only,
    padding_mask,
    sample,
)
from models.alignment import attention_weights
from models.decoder_only import DecoderOnly
from models.sequence_packing import fill_rows, own_cells_mask, pack
from seqpar.testing import assert_same_results
from tests.models.examples import (
    BOS,
    EOS,
    PAD,
    TINY_DECODER_ONLY,
    assert_loss_over_replicas_is_plain,
    small_decoder_only,
    small_transformer,
)
from tests.models.plain_search import every_hypothesis, plain_beam_search, same

VOCAB = 9
model_of = partial(small_decoder_only, vocab=VOCAB)


def padded(rows: list[list[int]], more: int = 0, left: bool = False) -> Tensor:
    width = max(map(len, rows)) + more
    padding = [[PAD] * (width - len(row)) for row in rows]
    return torch.tensor([pad + row if left else row + pad for row, pad in zip(rows, padding, strict=True)])


def alone(model: DecoderOnly, source: list[int], target: list[int]) -> Tensor:
    """Hidden states of the target, by torch's own encoder layers on one unpadded sequence."""
    hidden: Tensor = model.decoder.norm(states_alone(model, source, target)[-1])[len(source) :]
    return hidden


def attention_alone(model: DecoderOnly, source: list[int], target: list[int], number: int) -> Tensor:
    """The share of the source in a layer's attention, (T, S), computed head by head and position by position."""
    x_LD = states_alone(model, source, target)[number]
    layer = model.decoder.layers[number]
    attention = layer.self_attention
    if layer.residuals[0].pre:
        x_LD = layer.residuals[0].norm(x_LD)
    width = x_LD.size(1) // attention.heads
    query_LD = x_LD @ attention.query.weight.T + attention.query.bias
    key_LD = x_LD @ attention.key_value.weight[: x_LD.size(1)].T + attention.key_value.bias[: x_LD.size(1)]
    shares = torch.zeros(len(target), len(source), dtype=x_LD.dtype)
    for t in range(len(target)):
        own = len(source) + t
        for head in range(attention.heads):
            part = slice(head * width, (head + 1) * width)
            scores = [float(query_LD[own, part] @ key_LD[other, part]) / width**0.5 for other in range(own + 1)]
            exponentials = [math.exp(score) for score in scores]
            for s in range(len(source)):
                shares[t, s] += exponentials[s] / sum(exponentials)
    return shares / shares.sum(1, keepdim=True)


def states_alone(model: DecoderOnly, source: list[int], target: list[int]) -> list[Tensor]:
    """What each layer reads, (S + T, D), and the states after the last one, by torch's own encoder layers."""
    tokens = torch.tensor([*source, *target])
    d_model = model.generator.in_features
    positions = torch.tensor(
        [
            [
                (math.cos if index % 2 else math.sin)(place / 10_000 ** (index // 2 * 2 / d_model))
                for index in range(d_model)
            ]
            for place in range(len(tokens))
        ],
        dtype=torch.float64,
    )
    x = (model.tgt_embed.lookup.weight[tokens] * d_model**0.5 + positions)[None]
    after = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    states = [x[0]]
    for layer in model.decoder.layers:
        attention, feed_forward, (first, second) = layer.self_attention, layer.feed_forward, layer.residuals
        plain = nn.TransformerEncoderLayer(
            d_model,
            attention.heads,
            feed_forward.inner.out_features,
            dropout=0.0,
            batch_first=True,
            norm_first=first.pre,
            dtype=torch.float64,
        )
        weights = {
            "self_attn.in_proj_weight": torch.cat((attention.query.weight, attention.key_value.weight)),
            "self_attn.in_proj_bias": torch.cat((attention.query.bias, attention.key_value.bias)),
        }
        modules = {
            "self_attn.out_proj": attention.output,
            "linear1": feed_forward.inner,
            "linear2": feed_forward.outer,
            "norm1": first.norm,
            "norm2": second.norm,
        }
        weights |= {f"{name}.{what}": getattr(module, what) for name, module in modules.items() for what in WHAT}
        x = functional_call(plain, weights, (x,), {"src_mask": after})
        states.append(x[0])
    return states


WHAT = ("weight", "bias")


def result(total: Tensor, model: DecoderOnly) -> tuple[Tensor, dict[str, Tensor | None]]:
    """A loss and its gradients by name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return total.detach(), dict(zip(names, found, strict=True))


TOKENS = st.lists(st.integers(3, VOCAB - 1), max_size=6)
PAIRS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5)


@given(
    pairs=PAIRS,
    row=st.integers(1, 40),
    more=st.integers(0, 2),
    left=st.booleans(),
    norm=st.sampled_from(["pre", "post"]),
    tie=st.sampled_from(["none", "all"]),
    chunk=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_the_loss_of_packed_pairs_is_that_of_each_pair_alone(
    pairs: list[tuple[list[int], list[int]]],
    row: int,
    more: int,
    left: bool,
    norm: str,
    tie: str,
    chunk: int | None,
    seed: int,
) -> None:
    model = model_of(seed, norm=norm, tie=tie)
    model.row = row
    expected = torch.zeros((), dtype=torch.float64)
    for source, target in pairs:
        logits = model.generator(alone(model, [*source, EOS], [BOS, *target]))
        expected = expected + F.cross_entropy(logits, torch.tensor([*target, EOS]), reduction="sum")
    wanted = result(expected, model)

    src = padded([[*source, EOS] for source, _ in pairs], more, left)
    tgt_in = padded([[BOS, *target] for _, target in pairs], more)
    tgt_out = padded([[*target, EOS] for _, target in pairs], more)
    criterion = seqpar.CrossEntropy(ignore_index=PAD)
    loss = seqpar.LossCompute(model.generator, criterion, chunk_tokens=chunk)(model(src, tgt_in), tgt_out)
    assert int(loss.tokens) == sum(len(target) + 1 for _, target in pairs)
    assert_same_results(result(loss.total, model), wanted)


@given(lengths=st.lists(st.integers(1, 12), max_size=20), width=st.integers(1, 30))
def test_packed_sequences_lie_in_rows_without_overlap(lengths: list[int], width: int) -> None:
    places = pack(lengths, width)
    taken: list[int] = []
    for start, length in zip(places.starts, lengths, strict=True):
        assert start // places.width == (start + length - 1) // places.width
        taken += range(start, start + length)
    assert len(set(taken)) == len(taken)
    if lengths:
        assert places.width < sum(lengths) / places.rows + max(lengths)
        assert places.rows <= len(lengths)
        # As many sequences in a row as fit on average, one more or one less, or rows as wide as the longest sequence
        fit = max(width * len(lengths) // sum(lengths), 1)
        rows = {math.ceil(len(lengths) / number) for number in range(max(fit - 1, 1), fit + 2)}
        rows.add(math.ceil(sum(lengths) / max(lengths)))
        cells = [tried.rows * tried.width for tried in (fill_rows(lengths, number) for number in rows)]
        assert places.rows * places.width == min(cells)


@pytest.mark.parametrize("longest", [40, 60, 140, 300])
def test_rows_are_all_but_full(longest: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [longest, *torch.randint(8, 40, (199,), generator=generator).tolist()]
    places = pack(lengths, 128)
    assert sum(lengths) / (places.rows * places.width) > 0.93
    assert places.width < 128 + longest
    alike = torch.randint(30, 40, (60,), generator=generator).tolist()  # as in a batch of the recipe
    places = pack(alike, 128)
    assert sum(alike) / (places.rows * places.width) > 0.97


def test_rows_are_never_fuller_of_padding_than_one_for_each_long_sequence() -> None:
    lengths = list(range(100, 140, 2))
    places = pack(lengths, 128)
    assert places.rows * places.width <= len(lengths) * max(lengths)


def test_a_cell_attends_to_earlier_cells_of_its_own_sequence_alone() -> None:
    mask = own_cells_mask(torch.tensor([[0, 0, 1, 1, -1], [2, -1, -1, -1, -1]]))
    seen = [[row.nonzero().flatten().tolist() for row in rows[0]] for rows in mask]
    assert seen == [[[0], [0, 1], [2], [2, 3], [4]], [[0], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]]


def test_what_another_pair_of_the_row_says_changes_no_bit() -> None:
    model = model_of()
    src, tgt = torch.tensor([[3, 4, EOS], [5, EOS, PAD]]), torch.tensor([[BOS, 6], [BOS, 7]])
    other, other_tgt = src.clone(), tgt.clone()
    other[0, 0] = 8
    other_tgt[0, 1] = 8
    assert torch.equal(model(src, tgt)[1], model(other, other_tgt)[1])


@pytest.mark.parametrize("left", [False, True])
def test_decoding_step_by_step_and_at_once_are_the_packed_forward(left: bool) -> None:
    model = model_of(spread=2.0)
    src = padded([[3, 4, 5, EOS], [6, EOS], [7, 8, EOS]], left=left)
    tgt = torch.tensor([[BOS, 5, 6, 7], [BOS, 8, 8, 4], [BOS, 3, 3, 3]])
    mask = padding_mask(src, PAD)
    expected = model(src, tgt)
    torch.testing.assert_close(model.decode(model.encode(src), mask, tgt), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        memory = model.encode(src)
        cache = model.decoder.empty_cache()
        steps = [model.decode(memory, mask, tgt[:, some], cache=cache) for some in ([0], [1, 2], [3])]
    assert cache.length == 4
    torch.testing.assert_close(torch.cat(steps, 1), expected.detach(), rtol=1e-12, atol=1e-12)


def test_gradients_go_through_encode_and_decode_as_through_the_packed_forward() -> None:
    model = model_of()
    src, tgt = padded([[3, 4, 5, EOS], [6, EOS]]), torch.tensor([[BOS, 5], [BOS, 8]])
    factors = torch.randn(2, 2, 16, dtype=torch.float64)
    in_steps = model.decode(model.encode(src), padding_mask(src, PAD), tgt)
    assert_same_results(result((in_steps * factors).sum(), model), result((model(src, tgt) * factors).sum(), model))


SOURCES = [[3, 4, 5, 6, EOS], [6, EOS], [7, 3, EOS], [8, 8, 4, EOS]]


@given(
    seed=st.integers(0, 99), beam=st.integers(1, 4), alpha=st.sampled_from([0.0, 0.6, 1.0]), members=st.integers(1, 2)
)
@settings(deadline=None, max_examples=12)
def test_the_search_is_the_plain_one_of_each_sentence(seed: int, beam: int, alpha: float, members: int) -> None:
    models = [model_of(seed + member, spread=2.0) for member in range(members)]
    found = beam_search(
        models, padded(SOURCES), bos=BOS, eos=EOS, beam=beam, n_best=beam, length_penalty=alpha, max_length=5
    )
    same(found, [plain_beam_search(models, source, beam, beam, alpha, 5) for source in SOURCES])


def test_a_wide_beam_finds_the_best_of_all_translations() -> None:
    model = model_of(3, spread=2.0, vocab=6)
    sources = [[3, 4, 5, EOS], [5, EOS]]
    found = beam_search(model, padded(sources), bos=BOS, eos=EOS, beam=60, length_penalty=0.6, n_best=3, max_length=4)
    same(found, [every_hypothesis(model, source, 4, 0.6)[:3] for source in sources])


def test_every_search_gives_a_sentence_what_it_gives_it_alone() -> None:
    model = model_of(5, spread=2.5)
    more: dict[str, int] = {"bos": BOS, "eos": EOS}
    rules = [MinimumLength(2, EOS), NoRepeatedNgrams(2)]
    phrases = [[Phrase([4, 4])], [], [Phrase([5])], []]
    prefixes = [[4], [], [5, 6], []]
    together = (
        greedy(model, padded(SOURCES), rules=rules, **more),
        beam_search(model, padded(SOURCES), beam=3, rules=[ForcedPrefixes(prefixes)], **more),
        sample(model, padded(SOURCES), seeds=[1, 2, 3, 4], samples=2, top_k=4, **more),
        constrained_beam_search(model, padded(SOURCES), phrases, beam=6, **more),
    )
    for number, source in enumerate(SOURCES):
        src = torch.tensor([source])
        single = (
            greedy(model, src, rules=rules, **more),
            beam_search(model, src, beam=3, rules=[ForcedPrefixes([prefixes[number]])], **more),
            sample(model, src, seeds=[number + 1], samples=2, top_k=4, **more),
            constrained_beam_search(model, src, [phrases[number]], beam=6, **more),
        )
        assert together[0][number] == single[0][0]
        for many, one in zip(together[1:], single[1:], strict=True):
            same([many[number]], one[:1])  # type: ignore[arg-type]
    tokens = together[3][0][0].tokens
    assert [4, 4] in [tokens[place : place + 2] for place in range(len(tokens))]


def test_it_translates_in_an_ensemble_with_an_encoder_decoder() -> None:
    models = [model_of(1, spread=2.0), small_transformer(2, VOCAB, spread=2.0)]
    found = beam_search(models, padded(SOURCES), bos=BOS, eos=EOS, beam=2, max_length=4)
    same(found, [plain_beam_search(models, source, 2, 1, 0.6, 4) for source in SOURCES])


def test_the_loss_over_replicas_is_the_plain_loss() -> None:
    model = model_of()
    src, tgt = padded([[3, 4, EOS], [5, EOS], [EOS]]), padded([[BOS, 5, 6], [BOS, 8], [BOS, 4]])
    target = padded([[5, 6, EOS], [8, EOS], [4, EOS]])
    assert_loss_over_replicas_is_plain(model, src, tgt, target)


def test_an_empty_batch_and_a_source_of_padding_alone_are_computed() -> None:
    model = model_of()
    nothing = torch.zeros(0, 3, dtype=torch.long)
    assert model(nothing, nothing).shape == (0, 3, 16)
    src, tgt = torch.tensor([[PAD, PAD, PAD], [3, 4, EOS]]), torch.tensor([[BOS, 3], [BOS, 4]])
    torch.testing.assert_close(model(src, tgt)[0], alone(model, [PAD], [BOS, 3]), rtol=1e-12, atol=1e-12)
    step = model.decode(model.encode(src), padding_mask(src, PAD), tgt)
    torch.testing.assert_close(step, model(src, tgt), rtol=1e-12, atol=1e-12)


def test_padding_before_a_real_token_is_a_token() -> None:
    model = model_of()
    src = padded([[3, 4, EOS], [5, EOS], [6, EOS]])
    tgt = torch.tensor([[PAD, 3, PAD], [PAD, PAD, PAD], [BOS, PAD, 4]])
    hidden = model(src, tgt)
    torch.testing.assert_close(hidden[0, :2], alone(model, [3, 4, EOS], [PAD, 3]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden[1, :1], alone(model, [5, EOS], [PAD]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden[2], alone(model, [6, EOS], [BOS, PAD, 4]), rtol=1e-12, atol=1e-12)


@given(
    PAIRS, st.integers(0, 2), st.sampled_from(["pre", "post"]), st.sampled_from([None, *range(3)]), st.integers(0, 9)
)
@settings(deadline=None)
def test_its_alignment_weights_are_the_sources_share_of_the_attention_computed_by_hand(
    pairs: list[tuple[list[int], list[int]]], more: int, norm: str, layer: int | None, seed: int
) -> None:
    model = model_of(seed, norm=norm, decoder_layers=3, dropout=0.5)
    both = [([*source, EOS], [BOS, *target]) for source, target in pairs]
    found = attention_weights(model, *(padded(list(side), more) for side in zip(*both, strict=True)), layer)
    assert model.training
    number = 1
    if layer is not None:
        number = layer
    model.eval()
    with torch.no_grad():
        for row, (source, target) in zip(found, both, strict=True):
            expected = attention_alone(model, source, target, number)
            torch.testing.assert_close(row[: len(target), : len(source)], expected, rtol=1e-9, atol=1e-12)
            assert not row[:, len(source) :].any()  # padding
    torch.testing.assert_close(found.sum(2), torch.ones(found.shape[:2], dtype=found.dtype), rtol=1e-12, atol=0)


def test_a_share_of_the_source_too_small_for_a_float_is_still_divided() -> None:
    model = model_of(3, spread=9.0)
    src, tgt = torch.tensor([[3, 4, 5, EOS]]), torch.tensor([[BOS, 6, 7, 8, 3]])
    expected = attention_weights(model, src, tgt)
    found = attention_weights(model.float(), src, tgt)
    torch.testing.assert_close(found.sum(2), torch.ones(1, 5), rtol=1e-6, atol=0)
    assert torch.equal(found.argmax(2), expected.argmax(2))


def test_what_it_cannot_obey_is_refused() -> None:
    model = model_of()
    src, tgt = torch.tensor([[3, EOS]]), torch.tensor([[BOS, 4]])
    with pytest.raises(ValueError, match=r"tgt_mask was given, but every token .* attends to those before it"):
        model(src, tgt, None, torch.ones(1, 1, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"src_mask has shape \(1, 1, 2, 2\), not \(batch, 1, 1, source time\)"):
        model(src, tgt, torch.ones(1, 1, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="src has 1 sentences, tgt 2"):
        model(src, tgt.expand(2, 2))
    with pytest.raises(ValueError, match="src has 1 sentences, tgt 2"):
        attention_weights(model, src, tgt.expand(2, 2))
    with pytest.raises(ValueError, match=r"layer is 2, outside \[0, 1\]: the decoder has 2 layers"):
        attention_weights(model, src, tgt, 2)
    with pytest.raises(ValueError, match="heads 3"):
        replace(TINY_DECODER_ONLY, heads=3)
    with pytest.raises(ValueError, match="decoder_layers is 0, below 1"):
        replace(TINY_DECODER_ONLY, decoder_layers=0)
    with pytest.raises(ValueError, match=r"pad is 9, outside \[0, 9\)"):
        make_decoder_only(TINY_DECODER_ONLY, 9, 9)


def test_a_target_without_steps_has_an_empty_attention() -> None:
    src = padded([[3, 4, EOS], [5, EOS]])
    assert model_of().source_attention(src, src[:, :0]).shape == (2, 0, 3)

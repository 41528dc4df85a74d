"""Models whose weights are split over real ranks have the value, gradients and searches of the whole ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from models import (
    DecoderOnlyConfig,
    EncoderDecoder,
    TransformerConfig,
    beam_search,
    greedy,
    make_decoder_only,
    make_transformer,
)
from models.alignment import attention_weights
from models.decoding_rules import NoRepeatedNgrams
from models.lora import add_lora
from models.sharding import cut, cut_of, join, split_weights, whole_outputs
from seqpar.testing import assert_same_results
from seqpar.testing.ranks import ranks

PAD = 0


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    config: TransformerConfig
    vocabularies: tuple[int, int]
    sizes: tuple[int, int, int]
    """Sentences, source and target time steps."""
    frozen: str
    smoothing: float
    chunk_tokens: int | None
    seed: int

    def model(self):
        torch.manual_seed(self.seed)
        model = make_transformer(self.config, *self.vocabularies, pad=PAD).double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self.frozen or self.frozen not in name)
            if name.endswith("bias"):  # zero at first: they would hide one that is added once a rank
                torch.nn.init.normal_(parameter)
        return model

    def batch(self):
        generator = torch.Generator().manual_seed(self.seed + 1)
        batch, source, target = self.sizes
        src = torch.randint(0, self.vocabularies[0], (batch, source), generator=generator)
        tgt = torch.randint(0, self.vocabularies[1], (batch, target + 1), generator=generator)
        return src, tgt[:, :-1], tgt[:, 1:]


@st.composite
def model_cases(draw, heads):
    heads = heads * draw(st.integers(1, 2))
    tie = draw(st.sampled_from(["none", "target", "all"]))
    target_vocab = draw(st.integers(4, 9))
    config = TransformerConfig(
        d_model=heads * -(-8 // heads) * 2,  # a norm over two or four numbers loses digits by itself
        d_ff=draw(st.integers(4, 7)),
        heads=heads,
        encoder_layers=draw(st.integers(1, 2)),
        decoder_layers=draw(st.integers(1, 2)),
        dropout=0.0,
        norm=draw(st.sampled_from(["pre", "post"])),
        tie=tie,
    )
    return Case(
        config,
        (target_vocab if tie == "all" else draw(st.integers(4, 9)), target_vocab),
        (draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))),
        draw(st.sampled_from(["", "", "tgt_embed", "feed_forward", "query"])),
        draw(st.sampled_from([0.0, 0.1])),
        draw(st.sampled_from([None, 1, 3])),
        draw(st.integers(0, 2**16)),
    )


def whole(case):
    model, (src, tgt_in, tgt_out) = case.model(), case.batch()
    logits = model.generator(model(src, tgt_in)).flatten(0, 1)
    total = F.cross_entropy(
        logits, tgt_out.flatten(), ignore_index=PAD, label_smoothing=case.smoothing, reduction="sum"
    )
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters()}


def over_ranks(rank, world, case):
    group = torch.distributed.group.WORLD
    model, (src, tgt_in, tgt_out) = case.model(), case.batch()
    shard = split_weights(model, group)
    loss = seqpar.linear_cross_entropy(
        model(src, tgt_in),
        model.generator.weight,
        tgt_out,
        bias=model.generator.bias,
        ignore_index=PAD,
        label_smoothing=case.smoothing,
        chunk_tokens=case.chunk_tokens,
        vocab=shard,
    )
    loss.total.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None and parameter.requires_grad else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return loss.total.detach(), gradients


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@settings(max_examples=max(5, settings.default.max_examples // 4))  # of each of four worlds, a whole model each
@given(data=st.data())
def test_any_split_of_weights_has_the_gradients_of_the_whole_model(world, data):
    case = data.draw(model_cases(heads=world))
    expected, totals, parts = whole(case), *zip(*ranks(world, over_ranks, case), strict=True)
    joined = {
        name: None if own is None else join(name, [gradients[name] for gradients in parts])
        for name, own in parts[0].items()
    }
    for rank, total in enumerate(totals):
        try:
            assert_same_results((total, joined), expected)
        except AssertionError as error:
            error.add_note(f"on rank {rank}")
            raise


@given(
    st.integers(1, 4),
    st.integers(4, 11),
    st.sampled_from(
        ["generator.weight", "x_attention.key_value.weight", "a.feed_forward.outer.weight", "a.norm.weight"]
    ),
)
def test_joining_undoes_cutting(world, size, name):
    weight = torch.randn(2 * size, size)
    parts = [cut(name, weight, rank, world) for rank in range(world)]
    assert torch.equal(join(name, parts), weight)
    if cut_of(name) is not None:
        assert sum(part.numel() for part in parts) == weight.numel()


def test_every_matrix_of_the_model_is_cut_but_none_that_is_added_after_a_sum():
    model = make_transformer(TransformerConfig(8, 8, 2, 1, 1), 5, 5)
    whole_ones = {
        name.partition("layers.0.")[2] or name for name, _ in model.named_parameters() if cut_of(name) is None
    }
    assert all("norm" in name or name.endswith(("output.bias", "outer.bias")) for name in whole_ones)


def split_generator(rank, world):
    whole, split = (make_transformer(TransformerConfig(8, 12, 2, 2, 2, norm="pre", tie="none"), 9, 9) for _ in range(2))
    for parameter in split.src_embed.parameters():
        parameter.requires_grad_(False)
    split_weights(split, torch.distributed.group.WORLD)
    generator, frozen = split.generator, split.src_embed.lookup.weight
    described = (generator.in_features, generator.out_features, tuple(generator.weight.shape), frozen.requires_grad)
    kept = sum(p.untyped_storage().nbytes() for p in split.parameters())
    return described, kept, sum(p.untyped_storage().nbytes() for p in whole.parameters())


def test_a_split_generator_says_how_many_rows_it_has_and_only_parts_are_kept():
    for rows, (described, kept, whole) in zip((5, 4), ranks(2, split_generator), strict=True):
        assert described == (8, rows, (rows, 8), False)
        assert kept < 0.62 * whole


def refusals(rank, world):
    said = []
    for config, vocabulary in (
        (TransformerConfig(6, 8, 3, 1, 1), 5),
        (TransformerConfig(8, 1, 2, 1, 1), 5),
        (TransformerConfig(8, 8, 2, 1, 1), 1),
    ):
        try:
            split_weights(make_transformer(config, vocabulary, vocabulary), torch.distributed.group.WORLD)
        except ValueError as error:
            said.append(str(error))
    return said


def sums_of_a_step(rank, world, kind, layers):
    """How many sums over the ranks forward and backward of a split model take."""
    torch.manual_seed(1)
    if kind == "decoder only":
        model = make_decoder_only(DecoderOnlyConfig(16, 24, 4, layers, dropout=0.0), 9)
    else:
        model = make_transformer(TransformerConfig(16, 24, 4, layers, layers, dropout=0.0), 9, 9)
    split_weights(model, torch.distributed.group.WORLD)
    tokens = torch.randint(1, 9, (2, 5))
    with mock.patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce) as counted:
        model(tokens, tokens).sum().backward()
    return counted.call_count


@pytest.mark.parametrize("layers", [1, 3])
def test_a_sublayer_takes_one_sum_forward_and_one_backward_as_step_plan_counts(layers):
    # And one for each embedding; the memory's gradient is summed once for all layers of the decoder
    assert ranks(2, sums_of_a_step, "decoder only", layers) == [4 * layers + 1] * 2
    assert ranks(2, sums_of_a_step, "encoder and decoder", layers) == [(4 + 6) * layers + 1 + 2] * 2


def refusals_of_kinds(rank, world):
    group = torch.distributed.group.WORLD
    lora = make_transformer(TransformerConfig(8, 8, 2, 1, 1), 6, 6)
    add_lora(lora, 2, 4.0)
    twice = make_transformer(TransformerConfig(8, 8, 4, 1, 1), 6, 6)
    split_weights(twice, group)
    said = []
    for refused, model in (
        (split_weights, lora),
        (split_weights, twice),
    ):
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        try:
            refused(model, group)
        except ValueError as error:
            said.append(str(error))
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    return said


def test_layers_that_are_not_split_are_refused_before_a_tie_is_broken():
    for lora, twice in ranks(2, refusals_of_kinds):
        assert lora.startswith("encoder.layers.0.self_attention.query has LoRA, which is not split over ranks: split")
        assert twice.endswith("output is split already: split the weights of a whole model, once")


def test_what_cannot_be_shared_out_is_refused_with_both_numbers():
    for heads, units, rows in ranks(2, refusals):
        assert "self_attention has 3 heads, which are not divisible by 2 ranks" in heads
        assert "feed_forward has 1 units for 2 ranks" in units
        assert "lookup has 1 rows for 2 ranks" in rows


VOCAB = 23


def model_of(kind: str) -> EncoderDecoder:
    torch.manual_seed(6)
    if kind == "decoder only":
        made = make_decoder_only(DecoderOnlyConfig(16, 24, 4, 2, dropout=0.0), VOCAB)
    else:
        made = make_transformer(TransformerConfig(16, 24, 4, 2, 2, dropout=0.0, norm="pre", tie=kind), VOCAB, VOCAB)
    for parameter in made.parameters():  # biases are zero at first, and sentences would be all alike
        torch.nn.init.normal_(parameter, std=0.3)
    return made.double()


def sentences() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    src = torch.randint(3, VOCAB, (5, 7), generator=generator)
    src[1, 4:] = src[3, 2:] = 0
    return src


def found(searched: EncoderDecoder) -> dict[str, Any]:
    """What each search finds, and the attention of the second layer."""
    src = sentences()
    given: dict[str, Any] = {"bos": 1, "eos": 2, "max_length": 9}
    tgt = torch.randint(3, VOCAB, (5, 4), generator=torch.Generator().manual_seed(4))
    return {
        "greedy": greedy(searched, src, **given),
        "rules": greedy(searched, src, rules=[NoRepeatedNgrams(1)], **given),
        "beam": beam_search(searched, src, beam=3, n_best=2, **given),
        "attention": attention_weights(searched, src, tgt, 1),
    }


def searched_over_ranks(rank: int, world: int, kind: str) -> dict[str, Any]:
    split = model_of(kind)
    split_weights(split, torch.distributed.group.WORLD)
    with whole_outputs(split):
        inside = found(split)
    for search in (greedy, beam_search):
        for searched in (split, [model_of(kind), split]):
            with pytest.raises(ValueError, match=REFUSED):
                search(searched, sentences(), bos=1, eos=2)
    return inside


REFUSED = (
    r"^the model is split over ranks: search within models\.sharding\.whole_outputs\(model\), where all ranks that "
    "split the vocabulary translate the same sentences$"
)


@pytest.mark.parametrize("kind", ["none", "all", "decoder only"])
def test_searches_and_attention_are_those_of_the_whole_model(kind: str) -> None:
    expected = found(model_of(kind))
    assert len({tuple(tokens) for tokens in expected["greedy"]}) > 1 or kind == "decoder only"
    for one in ranks(2, searched_over_ranks, kind):
        assert one["greedy"] == expected["greedy"]
        assert one["rules"] == expected["rules"]
        for ours, theirs in zip(one["beam"], expected["beam"], strict=True):
            assert [each.tokens for each in ours] == [each.tokens for each in theirs]
            assert [each.score for each in ours] == pytest.approx([each.score for each in theirs], rel=1e-12)
        torch.testing.assert_close(one["attention"], expected["attention"], rtol=1e-12, atol=1e-14)

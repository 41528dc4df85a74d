"""Alignment weights are the attention that the decoder computes, in the layer asked for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import EncoderDecoder, padding_mask
from models.alignment import attention_weights
from tests.models.examples import BOS, PAD, batch, pad_to, small_transformer


def by_hand(model: EncoderDecoder, src: list[int], tgt: list[int], chosen: int) -> Tensor:
    """The mean attention of one pair alone, (T, S), computed head by head and position by position."""
    memory = model.encode(torch.tensor([src]))
    x = model.tgt_embed(torch.tensor([tgt]))
    layer = model.decoder.layers[0]
    for layer in model.decoder.layers[:chosen]:
        x = layer(x, None, memory, None)
    layer = model.decoder.layers[chosen]
    own, other = layer.self_attention, layer.memory_attention
    x = layer.residuals[0](x, lambda y: own(y, own.keys_values(y), None, True))
    if layer.residuals[1].pre:
        x = layer.residuals[1].norm(x)
    width = memory.size(2) // other.heads
    weights = torch.zeros(len(tgt), len(src), dtype=memory.dtype)
    key_weight, key_bias = other.key_value.weight[: memory.size(2)], other.key_value.bias[: memory.size(2)]
    keys = [key_weight @ memory[0, s] + key_bias for s in range(len(src))]
    for t in range(len(tgt)):
        query = other.query.weight @ x[0, t] + other.query.bias
        for head in range(other.heads):
            part = slice(head * width, (head + 1) * width)
            scores = [float(query[part] @ key[part]) for key in keys]
            shares = [math.exp(score / width**0.5) for score in scores]
            for s in range(len(src)):
                weights[t, s] += shares[s] / sum(shares) / other.heads
    return weights


@pytest.mark.parametrize("norm", ["pre", "post"])
@settings(max_examples=settings.default.max_examples // 2)  # of each
@given(sources=batch(), targets=batch(), seed=st.integers(0, 9), layer=st.integers(0, 2))
def test_weights_are_the_attention_computed_by_hand(
    norm: str, sources: list[list[int]], targets: list[list[int]], seed: int, layer: int
) -> None:
    both = list(zip(sources, [[BOS, *ids] for ids in targets], strict=False))
    model = small_transformer(seed, norm=norm, decoder_layers=3)
    src, tgt = pad_to([source for source, _ in both], 8), pad_to([target for _, target in both], 9)
    found = attention_weights(model, src, tgt, layer)
    with torch.no_grad():
        for row, (source, target) in enumerate(both):
            real = found[row, : len(target), : len(source)]
            torch.testing.assert_close(real, by_hand(model, source, target, layer), rtol=1e-10, atol=1e-12)
            assert not found[row, : len(target), len(source) :].any()  # padding
    torch.testing.assert_close(found.sum(-1), torch.ones(tgt.shape, dtype=found.dtype), rtol=1e-12, atol=0)
    assert model.training


def test_the_penultimate_layer_is_the_default() -> None:
    src, tgt = torch.tensor([[4, 5, 6]]), torch.tensor([[BOS, 7]])
    for layers, expected in ((1, 0), (2, 0), (4, 2)):
        model = small_transformer(layers, decoder_layers=layers)
        found = attention_weights(model, src, tgt)
        assert torch.equal(found, attention_weights(model, src, tgt, expected))
        if layers > 1:
            assert not torch.equal(found, attention_weights(model, src, tgt, layers - 1))


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    model = small_transformer()
    with pytest.raises(ValueError, match=rf"^layer is {layer}, outside \[0, 1\]: the decoder has 2 layers"):
        attention_weights(model, torch.tensor([[4]]), torch.tensor([[BOS]]), layer)


def test_nothing_is_left_in_the_model() -> None:
    model = small_transformer()
    before = model(torch.tensor([[4, 5]]), torch.tensor([[BOS, 6]]))
    with pytest.raises(TypeError):
        attention_weights(model, torch.tensor([[4.0]]), torch.tensor([[BOS]]))
    attention_weights(model, torch.tensor([[4, 5]]), torch.tensor([[BOS, 6]]))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(before, model(torch.tensor([[4, 5]]), torch.tensor([[BOS, 6]])))


def test_a_source_of_padding_alone_attends_to_its_first_position() -> None:
    found = attention_weights(small_transformer(), torch.full((1, 3), PAD), torch.tensor([[BOS]]))
    assert found.tolist() == [[[1.0, 0.0, 0.0]]]
    assert padding_mask(torch.full((1, 3), PAD), PAD)[0, 0, 0].tolist() == [True, False, False]

"""Weights that are drawn later, one at a time, are those of a model that is built at once."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from models import (
    PRESETS,
    DecoderOnlyConfig,
    RecurrentConfig,
    make_decoder_only,
    make_recurrent,
    make_transformer,
)
from models.drawn_later import drawn_later
from models.lora import add_lora
from models.transformer import EncoderDecoder


def made(preset: str, vocab: int = 30, **changes: Any) -> EncoderDecoder:
    sizes: Any = replace(PRESETS[preset], d_model=16, **changes)
    if isinstance(sizes, RecurrentConfig):
        return make_recurrent(sizes, vocab, vocab)
    if isinstance(sizes, DecoderOnlyConfig):
        return make_decoder_only(sizes, vocab)
    return make_transformer(sizes, vocab, vocab)


def with_lora() -> EncoderDecoder:
    model = made("tiny")
    add_lora(model, 2, 2.0)
    return model


@pytest.mark.parametrize("preset", [*PRESETS, "LoRA"])
@pytest.mark.parametrize("tie", ["none", "all"])
def test_weights_are_those_of_the_same_seed_bit_for_bit(preset: str, tie: str) -> None:
    def build() -> EncoderDecoder:
        return with_lora() if preset == "LoRA" else made(preset, tie=tie)

    torch.manual_seed(3)
    usual = dict(build().named_parameters())
    after = torch.get_rng_state()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model, weights = drawn_later(build)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.is_meta for weight in model.parameters())
    found = dict(weights)
    assert found.keys() == usual.keys() == dict(model.named_parameters()).keys()
    for name, weight in usual.items():
        assert torch.equal(found[name], weight), name
    assert torch.equal(torch.get_rng_state(), after)


def test_one_weight_exists_at_a_time() -> None:
    _, weights = drawn_later(lambda: made("tiny", vocab=300))
    seen: list[weakref.ref[torch.Tensor]] = []
    most = 0
    for _, weight in weights:
        seen.append(weakref.ref(weight))
        most = max(most, sum(each() is not None for each in seen))
        del weight
    assert len(seen) > 30
    assert most <= 2  # the one at hand, and the one that it replaces


class SetInAnotherWay(nn.Module):
    """A weight of which one row is set without a function of `torch.nn.init`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 2))
        with torch.no_grad():
            self.weight[:2].normal_()
            self.weight[2:].copy_(torch.ones(1, 2))


def test_a_weight_that_is_set_in_another_way_is_refused_and_never_left_unset() -> None:
    _, weights = drawn_later(SetInAnotherWay)
    with pytest.raises(RuntimeError, match="weight is set by a function that is not noted"):
        next(weights)

"""The random weights with which a model begins: one is drawn at a time, and they are those of the built model."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import (
    PRESETS,
    DecoderOnlyConfig,
    make_decoder_only,
    make_transformer,
)
from models.lora import add_lora
from models.transformer import EncoderDecoder, first_weights


def made(preset: str, vocab: int = 30, d_model: int = 16, **changes: Any) -> EncoderDecoder:
    sizes: Any = replace(PRESETS[preset], d_model=d_model, **changes)
    if isinstance(sizes, DecoderOnlyConfig):
        return make_decoder_only(sizes, vocab)
    return make_transformer(sizes, vocab, vocab)


def with_lora(d_model: int = 16) -> EncoderDecoder:
    model = made("tiny", d_model=d_model)
    add_lora(model, 2, 2.0)
    return model


@pytest.mark.parametrize("preset", [*PRESETS, "LoRA"])
@pytest.mark.parametrize("tie", ["none", "all"])
def test_weights_drawn_later_are_those_of_the_same_seed_bit_for_bit(preset: str, tie: str) -> None:
    def build() -> EncoderDecoder:
        return with_lora() if preset == "LoRA" else made(preset, tie=tie)

    torch.manual_seed(3)
    usual = build()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = build()
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn on "meta"
    found = dict(first_weights(model))
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, weight in usual.named_parameters():
        assert torch.equal(found[name], weight), name
    assert torch.equal(torch.get_rng_state(), after)


def test_weights_do_not_depend_on_the_precision_of_a_training() -> None:
    torch.manual_seed(3)
    usual = dict(first_weights(made("tiny")))
    torch.manual_seed(3)
    for name, weight in first_weights(made("tiny").double()):
        assert torch.equal(usual[name], weight), name


def test_one_weight_exists_at_a_time() -> None:
    with torch.device("meta"):
        model = made("tiny", vocab=300)
    seen: list[weakref.ref[torch.Tensor]] = []
    most = 0
    for _, weight in first_weights(model):
        seen.append(weakref.ref(weight))
        most = max(most, sum(each() is not None for each in seen))
        del weight
    assert len(seen) > 30
    assert most <= 2  # the one at hand, and the one that it replaces


D = 64


def test_lora_begins_as_where_it_comes_from() -> None:
    torch.manual_seed(1)
    lora = dict(first_weights(with_lora(d_model=D)))
    name = "encoder.layers.0.self_attention.query"
    assert 0.97 * D**-0.5 < lora[f"{name}.lora_A"].abs().max().item() <= D**-0.5  # kaiming_uniform_(a=sqrt(5))
    assert not lora[f"{name}.lora_B"].any()

"""Models whose weights are read at once have no random ones."""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import (
    PRESETS,
    DecoderOnlyConfig,
    EncoderDecoder,
    RecurrentConfig,
    make_decoder_only,
    make_recurrent,
    make_transformer,
)
from models.undrawn import undrawn

PAGE = resource.getpagesize()


def made(preset: str, vocab: int = 30, **changes: Any) -> EncoderDecoder:
    sizes: Any = replace(PRESETS[preset], d_model=16, **changes)
    if isinstance(sizes, RecurrentConfig):
        return make_recurrent(sizes, vocab, vocab)
    if isinstance(sizes, DecoderOnlyConfig):
        return make_decoder_only(sizes, vocab)
    return make_transformer(sizes, vocab, vocab)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_random_number_is_drawn_and_all_other_values_are_as_always(preset: str) -> None:
    before = torch.get_rng_state()
    with undrawn():
        model = made(preset)
    assert torch.equal(torch.get_rng_state(), before)
    usual = made(preset).state_dict()
    assert not torch.equal(torch.get_rng_state(), before)
    found = model.state_dict()
    assert {name: each.shape for name, each in found.items()} == {name: each.shape for name, each in usual.items()}
    constant = [name for name, each in usual.items() if each.unique().numel() == 1]
    assert any(name.endswith("bias") for name in constant)
    for name in constant:
        assert torch.equal(found[name], usual[name]), name


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return PAGE * int(file.read().split()[1])


def test_embeddings_that_nobody_writes_to_take_up_no_memory() -> None:
    size = 4 * 16 * 1_000_000  # bytes of one of the three embeddings
    before = resident()
    with undrawn():
        model = made("tiny", 1_000_000, tie="none")
    assert resident() - before < size / 4
    weights = {model.src_embed.lookup.weight, model.tgt_embed.lookup.weight, model.generator.weight}
    assert len(weights) == 3

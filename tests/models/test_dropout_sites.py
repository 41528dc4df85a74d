"""Every place where an architecture drops values, found by running it: all that its paper has, none without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from models import (
    PRESETS,
    DecoderOnlyConfig,
    EncoderDecoder,
    TransformerConfig,
    make_decoder_only,
    make_transformer,
)
from models.dropout import Dropout
from models.presets import ARCHITECTURES
from tests.models.examples import random_batch

SIZES = {"d_model": 16, "dropout": 0.25}


def transformer(architecture: str, norm: str) -> EncoderDecoder:
    layers = {"d_ff": 24, "heads": 4, "encoder_layers": 2, "decoder_layers": 3, **SIZES}
    return make_transformer(TransformerConfig(**layers, norm=norm, architecture=architecture), 11, 11)  # type: ignore[arg-type]


def decoder_only(norm: str) -> EncoderDecoder:
    config = DecoderOnlyConfig(**SIZES, d_ff=24, decoder_layers=3, norm=norm)  # type: ignore[arg-type]
    return make_decoder_only(config, 11)


MADE: dict[str, tuple[Callable[[], EncoderDecoder], int]] = {
    # Both embeddings, and the output of each sublayer: two in an encoder's layer, three in a decoder's
    **{
        f"{architecture} {norm}": (lambda a=architecture, n=norm: transformer(a, n), 2 + 2 * 2 + 3 * 3)  # type: ignore[misc]
        for architecture in ARCHITECTURES
        for norm in ("pre", "post")
    },
    # The embedding, and two sublayers of each layer
    **{f"decoder_only {norm}": (lambda n=norm: decoder_only(n), 1 + 3 * 2) for norm in ("pre", "post")},  # type: ignore[misc]
}


@contextmanager
def counted(without: int | None = None) -> Iterator[list[float]]:
    """Let every dropout draw numbers of its own, but for one call that drops nothing; yield the rate of each call."""
    rates: list[float] = []

    def forward(module: Dropout, x: Tensor) -> Tensor:
        call = len(rates)
        rates.append(module.p)
        if call == without:
            return x
        drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(call), dtype=x.dtype)
        return x * (drawn >= module.p)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dropout, "forward", forward)
        yield rates


def test_the_table_has_every_kind_of_model() -> None:
    made = {type(make()) for make, _ in MADE.values()}
    kinds = {TransformerConfig: make_transformer, DecoderOnlyConfig: make_decoder_only}
    assert {type(preset) for preset in PRESETS.values()} == set(kinds)
    assert len(made) == len(kinds)


@pytest.mark.parametrize(("make", "sites"), MADE.values(), ids=MADE.keys())
def test_every_dropout_of_the_paper_is_there_and_changes_the_hidden_states(
    make: Callable[[], EncoderDecoder], sites: int
) -> None:
    torch.manual_seed(0)
    model = make().double()
    src, tgt = random_batch(1), random_batch(2)
    with counted() as rates:
        everywhere = model(src, tgt)
    assert rates == [SIZES["dropout"]] * sites
    for call in range(sites):
        with counted(without=call):
            assert not torch.equal(model(src, tgt), everywhere), f"dropout {call} of {sites} has no effect"


@pytest.mark.parametrize("make", [make for make, _ in MADE.values()], ids=MADE.keys())
def test_two_passes_of_training_drop_other_values_and_evaluation_none(
    make: Callable[[], EncoderDecoder],
) -> None:
    torch.manual_seed(0)
    model = make()
    src, tgt = random_batch(1), random_batch(2)
    assert not torch.equal(model(src, tgt), model(src, tgt))
    model.eval()
    assert torch.equal(model(src, tgt), model(src, tgt))

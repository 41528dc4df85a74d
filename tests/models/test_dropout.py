"""Dropout: the right share, mean and seed, one mask for value and gradient, and every place that drops values."""

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


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.99])
def test_the_share_dropped_is_p_and_the_mean_is_kept(p: float) -> None:
    torch.manual_seed(0)
    count = 1_000_003  # no multiple of the four values a draw has
    dropped = Dropout(p)(torch.ones(count, dtype=torch.float64))
    assert dropped.unique().tolist() == [0.0, pytest.approx(1 / (1 - p), rel=1e-3)]
    deviation = (p * (1 - p) / count) ** 0.5
    assert float((dropped == 0).double().mean()) == pytest.approx(p, abs=4 * deviation + 2**-17)
    assert float(dropped.mean()) == pytest.approx(1, abs=4 * deviation / (1 - p))


def test_values_are_dropped_independently_of_their_neighbours() -> None:
    torch.manual_seed(1)
    zeros = (Dropout(0.5)(torch.ones(1_000_000)) == 0).double() - 0.5
    for distance in (1, 2, 3, 4, 8, 624):
        assert abs(float((zeros[distance:] * zeros[:-distance]).mean())) < 4 * 0.25 / 1000


def test_the_seed_decides_and_the_gradient_has_the_same_mask() -> None:
    x = torch.randn(7, 11, 3, dtype=torch.float64, requires_grad=True)
    outputs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outputs.append(Dropout(0.4)(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    (gradient,) = torch.autograd.grad(outputs[0].sum(), x)
    torch.testing.assert_close(gradient * x, outputs[0], rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_nothing_is_dropped_where_nothing_is_to_be(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, dtype=dtype)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert Dropout(0.5)(x).dtype == dtype
    assert Dropout(0.5)(x[:0]).shape == (0, 3)
    assert Dropout(0.999999)(x).isfinite().all()


@pytest.mark.parametrize("p", [0.1, 0.25, 2**-16, 0.9999999])
def test_of_all_values_that_can_be_drawn_exactly_the_rounded_share_is_dropped(
    p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_value = torch.arange(-(2**15), 2**15).to(torch.int16)
    monkeypatch.setattr(torch.Tensor, "random_", lambda words, *_: words.copy_(every_value.view(torch.int64)))
    output = Dropout(p)(torch.ones(2**16, dtype=torch.float64))
    dropped = min(round(p * 2**16), 2**16 - 1)
    assert int((output == 0).sum()) == dropped
    assert float(output.mean()) == pytest.approx(1, rel=1e-12), "the expected output is the input"


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

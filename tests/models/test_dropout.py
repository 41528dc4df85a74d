"""What dropout promises: the right share, the right mean, the seed's numbers, one mask for value and gradient."""

from __future__ import annotations

import pytest
import torch

from models.dropout import Dropout


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

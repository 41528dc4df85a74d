"""What packed weights promise: the products of F.linear, while the block lasts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.packed import packed


@pytest.fixture(autouse=True)
def _small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.packed.SMALLEST", 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 7), (5, 1, 7), (320, 7)])
def test_the_product_is_as_good_as_torchs(shape: tuple[int, ...], bias: bool) -> None:
    linear, x = nn.Linear(7, 33, bias=bias), torch.randn(shape)
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    exact, plain = exact.detach(), linear(x).detach()
    with torch.no_grad(), packed([linear]):
        assert "forward" in vars(linear)
        product = linear(x)
    assert product.shape == plain.shape
    rounding = torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert float((product - exact).norm()) <= 2 * float((plain - exact).norm()) + rounding
    assert "forward" not in vars(linear)


def test_layers_inside_are_packed_and_come_back_after_an_error() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    inner, own, wide = nn.Linear(3, 4), Own(3, 4), nn.Linear(3, 4).double()
    model = nn.ModuleList([nn.Sequential(inner), own, wide])

    def fails() -> None:
        with packed([model, inner]):
            assert "forward" in vars(inner)
            assert "forward" not in vars(own)
            assert "forward" not in vars(wide)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert "forward" not in vars(inner)


def test_without_onednn_or_under_autocast_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(3, 4)
    with torch.autocast("cpu", torch.bfloat16), packed([linear]):
        assert "forward" not in vars(linear)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with packed([linear]):
        assert "forward" not in vars(linear)


def test_what_is_too_small_to_gain_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.packed.SMALLEST", 13)
    small, large = nn.Linear(3, 4), nn.Linear(3, 5)
    with packed([small, large]):
        assert "forward" not in vars(small)
        assert "forward" in vars(large)


def test_where_onednn_is_switched_off_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    linear = nn.Linear(3, 4)
    with packed([linear]):
        assert "forward" not in vars(linear)


def test_without_the_private_operators_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    linear = nn.Linear(3, 4)
    with packed([linear]):
        assert "forward" not in vars(linear)


def test_a_forward_that_someone_replaced_is_used_and_stays() -> None:
    linear = nn.Linear(3, 4)
    linear.forward = lambda x: x + 1  # type: ignore[method-assign]
    with packed([linear]):
        assert torch.equal(linear(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(linear(torch.ones(3)), torch.full((3,), 2.0))


def test_weights_that_are_no_plain_tensors_or_on_another_device_are_left_alone() -> None:
    class Marked(torch.Tensor):
        """As DTensor and quantised weights are: a tensor with rules of its own."""

    special, elsewhere = nn.Linear(3, 4), nn.Linear(3, 4, device="meta")
    special.weight = nn.Parameter(torch.randn(4, 3).as_subclass(Marked))
    assert type(special.weight) is not nn.Parameter
    with packed([special, elsewhere]):
        assert "forward" not in vars(special)
        assert "forward" not in vars(elsewhere)


def test_hooks_of_a_packed_layer_run() -> None:
    linear, seen = nn.Linear(3, 4), []
    linear.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with torch.no_grad(), packed([linear]):
        linear(torch.ones(2, 3))
    assert seen == [(2, 4)]


def test_a_layer_that_is_named_twice_is_packed_once_and_comes_back() -> None:
    linear = nn.Linear(3, 4)
    with packed([linear, nn.Sequential(linear), linear]):
        with packed([linear]):
            assert "forward" in vars(linear)
        assert "forward" in vars(linear)
    assert "forward" not in vars(linear)

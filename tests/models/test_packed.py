"""What packed weights promise: the products of F.linear, while the block lasts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.packed import Weight, can_be_packed, pack, packed, unpack


@pytest.fixture(autouse=True)
def _small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.packed.SMALLEST", 1)


def is_packed(linear: nn.Linear) -> bool:
    return "packed_weight" in vars(linear) or type(linear).__module__ == "models.packed"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 7), (5, 1, 7), (320, 7)])
def test_the_product_is_as_good_as_torchs(shape: tuple[int, ...], bias: bool) -> None:
    linear, x = nn.Linear(7, 33, bias=bias), torch.randn(shape)
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    exact, plain = exact.detach(), linear(x).detach()
    with torch.no_grad(), packed([linear]):
        assert is_packed(linear)
        product = linear(x)
    assert product.shape == plain.shape
    rounding = torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert float((product - exact).norm()) <= 2 * float((plain - exact).norm()) + rounding
    assert not is_packed(linear)


def test_layers_inside_are_packed_and_come_back_after_an_error() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    inner, own, wide = nn.Linear(3, 4), Own(3, 4), nn.Linear(3, 4).double()
    model = nn.ModuleList([nn.Sequential(inner), own, wide])

    def fails() -> None:
        with packed([model, inner]):
            assert is_packed(inner)
            assert not is_packed(own)
            assert not is_packed(wide)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not is_packed(inner)


def test_without_onednn_or_under_autocast_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(3, 4)
    with torch.autocast("cpu", torch.bfloat16), packed([linear]):
        assert not is_packed(linear)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with packed([linear]):
        assert not is_packed(linear)


def test_what_is_too_small_to_gain_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.packed.SMALLEST", 13)
    small, large = nn.Linear(3, 4), nn.Linear(3, 5)
    with packed([small, large]):
        assert not is_packed(small)
        assert is_packed(large)


def test_where_onednn_is_switched_off_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    linear = nn.Linear(3, 4)
    with packed([linear]):
        assert not is_packed(linear)


def test_without_the_private_operators_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    linear = nn.Linear(3, 4)
    with packed([linear]):
        assert not is_packed(linear)


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
        assert not is_packed(special)
        assert not is_packed(elsewhere)


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
            assert is_packed(linear)
        assert is_packed(linear)
    assert not is_packed(linear)


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


class Inheriting(nn.Linear):
    """A subclass that inherits forward, and so is packed, too."""


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("kind", [nn.Linear, Inheriting])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_made_within_the_block_is_an_ordinary_layer_with_weights_of_its_own(
    copied: Callable[[nn.Module], nn.Module], kind: type[nn.Linear]
) -> None:
    model, other, x = nn.Sequential(kind(7, 5)), nn.Linear(7, 5), torch.randn(2, 7)
    before = set(vars(model[0]))
    with torch.no_grad(), packed([model]):
        assert is_packed(model[0])
        twin = copied(model)[0]
    assert type(twin) is type(model[0]) is kind
    assert set(vars(twin)) == set(vars(model[0])) == before
    assert torch.equal(twin(x), model[0](x))
    twin.load_state_dict(other.state_dict())
    twin(x).sum().backward()
    other(x).sum().backward()
    assert torch.equal(twin(x), other(x))
    assert torch.equal(twin.weight.grad, other.weight.grad)
    assert model[0].weight.grad is None


def test_a_shallow_copy_made_within_the_block_is_an_ordinary_layer() -> None:
    linear = nn.Linear(7, 5)
    with packed([linear]):
        twin = copy.copy(linear)
    assert type(twin) is nn.Linear
    assert twin.weight is linear.weight
    assert not is_packed(twin)


def test_autocast_within_the_block_is_that_of_an_ordinary_layer() -> None:
    linear, x = nn.Linear(7, 5), torch.randn(2, 7)
    with torch.no_grad(), packed([linear]), torch.autocast("cpu", torch.bfloat16):
        product = linear(x)
        again = linear(product @ torch.ones(5, 7))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(product, nn.Linear.forward(linear, x))
    assert product.dtype == again.dtype == torch.bfloat16


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda linear: linear.weight.mul_(2),
    "load_state_dict": lambda linear: linear.load_state_dict(nn.Linear(7, 5).state_dict()),
    "another parameter": lambda linear: setattr(linear, "weight", nn.Parameter(torch.ones(5, 7))),
    "data": lambda linear: setattr(linear.weight, "data", torch.ones(5, 7)),
    "half": lambda linear: linear.half(),
    "double": lambda linear: linear.double(),
    "double and back": lambda linear: linear.double().float(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_that_change_within_the_block_are_used(change: Callable[[nn.Linear], object]) -> None:
    linear = nn.Linear(7, 5)
    with torch.no_grad(), packed([linear]):
        change(linear)
        x = torch.randn(2, 7, dtype=linear.weight.dtype)
        product = linear(x)
    assert torch.equal(product, F.linear(x, linear.weight, linear.bias))


@pytest.mark.parametrize("size", [7, 64])
def test_a_weight_whose_memory_was_freed_is_never_taken_for_a_later_one(size: int) -> None:
    x = torch.randn(2, size)
    for _ in range(40):
        linear = nn.Linear(size, size)
        with torch.no_grad(), packed([linear]):
            for value in range(30):
                # The second one may be given the address of the first weight
                linear.weight.data = torch.full((size, size), float(value))
                assert torch.allclose(linear(x), F.linear(x, linear.weight, linear.bias), atol=1e-2)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda weight: weight.t(),
    "fewer rows": lambda weight: weight[:5],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_the_weights_memory_is_another_weight(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    linear, x = nn.Linear(7, 7, bias=False), torch.randn(2, 7)
    with torch.no_grad(), packed([linear]):
        linear.weight.data = view(linear.weight.data)
        product = linear(x)
    assert torch.equal(product, F.linear(x, linear.weight))


def test_within_the_block_gradients_are_those_of_an_ordinary_layer() -> None:
    linear, x = nn.Linear(7, 5), torch.randn(2, 7, requires_grad=True)
    with packed([linear]):
        linear(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, linear.weight.detach().sum(0).expand(2, 7))
    assert torch.allclose(linear.weight.grad, x.detach().sum(0).expand(5, 7))


def test_weights_made_in_inference_mode_are_packed() -> None:
    with torch.inference_mode():
        linear, x = nn.Linear(7, 5), torch.randn(2, 7)
        with packed([linear]):
            assert is_packed(linear)
            assert torch.allclose(linear(x), F.linear(x, linear.weight, linear.bias), atol=1e-6)


def test_a_layer_is_compiled_within_the_block_as_an_ordinary_one() -> None:
    linear, x = nn.Linear(7, 5), torch.randn(2, 7)
    with torch.no_grad(), packed([linear]):
        compiled = torch.compile(linear, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), F.linear(x, linear.weight, linear.bias))


def test_two_threads_that_pack_a_layer_at_the_same_time_pack_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x, before, within = nn.Linear(3, 4), torch.randn(2, 3), Barrier(2), Barrier(2)
    plain = linear(x).detach()

    def both_at(barrier: Barrier) -> None:
        with suppress(BrokenBarrierError):
            barrier.wait(0.5)

    def at_the_same_time(one: nn.Linear) -> bool:
        answer = can_be_packed(one)
        both_at(before)
        return answer

    monkeypatch.setattr("models.packed.can_be_packed", at_the_same_time)

    def product(_: int) -> torch.Tensor:
        with torch.no_grad(), packed([linear]):
            y: torch.Tensor = linear(x)
            both_at(within)
            return y

    with ThreadPoolExecutor(2) as pool:
        for y in pool.map(product, range(2)):
            torch.testing.assert_close(y, plain)
    assert not is_packed(linear)


@pytest.mark.parametrize("known", [True, False])
def test_a_product_goes_on_when_the_block_of_another_thread_ends(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    linear, x = nn.Linear(3, 4), torch.randn(2, 3)
    plain = linear(x).detach()

    def meanwhile(*_: object) -> bool:
        unpack(linear)
        return known

    monkeypatch.setattr(Weight, "is_that_of", meanwhile)
    pack(linear)
    with torch.no_grad():
        torch.testing.assert_close(linear(x), plain)
    assert not is_packed(linear)


@pytest.mark.parametrize("ended", [False, True])
def test_a_layer_that_ctrl_c_caught_while_it_was_packed_is_an_ordinary_one(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(7, 33)

    def interrupted(layer: nn.Linear) -> None:
        if ended:
            pack(layer)
        else:
            vars(layer)["packed_weight"] = Weight.of(layer.weight)
        raise KeyboardInterrupt

    monkeypatch.setattr("models.packed.pack", interrupted)
    with pytest.raises(KeyboardInterrupt), packed([linear]):
        pass
    assert not is_packed(linear)

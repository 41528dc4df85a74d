"""Buffers that a pair changes: sums over rows are those of all rows on all devices, others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import seqpar
from tests.seqpar.engine.pairs import Made, V, assert_plain, batch, cross_entropy, each_row, linear

ROWS = 9
"""Of `batch(ROWS)`."""


class Changing(nn.Linear):
    """Changes a buffer by each call, given the rows' scores."""

    def __init__(self, kept: Tensor, change: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(4, V, dtype=torch.float64)
        self.register_buffer("kept", kept.clone())
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.change(self.kept, y.detach().flatten(0, -2))
        return y


def by_engine(generator: nn.Module, devices: Any = None, **options: Any) -> Tensor:
    """The loss of the generator's scores of nine rows."""
    return seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices, **options)(*batch(ROWS)).total


class Scaling(nn.Module):
    """A generator that replaces its buffer, or changes it in place, whenever it is called."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear = linear()
        self.in_place = in_place
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) / self.scale
        if self.training and self.in_place:
            self.scale.mul_(0.9)
        elif self.training:
            self.scale = 0.9 * self.scale
        return y


def counting(self: Any, logits: Tensor, target: Tensor) -> Tensor:
    if self.training:
        self.calls += 1
    return cross_entropy(logits, target)


def averaging(self: Any, logits: Tensor, target: Tensor) -> Tensor:
    """A slow moving average of the loss, which half of the rows twice change by 1 % otherwise."""
    losses = each_row(logits, target)
    if self.training:
        self.average.lerp_(losses.detach().mean(), 0.01)
    return losses.sum()


CHANGING = {
    "generator.scale": (lambda: Scaling(False), seqpar.CrossEntropy),
    "the same in place: generator.scale": (lambda: Scaling(True), seqpar.CrossEntropy),
    "generator.parametrizations.weight.0._": (lambda: parametrizations.spectral_norm(linear()), seqpar.CrossEntropy),
    "criterion.calls": (linear, lambda: Made(counting, calls=nn.Buffer(torch.tensor(0)))),
    "criterion.average": (linear, lambda: Made(averaging, average=nn.Buffer(torch.ones(()).double()))),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_buffer_that_would_change_once_a_chunk_is_refused_in_training_alone(name: str) -> None:
    make, make_criterion = CHANGING[name]
    generator, criterion = make(), make_criterion()
    engine = seqpar.LossCompute(generator, criterion)
    before = {key: value.clone() for key, value in engine.state_dict().items()}
    with pytest.raises(ValueError, match=rf"the buffer {name.split(': ')[-1]}\w* changes when the (gen|crit)"):
        engine(*batch(ROWS))
    for key, value in engine.state_dict().items():
        assert torch.equal(value, before[key])
    engine.eval()
    assert_plain(generator, criterion)


def test_an_iteration_that_has_converged_before_the_first_call_is_refused_as_well() -> None:
    generator = parametrizations.spectral_norm(linear())
    for _ in range(200):
        generator.weight  # one step of the power iteration
    with pytest.raises(ValueError, match=r"the buffer generator.parametrizations.weight.0._\w changes when the gen"):
        by_engine(generator)


class Counting(nn.Linear):
    """Counts rows and sums scores in place, neither of which changes the scores."""

    def __init__(self) -> None:
        super().__init__(4, V, dtype=torch.float64)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sums", torch.zeros(V, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.rows += len(x)
        self.sums += y.detach().sum(0)
        return y


class CountingRounded(Counting):
    """The same in float32, with a class whose sum is nan, and a count of what only the weights of now give."""

    def __init__(self) -> None:
        super().__init__()
        self.float().sums[3] = torch.nan
        self.register_buffer("now", torch.zeros((), dtype=torch.int64))
        self.first = self.weight[0, 0].item()

    def forward(self, x: Tensor) -> Tensor:
        self.now += len(x) * (self.weight[0, 0] == self.first)
        return super().forward(x.float())


class AveragingBeside(Counting):
    """The same with a moving average of small numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.small.lerp_(1e-7 * x.detach().abs().mean(), 0.1)
        return super().forward(x)


class Renewed(Counting):
    """The same with a buffer that is renewed, and has the same numbers."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.sums.new_ones(())
        self.register_buffer("scale", scale)
        return super().forward(x) * self.scale


class CountingMatters(Counting):
    """The same, and the scores depend on the count."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.rows


class CountingMattersLittle(Counting):
    """The same, and the scores depend on it in their sixth digit."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-6 * self.rows)


@pytest.mark.parametrize("devices", [None, ["cpu"], ["cpu"] * 2, ["cpu"] * 3])
def test_a_generator_may_count_its_rows_over_any_devices_if_the_scores_do_not_depend_on_it(devices: Any) -> None:
    generator, (hidden, target) = Counting(), batch(ROWS)
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices, chunk_tokens=2)
    for calls in (1, 2):
        engine(hidden, target)
        assert generator.rows == calls * ROWS
    plain = 2 * F.linear(hidden, generator.weight, generator.bias).sum(0)
    torch.testing.assert_close(generator.sums, plain, rtol=1e-12, atol=1e-12)
    rounded = CountingRounded()
    by_engine(rounded, devices)
    assert (rounded.rows, rounded.now) == (ROWS, ROWS)
    by_engine(Renewed(), devices)


def test_a_buffer_counts_in_inference_mode_as_well() -> None:
    generator = Counting()
    with torch.inference_mode():
        by_engine(generator, chunk_tokens=6)
    assert generator.rows == ROWS


class Replacing(nn.Linear):
    """Replaces a buffer by a sum of its scores' rows."""

    def __init__(self, summed: Callable[[Tensor], Any]) -> None:
        super().__init__(4, V, dtype=torch.float64)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.summed = summed

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.rows = self.rows + self.summed(y)
        return y


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a moving average": (AveragingBeside, "small"),
    "a count that matters": (CountingMatters, "rows"),
    "a count that matters little": (CountingMattersLittle, "rows"),
    "a sum in the place of another": (lambda: Replacing(lambda y: y[..., 0].numel()), "rows"),
    "a sum to which nothing is added yet": (lambda: Replacing(lambda y: (y > 1e9).sum()), "rows"),
    "the largest imaginary part": (
        lambda: Changing(torch.tensor(0j), lambda kept, y: kept.copy_(1j * torch.maximum(kept.imag, y.square().sum()))),
        "kept",
    ),
}


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize("name", REFUSED)
def test_a_buffer_that_matters_or_is_replaced_or_averaged_is_refused_and_stays(name: str, devices: Any) -> None:
    make, buffer = REFUSED[name]
    generator = make()
    with pytest.raises(ValueError, match=rf"the buffer generator\.{buffer} changes "):
        by_engine(generator, devices)
    assert not any(b.any() for b in generator.buffers())


NO_SUMS: dict[str, tuple[Tensor, Callable[[Tensor, Tensor], Any]]] = {
    "classes that were found": (
        torch.zeros(V, dtype=torch.bool),
        lambda kept, y: kept.logical_or_(F.one_hot(y.argmax(-1), V).any(0)),
    ),
    "the largest score": (torch.zeros(()), lambda kept, y: kept.clamp_(min=y.max())),
    "one that was large": (torch.tensor(1000.0), lambda kept, y: kept.clamp_(min=1000 + y.max())),
    "a constant": (torch.zeros(3), lambda kept, y: kept.fill_(1)),
    "another size": (torch.zeros(3), lambda kept, y: kept.resize_(5).fill_(1)),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_a_buffer_that_is_no_sum_over_rows_is_right_on_one_device_and_refused_over_several(name: str) -> None:
    generator, plain = Changing(*NO_SUMS[name]), Changing(*NO_SUMS[name])
    plain.load_state_dict(generator.state_dict())
    with pytest.raises(ValueError, match=r"the buffer generator.kept changes by other than a sum .* each device would"):
        by_engine(generator, ["cpu"] * 2)
    assert torch.equal(generator.kept, plain.kept)
    by_engine(generator, chunk_tokens=2)
    plain(batch(ROWS)[0])
    torch.testing.assert_close(generator.kept, plain.kept)


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize("start", [128, -128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_a_sum_that_was_large_before_is_one_over_several_devices(dtype: torch.dtype, start: int, devices: Any) -> None:
    generator = Changing(torch.full((2,), start, dtype=dtype), lambda kept, y: kept.add_(len(y)))
    by_engine(generator, devices)
    assert generator.kept.tolist() == [start + ROWS] * 2


SPECIAL = torch.tensor([torch.inf, -torch.inf, torch.nan, 5.0])


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize("start", [SPECIAL, 1j * SPECIAL[3:]], ids=["infinite or no number", "imaginary"])
def test_what_is_infinite_or_no_number_stays_so_in_a_sum_and_imaginary_parts_add_up(
    start: Tensor, devices: Any
) -> None:
    factor = 1j if start.is_complex() else 1
    generator = Changing(start, lambda kept, y: kept.add_(factor * len(y)))
    by_engine(generator, devices, chunk_tokens=4)
    torch.testing.assert_close(generator.kept, start + factor * ROWS, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
def test_a_count_that_was_0_in_the_first_call_is_that_of_all_devices_later(devices: Any) -> None:
    least = [1e9]
    generator = Changing(torch.tensor(5), lambda kept, y: kept.add_((y[:, 0] > least[0]).sum()))
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices)
    engine(*batch(ROWS))
    assert generator.kept == 5
    least[0] = -1e9
    engine(*batch(ROWS))
    assert generator.kept == 5 + ROWS


@pytest.mark.parametrize(
    ("kept", "later", "change"),
    [
        (torch.tensor(1e9), -1e9, lambda kept, y: kept.clamp_(min=y.max())),
        (torch.tensor(-1e9), 1e9, lambda kept, y: kept.clamp_(max=y.min())),
        (torch.tensor(-1.0), -1e9, lambda kept, y: kept.clamp_(min=y.max() - 100)),
        (torch.tensor(9), 0, lambda kept, y: kept.clamp_(min=len(y))),
        (torch.tensor(True), False, lambda kept, y: kept.logical_or_(torch.tensor(True))),
    ],
    ids=["largest", "smallest", "largest from -1 on", "longest", "any"],
)
def test_a_buffer_that_is_no_sum_is_refused_when_several_devices_first_change_it(
    kept: Tensor, later: float, change: Callable[[Tensor, Tensor], Any]
) -> None:
    generator = Changing(kept, change)
    engine, (hidden, target) = seqpar.LossCompute(generator, seqpar.CrossEntropy(), ["cpu"] * 2), batch(ROWS)
    for _ in range(2):
        engine(hidden, target)
    assert torch.equal(generator.kept, kept)
    generator.kept.fill_(later)
    with pytest.raises(ValueError, match=r"the buffer generator.kept changes by other than a sum over rows"):
        engine(hidden, target)


class Detaching(nn.Linear):
    """Replaces a buffer by a view of itself."""

    def __init__(self) -> None:
        super().__init__(4, V, dtype=torch.float64)
        self.register_buffer("state", torch.tensor([1.0, torch.nan]))

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state.detach()
        return super().forward(x) * self.state[0]


def test_a_buffer_that_is_replaced_by_itself_is_no_sum() -> None:
    assert_plain(Detaching(), seqpar.CrossEntropy())
    by_engine(Detaching(), ["cpu"] * 2)


def test_a_buffer_of_nan_does_not_count_as_changed() -> None:
    """Buffers that have changed would be looked into, with further calls."""
    calls: list[float] = []
    for number in (1.0, torch.nan):
        generator = Scaling(False).eval()
        generator.register_buffer("unused", torch.full((3,), number))
        generator.linear.register_forward_hook(lambda *_, number=number: calls.append(number))
        assert_plain(generator, seqpar.CrossEntropy())
    assert 2 * calls.count(1.0) == len(calls)

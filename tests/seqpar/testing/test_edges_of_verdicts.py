"""Where the kit draws the line: on this side a loss is right, on that side wrong."""

import math

import pytest
import torch
from torch import nn

from seqpar.testing import precision
from seqpar.testing.evidence import Evidence, close, ratio, repeat_loss, shares_of, spell

pytestmark = pytest.mark.unswitched

JUST = pytest.mark.parametrize(("times", "right"), [(0.95, True), (1.05, False)])
"""How far a number is off, relative to what is allowed, and whether it is still right."""


def wide(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_an_error_is_relative_to_the_truth_and_infinite_without_a_number():
    assert precision.error(wide(3.0, 4.0), wide(0.0, 4.0)) == 0.75
    assert precision.error(wide(0.0, 4.0), wide(3.0, 4.0)) == 0.6
    assert precision.error(None, wide(1.0)) == precision.error(wide(math.nan), wide(1.0)) == math.inf
    assert precision.error(wide(0.0), wide(0.0)) == 0


@JUST
@pytest.mark.parametrize(
    ("plain", "allowed"), [([1e-3, 4e-3, 2e-3], 8e-3), ([0.0], 2 * torch.finfo(torch.float32).eps)]
)
@pytest.mark.parametrize("of_value", [True, False])
def test_without_float64_twice_the_largest_error_of_plain_pytorch_is_allowed(of_value, plain, allowed, times, right):
    """And two units in the last place of float32."""

    def result(off):
        value, gradient = (1.0 + off, 2.0) if of_value else (1.0, 2.0 + 2.0 * off)
        return wide(value)[0], {"w": wide(gradient)}

    said = precision.farther_than_twice_plain(result(times * allowed), [result(one) for one in plain], result(0.0))
    if right:
        assert not said
    else:
        assert said.startswith("the loss is off by" if of_value else "the gradient of w is off by")


def test_no_gradient_is_a_gradient_of_zero():
    value = wide(1.0)[0]
    nothing, zero, one = (value, {"w": None}), (value, {"w": wide(0.0)}), (value, {"w": wide(1.0)})
    assert not precision.farther_than_twice_plain(nothing, [nothing], nothing)
    assert not precision.farther_than_twice_plain(zero, [zero], nothing)
    assert precision.farther_than_twice_plain(one, [nothing], nothing)
    assert precision.farther_than_twice_plain(nothing, [one], one)


@JUST
def test_numbers_are_multiples_up_to_a_millionth(times, right):
    off = times * 1e-6
    assert close(ratio(wide(1 + off, 2 + 2 * off), wide(1.0, 2.0)), 1) == right
    # Beside the direction of the plain gradient, and relative to its size
    found = ratio(wide(30.0, 30 * off), wide(10.0, 0.0))
    assert found == (pytest.approx(3) if right else None)
    assert ratio(wide(-3.0, -6.0), wide(1.0, 2.0)) == -3
    assert spell((1 + off) * 2 / 7) == ("2/7" if right else "0.285715")


def test_a_sum_is_taken_apart_where_its_parts_can_be_told_apart():
    a, b, nothing = wide(10.0, 20.0, 0.0), wide(0.0, 1.0, 1.0), wide(0.0, 0.0, 0.0)
    assert shares_of(a + 2 * b, [a, b]) == pytest.approx([1, 2])
    assert shares_of(-b / 3, [a, b]) == [0, pytest.approx(-1 / 3)]
    unknown = pytest.approx(math.nan, nan_ok=True)
    assert shares_of(a, [nothing, a]) == [unknown, pytest.approx(1)]
    assert shares_of(2 * a + 3 * b, [a, nothing, b]) == [pytest.approx(2), unknown, pytest.approx(3)]
    assert shares_of(3 * a, [a, 2 * a]) is None
    assert shares_of(wide(1.0, 1.0, 1.0), [a, b]) is None
    assert shares_of(a + 2 * b, [a, b, 3 * b]) is None
    assert shares_of(a, [nothing, nothing]) is None


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_what_is_told_apart_does_not_depend_on_the_scale(scale):
    """Of a sum, of its parts, and of float32, whose digits would not be enough to solve for the shares."""
    near, other = wide(1000.0, 1.0), wide(1000.0, -1.0)
    assert shares_of(scale * (near + 2 * other), [near, other]) == pytest.approx([scale, 2 * scale], rel=1e-9)
    assert shares_of(near + 2 * other, [near * scale, other]) == pytest.approx([1 / scale, 2], rel=1e-9)
    assert shares_of(scale * other, [near, other])[0] == 0
    assert shares_of(scale * wide(1.0, 1.0, 1.0), [wide(10.0, 20.0, 0.0), wide(0.0, 1.0, 1.0)]) is None
    assert ratio(scale * 1e50 * near, scale * 1e50 * near / 3) == pytest.approx(3, rel=1e-15)
    narrow = [near.float(), other.float()]
    assert shares_of(near.float() + 2 * other.float(), narrow) == pytest.approx([1, 2], rel=1e-9)


@pytest.mark.parametrize(("length", "told"), [(4e4, True), (5e4, False)])
def test_parts_are_told_apart_down_to_an_eigenvalue_of_1e_9(length, told):
    """That of the correlations of (N, 1) and (N, -1) is 2 / (N^2 + 1)."""
    one, other = wide(length, 1.0), wide(length, -1.0)
    assert (shares_of(one + other, [one, other]) is not None) == told


def test_a_ratio_is_spelt_as_a_fraction_of_up_to_a_thousand():
    assert [spell(t) for t in (3.0, -1 / 1000, 355 / 113, 1 / 1001)] == ["3", "-1/1000", "355/113", "0.000999001"]


def test_compared_are_gradients_of_one_shape_whose_plain_one_is_not_0():
    plain = {"none": None, "zero": wide(0.0), "shape": wide(1.0), "right": wide(2.0), "lost": wide(4.0)}
    got = {"none": wide(1.0), "zero": wide(1.0), "shape": wide(1.0, 2.0), "right": wide(6.0), "lost": None}
    assert Evidence((wide(1.0), got), (wide(1.0), plain)).ratios() == {"right": 3, "lost": 0}


def test_a_loss_is_called_three_times_more_and_three_times_from_one_random_state_that_is_put_back():
    numbers = iter(range(1, 9))
    assert repeat_loss(lambda: wide(next(numbers))[0]) == ([1, 2, 3], [4, 5, 6], [])
    torch.manual_seed(5)
    drawn = torch.rand(4).tolist()
    torch.manual_seed(5)
    values, seeded, _ = repeat_loss(lambda: torch.rand(()))
    assert [*values, torch.rand(()).item()] == drawn
    assert len({*seeded}) == 1
    torch.manual_seed(6)
    assert repeat_loss(lambda: torch.rand(())).seeded == seeded


def test_what_a_call_changes_is_named_in_every_module_with_both_values():
    modules = {"head": nn.Sequential(nn.Tanh(), nn.Tanh()), "loss": nn.Tanh()}
    part = modules["head"][1]
    part.eps, part.kind, part.on, part.kept = 0.5, "a", False, 7
    for name, buffer in {"seen": 2, "each": [1.0, 2.0], "other": [1.0, 2.0]}.items():
        part.register_buffer(name, torch.tensor(buffer))
    modules["loss"].step = 1

    def loss():
        part.eps, part.kind, part.on, modules["loss"].step = 0.25, "b", True, 3
        part.seen += 1
        part.each[1] = 5
        return wide(1.0)[0]

    said = ["head.1.eps went from 0.5 to 0.25", "head.1.kind went from a to b", "head.1.on went from False to True"]
    said += ["head.1.seen went from 2 to 3", "head.1.each changed", "loss.step went from 1 to 3"]
    assert repeat_loss(loss, modules).changed == said

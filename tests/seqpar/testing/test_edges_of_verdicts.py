"""Where the kit draws the line: on this side a loss is right, on that side wrong."""

import math

import pytest
import torch

from seqpar.testing import precision
from seqpar.testing.evidence import ratio, same, shares_of, spelt

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
    assert same(wide(1 + off, 2 + 2 * off), wide(1.0, 2.0)) == right
    # Beside the direction of the plain gradient, and relative to its size
    found = ratio(wide(30.0, 30 * off), wide(10.0, 0.0))
    assert found == (pytest.approx(3) if right else None)
    assert ratio(wide(-3.0, -6.0), wide(1.0, 2.0)) == -3
    assert spelt((1 + off) * 2 / 7) == ("2/7" if right else "0.285715")


def test_a_sum_is_taken_apart_where_its_parts_can_be_told_apart():
    a, b, nothing = wide(10.0, 20.0, 0.0), wide(0.0, 1.0, 1.0), wide(0.0, 0.0, 0.0)
    assert shares_of(a + 2 * b, [a, b]) == pytest.approx([1, 2])
    assert shares_of(-b / 3, [a, b]) == [0, pytest.approx(-1 / 3)]
    assert shares_of(a, [nothing, a]) == [pytest.approx(math.nan, nan_ok=True), pytest.approx(1)]
    assert shares_of(wide(1.0, 1.0, 1.0), [a, b]) is None
    assert shares_of(a + 2 * b, [a, b, 3 * b]) is None
    assert shares_of(a, [nothing, nothing]) is None

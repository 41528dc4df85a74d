"""What is no dense tensor, no class index and no number in its range is named, with the way out."""

import re
from fractions import Fraction

import pytest
import torch

from seqpar.core.checks import check_dense, check_floating, check_integer_target, check_number
from tests.seqpar.core.odd_tensors import NO_TENSOR, SPECIAL

NOT_DENSE = SPECIAL | NO_TENSOR


@pytest.mark.parametrize("case", NOT_DENSE)
@pytest.mark.parametrize("check", [check_dense, check_floating, check_integer_target])
def test_what_is_no_dense_tensor_is_named_with_a_remedy(case, check):
    make, message = NOT_DENSE[case]
    with pytest.raises(TypeError, match=f"^x is {re.escape(message)}"):
        check(make(), "x")


def test_views_of_all_kinds_are_dense():
    for tensor in (torch.ones(3, 2).t(), torch.ones(1).expand(5), torch.ones(0, 4), torch.nn.Parameter(torch.ones(2))):
        check_dense(tensor, "x")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_without_arithmetic_of_their_own_are_not_floating(dtype):
    with pytest.raises(TypeError, match=rf"hidden has dtype {dtype}; it must be a floating dtype"):
        check_floating(torch.ones(2).to(dtype), "hidden")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint64, torch.float32, torch.complex64])
def test_targets_that_are_no_class_indices_are_refused(dtype):
    with pytest.raises(TypeError, match=rf"target has dtype {dtype}; it must hold class indices, int64"):
        check_integer_target(torch.ones(2).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_signed_integers_and_bytes_are_class_indices(dtype):
    check_integer_target(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("value", [None, True, "0.1", 1j, torch.ones(1), [1.0]])
def test_what_is_no_number_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"^z_loss is .*; it must be a finite number at least 0$"):
        check_number(value, "z_loss", at_least=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.5, 1.0, 10**400])
def test_numbers_outside_the_range_are_value_errors(value):
    with pytest.raises(ValueError, match=r"it must be a finite number at least 0 and below 1$"):
        check_number(value, "smoothing", at_least=0, below=1)


@pytest.mark.parametrize("value", [0, 0.5, Fraction(1, 3), torch.ones(1).cpu().numpy()[0] / 2])
def test_any_real_number_in_the_range_passes(value):
    check_number(value, "smoothing", at_least=0, below=1)

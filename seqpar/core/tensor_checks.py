"""Check arguments by type: dense tensors, floating dtypes, class indices, numbers in a range.

None of these checks reads a tensor's data, so none of them waits for a device.
"""

from __future__ import annotations

import math
import sys
from contextvars import ContextVar
from numbers import Real

import torch
from torch import Tensor, nn

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CLASS_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""The dtypes of torch's own cross-entropy (int64, uint8), and the narrower signed ones. A narrow target must be widened
to int64 before it is compared with `ignore_index`, because torch would wrap that around: -100 is 156 in uint8."""


PROVED: ContextVar[bool] = ContextVar("seqpar_proved", default=False)
"""Whether the loss under test of a proof is being computed: an adapter must not leave the plain one in place."""


def is_dtensor(value: object) -> bool:
    """Return whether `value` is a DTensor, without importing DTensor, which takes longer than this whole library."""
    # A program that has not imported the class cannot have an instance of it
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def check_dense(value: object, name: str, *, dtensor: bool = False) -> None:
    """Raise TypeError unless `value` is a strided tensor with data; a DTensor is allowed if `dtensor` is true."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {_kind_of(value)}; it must be a tensor")
    # Before `_why_not_dense`: a DTensor is strided, but its numbers are only this rank's
    if is_dtensor(value):
        if dtensor:
            return
        raise TypeError(f"{name} is a DTensor; pass this rank's own tensor ({name}.to_local() or full_tensor())")
    remedy = _why_not_dense(value, name)
    if remedy:
        raise TypeError(f"{name} is {remedy}")


def _kind_of(value: object) -> str:
    """Return what a value is, for an error message."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _why_not_dense(tensor: Tensor, name: str) -> str:
    """Return why a tensor is not dense and how to make it so; an empty string if it is."""
    if tensor.is_nested:
        return f"a nested tensor; pad it ({name}.to_padded_tensor(0.0)) and mark the padding as ignored targets"
    if tensor.is_quantized:
        return f"quantised ({tensor.dtype}); use {name}.dequantize()"
    if tensor.layout is not torch.strided:
        return f"sparse ({tensor.layout}); use {name}.to_dense()"
    if tensor.is_meta:
        return "on the meta device and has no data; create it on the device that computes"
    return ""


def check_floating(value: object, name: str, *, dtensor: bool = False) -> None:
    """Raise TypeError unless `value` is a dense tensor of float16, bfloat16, float32 or float64."""
    check_dense(value, name, dtensor=dtensor)
    assert isinstance(value, Tensor)
    # The 8-bit floats have neither sums nor products in torch
    if value.dtype not in FLOATING:
        raise TypeError(
            f"{name} has dtype {value.dtype}; it must be a floating dtype: float16, bfloat16, float32 or float64"
        )


def check_integer_target(value: object, name: str = "target", *, dtensor: bool = False) -> None:
    """Raise TypeError unless `value` is a dense tensor of class indices; see `CLASS_INDICES`."""
    check_dense(value, name, dtensor=dtensor)
    assert isinstance(value, Tensor)
    if value.dtype not in CLASS_INDICES:
        raise TypeError(f"{name} has dtype {value.dtype}; it must hold class indices, int64: use {name}.long()")


def check_number(
    value: object,
    name: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise TypeError unless `value` is a real number (no bool), ValueError unless it is finite and in the range."""
    bounds = (("at least", at_least), ("above", above), ("at most", at_most), ("below", below))
    range_text = " and ".join(f"{words} {bound:g}" for words, bound in bounds if bound is not None)
    wanted = f"a finite number {range_text}".rstrip()
    # A bool is a Real: True would pass as 1
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {_kind_of(value)}; it must be {wanted}")
    try:
        number = float(value)
    except OverflowError:
        # An int above the largest float is no finite number, either
        number = math.inf
    inside = (
        math.isfinite(number)
        and (at_least is None or number >= at_least)
        and (above is None or number > above)
        and (at_most is None or number <= at_most)
        and (below is None or number < below)
    )
    if not inside:
        raise ValueError(f"{name} is {value!r}; it must be {wanted}")


def check_integer(value: object, name: str) -> None:
    """Raise TypeError unless `value` is an int (no bool)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {_kind_of(value)}; it must be an int")


def check_module(value: object, name: str) -> None:
    """Raise TypeError unless `value` is a `torch.nn.Module`; for a class the message says to call it."""
    if isinstance(value, type):
        raise TypeError(f"{name} is the class {value.__name__}; it must be a torch.nn.Module: {value.__name__}(...)")
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} is {_kind_of(value)}; it must be a torch.nn.Module")

"""What a pair may hold, on itself or around its code, without being refused: whatever it does not change."""

from __future__ import annotations

import functools
import weakref
from array import array
from contextvars import ContextVar
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import seqpar
from tests.seqpar.engine.pairs import Made, V, batch, cross_entropy, linear


def read_only(numbers: Any) -> Any:
    numbers.flags.writeable = False
    return numbers


class Settings(dict[str, Any]):
    """As many programs have theirs: every attribute that it lacks is None."""

    __getattr__ = dict.get


class Nothing:
    """The same without a dict."""

    def __getattr__(self, name: str) -> None:
        return None


class Refusing:
    """An object that says what it lacks by another error than Python's own."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Lazy:
    """It makes what it lacks when it is asked for it."""

    __slots__ = ("made",)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was made")


class Kind(type):
    """A class of classes that refuse, too."""

    def __getattr__(cls, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Refused(metaclass=Kind):
    """One of these."""


class Uncopied(dict[str, Any]):
    """It cannot be copied."""

    def copy(self) -> Any:
        raise TypeError("no copy")


class Frozen(dict[str, Any]):
    """It cannot be changed."""

    def _refuse(self, *given: Any) -> Any:
        raise TypeError("frozen")

    __setitem__ = update = clear = _refuse


class Incomparable:
    """Neither the same nor another one, nor true."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("incomparable")

    def __bool__(self) -> bool:
        raise RuntimeError("neither")


OBJECTS = {
    "a float32 of numpy's": np.float32(2),
    "an int64 of numpy's": np.int64(2),
    "a bool of numpy's": np.bool_(True),
    "a complex number of numpy's": np.complex64(2),
    "a time of numpy's": np.timedelta64(2, "D"),
    "bytes of numpy's": np.void(b"ab"),
    "an array that is read-only": read_only(np.array([2.0])),
    "an array that is broadcast": np.broadcast_to(np.array(2.0), (3,)),
    "an array from a buffer": np.frombuffer(b"12345678"),
    "an array of dates": np.array(["2026-01-31"], dtype="M8[D]"),
    "a view of an array with nan": np.array([np.nan, 2.0])[::-1],
    "an array of Python's": array("d", [2.0, float("nan")]),
    "bytes that may change": bytearray(b"ab"),
    "a view of bytes": memoryview(b"ab"),
    "a context variable": ContextVar("unset"),
    "settings": Settings(a=[1]),
    "nothing": Nothing(),
    "refusing": Refusing(),
    "lazy": Lazy(),
    "a class": Refused,
    "an object of it": Refused(),
    "uncopied": Uncopied(a=1),
    "frozen": Frozen(a=[1]),
    "incomparable": Incomparable(),
    "a proxy": weakref.proxy(Kind),
    "a mock": mock.MagicMock(),
    "a cached function": functools.lru_cache(len),
}


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_pair_may_hold_what_it_does_not_change(name: str, devices: Any) -> None:
    """A weight that numpy has computed is a number of numpy's, and many settings have every attribute."""
    value = OBJECTS[name]

    def beside(self: Any, z: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(2 * z, y)

    def around(self: Any, z: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(2 * z, y) if value is not z else z

    generator, (hidden, target) = linear(), batch()
    plain = cross_entropy(2 * generator(hidden), target)
    for criterion in (Made(beside, value=value), Made(around)):
        loss = seqpar.LossCompute(generator, criterion, devices, chunk_tokens=5)(hidden, target)
        torch.testing.assert_close(loss.total, plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_micro_batch_may_hold_any_object(name: str) -> None:
    """In a dict that gives every attribute."""
    weight = torch.randn(V, 4, requires_grad=True)
    value = OBJECTS[name]
    batches = [Settings(hidden=torch.randn(5, 4), target=torch.randint(V, (5,)), value=value) for _ in range(2)]
    loss = seqpar.accumulate_gradients(
        batches, lambda batch: seqpar.linear_cross_entropy(batch.hidden, weight, batch.target), lambda batch: 5
    )
    assert int(loss.tokens) == 10

"""Describe one call of a public function with odd arguments, and the answer that is documented for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

RELATIVE = 1e-12


class Raises(NamedTuple):
    """Expect one of our own errors: its type, and the words its single line must hold (the argument's name first)."""

    error: type[Exception]
    words: tuple[str, ...]


class Equals(NamedTuple):
    """Expect the numbers that plain float64 torch gives, each within 1e-12 relative."""

    reference: Callable[[], tuple[Tensor, ...]]


class Case(NamedTuple):
    """Name a call, make it, and say what must come of it. A call under `Equals` returns a tuple of tensors."""

    name: str
    call: Callable[[], object]
    answer: Raises | Equals


def hold(case: Case) -> None:
    """Make the call and hold what comes of it against the documented answer."""
    if isinstance(case.answer, Raises):
        _hold_error(case, case.answer)
    else:
        _hold_numbers(case, case.answer)


def _hold_error(case: Case, answer: Raises) -> None:
    with pytest.raises(answer.error) as caught:
        case.call()
    message = str(caught.value)
    assert type(caught.value) is answer.error
    assert "\n" not in message, "one line"
    for word in answer.words:
        assert word in message


def _hold_numbers(case: Case, answer: Equals) -> None:
    found = case.call()
    expected = answer.reference()
    assert isinstance(found, tuple)
    assert len(found) == len(expected) > 0
    for ours, plain in zip(found, expected, strict=True):
        assert ours.shape == plain.shape
        assert torch.isfinite(plain).all()
        largest = float(plain.double().abs().max()) if plain.numel() else 0.0
        torch.testing.assert_close(ours.double(), plain.double(), rtol=0.0, atol=RELATIVE * max(largest, 1e-300))

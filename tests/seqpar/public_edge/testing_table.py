"""Odd arguments of the kit that proves losses, each with the line that names the argument."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from seqpar.testing import assert_same_gradients, assert_same_loss, assert_same_results, plain_loss
from tests.seqpar.public_edge.case import Case, Equals
from tests.seqpar.public_edge.tables import NOT_TENSORS, raises

NAN, INF = float("nan"), float("inf")
CRITERION = nn.CrossEntropyLoss(reduction="sum")
TOLERANCES: dict[str, tuple[Any, type[Exception]]] = {
    "nan": (NAN, ValueError), "inf": (INF, ValueError), "negative": (-1e-12, ValueError), "none": (None, TypeError),
    "text": ("1e-12", TypeError), "a bool": (True, TypeError), "a tensor": (torch.ones(()), TypeError),
}  # fmt: skip


def same_loss(**odd: Any) -> None:
    """A good proof but for the odd arguments."""
    given = {
        "generator": nn.Linear(4, 5), "criterion": CRITERION, "hidden": torch.ones(6, 4), "target": torch.arange(6) % 5,
    }  # fmt: skip
    assert_same_loss(**(given | odd))


def same_gradients(**odd: Any) -> None:
    """A good comparison but for the odd arguments."""
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    given: dict[str, Any] = {"candidate": lambda: w.sum(), "reference": lambda: w.sum(), "tensors": {"w": w}}
    assert_same_gradients(**(given | odd))


def same_results(rtol: Any) -> None:
    """The same numbers, by some tolerance."""
    one = torch.ones(()), {"w": torch.ones(2)}
    assert_same_results(one, one, rtol)


def _proofs() -> Iterator[Case]:
    """Of `assert_same_loss`, and the tolerance of all three."""
    for name, call in (("loss", same_loss), ("gradients", same_gradients), ("results", same_results)):
        for kind, (value, error) in TOLERANCES.items():
            yield raises(f"assert_same_{name}, rtol {kind}", partial(call, rtol=value), error, "rtol is ")
    for argument in ("hidden", "target", "gate"):
        for kind, (make, message) in NOT_TENSORS.items():
            odd = partial(lambda argument, make: same_loss(**{argument: make()}), argument, make)
            yield raises(f"assert_same_loss, {argument} {kind}", odd, TypeError, f"{argument} is {message}")
    for argument in ("generator", "criterion"):
        for value, shown in {
            None: "None",
            torch.relu: "a builtin_function_or_method",
            nn.Linear: "the class Linear",
            "linear": "the text 'linear'",
        }.items():
            call = partial(same_loss, **{argument: value})
            yield raises(f"assert_same_loss, {argument} is {shown}", call, TypeError, f"{argument} is {shown}; it must")
    for kind, (value, error) in ({"0": (0, ValueError)} | TOLERANCES).items():
        yield raises(f"assert_same_loss, tokens {kind}", partial(same_loss, tokens=value), error, "tokens is ")
    for kind, value in {"text": "world", "ranks": [0, 1]}.items():
        yield raises(f"assert_same_loss, group {kind}", partial(same_loss, group=value), TypeError, "group is ")


def _comparisons() -> Iterator[Case]:
    """Of `assert_same_gradients` and `plain_loss`."""
    for argument in ("candidate", "reference"):
        for value, shown in ((None, "None"), (torch.ones(()), "a Tensor")):
            call = partial(same_gradients, **{argument: value})
            yield raises(f"assert_same_gradients, {argument} is {shown}", call, TypeError, f"{argument} is {shown}; it")
        for value, shown in ((1.0, "a float"), (None, "None"), ((torch.ones(()), 2), "a tuple of 2")):
            call = partial(same_gradients, **{argument: lambda value=value: value})
            name = f"assert_same_gradients, {argument} gives {shown}"
            yield raises(name, call, TypeError, f"{argument} returned {shown}; it must return one tensor")
        rows = partial(same_gradients, **{argument: lambda: torch.ones(3)})
        yield raises(
            f"assert_same_gradients, {argument} gives rows", rows, ValueError, f"{argument} returned shape (3,)"
        )
    wrong: dict[str, tuple[Any, type[Exception], str]] = {
        "empty": ({}, ValueError, "tensors is empty"),
        "a list": ([torch.ones(3)], TypeError, "tensors is a list"),
        "no tensor": ({"w": 1.0}, TypeError, "tensors['w'] is a float"),
        "no leaf": ({"w": torch.ones(3, requires_grad=True) * 2}, ValueError, "tensors['w'] is not a leaf"),
        "a stranger": ({"w": torch.ones(3, requires_grad=True)}, ValueError, "neither loss has a gradient"),
    }
    for kind, (value, error, words) in wrong.items():
        yield raises(f"assert_same_gradients, tensors {kind}", partial(same_gradients, tensors=value), error, words)
    hidden, target = torch.ones(2, 3, 4).double(), torch.tensor([[0, 1, -100], [2, 3, 4]])
    generator = nn.Linear(4, 5).double()
    plain = nn.functional.cross_entropy(generator(hidden).flatten(0, 1), target.flatten(), reduction="sum").detach()
    ours = partial(lambda: (plain_loss(generator, CRITERION, hidden, target).detach(),))
    yield Case("plain_loss of sentences", ours, Equals(lambda: (plain,)))


CASES = [*_proofs(), *_comparisons()]

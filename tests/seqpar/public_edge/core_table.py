"""`chunked_gradient` and `TokenLoss`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import seqpar
from seqpar import TokenLoss
from tests.seqpar.public_edge.case import Case, Equals
from tests.seqpar.public_edge.criteria_table import logits
from tests.seqpar.public_edge.engine_table import NO_SCALE, NOT_FINITE
from tests.seqpar.public_edge.tables import NOT_TENSORS, raises, refused, values

HALVES = [slice(0, 3), slice(3, 6)]
NAME = "chunked_gradient"


def _squares(params: tuple[Tensor, ...], rows: tuple[Tensor, ...], chunk: object) -> TokenLoss:
    """The sum of (row * param)^2, which any chunk can be asked for."""
    total = (rows[0] * params[0]).square().sum()
    return TokenLoss(total, torch.tensor(len(rows[0])))


def _empty() -> TokenLoss:
    return TokenLoss.zero(torch.float64, torch.device("cpu"), tells=False)


def _walk(chunks: Any = HALVES, **given: Any) -> TokenLoss:
    torch.manual_seed(0)
    per_token, params = [logits(6, 4).requires_grad_()], [logits(4).requires_grad_()]
    arguments = {"per_chunk": _squares, "per_token": per_token, "params": params, "empty": _empty(), **given}
    return seqpar.chunked_gradient(chunks=chunks, **arguments)


def _argument(name: str) -> Callable[[Any], TokenLoss]:
    return lambda x: _walk(**{name: x})


def _in_a_list(name: str) -> Callable[[Any], TokenLoss]:
    return lambda x: _walk(**{name: [x]})


OVERLAPS = {
    "slices that overlap": [slice(0, 4), slice(3, 6)],
    "a slice twice": [slice(0, 6), slice(0, 6)],
    "a slice inside another": [slice(0, 6), slice(2, 3)],
    "an index in two chunks": [torch.tensor([0, 1]), torch.tensor([2, 1])],
    "an index twice in one": [torch.tensor([0, 3, 0])],
    "an index from both ends": [torch.tensor([0, -6])],
    "an index inside a slice": [slice(0, 3), torch.tensor([5, 2])],
    "steps that meet": [slice(0, 6, 2), slice(0, 6, 3)],
    "a slice that ends before it begins": [slice(0, 4), slice(4, 2), slice(2, 6)],
    "one that ends there from the back": [slice(0, 7), slice(7, -2), slice(-2, 6)],
}
NO_CHUNKS = {
    "a number": (lambda: [3], "[0] is an int; it must be a slice or a vector of int64 indices"),
    "a list": (lambda: [[0, 1]], "[0] is a list of 2; it must be a slice"),
    "none": (lambda: [None], "[0] is None; it must be a slice"),
    "a float tensor": (lambda: [torch.ones(2)], "[0] is a Tensor of shape (2,) and torch.float32"),
    "int32 indices": (lambda: [torch.zeros(2, dtype=torch.int32)], "[0] is a Tensor of shape (2,) and torch.int32"),
    "a mask": (lambda: [torch.ones(6, dtype=torch.bool)], "[0] is a Tensor of shape (6,) and torch.bool"),
    "a matrix": (lambda: [torch.zeros(2, 1, dtype=torch.int64)], "[0] is a Tensor of shape (2, 1)"),
    "an int tensor": (lambda: [torch.tensor(3)], "[0] is a Tensor of shape ()"),
    "no list": (lambda: slice(0, 6), "is a slice; it must be a list"),
    "a generator": (lambda: iter(HALVES), "is a list_iterator; it must be a list"),
    "nothing": (lambda: None, "is None; it must be a list"),
}
NO_FUNCTION = values("it must be a function that returns a TokenLoss", none=None, text="f", a_tensor=torch.ones(1))
NO_LOSS = values("it must be a TokenLoss", none=None, a_number=0.0, a_tensor=torch.zeros(()), a_tuple=(0, 0))
NO_LIST = values("it must be a list or tuple of tensors", none=None, a_tensor=torch.ones(6, 4), text="hidden")


def _refused() -> list[Case]:
    cases = [
        raises(f"{NAME}: {label}", partial(_walk, chunks), ValueError, "chunks overlap: row ", "2 times", "once")
        for label, chunks in OVERLAPS.items()
    ]
    cases += refused(NAME, _walk, "chunks", NO_CHUNKS, TypeError)
    for bad in ([0, 6], [-7], [10**9]):
        words = ("chunks[1]", f"to {max(bad)}", "there are 6")
        call = partial(_walk, [slice(1, 3), torch.tensor(bad)])
        cases.append(raises(f"{NAME}: indices {bad}", call, IndexError, *words))
    words = "[0] is slice(5, 0, -1); a slice of rows must have a positive step"
    backwards = {"backwards": (lambda: [slice(5, 0, -1)], words)}
    cases += refused(NAME, _walk, "chunks", backwards, ValueError)
    for name in ("per_token", "params"):
        cases += refused(NAME, _in_a_list(name), f"{name}[0]", NOT_TENSORS, TypeError)
        cases += refused(NAME, _argument(name), name, NO_LIST, TypeError)
    cases += refused(NAME, _argument("loss_scale"), "loss_scale", NO_SCALE, TypeError)
    cases += refused(NAME, _argument("loss_scale"), "loss_scale", NOT_FINITE, ValueError)
    cases += refused(NAME, _argument("per_chunk"), "per_chunk", NO_FUNCTION, TypeError)
    cases += refused(NAME, _argument("empty"), "empty", NO_LOSS, TypeError)
    returned = values("it must return a TokenLoss of sums", a_number=1.0, none=None, a_tensor=torch.ones(()))
    cases += refused(f"{NAME}, called", lambda x: _walk(per_chunk=lambda *_: x), "per_chunk", returned, TypeError)
    rows = {"an empty list": (list, "is empty"), "a number": (lambda: [torch.ones(())], "[0] has shape ()")}
    cases += refused(NAME, _argument("per_token"), "per_token", rows, ValueError)
    rows = {"of two lengths": (lambda: [logits(6, 4), logits(5, 4)], "[1] has shape (5, 4)")}
    return cases + refused(NAME, _argument("per_token"), "per_token", rows, ValueError)


DISJOINT = {
    "no chunks": [],
    "halves": HALVES,
    "in the opposite order": HALVES[::-1],
    "single rows": [slice(i, i + 1) for i in range(6)],
    "a chunk without rows": [slice(0, 6), slice(6, 6), torch.tensor([], dtype=torch.int64)],
    "some rows only": [slice(1, 3)],
    "every second row and the others": [slice(0, 6, 2), slice(1, 6, 2)],
    "indices in any order": [torch.tensor([5, 0]), torch.tensor([2]), torch.tensor([1, 4, 3])],
    "an index from the end": [torch.tensor([-1, 0])],
    "all indices from the end": [torch.tensor([-6, -5]), torch.tensor([-1, -4, -2, -3])],
    "steps of one row": [slice(0, 4, 1), slice(4, 6, 1)],
    "a slice and indices": [slice(0, 2), torch.tensor([4, 3])],
    "a slice beyond the end": [slice(0, 99)],
    "a tuple of chunks": tuple(HALVES),
}


def _numbers(chunks: Any, plain: bool) -> tuple[Tensor, ...]:
    rows, param = logits(6, 4).requires_grad_(), logits(4).requires_grad_()
    if plain:
        taken = torch.cat([torch.arange(6)[chunk] for chunk in chunks] or [torch.arange(0)])
        total = (rows[taken] * param).square().sum()
    else:
        total = _walk(chunks, per_token=[rows], params=[param]).total
    return total.detach(), *torch.autograd.grad(total, (rows, param))


def _equal() -> list[Case]:
    return [
        Case(f"{NAME}: {label}", partial(_numbers, chunks, False), Equals(partial(_numbers, chunks, True)))
        for label, chunks in DISJOINT.items()
    ]


LOSS = TokenLoss(torch.tensor(6.0, dtype=torch.float64), torch.tensor(3))
INSTEAD = ("TokenLoss", "(loss.total / loss.tokens).backward()", "loss.mean.item()")
ONE_NUMBER: dict[str, Callable[[], object]] = {
    "float(loss)": lambda: float(LOSS),
    "loss / 2": lambda: operator.truediv(LOSS, 2),
    "loss / tokens": lambda: operator.truediv(LOSS, torch.tensor(2)),
    "loss * 2": lambda: operator.mul(LOSS, 2),
    "2 * loss": lambda: operator.mul(2, LOSS),
    "0.5 * loss": lambda: operator.mul(0.5, LOSS),
    "tensor * loss": lambda: operator.mul(torch.ones(()), LOSS),
    "loss - 1": lambda: operator.sub(LOSS, 1),
    "a format": lambda: f"{LOSS:.2f}",
}
OF_A_TENSOR = ("backward", "item", "cpu", "cuda", "numpy", "requires_grad", "grad_fn", "dtype", "device", "sum", "to")


def _token_loss() -> list[Case]:
    cases = [raises(f"TokenLoss: {label}", call, TypeError, *INSTEAD) for label, call in ONE_NUMBER.items()]
    for name in OF_A_TENSOR:
        call = partial(getattr, LOSS, name)
        cases.append(raises(f"TokenLoss: .{name}", call, AttributeError, f"TokenLoss.{name}", *INSTEAD[1:]))
    for label, other in {"1": 1, "a tensor": torch.ones(()), "a tuple": (1, 2), "none": None}.items():
        words = ("TokenLoss + ", "loss.total / loss.tokens + other")
        cases.append(raises(f"TokenLoss: loss + {label}", partial(operator.add, LOSS, other), TypeError, *words))
    none = TokenLoss.zero(torch.float64, torch.device("cpu"), tells=False)
    numbers: dict[str, tuple[Callable[[], tuple[Tensor, ...]], tuple[float, ...]]] = {
        "sum of none and two": (lambda: tuple(sum([none, LOSS, LOSS]))[:2], (12.0, 6)),
        "the mean of nothing": (lambda: (none.mean,), (0.0,)),
        "the mean": (lambda: (LOSS.mean,), (2.0,)),
        "sum of a generator": (lambda: tuple(sum(loss for loss in (LOSS, LOSS)))[:2], (12.0, 6)),
        "detached": (lambda: LOSS.detach()[:2], (6.0, 3)),
    }
    for label, (call, expected) in numbers.items():
        wanted = tuple(torch.tensor(x, dtype=torch.float64) for x in expected)
        cases.append(Case(f"TokenLoss: {label}", call, Equals(partial(tuple, wanted))))
    return cases


CASES = [*_refused(), *_equal(), *_token_loss()]

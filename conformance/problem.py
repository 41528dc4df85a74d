"""State a problem for an implementation, by the text that a reproduction shows, and measure the error of its answer.

`Inputs` are the problems of losses and `ScoreInputs` those of scores.

Shape suffixes: N rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from conformance.adapter import DEVICE, on_device
from conformance.finding import RaisedError
from seqpar.testing.precision import DRAWS, EXACT, TWICE, error

GRADIENTS = ("hidden", "weight", "bias")

Answer = dict[str, Tensor | None]
"""The results and the gradients, by name, in float64; None for a tensor without a gradient."""


@dataclass(frozen=True)
class Problem:
    """Sizes, options of the call, and a line that changes the tensors."""

    adapter: Any
    """The implementation; its kind, like that of the options, is the subclass's."""
    rows: int
    width: int
    vocab_size: int
    options: Any
    change: str = ""
    """Such as `target[::3] = -100`."""
    frozen: tuple[str, ...] = ()
    seed: int = 0
    device: str = DEVICE
    result: ClassVar[str]
    """What a reproduction calls the result of the call."""
    own_imports: ClassVar[str]
    """The first line of a reproduction that calls the adapter itself, found by `{spec!r}`."""
    needed: ClassVar[dict[str, str]]
    """What a reproduction uses beside the implementation, as it is seen in a line of imports, and its import."""

    @property
    def call(self) -> str:
        """Return the call in a reproduction."""
        raise NotImplementedError

    @property
    def loss_code(self) -> str:
        """Return the loss that is differentiated, in terms of the result."""
        raise NotImplementedError

    def run(self, tensors: dict[str, Tensor]) -> Any:
        """Return the implementation's result for these tensors; raise RaisedError if it fails."""
        raise NotImplementedError

    def loss_of(self, result: Any, tensors: dict[str, Tensor]) -> Tensor:
        """Return the loss that is differentiated."""
        raise NotImplementedError

    def values(self, result: Any) -> Mapping[str, Tensor | None]:
        """Return the numbers of a result by name."""
        raise NotImplementedError

    def truth(self) -> Answer:
        """Return the answer of plain PyTorch in float64, with the gradients of frozen tensors too."""
        raise NotImplementedError

    def plainly(self: Made) -> Made:
        """Return the same problem with plain PyTorch as the implementation."""
        raise NotImplementedError

    @property
    def imports(self) -> str:
        """Return the first line of a reproduction."""
        if self.adapter.call is None:
            return on_device(self.own_imports.format(spec=self.adapter.spec))
        missing = [line for seen, line in self.needed.items() if seen not in self.adapter.imports]
        return on_device("; ".join([self.adapter.imports, *missing]))

    @property
    def is_differentiated(self) -> bool:
        """Return whether there is anything to differentiate."""
        return True

    @property
    def further_lines(self) -> list[str]:
        """Return the statements that make tensors beside hidden, weight, bias and target."""
        return []

    @property
    def code(self) -> str:
        """Return the line of code that makes the tensors: bias is None if the adapter takes none."""
        n, d, v = self.rows, self.width, self.vocab_size
        to = ""
        if self.options.dtype != torch.float32:
            to = f".to({self.options.dtype})"
        has_bias = "bias" in self.adapter.offers
        bias = f"torch.nn.Parameter(torch.randn({v}){to})" if has_bias else "None"
        lines = [
            f"torch.manual_seed({self.seed})",
            f"hidden = torch.randn({n}, {d}){to}.requires_grad_()",
            # Divided by sqrt(width), the logits have a variance of 1 whatever the width
            f"weight = torch.nn.Parameter((torch.randn({v}, {d}) / {d**0.5:g}){to})",
            f"bias = {bias}",
            f"target = torch.randint({v}, ({n},))",
            *self.further_lines,
            self.change,
        ]
        lines += [f"{name}.requires_grad_(False)" for name in self.frozen if has_bias or name != "bias"]
        return "; ".join(filter(None, lines))

    @property
    def backward_code(self) -> str:
        """Return the line that runs backward in a reproduction."""
        return f"{self.loss_code}.backward()"

    @property
    def step_code(self) -> str:
        """Return forward and backward on one line."""
        raise NotImplementedError

    def shown(self, *lines: str) -> str:
        """Return a reproduction: imports, tensors, the call, and the lines that show the failure."""
        return "\n".join([self.imports, self.code, f"{self.result} = {self.call}", *lines])

    def made(self) -> dict[str, Tensor]:
        """Return new tensors: hidden, weight, target, bias if the implementation has one, and further ones."""
        here: dict[str, Tensor | None] = {}
        with torch.device(self.device):
            exec(self.code, {"torch": torch}, here)
        return {name: t for name, t in here.items() if t is not None}

    def backward(self, result: Any, tensors: dict[str, Tensor], factor: float = 1.0, **keywords: bool) -> None:
        """Run backward from `factor` times the loss, and raise RaisedError if it fails."""
        loss = self.loss_of(result, tensors)
        with self.raising():
            (loss * factor).backward(**keywords)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Turn an exception into a RaisedError, with a reproduction."""
        try:
            yield
        except Exception as error:
            raise RaisedError(self.shown(self.backward_code)) from error

    def answer(self, factor: float = 1.0) -> Answer:
        """Return the results and the gradients of one forward and backward, with the loss times `factor`."""
        return self.answer_on(self.made(), factor)

    def answer_on(self, tensors: dict[str, Tensor], factor: float = 1.0) -> Answer:
        """Return the same of these tensors."""
        result = self.run(tensors)
        found = dict(self.values(result))
        if self.is_differentiated:
            if self.loss_of(result, tensors).requires_grad:
                self.backward(result, tensors, factor)
            found |= {name: t.grad for name, t in leaves(tensors).items()}
        return as_float64(found)


Made = TypeVar("Made", bound=Problem)


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are differentiated unless they are frozen."""
    return {name: tensors[name] for name in GRADIENTS if name in tensors}


def as_float64(found: Mapping[str, Tensor | None]) -> Answer:
    """Return the numbers without a graph, in float64; a missing one is still missing."""
    return {name: t if t is None else t.detach().double() for name, t in found.items()}


@dataclass(frozen=True)
class Deviation:
    """The error of one number or gradient of the answer."""

    name: str
    error: float
    plain: float
    """Plain PyTorch's own error in the same dtype."""
    allowed: float

    @property
    def label(self) -> str:
        """Return its name in a message."""
        if self.name in GRADIENTS:
            return f"{self.name} gradient"
        return self.name

    @property
    def of_allowed(self) -> float:
        """Return the error relative to the allowed one; above 1 it is wrong."""
        return self.error / self.allowed


def deviations(
    x: Made, measured: Callable[[Made], Answer] | None = None, right: Callable[[Made], Answer] | None = None
) -> list[Deviation]:
    """Return the error of every number and gradient, the worst first.

    `measured` computes the implementation's answer and `right` the one in float64; None are the problem's own.
    """
    measured = measured or type(x).answer
    right = right or type(x).truth
    draws = [replace(x, seed=seed) for seed in range(DRAWS)]
    # (plain PyTorch in the given dtype, the reference in float64), for each draw
    own = [(measured(draw.plainly()), right(draw)) for draw in draws]
    found = measured(x)
    dtype = x.options.dtype
    # A number that plain PyTorch has exactly, such as a loss of 0, may be off by one rounding
    rounding = torch.finfo(dtype).eps / 2
    made = []
    for name in found.keys() - set(x.frozen):
        plain = max(error(one[name], exact[name]) for one, exact in own)
        allowed = EXACT if dtype == torch.float64 else max(TWICE * plain, rounding)
        made.append(Deviation(name, error(found[name], own[x.seed][1][name]), plain, allowed))
    # By name among equals, because a set has no order of its own
    return sorted(made, key=lambda deviation: (-deviation.of_allowed, deviation.name))

"""State a problem for a loss or for scores, by the text that a reproduction shows, and measure the error of its answer.

Shape suffixes: N rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from conformance.adapter import DEVICE, Adapter, Implementation, Options
from conformance.finding import RaisedError
from conformance.plain import plain_loss, plain_scores
from seqpar.linear.token_scores import TokenScores
from seqpar.testing.precision import DRAWS, EXACT, TWICE, error

GRADIENTS = ("hidden", "weight", "bias")
FACTORS = {"log_prob": "u", "entropy": "h", "log_probs_at": "g"}
"""The upstream factor of each score that has a gradient, one for each of its numbers."""
NEEDED = {"entropy": "entropy", "log_probs_at": "given classes"}
"""The feature that each further score needs."""

Answer = dict[str, Tensor | None]
"""The results and the gradients, by name, in float64; None for a tensor without a gradient."""


@dataclass(frozen=True)
class Problem:
    """Sizes, options of the call, what is differentiated, and a line that changes the tensors."""

    adapter: Implementation
    rows: int = 96
    width: int = 16
    vocab_size: int = 128
    options: Options = field(default_factory=Options)
    """`temperature` and `ids` are filled in where `temperatures` and `given` ask for tensors."""
    change: str = ""
    """Such as `target[::3] = -100`."""
    frozen: tuple[str, ...] = ()
    temperatures: str = ""
    """The code of a temperature for each token, such as `torch.rand(96) + 0.5`."""
    given: int = 0
    """J."""
    used: tuple[str, ...] = ("loss",)
    """What is differentiated: the loss, or scores, each times its factors; only those with a gradient."""
    factor: float = 1.0
    """Multiplies what is differentiated."""
    seed: int = 0
    device: str = DEVICE

    @property
    def result(self) -> str:
        """Return what a reproduction calls the result of the call."""
        return "loss" if self.adapter.part == "losses" else "scores"

    @property
    def imports(self) -> str:
        """Return the first line of a reproduction, which puts the tensors of the next ones on the device."""
        plain = self.plain.__name__
        names = f"Options, adapter_of, {plain}; adapter = adapter_of({self.adapter.part!r}, {self.adapter.spec!r})"
        device = "" if self.device == "cpu" else f"; torch.set_default_device({self.device!r})"
        return f"import torch; from conformance import {names}{device}"

    @property
    def code(self) -> str:
        """Return the line of code that makes the tensors: bias is None if the adapter takes none."""
        n, d, v = self.rows, self.width, self.vocab_size
        to = ""
        if self.options.dtype != torch.float32:
            to = f".to({self.options.dtype})"
        has_bias = "bias" in self.adapter.offers
        bias = f"torch.nn.Parameter(torch.randn({v}){to})" if has_bias else "None"
        shapes = {"u": (n,), "h": (n,), "g": (n, self.given)}
        lines = [
            f"torch.manual_seed({self.seed})",
            f"hidden = torch.randn({n}, {d}){to}.requires_grad_()",
            # Divided by sqrt(width), the logits have a variance of 1 whatever the width
            f"weight = torch.nn.Parameter((torch.randn({v}, {d}) / {d**0.5:g}){to})",
            f"bias = {bias}",
            f"target = torch.randint({v}, ({n},))",
            f"temperature = {self.temperatures}" if self.temperatures else "",
            f"ids = torch.randint({v}, ({n}, {self.given}))" if self.given else "",
            *(f"{FACTORS[name]} = torch.randn{shapes[FACTORS[name]]}" for name in self.used if name in FACTORS),
            self.change,
        ]
        lines += [f"{name}.requires_grad_(False)" for name in self.frozen if has_bias or name != "bias"]
        return "; ".join(filter(None, lines))

    @property
    def call(self) -> str:
        """Return the call in a reproduction."""
        return self._call("adapter.function")

    def _call(self, function: str) -> str:
        return f"{function}(hidden, weight, target, bias, {self.options_of(self.made())!r})"

    @property
    def loss_code(self) -> str:
        """Return what is differentiated, in terms of the result."""
        terms = " + ".join(f"({FACTORS[n]} * scores.{n}).sum()" if n in FACTORS else n for n in self.used)
        if self.factor != 1:
            return f"({self.factor} * ({terms}))"
        return f"({terms})" if "scores" in terms else terms

    @property
    def backward_code(self) -> str:
        """Return the statement that runs backward in a reproduction; nothing if nothing is differentiated."""
        return f"{self.loss_code}.backward()" if self.used else ""

    @property
    def step_code(self) -> str:
        """Return forward and backward on one line."""
        return self._step("adapter.function")

    def _step(self, function: str) -> str:
        return "; ".join(filter(None, [f"{self.result} = {self._call(function)}", self.backward_code]))

    def shown(self, *lines: str) -> str:
        """Return a reproduction: imports, tensors, the call, and the lines that show the failure."""
        return "\n".join([self.imports, self.code, f"{self.result} = {self.call}", *lines])

    def seen(self, name: str) -> str:
        """Return a number or a gradient in a reproduction."""
        if name in GRADIENTS:
            return f"{name}.grad"
        return name if name == "loss" else f"scores.{name}"

    def compared(self, name: str, allowed: str, rows: str = "") -> str:
        """Return a reproduction that prints the error of a number or a gradient, or of some rows of it."""
        what = self.seen(name) + rows
        names = ", ".join(leaves(self.made()))
        wide = f"{names} = (t.detach().double().requires_grad_() for t in ({names},))"
        right = f"{wide}; {self._step(self.plain.__name__)}; right = {what}"
        off = "((got - right).norm() / right.norm()).detach()"
        compare = f"print(got if got is None else float({off}))  # {allowed}"
        return "\n".join([self.imports, self.code, f"{self.step_code}; got = {what}", right, compare])

    def made(self) -> dict[str, Tensor]:
        """Return new tensors: hidden, weight, target, bias if the implementation has one, and further ones."""
        here: dict[str, Tensor | None] = {}
        with torch.device(self.device):
            exec(self.code, {"torch": torch}, here)
        return {name: t for name, t in here.items() if t is not None}

    def options_of(self, tensors: dict[str, Tensor]) -> Options:
        """Return the options with the tensors in them."""
        given = {name: tensors[name] for name in ("temperature", "ids") if name in tensors}
        return replace(self.options, **given)  # type: ignore[arg-type]

    def run(self, tensors: dict[str, Tensor]) -> Any:
        """Return the implementation's result for these tensors; raise RaisedError if it fails."""
        arguments = tensors["hidden"], tensors["weight"], tensors["target"], tensors.get("bias")
        with self.raising():
            found = self.adapter.function(*arguments, self.options_of(tensors))
            self._check(found, len(tensors["target"]))
        return found

    def _check(self, found: object, rows: int) -> None:
        """Raise TypeError or ValueError unless the result is what was asked for."""
        if self.result == "loss":
            if not isinstance(found, Tensor):
                raise TypeError(f"the loss is a {type(found).__name__}; it must be a tensor of one number")
            if found.numel() != 1:
                raise ValueError(f"the loss has shape {tuple(found.shape)}; it must be one number")
            return
        if not isinstance(found, TokenScores):
            raise TypeError(f"the scores are a {type(found).__name__}; they must be seqpar.TokenScores")
        more = {"log_probs_at": (self.given,), "top_log_probs": (self.options.top_k,), "top_ids": (self.options.top_k,)}
        for name in self.wanted():
            shape = (rows, *more.get(name, ()))
            score = getattr(found, name)
            if not isinstance(score, Tensor):
                raise TypeError(f"{name} is a {type(score).__name__}; it must be a tensor of shape {shape}")
            if score.shape != shape:
                raise ValueError(f"{name} has shape {tuple(score.shape)}; it must be {shape}")

    def wanted(self) -> list[str]:
        """Return the names of the numbers that are asked for."""
        if self.result == "loss":
            return ["loss"]
        asked = {"entropy": self.options.entropy, "log_probs_at": self.given, "top_log_probs": self.options.top_k}
        return ["log_prob", *(name for name, is_asked in asked.items() if is_asked)] + ["top_ids"] * bool(
            self.options.top_k
        )

    def values(self, result: Any) -> Mapping[str, Tensor | None]:
        """Return the numbers that are asked for; classes are compared apart, as they have no error."""
        if self.result == "loss":
            return {"loss": result}
        return {name: getattr(result, name) for name in self.wanted() if name != "top_ids"}

    def loss_of(self, result: Any, tensors: dict[str, Tensor]) -> Tensor:
        """Return what is differentiated: the loss, or the sum of the scores in use, each times its factors."""
        if self.result == "loss":
            loss: Tensor = result * self.factor
            return loss
        terms = [(tensors[FACTORS[name]] * getattr(result, name)).sum() for name in self.used]
        return torch.stack(terms).sum() * self.factor

    def backward(self, result: Any, tensors: dict[str, Tensor], **keywords: bool) -> None:
        """Run backward, and raise RaisedError if it fails."""
        loss = self.loss_of(result, tensors)
        with self.raising():
            loss.backward(**keywords)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Turn an exception into a RaisedError, with a reproduction."""
        try:
            yield
        except Exception as error:
            raise RaisedError(self.shown(self.backward_code or "print()")) from error

    def answer(self) -> Answer:
        """Return the results and the gradients of one forward and backward."""
        return self.answer_on(self.made())

    def answer_on(self, tensors: dict[str, Tensor]) -> Answer:
        """Return the same of these tensors."""
        result = self.run(tensors)
        found = dict(self.values(result))
        if self.used:
            if self.loss_of(result, tensors).requires_grad:
                self.backward(result, tensors)
            found |= {name: t.grad for name, t in leaves(tensors).items()}
        return as_float64(found)

    @property
    def plain(self) -> Callable[..., Any]:
        """Return the plain loss or scores."""
        return plain_loss if self.result == "loss" else plain_scores

    def plainly(self) -> Problem:
        """Return the same problem with plain PyTorch as the implementation."""
        return replace(self, adapter=replace(self.adapter, function=self.plain))

    def truth(self) -> Answer:
        """Return the answer of plain PyTorch in float64, with the gradients of frozen tensors too."""
        return replace(self.plainly(), frozen=()).answer_on(wide(self.made()))


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in float64, made in the dtype under test first, so that both see the same rounded inputs."""
    made = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    return made | {name: t.detach().double().requires_grad_() for name, t in leaves(tensors).items()}


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are differentiated unless they are frozen."""
    return {name: tensors[name] for name in GRADIENTS if name in tensors}


def as_float64(found: Mapping[str, Tensor | None]) -> Answer:
    """Return the numbers without a graph, in float64; a missing one is still missing."""
    return {name: t if t is None else t.detach().double() for name, t in found.items()}


def asked(adapter: Implementation, names: Iterable[str] = FACTORS, **how: Any) -> Problem:
    """Return a problem with these fields of `Problem` and of `Options`: a loss, or these scores as far as offered.

    What is differentiated of the scores are those that have a gradient.
    """
    settings = {field.name: how.pop(field.name) for field in fields(Options) if field.name in how}
    if isinstance(adapter, Adapter):
        return Problem(adapter, options=Options(**{"reduction": adapter.reduction} | settings), **how)
    names = [name for name in names if name == "log_prob" or NEEDED[name] in adapter.offers]
    used = [name for name in names if name != "entropy" or "entropy gradient" in adapter.offers]
    if "gradients" not in adapter.offers:
        used = []
    options = Options(**settings, entropy="entropy" in names)
    given: dict[str, Any] = {"vocab_size": 131, "used": tuple(used), "given": 3 * ("log_probs_at" in names)} | how
    return Problem(adapter, options=options, **given)


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


Measured = Callable[[Problem], Answer]


def deviations(x: Problem, measured: Measured = Problem.answer, right: Measured = Problem.truth) -> list[Deviation]:
    """Return the error of every number and gradient, the worst first.

    `measured` computes the implementation's answer and `right` the one in float64.
    """
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

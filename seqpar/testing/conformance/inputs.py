"""Make the tensors of a check, by the same text that a reproduction shows, and measure a loss on them.

Shape suffixes: N rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.testing.conformance.adapter import DEVICE, Adapter, Options, on_device
from seqpar.testing.conformance.finding import Checked, RaisedError
from seqpar.testing.plain_reference import plain_logits, plain_value_and_gradients

TWICE = 2.0
"""The error allowed to an implementation, relative to that of the plain loss in the same dtype."""
DRAWS = 3
"""The number of draws over which the plain loss's own error is the largest: on one, a number may be right by luck."""
EXACT = 1e-12
"""The relative error allowed in float64."""
GRADIENTS = ("hidden", "weight", "bias")

Answer = dict[str, Tensor | None]
"""The loss and the gradients, by name, in float64; None for a tensor without a gradient."""


@dataclass(frozen=True)
class Inputs:
    """A problem: sizes, dtype, options of the loss, and a line that changes the targets."""

    adapter: Adapter
    rows: int = 512
    width: int = 16
    vocab_size: int = 1024
    options: Options = field(default_factory=Options)
    change: str = ""
    """Such as `target[::3] = -100`."""
    frozen: tuple[str, ...] = ()
    seed: int = 0
    device: str = DEVICE

    @property
    def code(self) -> str:
        """Return the line of code that makes the tensors."""
        lines = tensor_lines(self.adapter, self.rows, self.width, self.vocab_size, self.options.dtype, self.seed)
        lines += [self.change, *(f"{name}.requires_grad_(False)" for name in self.frozen)]
        return "; ".join(filter(None, lines))

    @property
    def call(self) -> str:
        """Return the call in a reproduction."""
        if self.adapter.call is None:
            return f"adapter.loss(hidden, weight, target, bias, {self.options!r})"
        return self.adapter.call(self.options)

    @property
    def imports(self) -> str:
        """Return the first line of a reproduction."""
        if self.adapter.call is not None and " as F" in self.adapter.imports:
            return on_device(self.adapter.imports)
        if self.adapter.call is not None:
            return on_device(self.adapter.imports + "; import torch.nn.functional as F")
        ours = "from seqpar.testing.conformance import Options, adapter_of"
        return on_device(f"import torch, torch.nn.functional as F; {ours}; adapter = adapter_of({self.adapter.spec!r})")

    @property
    def backward_code(self) -> str:
        """Return the line that runs backward in a reproduction."""
        return "loss.backward()"

    def shown(self, *lines: str) -> str:
        """Return a reproduction: imports, tensors, the call, and the lines that show the failure."""
        return "\n".join([self.imports, self.code, f"loss = {self.call}", *lines])

    def made(self) -> dict[str, Tensor]:
        """Return new tensors: hidden, weight, target and, if the implementation has one, bias."""
        here: dict[str, Tensor | None] = {}
        with torch.device(self.device):
            exec(self.code, {"torch": torch}, here)
        return {name: t for name, t in here.items() if t is not None}

    def loss(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the implementation's loss of these tensors."""
        arguments = tensors["hidden"], tensors["weight"], tensors["target"], tensors.get("bias")
        try:
            return _one_number(self.adapter.loss(*arguments, self.options))
        except Exception as error:
            raise RaisedError(self) from error

    def backward(self, loss: Tensor, **keywords: bool) -> None:
        """Run `loss.backward(**keywords)`, and raise RaisedError if it fails."""
        try:
            loss.backward(**keywords)
        except Exception as error:
            raise RaisedError(self) from error

    def plainly(self) -> Inputs:
        """Return the same problem with the plain loss of torch as the implementation."""
        return replace(self, adapter=replace(self.adapter, loss=plain_loss))


def tensor_lines(adapter: Checked, rows: int, width: int, vocab_size: int, dtype: torch.dtype, seed: int) -> list[str]:
    """Return the statements that make hidden, weight, bias (None if the adapter takes none) and target."""
    to = ""
    if dtype != torch.float32:
        to = f".to({dtype})"
    bias = "None"
    if "bias" in adapter.offers:
        bias = f"torch.nn.Parameter(torch.randn({vocab_size}){to})"
    return [
        f"torch.manual_seed({seed})",
        f"hidden = torch.randn({rows}, {width}){to}.requires_grad_()",
        # Divided by sqrt(width), the logits have a variance of 1 whatever the width
        f"weight = torch.nn.Parameter((torch.randn({vocab_size}, {width}) / {width**0.5:g}){to})",
        f"bias = {bias}",
        f"target = torch.randint({vocab_size}, ({rows},))",
    ]


def plain_loss(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Return the loss as it is usually written, in the dtype of the tensors."""
    logits_NV = plain_logits(hidden, weight, bias, options.softcap)
    settings = {"ignore_index": options.ignore_index, "label_smoothing": options.label_smoothing}
    return F.cross_entropy(logits_NV, target, reduction=options.reduction, **settings)  # type: ignore[arg-type]


def _one_number(loss: object) -> Tensor:
    """Return the loss; raise unless it is a tensor of one number."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss is a {type(loss).__name__}; it must be a tensor of one number")
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {tuple(loss.shape)}; it must be one number")
    return loss


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are differentiated unless they are frozen."""
    return {name: tensors[name] for name in GRADIENTS if name in tensors}


def answer(x: Inputs, factor: float = 1.0) -> Answer:
    """Return the loss and the gradients of one forward and backward, with the loss times `factor`."""
    tensors = x.made()
    loss = x.loss(tensors)
    if loss.requires_grad:
        x.backward(loss * factor)
    found = {"loss": loss, **{name: t.grad for name, t in leaves(tensors).items()}}
    return as_float64(found)


def as_float64(found: Mapping[str, Tensor | None]) -> Answer:
    """Return the numbers without a graph, in float64; a missing one is still missing."""
    wide: Answer = {}
    for name, tensor in found.items():
        wide[name] = tensor
        if tensor is not None:
            wide[name] = tensor.detach().double()
    return wide


def truth(x: Inputs) -> Answer:
    """Return the plain reference of the same numbers in float64, with the gradients of frozen tensors too."""
    tensors = x.made()
    # Made in the dtype under test first, so that both see the same rounded inputs
    wide = {name: t.double() for name, t in leaves(tensors).items()}
    loss, gradients = plain_value_and_gradients(
        target=tensors["target"],
        ignore_index=x.options.ignore_index,
        label_smoothing=x.options.label_smoothing,
        softcap=x.options.softcap,
        **wide,
    )
    divisor = 1
    if x.options.reduction == "mean":
        divisor = int((tensors["target"] != x.options.ignore_index).sum())
    return {name: t / divisor for name, t in {"loss": loss, **gradients}.items()}


def error(found: Tensor | None, right: Tensor | None) -> float:
    """Return |found - right| / |right| in the Euclidean norm; infinite if it is missing or not a number."""
    assert right is not None
    if found is None:
        return float("inf")
    relative = float((found - right).norm() / right.norm().clamp(min=1e-300))
    if math.isnan(relative):
        return float("inf")
    return relative


@dataclass(frozen=True)
class Deviation:
    """The error of one number or gradient of the answer."""

    name: str
    error: float
    plain: float
    """The plain loss's own error in the same dtype."""
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
    x: Inputs, measured: Callable[[Inputs], Answer] = answer, right: Callable[[Inputs], Answer] | None = None
) -> list[Deviation]:
    """Return the error of the loss and of every gradient, the worst first.

    `measured` computes the implementation's answer and `right` the one in float64.
    """
    right = right or truth
    draws = [replace(x, seed=seed) for seed in range(DRAWS)]
    # (the plain loss in the given dtype, the reference in float64), for each draw
    own = [(measured(draw.plainly()), right(draw)) for draw in draws]
    return compared(measured(x), own, x.seed, x.options.dtype, x.frozen)


def compared(
    found: Answer, own: list[tuple[Answer, Answer]], draw: int, dtype: torch.dtype, frozen: tuple[str, ...] = ()
) -> list[Deviation]:
    """Return the errors of an answer to one of the draws, the worst first.

    `own` has the plain answer in the given dtype and the reference in float64, for each draw.
    """
    # A number that plain PyTorch has exactly, such as a loss of 0, may be off by one rounding
    rounding = torch.finfo(dtype).eps / 2
    made = []
    for name in found.keys() - set(frozen):
        plain = max(error(one[name], exact[name]) for one, exact in own)
        allowed = max(TWICE * plain, rounding)
        if dtype == torch.float64:
            allowed = EXACT
        made.append(Deviation(name, error(found[name], own[draw][1][name]), plain, allowed))
    # By name among equals, because a set has no order of its own
    return sorted(made, key=lambda deviation: (-deviation.of_allowed, deviation.name))

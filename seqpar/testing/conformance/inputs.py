"""The tensors of a check, made by the same text that a reproduction shows; and what a loss gives of them.

Shape suffixes: N rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.testing.conformance.adapter import Adapter, Options
from seqpar.testing.plain_reference import plain_value_and_gradients

TWICE = 2.0
"""An implementation may be so many times as far from float64 as the plain loss in the same dtype."""
DRAWS = 3
"""The plain loss's own error is its largest over so many draws: on one, a single number may be right by luck."""
EXACT = 1e-12
"""In float64."""
NAMES = ("loss", "hidden", "weight", "bias")

Answer = dict[str, Tensor | None]
"""The loss and the gradients, by name, in float64; None where there is none."""


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
    device: str = "cpu"

    @property
    def code(self) -> str:
        """The line that makes the tensors."""
        (n, d, v), dtype = (self.rows, self.width, self.vocab_size), self.options.dtype
        to = "" if dtype == torch.float32 else f".to({dtype})"
        bias = "bias" in self.adapter.offers
        lines = [
            f"torch.manual_seed({self.seed})",
            f"hidden = torch.randn({n}, {d}){to}.requires_grad_()",
            f"weight = torch.nn.Parameter((torch.randn({v}, {d}) / {d**0.5:g}){to})",
            f"bias = torch.nn.Parameter(torch.randn({v}){to})" if bias else "bias = None",
            f"target = torch.randint({v}, ({n},))",
            *([self.change] if self.change else []),
            *(f"{name}.requires_grad_(False)" for name in self.frozen),
        ]
        return "; ".join(lines)

    @property
    def call(self) -> str:
        """The call of a reproduction."""
        if self.adapter.call is None:
            return f"adapter.loss(hidden, weight, target, bias, {self.options!r})"
        return self.adapter.call(self.options)

    @property
    def imports(self) -> str:
        """The first line of a reproduction."""
        if self.adapter.call is not None:
            more = "" if " as F" in self.adapter.imports else "; import torch.nn.functional as F"
            return self.adapter.imports + more
        ours = "from seqpar.testing.conformance import Options, adapter_of"
        return f"import torch, torch.nn.functional as F; {ours}; adapter = adapter_of({self.adapter.spec!r})"

    def made(self) -> dict[str, Tensor]:
        """hidden, weight, target and, where it has one, bias."""
        here: dict[str, Tensor | None] = {}
        with torch.device(self.device):
            exec(self.code, {"torch": torch}, here)
        return {name: t for name, t in here.items() if t is not None}

    def loss(self, tensors: dict[str, Tensor]) -> Tensor:
        """The implementation's, of these tensors."""
        arguments = tensors["hidden"], tensors["weight"], tensors["target"], tensors.get("bias")
        try:
            return _one_number(self.adapter.loss(*arguments, self.options))
        except Exception as error:
            raise RaisedError(self) from error

    def backward(self, loss: Tensor, **keywords: bool) -> None:
        """`loss.backward(**keywords)`."""
        try:
            loss.backward(**keywords)
        except Exception as error:
            raise RaisedError(self) from error

    def plainly(self) -> Inputs:
        """The same with the plain loss of torch."""
        return replace(self, adapter=replace(self.adapter, loss=plain_loss))


class RaisedError(Exception):
    """The implementation raised, as the exception's cause says, on these inputs."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs.adapter.name)
        self.inputs = inputs


def plain_loss(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """The loss as it is usually written."""
    logits_NV = F.linear(hidden, weight, bias)
    settings = {"ignore_index": options.ignore_index, "label_smoothing": options.label_smoothing}
    return F.cross_entropy(logits_NV, target, reduction=options.reduction, **settings)  # type: ignore[arg-type]


def _one_number(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss is a {type(loss).__name__}; it must be a tensor of one number")
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {tuple(loss.shape)}; it must be one number")
    return loss


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that are differentiated, or might be."""
    return {name: tensors[name] for name in NAMES if name in tensors}


def answer(x: Inputs, factor: float = 1.0) -> Answer:
    """What one forward and backward give."""
    tensors = x.made()
    loss = x.loss(tensors)
    if loss.requires_grad:
        x.backward(loss * factor)
    found = {"loss": loss, **{name: t.grad for name, t in leaves(tensors).items()}}
    return {name: None if t is None else t.detach().double() for name, t in found.items()}


def truth(x: Inputs) -> Answer:
    """Return the plain reference of the same numbers in float64, with the gradients of frozen tensors too."""
    tensors = x.made()
    wide = {name: t.double() for name, t in leaves(tensors).items()}
    loss, gradients = plain_value_and_gradients(
        target=tensors["target"],
        ignore_index=x.options.ignore_index,
        label_smoothing=x.options.label_smoothing,
        **wide,
    )
    divisor = 1
    if x.options.reduction == "mean":
        divisor = int((tensors["target"] != x.options.ignore_index).sum())
    return {name: t / divisor for name, t in {"loss": loss, **gradients}.items()}


def error(found: Tensor | None, right: Tensor | None) -> float:
    """The relative distance (a Euclidean norm); infinite for what is missing or not a number."""
    assert right is not None
    if found is None:
        return float("inf")
    apart = float((found - right).norm() / right.norm().clamp(min=1e-300))
    return apart if apart == apart else float("inf")


@dataclass(frozen=True)
class Part:
    """How far one part of the answer is off."""

    name: str
    error: float
    plain: float
    """The plain loss's own error in the same dtype."""
    allowed: float

    @property
    def label(self) -> str:
        """In words."""
        return "loss" if self.name == "loss" else f"{self.name} gradient"

    @property
    def share(self) -> float:
        """Above 1 it is wrong."""
        return self.error / self.allowed


def parts(
    x: Inputs, measured: Callable[[Inputs], Answer] = answer, right: Callable[[Inputs], Answer] | None = None
) -> list[Part]:
    """Every part that has a gradient, the worst first; `measured` takes the implementation's, `right` float64's."""
    right = right or truth
    draws = [replace(x, seed=seed) for seed in range(DRAWS)]
    own = [(measured(draw.plainly()), right(draw)) for draw in draws]
    found, rounding = measured(x), torch.finfo(x.options.dtype).eps / 2
    made = []
    for name in found.keys() - set(x.frozen):
        plain = max(error(one[name], exact[name]) for one, exact in own)
        allowed = EXACT if x.options.dtype == torch.float64 else max(TWICE * plain, rounding)
        made.append(Part(name, error(found[name], own[x.seed][1][name]), plain, allowed))
    return sorted(made, key=lambda part: (-part.share, part.name))

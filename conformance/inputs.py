"""State a problem for an implementation of the loss.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from conformance.adapter import Adapter, Options
from conformance.problem import Answer, Problem, leaves
from seqpar.testing.plain_reference import plain_logits, plain_value_and_gradients


@dataclass(frozen=True)
class Inputs(Problem):
    """A problem of the loss: sizes, dtype, options, and a line that changes the targets."""

    adapter: Adapter
    rows: int = 512
    width: int = 16
    vocab_size: int = 1024
    options: Options = field(default_factory=Options)
    result: ClassVar[str] = "loss"
    own_imports: ClassVar[str] = (
        "import torch, torch.nn.functional as F; from conformance import Options, adapter_of; "
        "adapter = adapter_of({spec!r})"
    )
    needed: ClassVar[dict[str, str]] = {" as F": "import torch.nn.functional as F"}

    @property
    def call(self) -> str:
        """Return the call in a reproduction."""
        if self.adapter.call is None:
            return f"adapter.loss(hidden, weight, target, bias, {self.options!r})"
        return self.adapter.call(self.options)

    @property
    def loss_code(self) -> str:
        """Return the name of the loss, which is the result itself."""
        return self.result

    @property
    def step_code(self) -> str:
        """Return forward and backward on one line."""
        return f"{self.call}.backward()"

    def run(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the implementation's loss of these tensors."""
        arguments = tensors["hidden"], tensors["weight"], tensors["target"], tensors.get("bias")
        with self.raising():
            return _one_number(self.adapter.loss(*arguments, self.options))

    def loss_of(self, result: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """Return the result itself."""
        return result

    def values(self, result: Tensor) -> Mapping[str, Tensor | None]:
        """Return the loss by its name."""
        return {"loss": result}

    def truth(self) -> Answer:
        """Return the plain reference of the same numbers in float64, with the gradients of frozen tensors too."""
        tensors = self.made()
        # Made in the dtype under test first, so that both see the same rounded inputs
        wide = {name: t.double() for name, t in leaves(tensors).items()}
        loss, gradients = plain_value_and_gradients(
            target=tensors["target"],
            ignore_index=self.options.ignore_index,
            label_smoothing=self.options.label_smoothing,
            softcap=self.options.softcap,
            **wide,
        )
        divisor = 1
        if self.options.reduction == "mean":
            divisor = int((tensors["target"] != self.options.ignore_index).sum())
        return {name: t / divisor for name, t in {"loss": loss, **gradients}.items()}

    def plainly(self) -> Inputs:
        """Return the same problem with the plain loss of torch as the implementation."""
        return replace(self, adapter=replace(self.adapter, loss=plain_loss))


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

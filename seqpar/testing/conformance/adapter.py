"""What an implementation of linear + cross-entropy is to the checks: a function, what it offers, how it is written."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

Feature = Literal[
    "float64", "float32", "bfloat16", "float16", "bias", "chunks", "smoothing", "sum", "mean", "CPU memory"
]
EVERYTHING: frozenset[Feature] = frozenset(
    {"float64", "float32", "bfloat16", "float16", "bias", "chunks", "smoothing", "sum", "mean", "CPU memory"}
)
LOW: frozenset[Feature] = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True)
class Options:
    """How the loss is to be computed this time."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    """eps / V to all classes, as `torch.nn.CrossEntropyLoss`."""
    reduction: Literal["sum", "mean"] = "sum"
    """The mean is over the targets that are not ignored."""
    chunk_rows: int | None = None
    """How many rows a chunk has; None leaves it to the implementation."""
    dtype: torch.dtype = torch.float32
    """Of hidden, weight and bias, for calls that must be told."""


Loss = Callable[[Tensor, Tensor, Tensor, "Tensor | None", Options], Tensor]
"""`loss(hidden, weight, target, bias, options)`: (N, D), (V, D), (N,), (V,) to a loss to call `backward()` on."""


@dataclass(frozen=True)
class Adapter:
    """An implementation of linear + cross-entropy that can be held against the checks.

        adapter = Adapter("mine", my_loss, offers=EVERYTHING - {"float64"})

    `python -m seqpar.testing.conformance my_module:adapter` then shows its column.

    Args:
        name: the head of its column.
        loss: the function under test; its weight and bias are `nn.Parameter`s.
        offers: what of `EVERYTHING` it claims to do; what it does not, is said to be not offered. "chunks": it follows
            `chunk_rows`; "sum" and "mean": the reductions it has; "CPU memory": what it takes can be measured as this
            process's peak.
        note: one line for the table's foot.
        imports: what a reproduction imports, on one line.
        call: the call in a reproduction, of `hidden, weight, target, bias`; None calls `loss`.
        package: whose version is stated, as the package index has it; empty for none.
        why_not: why it cannot run here; empty where it can.
        where: the `module:object` it was loaded from; empty for the known ones.
    """

    name: str
    loss: Loss
    offers: frozenset[Feature] = EVERYTHING
    note: str = ""
    imports: str = ""
    call: Callable[[Options], str] | None = None
    package: str = ""
    why_not: Callable[[], str] = str
    where: str = ""

    @property
    def spec(self) -> str:
        """What `adapter_of` finds it by."""
        return self.where or self.name

    @property
    def reduction(self) -> Literal["sum", "mean"]:
        """The one it is checked with: the sum, where it has one."""
        return "sum" if "sum" in self.offers else "mean"


def written(
    name: str, imports: str, call: Callable[[Options], str], needs: str = "", switch: str = "", **about: Any
) -> Adapter:
    """An adapter made of its own text, so that a reproduction is what was run.

    `needs` is the module it stands on; `switch` is a statement that goes before the imports and before every call.
    """
    names: dict[str, Any] = {}

    def loss(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
        exec(switch)
        if not names:
            quietly(lambda: exec(imports, names))
        here = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
        value: Tensor = eval(call(options), {**names, **here})
        return value

    about.setdefault("why_not", lambda: why_missing(needs))
    return Adapter(name, loss, imports="; ".join(filter(None, [switch, imports])), call=call, **about)


def why_missing(module: str) -> str:
    """Why that module cannot be imported here; empty where it can."""
    try:
        quietly(lambda: importlib.import_module(module) if module else None)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        return "not installed" if module.startswith(missing) else f"not installed: it needs {missing}"
    except Exception as error:  # whatever a package does at import is the answer
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return f"cannot be imported: {reason[0].strip()}"
    return ""


def quietly(action: Callable[[], Any]) -> Any:
    """Its result, without what packages say at import, and with the environment left as it was."""
    try:
        logging.disable(logging.WARNING)
        with warnings.catch_warnings(), patch.dict(os.environ):
            warnings.simplefilter("ignore")
            return action()
    finally:
        logging.disable(logging.NOTSET)

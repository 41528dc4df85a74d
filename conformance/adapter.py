"""Describe an implementation of linear + cross-entropy to the checks: its function, its features and its code."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args
from unittest.mock import patch

import torch
from torch import Tensor

Feature = Literal[
    "float64", "float32", "bfloat16", "float16", "bias", "chunks", "smoothing", "softcap", "sum", "mean", "CPU memory"
]
EVERYTHING: frozenset[Feature] = frozenset(get_args(Feature))
LOW: frozenset[Feature] = frozenset({"float32", "bfloat16", "float16"})
DEVICE = "cpu"
"""Where all tensors of the checks are: on the GPU if there is one, because there the kernels are."""
if torch.cuda.is_available():
    DEVICE = "cuda"


def on_device(imports: str) -> str:
    """Return the first line of a reproduction, which puts the tensors of the next ones on the device."""
    if DEVICE == "cpu":
        return imports
    return f"{imports}; import torch; torch.set_default_device({DEVICE!r})"


@dataclass(frozen=True)
class Options:
    """The options of one call of the loss."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    """eps, of which every class gets eps / V, as in `torch.nn.CrossEntropyLoss`."""
    softcap: float | None = None
    """softcap tanh(z / softcap) in place of the logits z."""
    reduction: Literal["sum", "mean"] = "sum"
    """The mean is over the targets that are not ignored."""
    chunk_rows: int | None = None
    """The number of rows in a chunk; None leaves it to the implementation."""
    dtype: torch.dtype = torch.float32
    """The dtype of hidden, weight and bias, for calls that take it as an argument."""

    @property
    def variables(self) -> dict[str, Any]:
        """Return the variables of a call's text beside hidden, weight, target and bias: none."""
        return {}


Made = TypeVar("Made")
Returned = TypeVar("Returned")
Loss = Callable[[Tensor, Tensor, Tensor, "Tensor | None", Options], Tensor]
"""`loss(hidden, weight, target, bias, options)`, of shapes (N, D), (V, D), (N,), (V,); `backward()` is called on it."""


@dataclass(frozen=True)
class Adapter:
    """An implementation of linear + cross-entropy that the checks can run.

        adapter = Adapter("mine", my_loss, offers=EVERYTHING - {"float64"})

    `python -m conformance losses my_module:adapter` then shows its column.

    Args:
        name: the heading of its column.
        loss: the function under test; its weight and bias are `nn.Parameter`s.
        offers: the features of `EVERYTHING` that it has; checks of the others report "not offered". "chunks": it obeys
            `chunk_rows`; "sum" and "mean": the reductions it has; "CPU memory": its memory can be measured as this
            process's peak.
        note: one line below the table.
        imports: the imports of a reproduction, on one line.
        call: returns the call in a reproduction, of `hidden, weight, target, bias`; None calls `loss`.
        package: the package whose version is reported, by its name in the package index; empty for none.
        why_not: returns why it cannot run here; empty if it can.
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
        """Return the name that `adapter_of` finds it by."""
        return self.where or self.name

    @property
    def reduction(self) -> Literal["sum", "mean"]:
        """Return the reduction that it is checked with: the sum, if it has one."""
        if "sum" in self.offers:
            return "sum"
        return "mean"


def written(
    kind: Callable[..., Made],
    name: str,
    imports: str,
    call: Callable[[Any], str],
    needs: str = "",
    switch: str = "",
    **about: Any,
) -> Made:
    """Return an adapter made from the text of its call, so that a reproduction shows exactly what was run.

    `kind` is `Adapter` or `ScoreAdapter`. `needs` is the module that it requires; `switch` is a statement to run before
    the imports and before every call.
    """
    evaluate = evaluator(imports, switch)

    def function(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Any) -> Any:
        variables = {"hidden": hidden, "weight": weight, "target": target, "bias": bias, **options.variables}
        return evaluate(call(options), variables)

    about.setdefault("why_not", lambda: why_missing(needs))
    return kind(name, function, imports="; ".join(filter(None, [switch, imports])), call=call, **about)


def evaluator(imports: str, switch: str = "") -> Callable[[str, Mapping[str, Any]], Any]:
    """Return a function that evaluates the text of a call, given its variables; it imports at the first call.

    `switch` is a statement to run before the imports and before every call.
    """
    names: dict[str, Any] = {}

    def evaluate(call: str, variables: Mapping[str, Any]) -> Any:
        exec(switch)
        # Not when the adapter is made: its package may not be installed
        if not names:
            quietly(lambda: exec(imports, names))
        return eval(call, {**names, **variables})

    return evaluate


def loaded(name: str) -> object:
    """Return the object at `module:object`; raise ValueError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} cannot be loaded: {error}") from error


def why_missing(module: str) -> str:
    """Return why that module cannot be imported here; empty if it can, or if there is none."""
    if not module:
        return ""
    try:
        quietly(lambda: importlib.import_module(module))
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if module.startswith(missing):
            return "not installed"
        return f"not installed: it needs {missing}"
    except Exception as error:
        # A package may raise anything at import
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return f"cannot be imported: {reason[0].strip()}"
    return ""


def why_no_nemo_rl() -> str:
    """Return why NeMo-RL cannot be imported here; empty if it can. The package index has a placeholder of its name."""
    why = why_missing("nemo_rl.distributed.model_utils")
    if why == "not installed":
        return f"{why}: clone https://github.com/NVIDIA-NeMo/RL and put it on PYTHONPATH"
    return why


def quietly(action: Callable[[], Returned]) -> Returned:
    """Return the action's result, without packages' messages and warnings, and with the environment restored."""
    try:
        logging.disable(logging.WARNING)
        with warnings.catch_warnings(), patch.dict(os.environ):
            warnings.simplefilter("ignore")
            return action()
    finally:
        logging.disable(logging.NOTSET)

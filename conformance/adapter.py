"""Describe an implementation to the checks: its function, its features, and why it may not run here."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})
LOW = DTYPES - {"float64"}
EVERYTHING = DTYPES | {"bias", "chunks", "smoothing", "softcap", "sum", "mean", "CPU memory"}
"""The features that a loss may have."""
ALL_SCORES = (
    DTYPES
    | {"bias", "chunks", "gradients", "ignored", "entropy", "entropy gradient", "given classes", "top-k", "ties"}
    | {"temperature", "token temperature", "softcap", "CPU memory"}
)
"""The features that scores may have."""
DEVICE = "cpu"
"""The device of all tensors in the checks: the GPU if there is one, since that is where the kernels run."""
if torch.cuda.is_available():
    DEVICE = "cuda"
Returned = TypeVar("Returned")


def call_of(x: Any) -> str:
    """Return the call that makes a dataclass's object, without fields at their defaults."""
    given = [(f.name, repr(getattr(x, f.name))) for f in fields(x) if repr(getattr(x, f.name)) != repr(f.default)]
    return f"{type(x).__name__}({', '.join(f'{name}={value}' for name, value in given)})"


@dataclass(frozen=True)
class Options:
    """The options of one call of a loss or of scores; each is used only if the adapter offers its feature."""

    ignore_index: int = -100
    """Tokens with this target do not count in a loss, and have scores of 0 and no gradient ("ignored")."""
    softcap: float | None = None
    """softcap tanh(z / softcap) in place of the logits z."""
    chunk: int | None = None
    """The chunk size, in rows or classes, whichever the implementation cuts; None leaves it to the implementation."""
    dtype: torch.dtype = torch.float32
    """The dtype of hidden, weight and bias, for calls that take it as an argument."""
    label_smoothing: float = 0.0
    """For a loss: eps, of which every class gets eps / V, as in `torch.nn.CrossEntropyLoss`."""
    reduction: Literal["sum", "mean"] = "sum"
    """For a loss; the mean is over the targets that are not ignored."""
    temperature: float | Tensor = 1.0
    """For scores: divides the logits, after softcap; a number ("temperature"), or one for each token ("token
    temperature")."""
    entropy: bool = False
    """For scores."""
    top_k: int | None = None
    """For scores; "ties": among equally likely classes the lower one comes first."""
    ids: Tensor | None = None
    """For scores: (N, J) classes whose log-probabilities are also wanted ("given classes")."""

    __repr__ = call_of


@dataclass(frozen=True)
class Implementation:
    """What the checks can run: an `Adapter`, a `ScoreAdapter` or a `LayoutAdapter`.

    Args:
        name: the heading of its column.
        function: the function under test.
        offers: the features that it has; checks for other features report "not offered".
        package: the package whose version is reported, by its name in the package index; empty for none.
        why_not: returns why it cannot run here; empty if it can.
        note: one line below the table; empty for the function's docstring.
        where: the `module:object` it was loaded from, so that another process can find it; empty for known ones.
    """

    part: ClassVar[str]

    name: str
    function: Callable[..., Any]
    offers: frozenset[str] = frozenset()
    package: str = ""
    why_not: Callable[[], str] = str
    note: str = ""
    where: str = ""

    @property
    def about(self) -> str:
        """Return the line below the table."""
        return self.note or " ".join((self.function.__doc__ or "").split())

    @property
    def spec(self) -> str:
        """Return the name that `adapter_of` finds it by."""
        return self.where or self.name

    def __repr__(self) -> str:
        """Return the call that finds the adapter."""
        return f"adapter_of({self.part!r}, {self.spec!r})"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        """Let another process find the adapter by name, since its function may exist only in this process."""
        return found, (self.part, self.spec)


@dataclass(frozen=True, repr=False)
class Adapter(Implementation):
    """An implementation of linear + cross-entropy: `function(hidden, weight, target, bias, options)` returns the loss.

        adapter = Adapter("mine", my_loss, offers=EVERYTHING - {"float64"})

    The tensors have shapes (N, D), (V, D), (N,), (V,); weight and bias are `nn.Parameter`s, and `backward()` is called
    on the loss. In `offers`, "chunks" means that it obeys `options.chunk`; "sum" and "mean" are the reductions that it
    has; "CPU memory" means that its memory can be measured as this process's peak. `python -m conformance losses
    my_module:adapter` then shows its column.
    """

    part: ClassVar[str] = "losses"
    offers: frozenset[str] = EVERYTHING

    @property
    def reduction(self) -> Literal["sum", "mean"]:
        """Return the reduction that it is checked with: the sum, if it has one."""
        if "sum" in self.offers:
            return "sum"
        return "mean"


@dataclass(frozen=True, repr=False)
class ScoreAdapter(Implementation):
    """An implementation of the scores of tokens: `function(hidden, weight, target, bias, options)` returns them.

        def scores(hidden, weight, target, bias, options):
            return seqpar.TokenScores(log_prob=my_log_probs(hidden, weight, target))

        adapter = ScoreAdapter("mine", scores, offers=frozenset({"float32", "gradients"}))

    The scores are tensors with shape (N,), (N, top_k) or that of ids; scores that the options do not ask for may be
    None. In `offers`, "gradients" means that backward goes through log_prob; "entropy gradient", also through entropy.
    """

    part: ClassVar[str] = "scores"
    offers: frozenset[str] = ALL_SCORES


def found(part: str, name: str) -> Any:
    """Return what `conformance.adapter_of` returns; it is imported here, since it imports this module indirectly."""
    return load("conformance:adapter_of")(part, name)  # type: ignore[operator]


def load(name: str) -> object:
    """Return the object at `module:object`; raise ValueError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} cannot be loaded: {error}") from error


class Package:
    """A peer's module, imported when something in it is first used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self.name), attribute)


def why_missing(module: str) -> str:
    """Return why a module cannot be imported here; empty if it can."""
    try:
        quietly(lambda: importlib.import_module(module))
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if module.startswith(missing):
            return "not installed"
        return f"not installed: it needs {missing}"
    except Exception as error:
        # A package may raise anything when it is imported
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return f"cannot be imported: {reason[0].strip()}"
    return ""


def why_no_nemo_rl() -> str:
    """Return why NeMo-RL cannot be imported here; empty if it can. The package index only has a placeholder for it."""
    why = why_missing("nemo_rl.distributed.model_utils")
    if why == "not installed":
        return f"{why}: clone https://github.com/NVIDIA-NeMo/RL and put it on PYTHONPATH"
    return why


def quietly(action: Callable[[], Returned]) -> Returned:
    """Return the action's result, suppressing packages' messages and warnings, and restore the environment."""
    try:
        logging.disable(logging.WARNING)
        with warnings.catch_warnings(), patch.dict(os.environ):
            warnings.simplefilter("ignore")
            return action()
    finally:
        logging.disable(logging.NOTSET)

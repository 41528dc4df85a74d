"""What a check is, and what it finds: a verdict, a figure, and five lines that show a failure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from seqpar.testing.conformance.adapter import quietly


class Checked(Protocol):
    """An implementation, as far as all checks and the report need it."""

    @property
    def name(self) -> str:
        """Return the heading of its column."""

    @property
    def offers(self) -> frozenset[Any]:
        """Return the features that it has."""

    @property
    def note(self) -> str:
        """Return one line below the table."""

    @property
    def imports(self) -> str:
        """Return the imports of a reproduction."""

    @property
    def package(self) -> str:
        """Return the package whose version is reported; empty for none."""

    @property
    def why_not(self) -> Callable[[], str]:
        """Return a function that says why it cannot run here."""


Implementation = TypeVar("Implementation", bound=Checked)


class Shown(Protocol):
    """The inputs of a check."""

    @property
    def adapter(self) -> Checked:
        """Return the implementation they were given to."""

    def shown(self, *lines: str) -> str:
        """Return a reproduction: imports, tensors, the call, and these lines."""

    @property
    def backward_code(self) -> str:
        """Return the line that runs backward."""


class RaisedError(Exception):
    """The implementation raised an error on these inputs: the cause of this exception."""

    def __init__(self, inputs: Shown) -> None:
        super().__init__(inputs.adapter.name)
        self.inputs = inputs


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    verdict: str
    """"pass", "fail", "not offered" or "not measured"."""
    figure: str = ""
    reproduction: str = ""
    """Five lines that show the failure."""

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.verdict, self.figure]))


@dataclass(frozen=True)
class Check(Generic[Implementation]):
    """A claim about an implementation, with the features that it must offer to be checked."""

    name: str
    run: Callable[[Implementation], Finding]
    needs: frozenset[str] = frozenset()
    is_cost: bool = False
    """Whether it is about memory or work; all others are about numbers."""

    def __call__(self, adapter: Implementation) -> Finding:
        """Return the finding; an exception of the implementation is a failure."""
        missing = sorted(self.needs - adapter.offers)
        if missing:
            # Memory is no feature of the function: it has some, which cannot be measured in this way
            if missing == ["CPU memory"]:
                return Finding("not measured")
            return Finding("not offered")
        # Dynamo stops compiling a function after a few settings of its arguments
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        try:
            return quietly(lambda: self.run(adapter))
        except RaisedError as raised:
            text = next(iter(str(raised.__cause__).strip().splitlines()), "")
            figure = f"{type(raised.__cause__).__name__}: {text[:80]}"
            return Finding("fail", figure, raised.inputs.shown(raised.inputs.backward_code))

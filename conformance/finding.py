"""What a check is, and what it finds: a verdict, a figure, and five lines that show a failure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from conformance.adapter import Implementation, quietly


class RaisedError(Exception):
    """The implementation raised an error, the cause of this exception, which has five lines that show it."""


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    verdict: str
    """"pass", "fail", "not offered" or "not measured"."""
    figure: str = ""
    reproduction: str = ""
    """Five lines that show the failure."""
    is_raised: bool = False
    """Whether the failure is an error, or ranks that hang, which nobody overlooks."""

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.verdict, self.figure]))


@dataclass(frozen=True)
class Check:
    """A claim about an implementation, with the features that it must offer to be checked."""

    name: str
    run: Callable[[Any], Finding]
    needs: frozenset[str] = frozenset()
    is_cost: bool = False
    """Whether it is about memory or work; all others are about numbers."""

    def __call__(self, adapter: Implementation) -> Finding:
        """Return the finding; an exception of the implementation is a failure."""
        missing = sorted(self.needs - adapter.offers)
        if missing:
            # Memory is not a feature of the function: it has some, which cannot be measured in this way
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
            return Finding("fail", figure, str(raised), is_raised=True)

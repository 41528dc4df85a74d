"""What a check is, and what it finds: a verdict, a figure, and the lines that reproduce a failure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from conformance.adapter import Implementation, quietly


class RaisedError(Exception):
    """The implementation raised an error, the cause of this exception."""


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    verdict: str
    """"pass", "fail", "not offered" or "not measured"."""
    figure: str = ""
    reproduction: str = ""
    """Lines of Python that judge the same problem again, and print the failure."""
    is_raised: bool = False
    """Whether the failure is an error, or ranks that hang, which cannot go unnoticed."""
    of_allowed: float = field(default=0.0, compare=False)
    """The error relative to the allowed one, which determines the worst of several findings."""

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
        """Return the finding; an exception from the implementation is a failure."""
        missing = sorted(self.needs - adapter.offers)
        if missing:
            # Memory is not a feature: the function uses some, but it cannot be measured in this way
            if missing == ["CPU memory"]:
                return Finding("not measured")
            return Finding("not offered")
        # Dynamo stops compiling a function after a few different settings of its arguments
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        return quietly(lambda: self.run(adapter))


def shown(judge: Callable[..., object], *given: object) -> str:
    """Return the lines that repeat a judgement; each of the given objects is written as the call that makes it."""
    module = judge.__module__.rpartition(".")[2]
    call = f"{module}.{judge.__name__}({', '.join(map(repr, given))})"
    return f"import torch\nfrom conformance import Case, Options, Problem, adapter_of, {module}\nprint({call})"

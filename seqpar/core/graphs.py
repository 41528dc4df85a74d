"""Keep loops over chunks out of the graphs of `torch.compile`: how many chunks there are depends on the targets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

REASON = (
    "this loss is computed in chunks, whose number depends on the targets, and stays outside the graph: leave out "
    "fullgraph=True"
)


def outside_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function that `torch.compile` is to call between two graphs; traced, it would be compiled many times.

    As `torch.compiler.disable`, without importing the compiler where nothing is compiled.
    """
    disabled: Any = None

    @functools.wraps(function)
    def outside(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        nonlocal disabled
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if disabled is None:
            # Says why in the error of fullgraph=True; the compiler has been imported, since it traces this
            torch._dynamo.graph_break(msg=REASON)
            disabled = torch.compiler.disable(function, reason=REASON)
        return disabled(*args, **kwargs)  # type: ignore[no-any-return]

    return outside

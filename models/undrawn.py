"""Models without random weights, for weights that are read from a file at once.

    with undrawn():
        model = make_transformer(config, src_vocab, tgt_vocab)  # every random weight is uninitialised memory

A matrix that nobody writes to takes up no memory: of embeddings that are tied, the system provides one, not three. The
state of torch's random numbers stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

DRAWING = ("uniform_", "normal_")
"""What the names of functions end with that draw a weight: those of tensors, and of `torch.nn.init`."""


@contextmanager
def undrawn() -> Iterator[None]:
    """Leave out every random draw into a tensor; zeros, ones and all other values are as always."""
    with _WithoutDraws():
        yield


class _WithoutDraws(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if function.__name__.endswith(DRAWING):
            return (*args, *named.values())[0]  # the tensor, which `torch.nn.init` passes by its name
        return function(*args, **named)

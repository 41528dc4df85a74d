"""Models whose weights are drawn later, one tensor at a time, and are those that would have been drawn at once.

    model, weights = drawn_later(lambda: make_transformer(config, src_vocab, tgt_vocab))   # on the device "meta"
    torch.manual_seed(1)
    for name, weight in weights:        # as in a model that is built after the same seed, bit for bit
        ...

A process that keeps a part of each weight then never holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WRITING = ("uniform_", "normal_", "zero_", "fill_")
"""What the names of functions end with that set a weight: those of tensors, and of `torch.nn.init`."""

Model = TypeVar("Model", bound=nn.Module)


class _Write(NamedTuple):
    """A function that sets all of a weight, or some of its rows."""

    weight: Tensor
    rows: slice
    like: Tensor
    """Of the shape and dtype of these rows."""
    function: Callable[[Tensor], Any]


class _Noting(TorchFunctionMode):
    """Notes what is written to tensors, and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[_Write] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if not function.__name__.endswith(WRITING):
            return function(*args, **named)
        # `torch.nn.init` passes the tensor by its name
        tensor, *others = args or (named.pop("tensor"),)
        weight = tensor
        start = 0
        if tensor._is_view():
            weight = tensor._base
            start = tensor.storage_offset() // weight.stride(0)
        rows = slice(start, start + len(tensor))
        like = torch.empty_like(tensor, device="meta")
        self.writes.append(_Write(weight, rows, like, lambda whole: function(whole, *others, **named)))
        return tensor


def drawn_later(build: Callable[[], Model]) -> tuple[Model, Iterator[tuple[str, Tensor]]]:
    """Build a model on the device "meta"; return it with its weights by name, each drawn when it is asked for.

    The weights take the random numbers that `build` would have taken: torch's generator must not be used in between.
    All rows of a weight must be set by functions of WRITING, or the first one raises RuntimeError.
    """
    noting = _Noting()
    with torch.device("meta"), noting:
        model = build()
    names = {id(weight): name for name, weight in model.named_parameters()}
    return model, _drawn(noting.writes, names, dict(model.named_parameters()))


@torch.no_grad()
def _drawn(writes: Sequence[_Write], names: dict[int, str], weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    # Weights are set when a layer is made, and often once more; what is overwritten is drawn and dropped
    unset = {name: torch.ones(len(weight), dtype=torch.bool) for name, weight in weights.items()}
    needed: set[int] = set()
    last: dict[str, int] = {}
    for number, write in reversed([*enumerate(writes)]):
        name = names.get(id(write.weight))
        if name is not None and unset[name][write.rows].any():
            unset[name][write.rows] = False
            needed.add(number)
            last.setdefault(name, number)
    for name, rows in unset.items():
        if rows.any():
            raise RuntimeError(f"{name} is set by a function that is not noted: add it to models.drawn_later.WRITING")
    begun: dict[str, Tensor] = {}
    for number, (weight, own, like, function) in enumerate(writes):
        rows = torch.empty_like(like, device="cpu")
        function(rows)
        if number not in needed:
            continue
        name = names[id(weight)]
        if rows.shape == weight.shape:
            begun[name] = rows
        else:
            begun.setdefault(name, torch.empty(weight.shape, dtype=rows.dtype))[own] = rows
        if number == last[name]:
            yield name, begun.pop(name)

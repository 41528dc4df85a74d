"""The numbers of a wrong loss, from which its cause is inferred, and how they are collected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

Result = tuple[Tensor, Mapping[str, Tensor | None]]
"""A loss and its gradients by name."""
Uses = Mapping[str, Sequence[tuple[str, Tensor]]]
"""The gradient of each tensor, split by use: the operation and the gradient through it."""
FACTOR = 0.125
"""The factor of the loss in the check that gradients follow it; a power of 2, so that it causes no rounding."""
SAME = 1e-6
"""The relative difference up to which two ratios count as equal: mistakes are recognised in float32, too."""
CALLS = 3
"""How often the plain loss is computed once more: dropout may well draw the same for a few numbers once."""


@dataclass(frozen=True)
class Evidence:
    """The numbers of a wrong loss, and how they were computed."""

    got: Result
    expected: Result
    eighth: Result | None = None
    """The same loss times `FACTOR`."""
    uses: Uses = field(default_factory=dict)
    """Of the plain gradients."""
    per_token: frozenset[str] = frozenset()
    """The tensors all of whose dimensions but the last are tokens."""
    tokens: int | None = None
    """The number of targets on this rank that are not ignored."""
    rows: int | None = None
    """The number of all targets on this rank."""
    divisor: float = 1
    """The number that the plain sum was divided by."""
    world: int = 1
    again: Sequence[float] = ()
    """The plain loss, computed some more times."""
    imagined: Sequence[tuple[str, Callable[[], Result]]] = ()
    """Mistakes, and functions that compute the plain loss with each of them; the first has none, and no name."""
    is_float64: bool = True
    """Whether the loss under test could be computed in float64, which some devices lack."""

    def pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, gradient and plain gradient, where the plain one is not 0 and the shapes agree."""
        for name, plain in self.expected[1].items():
            if plain is None or not plain.count_nonzero():
                continue
            got = self.got[1][name]
            if got is None:
                got = torch.zeros_like(plain)
            if got.shape == plain.shape:
                yield name, got, plain

    def ratio(self) -> float | None:
        """Return r if all gradients are r times the plain ones, with the same r; else None."""
        ratios = [ratio(got, plain) for _, got, plain in self.pairs()]
        first = next(iter(ratios), None)
        if first and all(r is not None and math.isclose(r, first, rel_tol=SAME) for r in ratios):
            return first
        return None


def ratio(got: Tensor, plain: Tensor) -> float | None:
    """Return r if got is r times plain; None if it is not a multiple."""
    # The least-squares r: <got, plain> / <plain, plain>
    times = float((got.to(plain) * plain).sum() / plain.square().sum())
    if (got.to(plain) - times * plain).norm() <= SAME * abs(times) * plain.norm():
        return times
    return None


def dense(gradient: Tensor) -> Tensor:
    """Return the same numbers in a dense layout: an embedding's gradient may be sparse."""
    if gradient.layout == torch.strided:
        return gradient
    return gradient.to_dense()


def same(got: Tensor, plain: Tensor) -> bool:
    """Return whether got is plain."""
    times = ratio(got, plain)
    return times is not None and math.isclose(times, 1, rel_tol=SAME)


def spelt(times: float) -> str:
    """Return a ratio as a fraction if it is a simple one, else as a decimal number."""
    simple = Fraction(times).limit_denominator(1000)
    if math.isclose(simple, times, rel_tol=SAME):
        return str(simple)
    return f"{times:.6g}"


def repeated(loss: Callable[[], Tensor]) -> list[float]:
    """Return the loss of some more calls, by which one that draws random numbers is recognised."""
    with torch.no_grad():
        return [float(loss()) for _ in range(CALLS)]


class _Uses(TorchFunctionMode):
    """Give every operation an alias of its own of each watched tensor, whose gradient is that of this one use."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(t): name for name, t in tensors.items() if t.requires_grad}
        self.aliases: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in self.names.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        # Reading a property such as .shape contributes nothing to a gradient
        if name == "__get__":
            return func(*args, **(kwargs or {}))

        def aliased(value: Any) -> Any:
            if id(value) not in self.names:
                return value
            # d loss / d alias is the gradient through this operation alone
            alias = value.view_as(value)
            self.aliases[self.names[id(value)]].append((name, alias))
            return alias

        args, kwargs = tree_map(aliased, (args, kwargs or {}))
        return func(*args, **kwargs)


def gradients_by_use(loss: Callable[[], Tensor], tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[str, Tensor]]]:
    """Return the gradient of each tensor through each operation that uses it; their sum is its gradient."""
    with _Uses(tensors) as watched:
        value = loss()
    # An alias made under no_grad has no gradient to ask for
    named = [(name, use, alias) for name, uses in watched.aliases.items() for use, alias in uses if alias.requires_grad]
    if not named or not value.requires_grad:
        return {}
    gradients = torch.autograd.grad(value, [alias for *_, alias in named], allow_unused=True)
    found: dict[str, list[tuple[str, Tensor]]] = {}
    for (name, use, _), gradient in zip(named, gradients, strict=True):
        if gradient is not None:
            found.setdefault(name, []).append((use, dense(gradient)))
    return found


class StraightTanh(TorchFunctionMode):
    """Compute tanh with a derivative of 1: a softcap whose own derivative is left out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "tanh":
            return func(*args, **(kwargs or {}))
        x = args[0]
        return x + (func(*args, **(kwargs or {})) - x).detach()

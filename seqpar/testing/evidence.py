"""The numbers of a wrong loss that its cause is inferred from, and how they are collected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from seqpar.rows.conventions import Convention

Result = tuple[Tensor, Mapping[str, Tensor | None]]
"""A loss and its gradients by name."""
Uses = Mapping[str, Sequence[tuple[str, Tensor]]]
"""The gradient of each tensor, split by use: the operation and the gradient through it."""
Weight = TypeVar("Weight", int, float)
FACTOR = 0.125
"""The factor of the loss in the check that gradients scale with it; a power of 2, so that it causes no rounding."""
SAME = 1e-6
"""The relative difference up to which two ratios count as equal: mistakes are recognised in float32 too."""
CALLS = 3
"""How many more times the plain loss is computed: for a few numbers, dropout may well draw the same twice."""
APART = 1e-9
"""The smallest eigenvalue of the gradients' correlations at which they can still be told apart in their sum."""


class Repeated(NamedTuple):
    """The plain loss, computed a few more times."""

    values: Sequence[float] = ()
    seeded: Sequence[float] = ()
    """The loss from one fixed random state: the values differ if something other than random numbers changes."""
    changed: Sequence[str] = ()
    """Attributes that a call changes, such as "criterion.step went from 2 to 3"."""


NEVER = Repeated()


@dataclass(frozen=True)
class Evidence:
    """The numbers of a wrong loss, and how they were computed."""

    got: Result
    expected: Result
    eighth: Result | None = None
    """The same loss times `FACTOR`."""
    plain_eighth: Result | None = None
    """The plain loss times `FACTOR`."""
    uses: Uses = field(default_factory=dict)
    """The uses in the plain loss, which computes the ranks' tokens one rank after the other."""
    per_token: frozenset[str] = frozenset()
    """The tensors all of whose dimensions but the last are tokens."""
    tokens: int | None = None
    """The number of targets on this rank that are not ignored."""
    rows: int | None = None
    """The number of all targets on this rank."""
    ignored: Tensor | None = None
    """Which of this rank's targets are ignored, in one dimension."""
    divisor: float = 1
    """The number that the plain sum was divided by."""
    rank: int = 0
    counts: Sequence[tuple[int, int]] = ()
    """The numbers of tokens and rows of each rank."""
    again: Repeated = NEVER
    imagined: Sequence[tuple[str, Callable[[], Result]]] = ()
    """Mistakes, and functions that compute the plain loss with each of them; the first has no mistake, and no name."""
    smoothed: Callable[[Convention, float], Result] | None = None
    """Computes the cross-entropy of the same logits with a smoothing convention and eps."""
    smoothing: tuple[str, float] | None = None
    """The criterion's own convention and eps, if it states them."""
    parts: Sequence[Mapping[str, Tensor]] = ()
    """The plain gradient's summands by part of the step: sentences or micro-batches."""
    weights: Sequence[float] = ()
    """Each part's share of the step's tokens, 1 in total."""
    micro_batches: int = 1
    """The number of micro-batches of all ranks."""
    ranks_differ: bool = False
    """Whether ranks that should have the same gradient have different ones."""
    dtype: torch.dtype = torch.float64
    """The dtype in which the loss under test was computed; some devices lack float64."""

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return max(1, len(self.counts))

    def pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, gradient and plain gradient if the plain one is not 0 and the shapes agree."""
        for name, plain in self.expected[1].items():
            if plain is None or not plain.count_nonzero():
                continue
            got = self.got[1][name]
            if got is None:
                got = torch.zeros_like(plain)
            if got.shape == plain.shape:
                yield name, got, plain

    def ratios(self) -> dict[str, float | None]:
        """Return the ratio of each gradient to the plain one; None if it is not a multiple of that."""
        return {name: ratio(got, plain) for name, got, plain in self.pairs()}

    def ratio(self) -> float | None:
        """Return r if all gradients are the same r times the plain ones, else None."""
        first, *others = [*self.ratios().values()] or [None]
        if first and all(close(r, first) for r in others):
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
    """Return the numbers in a dense layout, as an embedding's gradient may be sparse; complex ones as two real."""
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        # (..., 2); a difference in float64 would drop the imaginary part
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient


def close(times: float | None, wanted: float) -> bool:
    """Return whether there is a ratio and it is this number."""
    return times is not None and math.isclose(times, wanted, rel_tol=SAME)


def is_several(times: float) -> bool:
    """Return whether a ratio is a whole number from 2 on."""
    return times > 1.5 and close(times, round(times))


def tally(weighted: Iterable[tuple[float, Weight]]) -> dict[float, Weight]:
    """Return the total weight of each ratio, where ratios that are equal up to rounding are one."""
    found: dict[float, Weight] = {}
    for times, weight in weighted:
        near = next((known for known in found if close(times, known)), times)
        found[near] = found.get(near, 0) + weight
    return found


def shares_of(got: Tensor, parts: Sequence[Tensor]) -> list[float] | None:
    """Return c if got is sum_k c_k parts_k for exactly one c, else None; a part that is 0 gets nan."""
    there = [k for k, part in enumerate(parts) if part.any()]
    if not there:
        return None
    parts_KN = torch.stack([parts[k].flatten() for k in there]).double()
    got_N = got.flatten().to(parts_KN)
    sizes_K = parts_KN.norm(dim=1)
    units_KN = parts_KN / sizes_K.unsqueeze(1)
    gram_KK = units_KN @ units_KN.T
    if torch.linalg.eigvalsh(gram_KK)[0] < APART:
        return None
    # The least-squares c for parts scaled to size 1: (P P^T) c = P got
    scaled_K = torch.linalg.solve(gram_KK, units_KN @ got_N)
    if (got_N - scaled_K @ units_KN).norm() > SAME * got_N.norm():
        return None
    # Set to 0 what is 0 up to rounding
    scaled_K = scaled_K.where(scaled_K.abs() > SAME * got_N.norm(), 0)
    found = dict(zip(there, (scaled_K / sizes_K).tolist(), strict=True))
    return [found.get(k, math.nan) for k in range(len(parts))]


def spell(times: float) -> str:
    """Return a ratio as a fraction if it is simple, else as a decimal number."""
    simple = Fraction(times).limit_denominator(1000)
    if math.isclose(simple, times, rel_tol=SAME):
        return str(simple)
    return f"{times:.6g}"


def besides(times: float) -> str:
    """Say that all gradients are also `times` times too large; return "" if they are not."""
    if close(times, 1):
        return ""
    return f"; besides, all gradients are multiplied by {spell(times)}"


def repeat_loss(loss: Callable[[], Tensor], modules: Mapping[str, nn.Module] | None = None) -> Repeated:
    """Return the loss of a few more calls, to recognise one that changes from call to call."""
    before = _settings(modules or {})
    with torch.no_grad():
        values = [float(loss())]
        after = _settings(modules or {})
        values += [float(loss()) for _ in range(CALLS - 1)]
        seeded = [_from_one_random_state(loss) for _ in range(CALLS)]
    return Repeated(values, seeded, [*_changes(before, after)])


def _from_one_random_state(loss: Callable[[], Tensor]) -> float:
    """Return the loss with torch's random numbers from a fixed seed, leaving their state unchanged."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)
        return float(loss())


def _settings(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the numbers, strings and buffers that are attributes of modules, by full name."""
    found: dict[str, Any] = {}
    for root, module in modules.items():
        for path, part in module.named_modules(prefix=root):
            found |= {f"{path}.{name}": v for name, v in vars(part).items() if isinstance(v, bool | int | float | str)}
            found |= {f"{path}.{name}": b.clone() for name, b in part.named_buffers(recurse=False)}
    return found


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield a phrase for each attribute that has changed."""
    for name, new in after.items():
        old = before.get(name)
        if isinstance(new, Tensor) and isinstance(old, Tensor):
            if torch.equal(old, new):
                continue
            if new.numel() > 1:
                yield f"{name} changed"
                continue
            old, new = old.item(), new.item()
        if old != new:
            yield f"{name} went from {old} to {new}"


class _Uses(TorchFunctionMode):
    """Give every operation its own alias of each watched tensor; the alias's gradient is that of this one use."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(t): name for name, t in tensors.items()}
        self.aliases: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in self.names.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = func.__self__.__name__
            # Reading another property, such as .shape, contributes nothing to a gradient
            if name not in ("T", "mT", "H", "mH"):
                return func(*args, **(kwargs or {}))

        def give_alias(value: Any) -> Any:
            if id(value) not in self.names:
                return value
            # d loss / d alias is the gradient through this operation alone
            alias = value.view_as(value)
            self.aliases[self.names[id(value)]].append((name, alias))
            return alias

        args, kwargs = tree_map(give_alias, (args, kwargs or {}))
        return func(*args, **kwargs)


def gradients_by_use(loss: Callable[[], Tensor], tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[str, Tensor]]]:
    """Return each tensor's gradient through each operation that uses it; they add up to the tensor's gradient."""
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


class OtherTanh(TorchFunctionMode):
    """Compute a different function in place of tanh(x): a softcap that is computed differently, or left out."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "tanh":
            return func(*args, **(kwargs or {}))
        return self.function(args[0])


SOFTCAPS = (
    (
        "the softcap's derivative is missing: d softcap tanh(x / softcap) / dx is 1 - tanh^2, and these gradients "
        "have 1",
        OtherTanh(lambda x: x + (torch.tanh(x) - x).detach()),
    ),
    ("the softcap is missing: tanh is left out", OtherTanh(lambda x: x)),
)
"""Mistakes with a softcap, and the modes under which the plain loss makes them."""

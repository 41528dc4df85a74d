"""What is probably wrong with a loss, told from its numbers.

A cause is a function of the evidence that returns a sentence, or nothing where the numbers do not show it; `EXAMPLES`
has the lines that show the mistake and its remedy. The first cause that speaks is the likely one.
"""

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
FACTOR = 0.125
"""What a loss is multiplied by to see whether its gradients follow; a power of 2, so that no rounding comes of it."""
SAME = 1e-6
"""Two ratios that lie so near each other are one: a mistake made in float32 is still that mistake."""
FLOAT32 = 1e-5
"""Relative differences below it are what float32 rounds by."""


@dataclass(frozen=True)
class Evidence:
    """The numbers of a loss that is wrong, and what is known of where they come from."""

    got: Result
    expected: Result
    eighth: Result | None = None
    """The same loss times `FACTOR`."""
    uses: Mapping[str, Sequence[tuple[str, Tensor]]] = field(default_factory=dict)
    """The plain gradient of each tensor, use by use: the operation and the gradient through it."""
    per_token: frozenset[str] = frozenset()
    """The tensors whose dimensions but the last are tokens."""
    tokens: int | None = None
    """Targets here that are not ignored."""
    rows: int | None = None
    """All targets here."""
    divisor: float = 1
    """What the plain sum was divided by."""
    world: int = 1

    def pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, gradient and plain gradient, where the plain one is not 0 and the shapes agree."""
        for name, plain in self.expected[1].items():
            if plain is not None and plain.count_nonzero():
                got = self.got[1][name]
                if got is None or got.shape == plain.shape:
                    yield name, torch.zeros_like(plain) if got is None else got, plain

    def ratio(self) -> float | None:
        """By how much all gradients alike are too large; None where they are not one multiple of the plain ones."""
        ratios = [ratio(got, plain) for _, got, plain in self.pairs()]
        first = ratios[0] if ratios else None
        return first if first and all(r is not None and math.isclose(r, first, rel_tol=SAME) for r in ratios) else None


def ratio(got: Tensor, plain: Tensor) -> float | None:
    """r, where got is r times plain; None where it is no multiple."""
    times = float((got.to(plain) * plain).sum() / plain.square().sum())
    return times if (got.to(plain) - times * plain).norm() <= SAME * abs(times) * plain.norm() else None


def dense(gradient: Tensor) -> Tensor:
    """The same numbers in strides: an embedding may leave a sparse gradient."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def likely_cause(evidence: Evidence) -> str:
    """One sentence on what the numbers look like, and the mistake beside its remedy."""
    for cause in CAUSES:
        said = cause(evidence)
        if said:
            return f"Likely cause: {said}\n{EXAMPLES.get(cause, '')}".rstrip()
    return "Likely cause: none of the usual ones; the gradients are no simple multiple or part of the plain ones"


def _no_tokens(e: Evidence) -> str | None:
    if e.tokens == 0 and not torch.isfinite(e.got[0]):
        return "a division by 0 tokens: every target is ignored, and 0 / 0 is not a number"
    return None


def _no_gradient(e: Evidence) -> str | None:
    lost = [name for name, got, _ in e.pairs() if not got.count_nonzero()]
    if not lost:
        return None
    return f"{', '.join(lost)}: no gradient at all, so the loss is detached from it, or computed with a copy of it"


def _ignored_factor(e: Evidence) -> str | None:
    if e.eighth is None:
        return None
    pairs = [(n, e.eighth[1].get(n), g) for n, g in e.got[1].items() if g is not None and g.count_nonzero()]
    times = {name: ratio(eighth, once) for name, eighth, once in pairs if eighth is not None}
    deaf = [name for name, r in times.items() if r is not None and math.isclose(r, 1, rel_tol=SAME)]
    if not deaf:
        return None
    return f"the upstream factor is ignored: an eighth of the loss leaves the gradient of {', '.join(deaf)} as it was"


def _dropped_rows(e: Evidence) -> str | None:
    for name, got, plain in e.pairs():
        if name in e.per_token:
            cuts = {"rows": [t.flatten(0, -2) for t in (got, plain)]}
            cuts |= {"time steps": [t.transpose(0, 1) for t in (got, plain)]} if got.dim() == 3 else {}
            for what, parts in cuts.items():
                count = _lost_at_the_end(*parts)
                if count:
                    return (
                        f"the last chunk is dropped: {name} has no gradient in its last {count} {what}, of "
                        f"{len(parts[0])}, and the right one before them"
                    )
    return None


def _lost_at_the_end(got: Tensor, plain: Tensor) -> int:
    """How many entries along dim 0 are 0 at the end of one and not of the other, where the two are else the same."""
    filled = got.flatten(1).any(1).nonzero()
    kept = int(filled.max()) + 1 if len(filled) else 0
    same = ratio(got[:kept], plain[:kept]) if kept and plain[:kept].any() else None
    whole = same is not None and math.isclose(same, 1, rel_tol=SAME)
    return len(got) - kept if whole and plain[kept:].any() else 0


def _counted_padding(e: Evidence) -> str | None:
    for name, got, plain in e.pairs():
        if name in e.per_token:
            extra = int((got.flatten(0, -2).any(1) & ~plain.flatten(0, -2).any(1)).sum())
            if extra:
                return f"ignored padding is counted: {name} has a gradient in {extra} rows whose target is ignored"
    return None


def _wrong_divisor(e: Evidence) -> str | None:
    """A mean, this rank's token count, all rows, no division at all."""
    times, n, rows = e.ratio(), e.tokens, e.rows
    if times is None or math.isclose(times, 1, rel_tol=SAME):
        return None
    looks = f"all gradients are {_spelt(times)} times the plain ones"
    if n and e.world == 1 and math.isclose(times, e.divisor / n, rel_tol=SAME):
        return f"a mean instead of a sum: {looks}, and {n} targets are not ignored"
    if rows and n != rows and math.isclose(times, e.divisor / (rows * e.world), rel_tol=SAME):
        return f"a mean over all {rows} targets, ignored padding counted: {looks}, and only {n} are not ignored"
    if e.divisor != 1 and math.isclose(times * e.world, e.divisor, rel_tol=SAME):
        return f"a sum instead of a mean: {looks}, and the step has {e.divisor:g} tokens"
    return None


def _local_count(e: Evidence) -> str | None:
    for name, got, plain in e.pairs():
        times = ratio(got, plain)
        count = e.tokens if name in e.per_token and e.world > 1 else None
        wrong = times is not None and not math.isclose(times, 1, rel_tol=SAME)
        if count and times and wrong and math.isclose(times, e.divisor / (count * e.world), rel_tol=SAME):
            return (
                f"the local token count: here {count} of the step's {e.divisor:g} tokens, and {name}'s gradient is "
                f"{_spelt(times)} times the plain one, {e.divisor:g} / ({count} x {e.world} ranks)"
            )
    return None


def _world_size(e: Evidence) -> str | None:
    times = e.ratio()
    if e.world > 1 and times:
        for exponent, what in ((-1, "averaged over the ranks"), (1, "multiplied by the number of ranks")):
            if math.isclose(times, e.world**exponent, rel_tol=SAME):
                return f"the world size: all gradients are {_spelt(times)} times the plain ones, {what} once too often"
    return None


def _missed_tie(e: Evidence) -> str | None:
    for name, got, _ in e.pairs():
        uses = e.uses.get(name, ())
        for number, (operation, part) in enumerate(uses, 1):
            times = ratio(got, part) if part.count_nonzero() else None
            if len(uses) > 1 and times is not None and math.isclose(times, 1, rel_tol=SAME):
                return (
                    f"a missed tie: {name} is used {len(uses)} times, and its gradient is that of use {number} "
                    f"({operation}) alone"
                )
    return None


def _accumulated(e: Evidence) -> str | None:
    times = e.ratio()
    for whole in (times, times and 1 / times):
        if times and whole and whole > 1.5 and math.isclose(whole, round(whole), rel_tol=SAME):
            if times > 1:
                return f"accumulation: all gradients are {round(whole)} times the plain ones, as if added up so often"
            return (
                f"accumulation: all gradients are 1/{round(whole)} of the plain ones, as if divided by so many "
                "micro-batches or tokens"
            )
    return None


def _rounding(e: Evidence) -> str | None:
    pairs = [(e.got[0], e.expected[0]), *((got, plain) for _, got, plain in e.pairs())]
    apart = [float((got.to(plain) - plain).norm() / plain.norm().clamp(min=1e-300)) for got, plain in pairs]
    if not all(one <= FLOAT32 for one in apart):  # nor where one is nan
        return None
    worst = max(apart)
    return f"float32 on the way: nothing is off by more than {worst:.1g} of its size, and float64 keeps 1e-16"


CAUSES: tuple[Callable[[Evidence], str | None], ...] = (
    _no_tokens,
    _ignored_factor,
    _no_gradient,
    _dropped_rows,
    _counted_padding,
    _local_count,
    _world_size,
    _wrong_divisor,
    _missed_tie,
    _accumulated,
    _rounding,
)

EXAMPLES: dict[Callable[[Evidence], str | None], str] = {
    _no_tokens: """
    (total / tokens).backward()                  # 0 / 0
    (total / tokens.clamp(min=1)).backward()     # 0, with gradients of 0""",
    _ignored_factor: """
    return gradient                              # in backward(ctx, upstream)
    return upstream * gradient                   # of hidden AND of every parameter""",
    _no_gradient: """
    loss_of(hidden.detach(), head.weight.data)   # .data, .detach(), a deep copy, a layer in a plain list
    loss_of(hidden, head.weight)                 # the tensors themselves""",
    _dropped_rows: """
    for i in range(rows // chunk): ...           # 10 rows in chunks of 4 are 2 chunks
    for part in hidden.split(chunk): ...         # 3, the last one shorter""",
    _counted_padding: """
    F.cross_entropy(logits, target)                        # class 0, the padding, is a class like any other
    F.cross_entropy(logits, target, ignore_index=0)        # rows with target 0 count for nothing""",
    _local_count: """
    loss = total / tokens_here                             # each rank's own mean, then averaged: a mean of means
    loss = total * world_size / sum_over_ranks(tokens)     # one division, by the tokens of the whole step""",
    _world_size: """
    loss = total / tokens_of_all_ranks                     # DDP and FSDP then average over the ranks
    loss = total * world_size / tokens_of_all_ranks        # the average of which is the sum""",
    _wrong_divisor: """
    nn.CrossEntropyLoss(reduction="mean")                  # means of chunks, devices or ranks do not add up
    nn.CrossEntropyLoss(reduction="sum")                   # sums do; divide once, by the step's tokens""",
    _missed_tie: """
    head.weight = nn.Parameter(embed.weight.clone())       # equal at first, and each with a gradient of its own
    head.weight = embed.weight                             # one parameter: its gradient is the sum of all uses""",
    _accumulated: """
    for batch in batches: loss_of(batch).backward()        # .grad adds up: k calls, k times as large
    optimizer.zero_grad()                                  # between steps; within one, divide by all its tokens""",
    _rounding: """
    hidden.float(); weight.to(torch.float32)               # a cast on the way
    hidden.to(weight.dtype)                                # sums in float32 or wider, whichever the input has""",
}


def _spelt(times: float) -> str:
    """A ratio as a fraction where it is a simple one."""
    simple = Fraction(times).limit_denominator(1000)
    return str(simple) if math.isclose(simple, times, rel_tol=SAME) else f"{times:.6g}"


class _Uses(TorchFunctionMode):
    """Hands every operation an alias of its own of the tensors that are watched; an alias's gradient is that use's."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(t): name for name, t in tensors.items() if t.requires_grad}
        self.aliases: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in self.names.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # a property such as .shape, which is no use
            return func(*args, **(kwargs or {}))

        def aliased(value: Any) -> Any:
            if id(value) not in self.names:
                return value
            alias = value.view_as(value)
            self.aliases[self.names[id(value)]].append((name, alias))
            return alias

        args, kwargs = tree_map(aliased, (args, kwargs or {}))
        return func(*args, **kwargs)


def gradients_by_use(loss: Callable[[], Tensor], tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[str, Tensor]]]:
    """The gradient of each tensor through each operation it goes into; their sum is its gradient."""
    with _Uses(tensors) as watched:
        value = loss()
    named = [(name, use, alias) for name, uses in watched.aliases.items() for use, alias in uses if alias.requires_grad]
    if not named or not value.requires_grad:
        return {}
    gradients = torch.autograd.grad(value, [alias for *_, alias in named], allow_unused=True)
    found: dict[str, list[tuple[str, Tensor]]] = {}
    for (name, use, _), gradient in zip(named, gradients, strict=True):
        if gradient is not None:
            found.setdefault(name, []).append((use, dense(gradient)))
    return found

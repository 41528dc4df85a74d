"""Infer from a wrong loss's numbers what is probably wrong with it.

Each cause is a function of the evidence that returns a sentence, or None if the numbers do not show this cause;
`EXAMPLES` has the lines that show the mistake and its remedy. `CAUSES` lists them in the order in which they are tried.
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
Uses = Mapping[str, Sequence[tuple[str, Tensor]]]
"""The gradient of each tensor, split by use: the operation and the gradient through it."""
FACTOR = 0.125
"""The factor of the loss in the check that gradients follow it; a power of 2, so that it causes no rounding."""
SAME = 1e-6
"""The relative difference up to which two ratios count as equal: mistakes are recognised in float32, too."""
CALLS = 3
"""How often the plain loss is computed once more: dropout may well draw the same for a few numbers once."""
FLOAT32 = 1e-5
"""The relative difference up to which float32 rounding is the likely cause."""


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


def likely_cause(evidence: Evidence) -> str:
    """Return a sentence on what the numbers look like, and an example of the mistake with its remedy."""
    for cause in CAUSES:
        sentence = cause(evidence)
        if sentence:
            return f"Likely cause: {sentence}\n{EXAMPLES.get(cause, '')}".rstrip()
    return "Likely cause: none of the usual ones; the gradients are no simple multiple or part of the plain ones"


def _no_tokens(e: Evidence) -> str | None:
    """Recognise 0 / 0."""
    if e.tokens == 0 and not torch.isfinite(e.got[0]):
        return "a division by 0 tokens: every target is ignored, and 0 / 0 is not a number"
    return None


def _random_numbers(e: Evidence) -> str | None:
    """Recognise a plain loss that is another number in every call."""
    plain = float(e.expected[0])
    other = [value for value in e.again if not math.isclose(value, plain, rel_tol=SAME, abs_tol=SAME)]
    if not other or not math.isfinite(plain):
        return None
    return (
        f"random numbers, such as those of dropout in training mode: the plain loss itself is {plain:.6g} in one call "
        f"and {other[0]:.6g} in another"
    )


def _no_gradient(e: Evidence) -> str | None:
    """Recognise a tensor that the loss is detached from."""
    lost = [name for name, got, _ in e.pairs() if not got.count_nonzero()]
    if not lost:
        return None
    return f"{', '.join(lost)}: no gradient at all, so the loss is detached from it, or computed with a copy of it"


def _ignored_factor(e: Evidence) -> str | None:
    """Recognise a backward that does not multiply by the upstream factor."""
    if e.eighth is None:
        return None
    pairs = [(n, e.eighth[1].get(n), g) for n, g in e.got[1].items() if g is not None and g.count_nonzero()]
    times = {name: ratio(eighth, once) for name, eighth, once in pairs if eighth is not None}
    deaf = [name for name, r in times.items() if r is not None and math.isclose(r, 1, rel_tol=SAME)]
    if not deaf:
        return None
    return f"the upstream factor is ignored: an eighth of the loss leaves the gradient of {', '.join(deaf)} as it was"


def _dropped_rows(e: Evidence) -> str | None:
    """Recognise a last chunk that is never computed, by its zeros at the end."""
    for name, got, plain in e.pairs():
        if name not in e.per_token:
            continue
        views = {"rows": (got.flatten(0, -2), plain.flatten(0, -2))}
        # (B, T, D) may be cut over time
        if got.dim() == 3:
            views["time steps"] = got.transpose(0, 1), plain.transpose(0, 1)
        # The engine cuts rows or time steps, so the last chunk is at the end of one of these
        for what, (got_view, plain_view) in views.items():
            count = _lost_at_the_end(got_view, plain_view)
            if count:
                return (
                    f"the last chunk is dropped: {name} has no gradient in its last {count} {what}, of "
                    f"{len(got_view)}, and the right one before them"
                )
    return None


def _lost_at_the_end(got: Tensor, plain: Tensor) -> int:
    """Return how many entries at the end of dim 0 are 0 in `got` only, if the two agree before them; else 0."""
    filled = got.flatten(1).any(1).nonzero()
    if not len(filled):
        return 0
    end = int(filled.max()) + 1
    if not plain[:end].any() or not plain[end:].any():
        return 0
    same = ratio(got[:end], plain[:end])
    if same is None or not math.isclose(same, 1, rel_tol=SAME):
        return 0
    return len(got) - end


def _counted_padding(e: Evidence) -> str | None:
    """Recognise ignored rows that have a gradient."""
    for name, got, plain in e.pairs():
        if name in e.per_token:
            # The plain gradient of a row that is ignored is exactly 0, and of any other practically never
            extra = int((got.flatten(0, -2).any(1) & ~plain.flatten(0, -2).any(1)).sum())
            if extra:
                return f"ignored padding is counted: {name} has a gradient in {extra} rows whose target is ignored"
    return None


def _wrong_divisor(e: Evidence) -> str | None:
    """Recognise a mean over the tokens or over all rows, and a division that is missing."""
    times = e.ratio()
    n = e.tokens
    rows = e.rows
    # The plain loss is sum / divisor. A mean instead has divisor / n times its gradients, a mean over all rows of
    # all ranks divisor / (rows x world), and a sum (which DDP then averages) divisor / world.
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
    """Recognise a division by this rank's tokens instead of the step's."""
    if not e.tokens or e.world == 1:
        return None
    # (sum / tokens here, averaged over the ranks) / (sum / divisor)
    expected_ratio = e.divisor / (e.tokens * e.world)
    # Only a per-token gradient shows it: a parameter's mixes the wrong factors of all ranks
    for name, got, plain in e.pairs():
        times = ratio(got, plain)
        if name not in e.per_token or not times or math.isclose(times, 1, rel_tol=SAME):
            continue
        if math.isclose(times, expected_ratio, rel_tol=SAME):
            return (
                f"the local token count: here {e.tokens} of the step's {e.divisor:g} tokens, and {name}'s gradient is "
                f"{_spelt(times)} times the plain one, {e.divisor:g} / ({e.tokens} x {e.world} ranks)"
            )
    return None


def _world_size(e: Evidence) -> str | None:
    """Recognise the number of ranks as a factor too many or too few."""
    times = e.ratio()
    if e.world > 1 and times:
        # DDP averages over the ranks: without the factor world, gradients are 1/world; with it twice, world times
        for exponent, what in ((-1, "averaged over the ranks"), (1, "multiplied by the number of ranks")):
            if math.isclose(times, e.world**exponent, rel_tol=SAME):
                return f"the world size: all gradients are {_spelt(times)} times the plain ones, {what} once too often"
    return None


def _missed_tie(e: Evidence) -> str | None:
    """Recognise the gradient of a single use of a tensor that is used several times."""
    for name, got, _ in e.pairs():
        uses = e.uses.get(name, ())
        for number, (operation, gradient) in enumerate(uses, 1):
            if len(uses) == 1 or not gradient.count_nonzero():
                continue
            times = ratio(got, gradient)
            if times is not None and math.isclose(times, 1, rel_tol=SAME):
                return (
                    f"a missed tie: {name} is used {len(uses)} times, and its gradient is that of use {number} "
                    f"({operation}) alone"
                )
    return None


def _accumulated(e: Evidence) -> str | None:
    """Recognise a whole number of losses as a factor too many or too few."""
    times = e.ratio()
    # k micro-batches added up without a division give k times the gradient, a division too many gives 1/k
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
    """Recognise differences as small as float32's rounding."""
    pairs = [(e.got[0], e.expected[0]), *((got, plain) for _, got, plain in e.pairs())]
    errors = [float((got.to(plain) - plain).norm() / plain.norm().clamp(min=1e-300)) for got, plain in pairs]
    # Not `any(error > FLOAT32)`, which is false for nan
    if not all(error <= FLOAT32 for error in errors):
        return None
    worst = max(errors)
    return f"float32 on the way: nothing is off by more than {worst:.1g} of its size, and float64 keeps 1e-16"


def _rounded_reference(e: Evidence) -> str | None:
    """Recognise a plain loss that is float32 itself, where the one under test is float64."""
    if e.expected[0].dtype != torch.float32 or e.got[0].dtype != torch.float64 or not _rounding(e):
        return None
    return (
        "the plain loss casts its logits to float32, as decoder-only models of transformers do in every dtype, so it "
        "cannot show more than float32 does; compare with the loss of the same logits in float64, or pass rtol=1e-5"
    )


# From the most specific to the most general: a bare ratio fits several mistakes, a lost row only one
CAUSES: tuple[Callable[[Evidence], str | None], ...] = (
    _no_tokens,
    _random_numbers,
    _ignored_factor,
    _no_gradient,
    _dropped_rows,
    _counted_padding,
    _local_count,
    _world_size,
    _wrong_divisor,
    _missed_tie,
    _accumulated,
    _rounded_reference,
    _rounding,
)

EXAMPLES: dict[Callable[[Evidence], str | None], str] = {
    _no_tokens: """
    (total / tokens).backward()                  # 0 / 0
    (total / tokens.clamp(min=1)).backward()     # 0, with gradients of 0""",
    _random_numbers: """
    assert_same_loss(head, criterion, ...)           # head.training: dropout is drawn anew in every call
    assert_same_loss(head.eval(), criterion, ...)    # nothing is drawn; losses of draws cannot be compared""",
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
    _rounded_reference: """
    model(**inputs, labels=labels).loss                                                      # logits.float()
    F.cross_entropy(model(**inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())   # the same, in float64""",
    _rounding: """
    hidden.float(); weight.to(torch.float32)               # a cast on the way
    hidden.to(weight.dtype)                                # sums in float32 or wider, whichever the input has""",
}


def _spelt(times: float) -> str:
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

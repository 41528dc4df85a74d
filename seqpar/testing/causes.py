"""Infer from a wrong loss's numbers what is probably wrong with it.

`CAUSES` is the table. An entry has a detector, a function of the evidence that returns a sentence, or None if the
numbers do not show this cause, and the lines that show the mistake and its remedy. They are tried in that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.testing.evidence import FACTOR, SAME, Evidence, ratio, spelt
from seqpar.testing.rank_causes import local_count, reduced_twice, silent_rank, world_size
from seqpar.testing.row_causes import counted_padding, dropped_rows, mean_of_means

FLOAT32 = 1e-5
"""The relative difference up to which float32 rounding is the likely cause."""


class Cause(NamedTuple):
    """A usual mistake."""

    detect: Callable[[Evidence], str | None]
    example: str
    """The mistake and its remedy, a line each."""


def likely_cause(evidence: Evidence) -> str:
    """Return a sentence on what the numbers look like, and an example of the mistake with its remedy."""
    said = "none of the usual ones; the gradients are not a simple multiple or fraction of the plain ones"
    example = ""
    for cause in CAUSES:
        sentence = cause.detect(evidence)
        if sentence:
            said, example = sentence, cause.example
            break
    return f"Likely cause: {said}{_only_the_gradient(evidence)}\n{example}".rstrip()


def _only_the_gradient(e: Evidence) -> str:
    """Return that the value is right, if only gradients are wrong: a run would then look right from outside."""
    if not math.isclose(float(e.got[0]), float(e.expected[0]), rel_tol=1e-12):
        return ""
    return "; the value is right, only the gradient is wrong"


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


def _squared_factor(e: Evidence) -> str | None:
    """Recognise a backward that multiplies by the upstream factor twice."""
    if e.eighth is None:
        return None
    pairs = [(n, e.eighth[1].get(n), g) for n, g in e.got[1].items() if g is not None and g.count_nonzero()]
    times = {name: ratio(eighth, once) for name, eighth, once in pairs if eighth is not None}
    squared = [name for name, r in times.items() if r is not None and math.isclose(r, FACTOR**2, rel_tol=SAME)]
    if not squared:
        return None
    return f"the upstream factor is squared: an eighth of the loss has 1/64 of the gradient of {', '.join(squared)}"


def _imagined(e: Evidence) -> str | None:
    """Recognise a mistake by computing the plain loss with it."""
    for sentence, compute in e.imagined:
        with suppress(Exception):
            mistaken = compute()
            # Without a mistake it is the plain loss, unless the loss under test has left a hook on a tensor
            if not sentence and Evidence(mistaken, e.expected).ratio() != 1:
                return None
            # Where the mistake changes nothing, it explains nothing
            if Evidence(mistaken, e.expected).ratio() is None and Evidence(e.got, mistaken).ratio() is not None:
                return sentence
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
    looks = f"all gradients are {spelt(times)} times the plain ones"
    if n and e.world == 1 and math.isclose(times, e.divisor / n, rel_tol=SAME):
        return f"a mean instead of a sum: {looks}, and {n} targets are not ignored"
    if rows and n != rows and math.isclose(times, e.divisor / (rows * e.world), rel_tol=SAME):
        return f"a mean over all {rows} targets, ignored padding counted: {looks}, and only {n} are not ignored"
    if e.divisor != 1 and math.isclose(times * e.world, e.divisor, rel_tol=SAME):
        return f"a sum instead of a mean: {looks}, and the step has {e.divisor:g} tokens"
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
                return f"accumulation: all gradients are {round(whole)} times the plain ones, as if never set to zero"
            return (
                f"accumulation: all gradients are 1/{round(whole)} of the plain ones, as if divided by that many "
                "micro-batches or tokens"
            )
    return None


def _rounding(e: Evidence) -> str | None:
    """Recognise differences as small as float32's rounding, where there is float64."""
    if not e.is_float64:
        return None
    pairs = [(e.got[0], e.expected[0]), *((got, plain) for _, got, plain in e.pairs())]
    errors = [float((got.to(plain) - plain).norm() / plain.norm().clamp(min=1e-300)) for got, plain in pairs]
    # Not `any(error > FLOAT32)`, which is false for nan
    if not all(error <= FLOAT32 for error in errors):
        return None
    worst = max(errors)
    said = f"float32 on the way: nothing is off by more than {worst:.1g} of its size, and float64 keeps 1e-16"
    if e.got[0].dtype == torch.float32:
        said += (
            "; the loss is float32 itself, as that of decoder-only models of transformers is, which cast their logits: "
            "take the loss of the same logits in float64, or pass rtol=1e-5"
        )
    return said


def _narrow_sums(e: Evidence) -> str | None:
    """Recognise results that a narrow dtype can hold exactly, where the plain ones are numbers it rounds."""
    pairs = [("the loss", e.got[0], e.expected[0]), *e.pairs()]
    for dtype in (torch.bfloat16, torch.float16):
        narrow = [name for name, got, plain in pairs if _fits(got, dtype) and not _fits(plain, dtype)]
        if narrow:
            kind = str(dtype).removeprefix("torch.")
            return f"sums in {kind}: {', '.join(narrow)} has no digits beyond those of {kind}"
    return None


def _rounded_reference(e: Evidence) -> str | None:
    """Recognise a plain loss that is float32 itself, where the one under test is float64."""
    if e.expected[0].dtype != torch.float32 or e.got[0].dtype != torch.float64 or not _rounding(e):
        return None
    return (
        "the plain loss casts its logits to float32, as decoder-only models of transformers do in every dtype, so it "
        "cannot show more than float32 does; compare with the loss of the same logits in float64, or pass rtol=1e-5"
    )


def _fits(numbers: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the numbers survive a cast to that dtype."""
    return bool(numbers.any()) and torch.equal(numbers.to(dtype).to(numbers.dtype), numbers)


# From the most specific to the most general: a bare ratio fits several mistakes, a lost row only one
CAUSES: tuple[Cause, ...] = (
    Cause(
        _no_tokens,
        """
    (total / tokens).backward()                  # 0 / 0
    (total / tokens.clamp(min=1)).backward()     # 0, with gradients of 0""",
    ),
    Cause(
        _random_numbers,
        """
    assert_same_loss(head, criterion, ...)           # head.training: dropout is drawn anew in every call
    assert_same_loss(head.eval(), criterion, ...)    # nothing is drawn; losses of draws cannot be compared""",
    ),
    Cause(
        _ignored_factor,
        """
    return gradient                              # in backward(ctx, upstream)
    return upstream * gradient                   # of hidden AND of every parameter""",
    ),
    Cause(
        _squared_factor,
        """
    return upstream * (upstream * gradient)      # scaled in backward and once more by a hook or a scaler
    return upstream * gradient                   # once""",
    ),
    Cause(
        silent_rank,
        """
    if tokens_here == 0: return torch.zeros(())            # or detached, or skipped: no gradient from this rank
    total * world_size / tokens_of_all_ranks               # every rank, even with 0 tokens""",
    ),
    Cause(
        _no_gradient,
        """
    loss_of(hidden.detach(), head.weight.data)   # .data, .detach(), a deep copy, a layer in a plain list
    loss_of(hidden, head.weight)                 # the tensors themselves""",
    ),
    Cause(
        dropped_rows,
        """
    for i in range(rows // chunk): ...           # 10 rows in chunks of 4 are 2 chunks
    for part in hidden.split(chunk): ...         # 3, the last one shorter""",
    ),
    Cause(
        _imagined,
        "",
    ),
    Cause(
        counted_padding,
        """
    F.cross_entropy(logits, target)                        # class 0, the padding, is a class like any other
    F.cross_entropy(logits, target, ignore_index=0)        # rows with target 0 count for nothing""",
    ),
    Cause(
        local_count,
        """
    loss = total / tokens_here                             # each rank's own mean, then averaged: a mean of means
    loss = total * world_size / sum_over_ranks(tokens)     # one division, by the tokens of the whole step""",
    ),
    Cause(
        mean_of_means,
        """
    torch.stack([mean_of(part) for part in parts]).mean()  # parts of different numbers of tokens
    sum(sum_of(part) for part in parts) / tokens           # one division, by all tokens""",
    ),
    Cause(
        world_size,
        """
    loss = total / tokens_of_all_ranks                     # DDP and FSDP then average over the ranks
    loss = total * world_size / tokens_of_all_ranks        # their average is the sum""",
    ),
    Cause(
        _wrong_divisor,
        """
    nn.CrossEntropyLoss(reduction="mean")                  # means of chunks, devices or ranks do not add up
    nn.CrossEntropyLoss(reduction="sum")                   # sums do; divide once, by the step's tokens""",
    ),
    Cause(
        reduced_twice,
        """
    dist.all_reduce(weight.grad)                           # DDP and FSDP have reduced it already
    loss.backward()                                        # their hooks reduce it, once""",
    ),
    Cause(
        _missed_tie,
        """
    head.weight = nn.Parameter(embed.weight.clone())       # equal at first, and each with a gradient of its own
    head.weight = embed.weight                             # one parameter: its gradient is the sum of all uses""",
    ),
    Cause(
        _accumulated,
        """
    for batch in batches: loss_of(batch).backward()        # .grad adds up: k calls, k times as large
    optimizer.zero_grad()                                  # between steps; within one, divide by all its tokens""",
    ),
    Cause(
        _rounded_reference,
        """
    model(**inputs, labels=labels).loss                                                      # logits.float()
    F.cross_entropy(model(**inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())   # the same, in float64""",
    ),
    Cause(
        _rounding,
        """
    hidden.float(); weight.to(torch.float32)               # a cast on the way
    hidden.to(weight.dtype)                                # sums in float32 or wider, whichever the input has""",
    ),
    Cause(
        _narrow_sums,
        """
    total = torch.zeros((), dtype=hidden.dtype)            # 256 + 1 is 256 in bfloat16
    total = torch.zeros((), dtype=torch.float32)           # sums in float32 or wider""",
    ),
)

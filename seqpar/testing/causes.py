"""Infer from a wrong loss's numbers what is probably wrong with it.

`CAUSES` is the table. Its keys are detectors (functions of the evidence that return a sentence, or None if the numbers
do not show this cause), its values the lines that show the mistake and its remedy. They are tried in the table's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from seqpar.testing.evidence import FACTOR, SAME, Evidence, besides, close, is_several, ratio, spell
from seqpar.testing.precision import EXACT, error
from seqpar.testing.row_causes import counted_padding, difference, dropped_rows, mean_of_means, repeated_rows, where_off
from seqpar.testing.share_causes import (
    last_only,
    local_count,
    means_of_parts,
    miscounted_uses,
    silent_ranks,
    unequal_reductions,
    unreduced_parts,
    world_size,
)
from seqpar.testing.smoothing_causes import other_smoothing

FLOAT32 = 1e-5
"""The relative difference up to which float32 rounding is the likely cause."""


def likely_cause(evidence: Evidence) -> str:
    """Return a sentence about what the numbers look like, and an example of the mistake with its remedy."""
    for detect, example in CAUSES.items():
        sentence = detect(evidence)
        if sentence:
            return f"Likely cause: {sentence}{_only_one(evidence)}\n{example}".rstrip()
    known = _what_is_known(evidence)
    only = "" if "only the value" in known else _only_one(evidence)
    return f"Likely cause: none of the usual ones; {known}{only}"


def _what_is_known(e: Evidence) -> str:
    """Return which gradients are right, which are multiples of the plain ones, and in which rows the others are off."""
    times = e.ratio()
    if times and not close(times, 1):
        return f"all gradients are {spell(times)} times the plain ones"
    alike: dict[str, list[str]] = {}
    for name, got, plain in e.pairs():
        alike.setdefault(where_off(e, name) or difference(got, plain), []).append(name)
    if [*alike] == ["right"]:
        return f"all gradients are right, only the value is wrong{_times_too_large(e)}"
    right = alike.pop("right", [])
    phrases = [f"the gradient of {', '.join(names)} is {said}" for said, names in alike.items()]
    if right:
        phrases.append("all others are right")
    return "; ".join(phrases) or "no gradient can be compared"


def _times_too_large(e: Evidence) -> str:
    """Return the ratio of the value to the plain one, in words, if it is a simple fraction."""
    times = float(e.got[0]) / float(e.expected[0]) if e.expected[0] else math.nan
    said = spell(times) if math.isfinite(times) else ""
    return f": {said} times the plain one" if said and "." not in said else ""


def _only_one(e: Evidence) -> str:
    """Say if only the gradients are wrong (a run would then look right from outside), or only the value."""
    values = [float(e.got[0])]
    if e.eighth is not None:
        values.append(float(e.eighth[0]) / FACTOR)
    if not all(math.isclose(value, float(e.expected[0]), rel_tol=EXACT) for value in values):
        return "; only the value is wrong" if close(e.ratio(), 1) else ""
    return "; the value is right, only the gradient is wrong"


def _no_tokens(e: Evidence) -> str | None:
    """Recognise 0 / 0."""
    if e.tokens == 0 and not torch.isfinite(e.got[0]):
        return "a division by 0 tokens: every target is ignored, and 0 / 0 is not a number"
    return None


def _random_numbers(e: Evidence) -> str | None:
    """Recognise a plain loss that is a different number in every call because of random numbers."""
    other = _other(float(e.expected[0]), e.again.values)
    if other is None or _other(e.again.seeded[0], e.again.seeded) is not None:
        return None
    return (
        "random numbers, such as those of dropout in training mode: the plain loss itself is "
        f"{float(e.expected[0]):.6g} in one call and {other:.6g} in another"
    )


def _changing_modules(e: Evidence) -> str | None:
    """Recognise a plain loss that is a different number in every call because a call changes the modules."""
    other = _other(float(e.expected[0]), e.again.values)
    if other is None:
        return None
    changed = f": {', '.join(e.again.changed)}" if e.again.changed else ""
    return (
        f"the generator or the criterion changes from call to call{changed}; the plain loss itself is "
        f"{float(e.expected[0]):.6g} in one call and {other:.6g} in another"
    )


def _changing_loss(e: Evidence) -> str | None:
    """Recognise a loss under test that is a different number in the next call."""
    if e.eighth is None:
        return None
    other = _other(float(e.got[0]), [float(e.eighth[0]) / FACTOR])
    if other is None:
        return None
    return (
        f"the loss under test changes from call to call: it is {float(e.got[0]):.6g} in one and {other:.6g} in the next"
    )


def _other(first: float, values: Sequence[float]) -> float | None:
    """Return a value that differs from the first; None if none does, or if the first is not finite."""
    others = [value for value in values if not math.isclose(value, first, rel_tol=SAME, abs_tol=SAME)]
    if not math.isfinite(first) or not others:
        return None
    return others[0]


def _no_gradient(e: Evidence) -> str | None:
    """Recognise a tensor that the loss is detached from."""
    lost = [name for name, got, _ in e.pairs() if not got.count_nonzero()]
    if not lost:
        return None
    return f"{', '.join(lost)}: no gradient at all, so the loss is detached from it, or computed with a copy of it"


def _backward_that_is_not_linear(e: Evidence) -> str | None:
    """Recognise a generator or criterion whose own gradient does not scale with the loss, such as one that clamps."""
    if e.plain_eighth is None:
        return None
    eighths = e.plain_eighth[1]
    off = [n for n, g in e.expected[1].items() if _is_there(g) and not _is_factor(eighths[n], g, FACTOR)]
    if not off:
        return None
    return (
        "the backward of the generator or the criterion is not linear, as if it clamped or normalised gradients: an "
        f"eighth of the plain loss does not have an eighth of the gradient of {', '.join(off)}"
    )


def _ignored_factor(e: Evidence) -> str | None:
    """Recognise a backward that does not multiply by the upstream factor."""
    deaf = _with_factor(e, 1)
    if not deaf:
        return None
    return f"the upstream factor is ignored: an eighth of the loss leaves the gradient of {', '.join(deaf)} as it was"


def _squared_factor(e: Evidence) -> str | None:
    """Recognise a backward that multiplies by the upstream factor twice."""
    squared = _with_factor(e, FACTOR**2)
    if not squared:
        return None
    return f"the upstream factor is squared: an eighth of the loss has 1/64 of the gradient of {', '.join(squared)}"


def _with_factor(e: Evidence, factor: float) -> list[str]:
    """Return the tensors whose gradient is multiplied by this factor when the loss is multiplied by an eighth."""
    if e.eighth is None:
        return []
    return [n for n, g in e.got[1].items() if _is_factor(e.eighth[1].get(n), g, factor)]


def _is_there(gradient: Tensor | None) -> bool:
    """Return whether there is a gradient other than 0."""
    return gradient is not None and bool(gradient.count_nonzero())


def _is_factor(gradient: Tensor | None, of: Tensor | None, factor: float) -> bool:
    """Return whether one gradient is the other times this factor."""
    return gradient is not None and of is not None and close(ratio(gradient, of), factor)


def _imagined_mistake(e: Evidence) -> str | None:
    """Recognise a mistake by computing the plain loss with it."""
    for sentence, compute in e.imagined:
        with suppress(Exception):
            mistaken = compute()
            # With no mistake this is the plain loss, unless the loss under test has left a hook on a tensor
            if not sentence and not close(Evidence(mistaken, e.expected).ratio(), 1):
                return None
            if sentence and _has_value(e, mistaken[0]):
                return sentence
            times, of_plain = (Evidence(of, mistaken).ratio() for of in (e.got, e.expected))
            # A mistake that multiplies the plain gradients explains only gradients multiplied by exactly that
            if sentence and times and (of_plain is None or (close(times, 1) and not close(of_plain, 1))):
                return f"{sentence}{besides(times)}"
    return None


def _has_value(e: Evidence, mistaken: Tensor) -> bool:
    """Return whether the value is the one with a mistake, and not the plain one."""
    got, plain = (float(of[0]) for of in (e.got, e.expected))
    return close(got, float(mistaken)) and not close(got, plain)


def _wrong_sign(e: Evidence) -> str | None:
    """Recognise the gradient of minus the loss."""
    times = e.ratio()
    if times is None or times > 0:
        return None
    return f"the wrong sign: all gradients are {spell(times)} times the plain ones"


def _wrong_divisor(e: Evidence) -> str | None:
    """Recognise a mean over the tokens or over all rows, and a missing division."""
    times = e.ratio()
    n, rows = e.tokens, e.rows
    if e.world > 1:
        n, rows = (sum(each) for each in zip(*e.counts, strict=True))
    # The plain loss is sum / divisor. A mean has divisor / n times its gradients, a mean over all rows of all ranks
    # divisor / rows times, and a sum (which DDP then averages) divisor / world times.
    if times is None or close(times, 1):
        return None
    looks = f"all gradients are {spell(times)} times the plain ones"
    if n and e.world == 1 and close(times, e.divisor / n):
        return f"a mean instead of a sum: {looks}, and {n} targets are not ignored"
    if rows and n != rows and close(times, e.divisor / rows):
        return f"a mean over all {rows} targets, ignored padding counted: {looks}, and only {n} are not ignored"
    if close(times * e.world, e.divisor):
        return f"a sum instead of a mean: {looks}, and the step has {e.divisor:g} tokens"
    return None


def _accumulate(e: Evidence) -> str | None:
    """Recognise gradients that are a whole number of times too large or too small."""
    times = e.ratio()
    if not times:
        return None
    # k micro-batches added up without a division give k times the gradient; an extra division gives 1/k
    if is_several(times):
        return f"accumulation: all gradients are {round(times)} times the plain ones, as if never set to zero"
    if is_several(1 / times):
        return (
            f"accumulation: all gradients are 1/{round(1 / times)} of the plain ones, as if divided by that many "
            "micro-batches or tokens"
        )
    return None


def _gradient_of_nothing(e: Evidence) -> str | None:
    """Recognise a gradient for something that the plain loss does not depend on."""
    plains = {name: _largest(plain) for name, plain in e.expected[1].items()}
    noise = EXACT * max(plains.values())
    off = {name: _largest(e.got[1][name]) for name, size in plains.items() if not size}
    said = [f"that of {name}, which is up to {size:.3g}" for name, size in off.items() if size > noise]
    return f"a gradient where the plain one is 0: {', '.join(said)}" if said else None


def _largest(gradient: Tensor | None) -> float:
    """Return the largest absolute value in a gradient; 0 if there is none."""
    return 0.0 if gradient is None or not gradient.numel() else float(gradient.abs().max())


def _rounding(e: Evidence) -> str | None:
    """Recognise differences as small as float32's rounding in float64 computations."""
    if e.dtype != torch.float64:
        return None
    pairs = [(e.got[0], e.expected[0]), *((got, plain) for _, got, plain in e.pairs())]
    worst = max(error(got.to(plain), plain) for got, plain in pairs)
    if not 0 < worst <= FLOAT32:
        return None
    said = f"float32 on the way: nothing is off by more than {worst:.1g} of its size, and float64 keeps 1e-16"
    if e.got[0].dtype == torch.float32:
        said += (
            "; the loss is float32 itself, as that of decoder-only models of transformers is, which cast their logits: "
            "take the loss of the same logits in float64, or pass rtol=1e-5"
        )
    return said


def _narrow_sums(e: Evidence) -> str | None:
    """Recognise results that a narrow dtype holds exactly although it would round the plain ones."""
    pairs = [("the loss", e.got[0], e.expected[0]), *e.pairs()]
    # A loss computed in a narrow dtype has that dtype's digits anyway
    for dtype in (torch.bfloat16, torch.float16) if e.dtype.itemsize > 2 else ():
        narrow = [name for name, got, plain in pairs if got.any() and _fits(got, dtype) and not _fits(plain, dtype)]
        if narrow:
            kind = str(dtype).removeprefix("torch.")
            return f"sums in {kind}: {', '.join(narrow)} has no digits beyond those of {kind}"
    return None


def _rounded_reference(e: Evidence) -> str | None:
    """Recognise a plain loss that is itself float32 while the one under test is float64."""
    if e.expected[0].dtype != torch.float32 or e.got[0].dtype != torch.float64 or not _rounding(e):
        return None
    return (
        "the plain loss casts its logits to float32, as decoder-only models of transformers do in every dtype, so it "
        "cannot show more than float32 does; compare with the loss of the same logits in float64, or pass rtol=1e-5"
    )


def _fits(numbers: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast to this dtype leaves the numbers unchanged."""
    return torch.equal(numbers.to(dtype).to(numbers.dtype), numbers)


# From the most specific to the most general: a bare ratio fits several mistakes, a lost row fits only one
CAUSES: dict[Callable[[Evidence], str | None], str] = {
    _no_tokens: """
    (total / tokens).backward()                  # 0 / 0
    (total / tokens.clamp(min=1)).backward()     # 0, with gradients of 0""",
    _random_numbers: """
    assert_same_loss(head, criterion, ...)           # head.training: dropout is drawn anew in every call
    assert_same_loss(head.eval(), criterion, ...)    # nothing is drawn; losses of draws cannot be compared""",
    _changing_modules: """
    self.step += 1; eps = self.eps * 0.9**self.step  # in forward: each chunk, and each rank, has another loss
    criterion.eps = schedule(step)                   # set between steps, by the training loop""",
    _changing_loss: """
    scale = self.average = 0.9 * self.average + ...  # kept from call to call, or drawn anew
    loss_of(hidden, target)                          # a function of its arguments alone""",
    _backward_that_is_not_linear: """
    hidden.register_hook(lambda g: g.clamp(-c, c))   # in the generator: chunks and loss scales change what it does
    clip_grad_norm_(model.parameters(), c)           # after backward, in the training loop""",
    _ignored_factor: """
    return gradient                              # in backward(ctx, upstream)
    return upstream * gradient                   # of hidden AND of every parameter""",
    _squared_factor: """
    return upstream * (upstream * gradient)      # scaled in backward and once more by a hook or a scaler
    return upstream * gradient                   # once""",
    _imagined_mistake: "",
    silent_ranks: """
    if tokens_here == 0: return torch.zeros(())            # or detached, or skipped: no gradient from this rank
    total * world_size / tokens_of_all_ranks               # every rank, even with 0 tokens""",
    _no_gradient: """
    loss_of(hidden.detach(), head.weight.data)   # .data, .detach(), a deep copy, a layer in a plain list
    loss_of(hidden, head.weight)                 # the tensors themselves""",
    dropped_rows: """
    for i in range(rows // chunk): ...           # 10 rows in chunks of 4 are 2 chunks
    for part in hidden.split(chunk): ...         # 3, the last one shorter""",
    repeated_rows: """
    for part in parts: total += loss_of(part)    # and the last one once more after the loop
    sum(loss_of(part) for part in parts)         # each part once""",
    other_smoothing: "",
    counted_padding: """
    F.cross_entropy(logits, target)                        # class 0, the padding, is a class like any other
    F.cross_entropy(logits, target, ignore_index=0)        # rows with target 0 count for nothing""",
    local_count: """
    loss = total / tokens_here                             # each rank's own mean, then averaged: a mean of means
    loss = total * world_size / sum_over_ranks(tokens)     # one division, by the tokens of the whole step""",
    mean_of_means: """
    torch.stack([mean_of(part) for part in parts]).mean()  # parts of different numbers of tokens
    sum(sum_of(part) for part in parts) / tokens           # one division, by all tokens""",
    unreduced_parts: """
    loss = model.module(batch).loss                        # past DDP's forward, which alone makes backward reduce
    loss = ddp_model(batch).loss                           # every micro-batch of every rank, through the wrapper""",
    last_only: """
    for batch in batches: optimizer.zero_grad(); ...       # between micro-batches
    optimizer.step(); optimizer.zero_grad()                # between steps""",
    means_of_parts: """
    for batch in batches: mean_of(batch).backward()        # micro-batches of different numbers of tokens
    for batch in batches: (sum_of(batch) / tokens_of_the_step).backward()""",
    _wrong_sign: """
    loss = log_p.sum()                                     # its gradient leads uphill
    loss = -log_p.sum()                                    # the negative log-likelihood""",
    world_size: """
    loss = total / tokens_of_all_ranks                     # DDP and FSDP then average over the ranks
    loss = total * world_size / tokens_of_all_ranks        # their average is the sum""",
    _wrong_divisor: """
    nn.CrossEntropyLoss(reduction="mean")                  # means of chunks, devices or ranks do not add up
    nn.CrossEntropyLoss(reduction="sum")                   # sums do; divide once, by the step's tokens""",
    unequal_reductions: """
    dist.all_reduce(weight.grad)                           # DDP and FSDP have reduced it already
    loss.backward()                                        # their hooks reduce it, once""",
    miscounted_uses: """
    head.weight = nn.Parameter(embed.weight.clone())       # equal at first, and each with a gradient of its own
    head.weight = embed.weight                             # one parameter: its gradient is the sum of all uses""",
    _accumulate: """
    for batch in batches: loss_of(batch).backward()        # .grad adds up: k calls, k times as large
    optimizer.zero_grad()                                  # between steps; within one, divide by all its tokens""",
    _gradient_of_nothing: """
    loss + penalty(unused) - penalty(unused).detach()      # adds 0 to the value, and to the gradient what is not 0
    loss + penalty(unused)                                 # a term of the loss, in the plain one as well""",
    _rounded_reference: """
    model(**inputs, labels=labels).loss                                                      # logits.float()
    F.cross_entropy(model(**inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())   # the same, in float64""",
    _rounding: """
    hidden.float(); weight.to(torch.float32)               # a cast on the way
    hidden.to(weight.dtype)                                # sums in float32 or wider, whichever the input has""",
    _narrow_sums: """
    total = torch.zeros((), dtype=hidden.dtype)            # 256 + 1 is 256 in bfloat16
    total = torch.zeros((), dtype=torch.float32)           # sums in float32 or wider""",
}

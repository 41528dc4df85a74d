"""Check losses and token scores: a row for each claim, and judges for the claims that need more than a comparison.

A judge takes a problem and returns a finding. Scores are differentiated with a random factor for each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from conformance.adapter import Implementation
from conformance.bad_target import out_of_range
from conformance.finding import Check, Finding, RaisedError, shown
from conformance.memory import Growth, memory_growth
from conformance.problem import (
    GRADIENTS,
    QUIET,
    Answer,
    Deviation,
    Problem,
    as_float64,
    asked,
    deviations,
    leaves,
    wide,
)
from seqpar.testing.evidence import FACTOR
from seqpar.testing.precision import error

ROUNDING = 1e-6
"""The relative difference allowed between two float32 gradients that should be equal."""
PRODUCTS = {f"aten::{name}{suffix}" for name in ("mm", "addmm", "bmm", "baddbmm") for suffix in ("", "_")}
NO_GRADIENTS = Finding("fail", "no gradients at all")
HALF = 0.6
"""The fraction of the matrix products that may be left when half of the rows are ignored; ideally one half."""
BOTH = ("log_prob", "entropy")
Judge = Callable[[Problem], Finding]
Settings = Mapping[str, Any]
"""Arguments of `asked`; and "feature", which an adapter must offer to be asked."""


def name_of(dtype: torch.dtype) -> str:
    """Return "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def compare(x: Problem) -> Finding:
    """Check the worst number or gradient, relative to its allowed error."""
    return verdict(x, deviations(x)[0])


def verdict(x: Problem, worst: Deviation) -> Finding:
    """Return the verdict on the largest error."""
    if math.isinf(worst.error):
        return Finding("fail", f"{worst.label}: none, or not a number", of_allowed=worst.of_allowed)
    size = f"{worst.error:.1e}"
    if worst.plain and x.options.dtype != torch.float64:
        size += f", {worst.error / worst.plain:.1f} x plain's"
    if worst.of_allowed <= 1:
        return Finding("pass", f"{worst.name} {size}", of_allowed=worst.of_allowed)
    return Finding("fail", f"{worst.label} off by {size}", of_allowed=worst.of_allowed)


def of_dtype(x: Problem) -> Finding:
    """Check all numbers and gradients: 1e-12 in float64, else at most twice plain PyTorch's own error."""
    found = deviations(x)
    order = {name: place for place, name in enumerate((*x.wanted, *GRADIENTS))}
    parts = ", ".join(f"{d.name} {d.error:.1e}" for d in sorted(found, key=lambda d: order[d.name]))
    finding = verdict(x, found[0])
    return replace(finding, figure=f"{finding.figure}; {parts}")


def second_backward(x: Problem) -> Finding:
    """Check that `backward()` after `backward(retain_graph=True)` raises an error or gives twice the gradient."""
    # With a factor, since an implementation that stores its gradients may apply the factor to them a second time
    x = replace(x, factor=FACTOR)
    tensors = x.made()
    result = x.run(tensors)
    try:
        x.backward(result, tensors, retain_graph=True)
    except RaisedError as raised:  # refused at once, as by a compiled graph that reuses its buffers
        again = x.made()
        x.backward(x.run(again), again)  # raises if even a single backward fails
        return _refused(raised)
    first = {name: t.grad.clone() for name, t in leaves(tensors).items() if t.grad is not None}
    if not first:
        return NO_GRADIENTS
    try:
        x.backward(result, tensors)
    except RaisedError as raised:  # whatever its author chose to raise
        return _refused(raised)
    # 2 g: `.grad` already has the first gradient, and the second should add the same
    off = {name: error(tensors[name].grad, 2 * g) for name, g in first.items()}
    name = max(off, key=lambda n: off[n])
    if off[name] <= ROUNDING:
        return Finding("pass", "right")
    return Finding("fail", f"{name} gradient off by {off[name]:.2g}, in silence")


def _refused(raised: RaisedError) -> Finding:
    """Return the verdict on a second backward that is an error."""
    return Finding("pass", f"raises {type(raised.__cause__).__name__}")


def of_chunk(x: Problem) -> Finding:
    """Check value and gradients with this chunk size."""
    finding = compare(x)
    return replace(finding, figure=f"{x.options.chunk} rows, {name_of(x.options.dtype)}: {finding.figure}")


def upstream(x: Problem) -> Finding:
    """Check that an eighth of the loss gives an eighth of every gradient."""
    off = factor_errors(x)
    name = max(off, key=lambda n: off[n], default="")
    if not name:
        return NO_GRADIENTS
    if off[name] <= ROUNDING:
        return Finding("pass")
    return Finding("fail", f"{name} gradient off by {off[name]:.2g}")


def factor_errors(x: Problem) -> dict[str, float]:
    """Return by name how far the gradients of an eighth of the loss are from an eighth of the loss's gradients."""
    once = x.answer()
    eighth = replace(x, factor=FACTOR).answer()
    return {n: error(eighth[n], g * FACTOR) for n, g in once.items() if n != "loss" and g is not None and g.any()}


def accumulation(x: Problem) -> Finding:
    """Check that computing two losses, then both backwards into the same `.grad`, gives the sum of both gradients."""

    def both(x: Problem) -> Answer:
        tensors = x.made()
        other = tensors | {"target": tensors["target"].flip(0)}
        losses = [x.run(tensors), x.run(other)]
        for loss in losses:
            x.backward(loss, tensors)
        gradients = {name: t.grad for name, t in leaves(tensors).items()}
        return as_float64({"loss": losses[0] + losses[1], **gradients})

    def right(x: Problem) -> Answer:
        one = x.truth()
        two = replace(x, change="targets in reverse").truth()
        return {name: one[name] + two[name] for name in one}  # type: ignore[operator]

    return verdict(x, deviations(x, both, right)[0])


def no_target(x: Problem) -> Finding:
    """Check that all numbers and gradients are 0, and that backward works, if no target counts.

    The mean, which is nan in torch, is only reported.
    """
    found = x.answer()
    figure = "0"
    if x.is_loss and "mean" in x.adapter.offers:
        mean = replace(x, options=replace(x.options, reduction="mean")).answer()["loss"]
        figure = f"mean: {math.nan if mean is None else float(mean):g} (torch: nan)"
        if x.options.reduction == "mean":
            return Finding("pass", figure)
        figure = f"0; {figure}"
    if x.used and all(found[name] is None for name in leaves(x.made())):
        return NO_GRADIENTS
    wrong = next((name for name, t in found.items() if t is not None and not bool((t == 0).all())), "")
    return Finding("fail", f"{wrong} is not 0") if wrong else Finding("pass", figure)


def padding_cost(x: Problem) -> Finding:
    """Check that ignoring half of the rows halves the work in matrix products, which is counted, not timed."""
    work = [products(replace(x, change=change)) for change in ("", "every second target is -100")]
    fraction = 1.0
    if work[0]:
        fraction = work[1] / work[0]
    return Finding("pass" if fraction <= HALF else "fail", f"{fraction:.0%} of the products for 50% of the rows")


def products(x: Problem) -> int:
    """Return the multiplications in the matrix products of one forward and backward, according to torch's profiler."""
    # So that any compilation is done
    x.answer()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        x.answer()
    # (a, b) @ (b, c) takes a x b x c multiplications, times the batch for bmm
    total = 0
    for event in record.events() or []:
        if event.name in PRODUCTS:
            # The first operand of addmm is the matrix that it adds to; `out` would come last
            first = int("add" in event.name)
            left, right = event.input_shapes[first : first + 2]
            total += math.prod(left) * right[-1]
    return total


def top(x: Problem) -> Finding:
    """Check the largest log-probabilities, in descending order, and their classes."""
    found = x.run(x.made()).top_ids
    right = x.plainly().run(wide(x.made())).top_ids
    wrong = (found != right).nonzero()
    if not len(wrong):
        return compare(x)
    row, place = wrong[0].tolist()
    what = f"token {row} has class {int(found[row, place])} at place {place}, not {int(right[row, place])}"
    return Finding("fail", what, of_allowed=math.inf)


def in_any_batch(x: Problem) -> Finding:
    """Check eight tokens alone, among others, and next to tokens with logits 40 times as large."""
    changes = ("", "40 x the hidden states of all but the first 8", "the first 8 alone")
    answer = _quiet(Problem.answer)
    cases = [replace(x, change=change) for change in changes]
    found = [verdict(case, deviations(case, answer, _quiet(Problem.truth))[0]) for case in cases]
    finding = max(found, key=lambda finding: finding.of_allowed)
    bits = [answer(case) for case in cases]
    if finding.verdict == "pass" and all(_same(bits[0], other) for other in bits[1:]):
        return replace(finding, figure="the same bits")
    return finding


def _quiet(measured: Callable[[Problem], Answer]) -> Callable[[Problem], Answer]:
    """Return a function that measures only the first tokens: their scores, and the gradient of their hidden states."""

    def first_rows(x: Problem) -> Answer:
        found = measured(x)
        return {name: t if t is None else t[:QUIET] for name, t in found.items() if name not in ("weight", "bias")}

    return first_rows


def _same(one: Answer, other: Answer) -> bool:
    """Return whether the scores are the same to the last bit."""
    pairs = [(t, other[name]) for name, t in one.items() if name not in GRADIENTS]
    return all(t is not None and u is not None and torch.equal(t, u) for t, u in pairs)


def signs(x: Problem) -> Finding:
    """Check that no log-probability is above 0 and no entropy below 0 if the target is almost certain."""
    scores = x.run(x.made())
    extremes = {"log_prob": scores.log_prob.max()}
    if "entropy" in x.wanted:
        extremes["entropy"] = scores.entropy.min()
    for name, extreme in extremes.items():
        # Not `> 0`, which is false for nan
        if not (extreme <= 0 if name == "log_prob" else extreme >= 0):
            return Finding("fail", f"{name_of(x.options.dtype)}: {name} {float(extreme):.2g}")
    return Finding("pass")


ENTROPY = ("gradients", "entropy", "entropy gradient")


def row(
    name: str, *settings: Settings, needs: Iterable[str] = (), judge: Judge = compare, is_cost: bool = False
) -> Check:
    """Return a row of a table: the problems for an adapter with these features, and how its answers are judged."""
    return Check(name, partial(worst, judge, settings or ({},)), frozenset(needs), is_cost)


def worst(judge: Judge, settings: Sequence[Settings], adapter: Implementation) -> Finding:
    """Return the finding for the problem that is farthest off, with the lines that reproduce a failure."""
    found = [_judged(judge, x) for x in problems(settings, adapter)]
    return max(found, key=lambda finding: (finding.verdict == "fail", finding.of_allowed))


def problems(settings: Sequence[Settings], adapter: Implementation) -> list[Problem]:
    """Return the problems with these settings, except those with a dtype or a feature that is not offered."""
    made = []
    for how in settings:
        needs = {how.get("feature", ""), name_of(how["dtype"]) if "dtype" in how else ""} - {""}
        if needs <= adapter.offers:
            made.append(asked(adapter, **{name: value for name, value in how.items() if name != "feature"}))
    return made


def _judged(judge: Judge, x: Problem) -> Finding:
    """Return the finding for one problem."""
    try:
        finding = judge(x)
    except RaisedError as raised:
        text = next(iter(str(raised.__cause__).strip().splitlines()), "")
        figure = f"{type(raised.__cause__).__name__}: {text[:80]}"
        finding = Finding("fail", figure, is_raised=True, of_allowed=math.inf)
    if finding.verdict == "fail":
        return replace(finding, reproduction=shown(judge, x))
    return finding


KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LARGE: Settings = {"rows": 512, "vocab_size": 1024}
NONE_LEFT = {"change": "all targets are -100"}
IGNORING = [{"ignore_index": i, "change": f"every third target is {i}"} for i in (-100, 3)]
TRUNK = {"frozen": ("hidden",)}
HEAD = {"frozen": ("weight", "bias")}
OPTIONS = {"softcap": 2.0, "temperature": 0.7, "token_temperature": True}
FEW = {"feature": "ignored", "change": "every third target is -100"}
CAPPED = {"softcap": 2.0, "change": "3 x the weight"}
CERTAIN = {"names": BOTH, "rows": 256, "change": "targets that are almost certain"}
SMALL = {"rows": 16, "change": "logits far below 0", "chunk": 1024}
MEASURED: dict[str, Any] = {"names": BOTH, "rows": Growth.ROWS, "width": Growth.WIDTH, "vocab_size": Growth.VOCAB}
MEMORY = row("memory by rows", MEASURED, needs={"CPU memory"}, judge=memory_growth, is_cost=True)


def of_dtypes(**sizes: int) -> list[Check]:
    """Return the checks of all numbers and gradients in each dtype."""
    return [row(name_of(kind), {"dtype": kind, **sizes}, needs={name_of(kind)}, judge=of_dtype) for kind in KINDS]


CHECKS: tuple[Check, ...] = (
    *of_dtypes(**LARGE),
    row(
        "any number of chunks",
        *({"dtype": kind, "chunk": n, **LARGE} for kind in (torch.float32, torch.bfloat16) for n in (8, 96, 512)),
        needs={"chunks"},
        judge=of_chunk,
    ),
    row("upstream factor", judge=upstream),
    # Hidden needs no gradient but the weight does, as in training only the head; and the reverse
    row("frozen trunk", TRUNK),
    row("frozen head", HEAD),
    row("second backward", judge=second_backward),
    row("accumulation", judge=accumulation),
    # A third of the targets, -100 or a class, must not count in the loss or in gradients
    row("ignored targets", *IGNORING),
    # The mean is over the targets that are not ignored, wherever these are
    row("mean of kept targets", {"reduction": "mean", "change": "the first 50 targets are -100"}, needs={"mean"}),
    row("all ignored", NONE_LEFT, judge=no_target),
    row("target out of range", *({"change": f"target 5 is {t}"} for t in ("V", "V + 7", "-1")), judge=out_of_range),
    # As `torch.nn.CrossEntropyLoss` defines it
    row("label smoothing", {"label_smoothing": 0.1}, needs={"smoothing"}),
    # A softcap that affects most logits: softcap tanh(z / softcap) in place of z
    row("softcap", {"softcap": 2.0}, needs={"softcap"}),
    row("padding is not projected", LARGE, judge=padding_cost, is_cost=True),
    MEMORY,
)
"""All checks of a loss, in the order of the table."""
SCORE_CHECKS: tuple[Check, ...] = (
    *of_dtypes(rows=256, vocab_size=1003),
    # With nothing else asked for
    row("log-probability", {"names": ("log_prob",)}),
    row("entropy gradient", {"names": BOTH, "used": ("entropy",)}, needs=ENTROPY),
    row("both gradients", {"names": BOTH}, needs=ENTROPY),
    # Three for each token, with only their gradient
    row("given classes", {"names": ("log_prob", "log_probs_at"), "used": ("log_probs_at",)}, needs={"given classes"}),
    row("top-k", {"names": ("log_prob",), "top_k": 5}, needs={"top-k"}, judge=top),
    # Among equally likely classes, of which whole-number logits have many, the lower one comes first
    row(
        "ties in top-k",
        *({"names": ("log_prob",), "change": "whole logits", "top_k": k} for k in (1, 5)),
        needs={"top-k", "ties"},
        judge=top,
    ),
    row("temperature", {"temperature": 0.7}, needs={"temperature"}),
    row("temperature per token", {"token_temperature": True}, needs={"token temperature"}),
    # A softcap that affects most logits, alone and before a temperature
    row("softcap", CAPPED, CAPPED | {"temperature": 0.7}, needs={"softcap"}),
    # Classes with a bias of -inf do not count in entropy and gradients, and both are finite
    row("masked classes", {"names": BOTH, "change": "a bias of -inf for one class of three"}, needs={"bias"}),
    row("ignored tokens", *IGNORING, needs={"ignored"}),
    # The second of three responses of 32 tokens
    row("empty response", {"chunk": 8, "change": "the second 32 targets are -100"}, needs={"ignored"}),
    row("mostly ignored", {"rows": 512, "change": "one target of 32 is not -100"}, needs={"ignored"}),
    row("no token", NONE_LEFT, needs={"ignored"}, judge=no_target),
    row("any chunk size", *({"chunk": n} for n in (1, 7, 64)), {"dtype": torch.bfloat16, "chunk": 7}, needs={"chunks"}),
    row("in any batch", judge=in_any_batch),
    # Plainly, and with every option that is offered
    row("frozen trunk", TRUNK, TRUNK | OPTIONS, TRUNK | OPTIONS | FEW, needs={"gradients"}),
    row("frozen head", HEAD, HEAD | OPTIONS, HEAD | OPTIONS | FEW, needs={"gradients"}),
    row("second backward", needs={"gradients"}, judge=second_backward),
    row("signs", *(CERTAIN | {"dtype": kind} for kind in KINDS[1:]), judge=signs),
    # Logits in the thousands; and whole-number logits near 512, so that only the scores are rounded
    row("extreme logits", {"change": "1000 x the hidden states"}, {"change": "whole logits about 512"}),
    # No tile size divides these vocabularies, so that padding a tile with 0 would show
    row("last tile", SMALL | {"vocab_size": 129}, SMALL | {"vocab_size": 4099}),
    MEMORY,
)
"""All checks of token scores, in the order of the table."""

"""Check a loss: a row of `CHECKS` for each claim, and the claims that take more than a comparison."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from conformance.adapter import Adapter
from conformance.bad_target import out_of_range
from conformance.checks import ROUNDING, compares, dtype_check, judge, name_of, no_gradients, second_backward, show
from conformance.finding import Check, Finding
from conformance.memory import Growth, memory_growth
from conformance.problem import Answer, Problem, as_float64, deviations, leaves
from conformance.problem import loss_problem as asked
from seqpar.testing.evidence import FACTOR
from seqpar.testing.precision import error

PRODUCTS = {f"aten::{name}{suffix}" for name in ("mm", "addmm", "bmm", "baddbmm") for suffix in ("", "_")}
HALF = 0.6
"""The fraction of the matrix products that may be left when half of the rows are ignored; ideally one half."""


def large(adapter: Adapter, dtype: torch.dtype = torch.float32, chunk: int | None = None) -> Problem:
    """Return the plain problem of 512 rows and 1,024 classes."""
    return replace(asked(adapter, dtype, chunk=chunk), rows=512, vocab_size=1024)


def any_chunks(adapter: Adapter) -> Finding:
    """Check value and gradients with chunks of 8, 96 and all rows, in float32 and bfloat16."""
    findings = []
    for kind in (torch.float32, torch.bfloat16):
        if name_of(kind) in adapter.offers:
            for rows in (8, 96, 512):
                x = large(adapter, kind, rows)
                worst = deviations(x)[0]
                findings.append((worst.of_allowed, f"{rows} rows, {name_of(kind)}: ", judge(x, worst)))
    _, where, finding = max(findings, key=lambda f: f[0])
    return replace(finding, figure=where + finding.figure)


def upstream(adapter: Adapter) -> Finding:
    """Check that an eighth of the loss has an eighth of every gradient."""
    x = asked(adapter)
    off = factor_errors(x)
    name = max(off, key=lambda n: off[n], default="")
    if not name:
        return no_gradients(x)
    if off[name] <= ROUNDING:
        return Finding("pass")
    worst = next(deviation for deviation in deviations(x) if deviation.name == name)
    return Finding("fail", f"{name} gradient off by {off[name]:.2g}", show(replace(x, factor=FACTOR), worst))


def factor_errors(x: Problem) -> dict[str, float]:
    """Return, by name, how far the gradients of an eighth of the loss are from an eighth of the loss's gradients."""
    once = x.answer()
    eighth = replace(x, factor=FACTOR).answer()
    return {n: error(eighth[n], g * FACTOR) for n, g in once.items() if n != "loss" and g is not None and g.any()}


def accumulation(adapter: Adapter) -> Finding:
    """Check that two losses, and then both backwards into one `.grad`, give the sum of both gradients."""
    x = asked(adapter)

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
        two = replace(x, change="target = target.flip(0)").truth()
        return {name: one[name] + two[name] for name in one}  # type: ignore[operator]

    finding = judge(x, deviations(x, both, right)[0])
    if not finding.reproduction:
        return finding
    other = f"other = {x.call.replace('target', 'target.flip(0)')}; loss.backward(); other.backward()"
    plainly = x.call.replace("adapter.function", "plain_loss")
    both_plain = f"{plainly} + {plainly.replace('target', 'target.flip(0)')}"
    seen = f"print(weight.grad.norm(), torch.autograd.grad({both_plain}, weight)[0].norm())  # the same"
    return replace(finding, reproduction=x.shown(other, seen))


def all_ignored(adapter: Adapter) -> Finding:
    """Check that the sum over no target is 0, with gradients of 0; report the mean, which is nan in torch."""
    x = replace(asked(adapter), change="target[:] = -100")
    found = x.answer()
    value = _number(found.pop("loss"))
    if adapter.reduction == "mean":
        return Finding("pass", f"mean: {value:g} (torch: nan)")
    if all(gradient is None for gradient in found.values()):
        return no_gradients(x)
    stray = [name for name, gradient in found.items() if gradient is not None and gradient.any()]
    if value == 0 and not stray:
        if "mean" not in adapter.offers:
            return Finding("pass", "0")
        mean = replace(x, options=replace(x.options, reduction="mean")).answer()["loss"]
        return Finding("pass", f"0; mean: {_number(mean):g} (torch: nan)")
    what = f"the sum is {value:g}"
    if stray:
        what = f"{stray[0]} gradient is not 0"
    return Finding("fail", what, x.shown("loss.backward(); print(loss, hidden.grad.abs().max())  # 0, and 0"))


def _number(loss: torch.Tensor | None) -> float:
    """Return the loss of an answer, which always has one: None stands for a gradient that does not exist."""
    return math.nan if loss is None else float(loss)


def padding_cost(adapter: Adapter) -> Finding:
    """Check that with half of the rows ignored half of the matrix products' work is left; counted, not timed."""
    x = large(adapter)
    half_of = "target[::step] = -100"
    work = [products(replace(x, change=change)) for change in ("", half_of.replace("step", "2"))]
    fraction = 1.0
    if work[0]:
        fraction = work[1] / work[0]
    if fraction <= HALF:
        return Finding("pass", f"{fraction:.0%} of the products for 50% of the rows")
    code = f"    with torch.profiler.profile(with_flops=True, record_shapes=True) as p: {half_of}; {x.step_code}"
    count = "    print(sum(e.flops for e in p.key_averages()), 'operations, every', step, 'th row ignored')"
    lines = [x.imports, x.code, "for step in (512, 2):", code, count]
    return Finding("fail", f"{fraction:.0%} of the products for 50% of the rows", "\n".join(lines))


def products(x: Problem) -> int:
    """Return the multiplications in the matrix products of one forward and backward, as torch's profiler sees them."""
    # So that compilation, if any, is over
    x.answer()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        x.answer()
    # (a, b) @ (b, c) takes a x b x c multiplications, times the batch for bmm
    total = 0
    for event in record.events() or []:
        if event.name in PRODUCTS:
            # The first operand of addmm is the matrix it adds to; `out` would come last
            first = int("add" in event.name)
            left, right = event.input_shapes[first : first + 2]
            total += math.prod(left) * right[-1]
    return total


def measured_problem(adapter: Adapter, rows: int) -> Problem:
    """Return the problem whose peak is measured."""
    return replace(asked(adapter), rows=rows, width=Growth.WIDTH, vocab_size=Growth.VOCAB)


def _of(name: str) -> frozenset[str]:
    return frozenset({name})


CHECKS: tuple[Check, ...] = (
    *(
        Check(name_of(kind), dtype_check(large, kind), _of(name_of(kind)))
        for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    ),
    Check("any number of chunks", any_chunks, _of("chunks")),
    Check("upstream factor", upstream),
    # Hidden needs no gradient but the weight does, as in training the head alone; and the reverse
    Check("frozen trunk", compares(lambda a: replace(asked(a), frozen=("hidden",)))),
    Check("frozen head", compares(lambda a: replace(asked(a), frozen=("weight", "bias")))),
    Check("second backward", lambda adapter: second_backward(asked(adapter))),
    Check("accumulation", accumulation),
    # A third of the targets, ignored by -100 or as a class, contributes to no gradient
    Check(
        "ignored targets",
        compares(lambda a: [replace(asked(a, ignore_index=i), change=f"target[::3] = {i}") for i in (-100, 3)]),
    ),
    # The mean is over the targets that are not ignored, wherever these are
    Check(
        "mean of kept targets",
        compares(lambda a: replace(asked(a, reduction="mean"), change="target[:50] = -100")),
        _of("mean"),
    ),
    Check("all ignored", all_ignored),
    Check("target out of range", lambda adapter: out_of_range(asked(adapter))),
    # As `torch.nn.CrossEntropyLoss` defines it
    Check("label smoothing", compares(lambda a: asked(a, label_smoothing=0.1)), _of("smoothing")),
    # A softcap that most logits feel: softcap tanh(z / softcap) in place of z
    Check("softcap", compares(lambda a: asked(a, softcap=2.0)), _of("softcap")),
    Check("padding is not projected", padding_cost, is_cost=True),
    Check(
        "memory by rows",
        lambda a: memory_growth(measured_problem(a, Growth.ROWS)),
        _of("CPU memory"),
        is_cost=True,
    ),
)
"""All checks of a loss, in the order of the table."""

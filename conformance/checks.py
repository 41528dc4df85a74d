"""Check an adapter: each check is about one claim and returns a finding, with five lines that show a failure."""

from __future__ import annotations

import math
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from conformance.adapter import DEVICE, Adapter, Options
from conformance.adapters import capped
from conformance.finding import Check, Finding
from conformance.inputs import Inputs
from conformance.memory import Growth, growth_finding
from conformance.problem import Answer, Deviation, as_float64, deviations, leaves
from conformance.verdicts import (
    ROUNDING,
    error_finding,
    errors_of_parts,
    no_gradients,
    second_backward_finding,
)
from seqpar.testing.evidence import FACTOR
from seqpar.testing.forks import autograd_works_in_a_fork
from seqpar.testing.precision import error

PRODUCTS = {f"aten::{name}{suffix}" for name in ("mm", "addmm", "bmm", "baddbmm") for suffix in ("", "_")}
HALF = 0.6
"""The fraction of the matrix products that may be left when half of the rows are ignored; ideally one half."""
SILENCE = 60
"""The longest time in seconds that a call with a bad target may take."""


SOFTCAP = 2.0


def _options(adapter: Adapter, dtype: torch.dtype = torch.float32, smoothing: float = 0.0) -> Options:
    return Options(dtype=dtype, reduction=adapter.reduction, label_smoothing=smoothing)


def _shown_deviation(x: Inputs, worst: Deviation, times: float = 1) -> str:
    """Return the reproduction of a wrong number or gradient, with the plain loss's own error in a comment."""
    names = [*leaves(x.made())]
    settings = f"reduction={x.options.reduction!r}"
    if x.options.label_smoothing:
        settings += f", label_smoothing={x.options.label_smoothing}"
    if x.options.ignore_index != -100:
        settings += f", ignore_index={x.options.ignore_index}"
    plain = f"F.cross_entropy({capped('F.linear(*leaves)', x.options.softcap)}, target, {settings})"
    wide = f"leaves = [t.detach().double().requires_grad_() for t in ({', '.join(names)})]; right = {plain}"
    factor = ""
    scaled = "loss"
    if times != 1:
        factor = f" * {times}"
        scaled = f"(loss{factor})"
    allowed = f"at most {worst.allowed:.2g} is right (the plain loss in that dtype: {worst.plain:.2g})"
    if worst.name == "loss":
        return x.shown(wide, f"print(float(((loss - right).abs() / right).detach()))  # {allowed}")
    own = f"{scaled}.backward(); got = {worst.name}.grad"
    if worst.error == float("inf"):
        reached = f"loss.requires_grad and {own.split(';')[0]}"
        return x.shown(reached, f"print({worst.name}.grad)  # {worst.name} needs a gradient")
    right = f"right = torch.autograd.grad(right{factor}, leaves)[{names.index(worst.name)}]"
    return x.shown(f"{wide}; {right}; {own}", f"print(float((got - right).norm() / right.norm()))  # {allowed}")


def _compared(x: Inputs, found: list[Deviation] | None = None) -> Finding:
    """Return the verdict on the worst number or gradient of the answer."""
    found = found or deviations(x)
    return error_finding(found[0], x.options.dtype, lambda: _shown_deviation(x, found[0]))


def in_dtype(dtype: torch.dtype) -> Callable[[Adapter], Finding]:
    """Return a check of value and every gradient: 1e-12 in float64, else at most twice the plain loss's own error."""

    def check(adapter: Adapter) -> Finding:
        x = Inputs(adapter, options=_options(adapter, dtype))
        found = deviations(x)
        finding = _compared(x, found)
        return replace(finding, figure=f"{finding.figure}; {errors_of_parts(found)}")

    return check


def any_chunks(adapter: Adapter) -> Finding:
    """Check value and gradients with chunks of 8, 96 and all rows, in float32 and bfloat16."""
    findings = []
    for kind in (torch.float32, torch.bfloat16):
        if str(kind).removeprefix("torch.") in adapter.offers:
            for rows in (8, 96, 512):
                x = Inputs(adapter, options=replace(_options(adapter, kind), chunk_rows=rows))
                found = deviations(x)
                where = f"{rows} rows, {str(kind).removeprefix('torch.')}: "
                findings.append((found[0].of_allowed, where, _compared(x, found)))
    _, where, finding = max(findings, key=lambda f: f[0])
    return replace(finding, figure=where + finding.figure)


def upstream(adapter: Adapter) -> Finding:
    """Check that an eighth of the loss has an eighth of every gradient."""
    x = Inputs(adapter, rows=96, vocab_size=128, options=_options(adapter))
    off = factor_errors(x)
    name = max(off, key=lambda n: off[n], default="")
    if not name:
        return no_gradients(x)
    if off[name] <= ROUNDING:
        return Finding("pass")
    return Finding("fail", f"{name} gradient off by {off[name]:.2g}", _shown_deviation(x, _worst_of(x, name), FACTOR))


def factor_errors(x: Inputs) -> dict[str, float]:
    """Return, by name, how far the gradients of an eighth of the loss are from an eighth of the loss's gradients."""
    once = x.answer()
    eighth = x.answer(FACTOR)
    return {n: error(eighth[n], g * FACTOR) for n, g in once.items() if n != "loss" and g is not None and g.any()}


def _worst_of(x: Inputs, name: str) -> Deviation:
    """Return the deviation of one number or gradient."""
    return next(deviation for deviation in deviations(x) if deviation.name == name)


def frozen_trunk(adapter: Adapter) -> Finding:
    """Check the loss where hidden needs no gradient but weight does, as in training the head alone."""
    return _compared(Inputs(adapter, rows=96, vocab_size=128, options=_options(adapter), frozen=("hidden",)))


def frozen_head(adapter: Adapter) -> Finding:
    """Check the loss where weight and bias need no gradient but hidden does, as in training the layers below."""
    return _compared(Inputs(adapter, rows=96, vocab_size=128, options=_options(adapter), frozen=("weight", "bias")))


def second_backward(adapter: Adapter) -> Finding:
    """Check that `backward()` after `backward(retain_graph=True)` raises an error or gives twice the gradient."""
    return second_backward_finding(Inputs(adapter, rows=96, vocab_size=128, options=_options(adapter)))


def accumulation(adapter: Adapter) -> Finding:
    """Check that two losses, and then both backwards into one `.grad`, give the sum of both gradients."""
    x = Inputs(adapter, rows=96, vocab_size=128, options=_options(adapter))

    def both(x: Inputs) -> Answer:
        tensors = x.made()
        other = tensors | {"target": tensors["target"].flip(0)}
        losses = [x.run(tensors), x.run(other)]
        for loss in losses:
            x.backward(loss, tensors)
        gradients = {name: t.grad for name, t in leaves(tensors).items()}
        return as_float64({"loss": losses[0] + losses[1], **gradients})

    def right(x: Inputs) -> Answer:
        one = x.truth()
        two = replace(x, change="target = target.flip(0)").truth()
        return {name: one[name] + two[name] for name in one}  # type: ignore[operator]

    finding = _compared(x, deviations(x, both, right))
    if not finding.reproduction:
        return finding
    other = f"other = {x.call.replace('target', 'target.flip(0)')}; loss.backward(); other.backward()"
    plain = "F.cross_entropy(F.linear(hidden, weight, bias), torch.cat([target, target.flip(0)]))"
    plain = f"torch.autograd.grad({plain.replace('hidden, weight', 'torch.cat([hidden, hidden]), weight')}"
    # Undoes the plain loss's mean over the 2 x 96 rows
    scale = {"sum": 192, "mean": 2}[adapter.reduction]
    seen = f"print(weight.grad.norm(), {plain} * {scale}, weight)[0].norm())  # the same"
    return replace(finding, reproduction=x.shown(other, seen))


def ignored(adapter: Adapter) -> Finding:
    """Check that a third of the targets, ignored by -100 or as a class, contributes to no gradient."""
    worst = []
    for index in (-100, 3):
        options = replace(_options(adapter), ignore_index=index)
        x = Inputs(adapter, rows=96, vocab_size=128, options=options, change=f"target[::3] = {index}")
        found = deviations(x)
        worst.append((found[0].of_allowed, x, found))
    return _compared(*max(worst, key=lambda w: w[0])[1:])


def mean(adapter: Adapter) -> Finding:
    """Check that the mean is over the targets that are not ignored, wherever these are."""
    options = replace(_options(adapter), reduction="mean")
    return _compared(Inputs(adapter, rows=96, vocab_size=128, options=options, change="target[:50] = -100"))


def all_ignored(adapter: Adapter) -> Finding:
    """Check that the sum over no target is 0, with gradients of 0; report the mean, which is nan in torch."""
    x = Inputs(adapter, rows=96, vocab_size=128, options=_options(adapter), change="target[:] = -100")
    found = x.answer()
    value = found.pop("loss")
    assert value is not None
    if adapter.reduction == "mean":
        return Finding("pass", f"mean: {float(value):g} (torch: nan)")
    if all(gradient is None for gradient in found.values()):
        return no_gradients(x)
    stray = [name for name, gradient in found.items() if gradient is not None and gradient.any()]
    if float(value) == 0 and not stray:
        return Finding("pass", _mean_of_none(x))
    what = f"the sum is {float(value):g}"
    if stray:
        what = f"{stray[0]} gradient is not 0"
    return Finding("fail", what, x.shown("loss.backward(); print(loss, hidden.grad.abs().max())  # 0, and 0"))


def _mean_of_none(x: Inputs) -> str:
    """Return the figure of a sum over no target, with the mean if there is one."""
    if "mean" not in x.adapter.offers:
        return "0"
    value = replace(x, options=replace(x.options, reduction="mean")).answer()["loss"]
    # `answer` always has a loss; None stands for a gradient that does not exist
    assert value is not None
    return f"0; mean: {float(value):g} (torch: nan)"


def out_of_range(adapter: Adapter) -> Finding:
    """Check that a target of V, V + 7 or -1 raises an error, in a process of its own, which may not survive it."""
    said = []
    # -1 would index the last class from the end, and V the memory behind the logits
    for bad in ("128", "135", "-1"):
        x = Inputs(adapter, rows=96, vocab_size=128, options=_options(adapter), change=f"target[5] = {bad}")
        outcome = _in_a_process(x)
        if outcome.startswith("gave"):
            shown = x.shown("loss.backward(); print(loss)  # a number, though target[5] is no class")
            return Finding("fail", f"target {bad} of 128 classes {outcome}, in silence", shown)
        said.append(outcome)
    return Finding("pass", said[0])


def _in_a_process(x: Inputs) -> str:
    """Return the outcome of one forward and backward: "raises ...", "gave ..." or how the process ended."""
    # Forking spares the imports. But a fork cannot use CUDA, nor always autograd, whose error would pass for an answer
    if DEVICE != "cpu" or not autograd_works_in_a_fork():
        return _in_a_new_process(x)
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(theirs, x), daemon=True)
    process.start()
    theirs.close()
    try:
        if ours.poll(SILENCE):
            return str(ours.recv())
        return f"gave no answer in {SILENCE} s"
    except EOFError:
        # The pipe ended without an answer, because the process did
        process.join()
        return f"ends the process ({process.exitcode})"
    finally:
        process.kill()


def _in_a_new_process(x: Inputs) -> str:
    """Return the same of the code that a reproduction would show."""
    # The number is read, which waits for the device
    imports, rest = x.shown("loss.backward(); print(f'gave {float(loss):.6g}')").split("\n", 1)
    command = [sys.executable, "-W", "ignore", "-c", f"{imports}\nprint('found')\n{rest}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SILENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"gave no answer in {SILENCE} s"
    if not done.stdout.startswith("found"):
        return f"gave nothing: a new process does not find {x.adapter.spec!r}; name the adapter as module:object"
    if not done.returncode:
        return done.stdout.removeprefix("found").strip()
    # "package.SomeError: what was wrong", of which CUDA's has more lines
    errors = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception))\b", done.stderr, re.MULTILINE)
    if done.returncode < 0 or not errors:
        return f"ends the process ({done.returncode})"
    return f"raises {errors[-1]}"


def _try(pipe: Connection, x: Inputs) -> None:
    """Send the outcome of one forward and backward to the parent."""
    # The parent's thread pool did not survive the fork
    torch.set_num_threads(1)
    try:
        pipe.send(f"gave {float(x.answer()['loss'] or 0):.6g}")
    except Exception as raised:
        pipe.send(f"raises {type(raised.__cause__ or raised).__name__}")


def smoothing(adapter: Adapter) -> Finding:
    """Check a label smoothing of 0.1, as `torch.nn.CrossEntropyLoss` defines it."""
    return _compared(Inputs(adapter, rows=96, vocab_size=128, options=_options(adapter, smoothing=0.1)))


def softcap(adapter: Adapter) -> Finding:
    """Check a softcap that most logits feel: softcap tanh(z / softcap) in place of z."""
    options = replace(_options(adapter), softcap=SOFTCAP)
    return _compared(Inputs(adapter, rows=96, vocab_size=128, options=options))


def padding_cost(adapter: Adapter) -> Finding:
    """Check that with half of the rows ignored half of the matrix products' work is left; counted, not timed."""
    x = Inputs(adapter, options=_options(adapter))
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


def products(x: Inputs) -> int:
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


def memory_growth(adapter: Adapter) -> Finding:
    """Check by the peaks of fresh processes at 1,024 and 4,096 rows that the logits of all rows never exist."""
    return growth_finding(measured_inputs(adapter, Growth.ROWS), "losses")


def measured_inputs(adapter: Adapter, rows: int) -> Inputs:
    """Return the problem whose peak is measured."""
    return Inputs(adapter, rows, Growth.WIDTH, Growth.VOCAB, _options(adapter))


CHECKS: tuple[Check[Adapter], ...] = (
    Check("float64", in_dtype(torch.float64), frozenset({"float64"})),
    Check("float32", in_dtype(torch.float32), frozenset({"float32"})),
    Check("bfloat16", in_dtype(torch.bfloat16), frozenset({"bfloat16"})),
    Check("float16", in_dtype(torch.float16), frozenset({"float16"})),
    Check("any number of chunks", any_chunks, frozenset({"chunks"})),
    Check("upstream factor", upstream),
    Check("frozen trunk", frozen_trunk),
    Check("frozen head", frozen_head),
    Check("second backward", second_backward),
    Check("accumulation", accumulation),
    Check("ignored targets", ignored),
    Check("mean of kept targets", mean, frozenset({"mean"})),
    Check("all ignored", all_ignored),
    Check("target out of range", out_of_range),
    Check("label smoothing", smoothing, frozenset({"smoothing"})),
    Check("softcap", softcap, frozenset({"softcap"})),
    Check("padding is not projected", padding_cost, is_cost=True),
    Check("memory by rows", memory_growth, frozenset({"CPU memory"}), is_cost=True),
)
"""All checks, in the order of the table."""

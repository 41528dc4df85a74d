"""Check losses and token scores: a row for each claim, and the claims that take more than a comparison.

Each check returns a finding, with five lines that show a failure. Every score in a loss has a random factor for each
token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from conformance.adapter import Implementation
from conformance.bad_target import out_of_range
from conformance.finding import Check, Finding, RaisedError
from conformance.memory import Growth, memory_growth
from conformance.problem import GRADIENTS, Answer, Deviation, Problem, as_float64, asked, deviations, leaves, wide
from seqpar.testing.evidence import FACTOR
from seqpar.testing.precision import error

ROUNDING = 1e-6
"""The relative difference allowed between two float32 gradients that should be equal."""
PRODUCTS = {f"aten::{name}{suffix}" for name in ("mm", "addmm", "bmm", "baddbmm") for suffix in ("", "_")}
HALF = 0.6
"""The fraction of the matrix products that may be left when half of the rows are ignored; ideally one half."""
QUIET = 8
"""The number of tokens whose scores are looked at while the rest of the batch changes."""
BOTH = ("log_prob", "entropy")
Problems = Callable[[Any], Problem | Iterable[Problem]]
"""What is asked of an adapter."""


def name_of(dtype: torch.dtype) -> str:
    """Return "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def compare(problems: Problem | Iterable[Problem]) -> Finding:
    """Return the verdict on the worst number or gradient of one or several problems, relative to what is allowed."""
    given = [problems] if isinstance(problems, Problem) else problems
    found = [(x, deviations(x)[0]) for x in given]
    return judge(*max(found, key=lambda pair: pair[1].of_allowed))


def judge(x: Problem, worst: Deviation, rows: str = "") -> Finding:
    """Return the verdict on the largest error; `rows` is the index of the rows that were looked at."""
    if math.isinf(worst.error):
        return Finding("fail", f"{worst.label}: none, or not a number", show(x, worst, rows))
    size = f"{worst.error:.1e}"
    if worst.plain and x.options.dtype != torch.float64:
        size += f", {worst.error / worst.plain:.1f} x plain's"
    if worst.of_allowed <= 1:
        return Finding("pass", f"{worst.name} {size}")
    return Finding("fail", f"{worst.label} off by {size}", show(x, worst, rows))


def show(x: Problem, worst: Deviation, rows: str = "") -> str:
    """Return the reproduction of a wrong number or gradient, with plain PyTorch's own error in a comment."""
    allowed = f"at most {worst.allowed:.1e} is right"
    if x.options.dtype != torch.float64:
        allowed += f" (plain PyTorch in that dtype: {worst.plain:.1e})"
    return x.compared(worst.name, allowed, rows)


def of_dtype(x: Problem) -> Finding:
    """Check all numbers and gradients: 1e-12 in float64, else at most twice plain PyTorch's own error."""
    found = deviations(x)
    order = {name: place for place, name in enumerate((*x.wanted(), *GRADIENTS))}
    parts = ", ".join(f"{d.name} {d.error:.1e}" for d in sorted(found, key=lambda d: order[d.name]))
    finding = judge(x, found[0])
    return replace(finding, figure=f"{finding.figure}; {parts}")


def second_backward(x: Problem) -> Finding:
    """Check that `backward()` after `backward(retain_graph=True)` raises an error or gives twice the gradient."""
    # With a factor, which an implementation that stores its gradients may apply to them once more
    x = replace(x, factor=FACTOR)
    tensors = x.made()
    result = x.run(tensors)
    try:
        x.backward(result, tensors, retain_graph=True)
    except RaisedError as raised:  # refused at once, as by a compiled graph that reuses what it stored
        again = x.made()
        x.backward(x.run(again), again)  # an error here is one of backward itself
        return _refused(raised)
    first = {name: t.grad.clone() for name, t in leaves(tensors).items() if t.grad is not None}
    if not first:
        return no_gradients(x)
    try:
        x.backward(result, tensors)
    except RaisedError as raised:  # whatever its author chose to raise
        return _refused(raised)
    # 2 g: `.grad` has the first gradient already and should have the same once more
    off = {name: error(tensors[name].grad, 2 * g) for name, g in first.items()}
    name = max(off, key=lambda n: off[n])
    if off[name] <= ROUNDING:
        return Finding("pass", "right")
    backward = f"{x.loss_code}.backward"
    twice = f"{backward}(retain_graph=True); first = {name}.grad.clone(); {backward}()"
    ratio = f"print(float({name}.grad.norm() / first.norm()))  # 2 is right; no error is raised"
    return Finding("fail", f"{name} gradient off by {off[name]:.2g}, in silence", x.shown(twice, ratio))


def _refused(raised: RaisedError) -> Finding:
    """Return the verdict on a second backward that is an error."""
    return Finding("pass", f"raises {type(raised.__cause__).__name__}")


def no_gradients(x: Problem) -> Finding:
    """Return the failure of an implementation without any gradient."""
    return Finding("fail", "no gradients at all", x.shown(f"{x.backward_code}; print(weight.grad)"))


def any_chunks(x: Problem) -> Finding:
    """Check value and gradients with chunks of 8, 96 and all rows, in float32 and bfloat16."""
    findings = []
    for kind in (torch.float32, torch.bfloat16):
        if name_of(kind) in x.adapter.offers:
            for rows in (8, 96, 512):
                of_chunk = replace(x, options=replace(x.options, dtype=kind, chunk=rows))
                worst = deviations(of_chunk)[0]
                findings.append((worst.of_allowed, f"{rows} rows, {name_of(kind)}: ", judge(of_chunk, worst)))
    _, where, finding = max(findings, key=lambda f: f[0])
    return replace(finding, figure=where + finding.figure)


def upstream(x: Problem) -> Finding:
    """Check that an eighth of the loss has an eighth of every gradient."""
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


def accumulation(x: Problem) -> Finding:
    """Check that two losses, and then both backwards into one `.grad`, give the sum of both gradients."""

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


def no_target(x: Problem) -> Finding:
    """Check that without any target that counts all numbers and gradients are 0, and backward works.

    The mean, which is nan in torch, is reported.
    """
    found = x.answer()
    figure = "0"
    if x.result == "loss" and "mean" in x.adapter.offers:
        mean = replace(x, options=replace(x.options, reduction="mean")).answer()["loss"]
        figure = f"mean: {math.nan if mean is None else float(mean):g} (torch: nan)"
        if x.options.reduction == "mean":
            return Finding("pass", figure)
        figure = f"0; {figure}"
    if x.used and all(found[name] is None for name in leaves(x.made())):
        return no_gradients(x)
    wrong = next((name for name, t in found.items() if t is not None and not bool((t == 0).all())), "")
    if not wrong:
        return Finding("pass", figure)
    backward = f"{x.backward_code}; " if x.used else ""
    return Finding("fail", f"{wrong} is not 0", x.shown(f"{backward}print({x.seen(wrong)}.abs().max())  # 0"))


def padding_cost(x: Problem) -> Finding:
    """Check that with half of the rows ignored half of the matrix products' work is left; counted, not timed."""
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


def top(x: Problem) -> Finding:
    """Check the largest log-probabilities, in descending order, and their classes."""
    found = x.run(x.made()).top_ids
    right = x.plainly().run(wide(x.made())).top_ids
    wrong = (found != right).nonzero()
    if not len(wrong):
        return compare(x)
    row, place = wrong[0].tolist()
    truth = f"torch.nn.functional.linear(hidden, weight, bias)[{row}].sort(descending=True, stable=True).indices"
    shown = x.shown(f"print(scores.top_ids[{row}], {truth}[:{x.options.top_k}])  # the same")
    what = f"token {row} has class {int(found[row, place])} at place {place}, not {int(right[row, place])}"
    return Finding("fail", what, shown)


def ties(x: Problem) -> Finding:
    """Check that of equally likely classes the lower comes first."""
    found = [top(replace(x, options=replace(x.options, top_k=k))) for k in (1, 5)]
    return max(found, key=lambda finding: finding.verdict == "fail")


def in_any_batch(x: Problem) -> Finding:
    """Check eight tokens alone, among others, and beside tokens with logits 40 times as large."""
    names = ["target", *(name for name in ("u", "h", "g", "ids") if name in x.made())]
    cut = ", ".join(f"{name}[:8]" for name in names)
    alone = f"{', '.join(names)} = {cut}; hidden = hidden.detach()[:8].requires_grad_()"
    cases = [replace(x, change=change) for change in ("", "hidden.data[8:] *= 40", alone)]
    answer = _quiet(Problem.answer)
    found = [(case, deviations(case, answer, _quiet(Problem.truth))[0]) for case in cases]
    finding = judge(*max(found, key=lambda pair: pair[1].of_allowed), rows="[:8]")
    bits = [answer(case) for case in cases]
    if finding.verdict == "pass" and all(_same(bits[0], other) for other in bits[1:]):
        return replace(finding, figure="the same bits")
    return finding


def _quiet(measured: Callable[[Problem], Answer]) -> Callable[[Problem], Answer]:
    """Return a function that measures the first tokens alone: their scores, and the gradient of their hidden states."""

    def first_rows(x: Problem) -> Answer:
        found = measured(x)
        return {name: t if t is None else t[:QUIET] for name, t in found.items() if name not in ("weight", "bias")}

    return first_rows


def _same(one: Answer, other: Answer) -> bool:
    """Return whether the scores are the same to the last bit."""
    pairs = [(t, other[name]) for name, t in one.items() if name not in GRADIENTS]
    return all(t is not None and u is not None and torch.equal(t, u) for t, u in pairs)


def signs(x: Problem) -> Finding:
    """Check that no log-probability is above 0 and no entropy below it, where the target is almost certain."""
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        if name_of(kind) not in x.adapter.offers:
            continue
        x = replace(x, options=replace(x.options, dtype=kind))
        scores = x.run(x.made())
        extremes = {"log_prob": (float(scores.log_prob.max()), "max() <= 0")}
        if "entropy" in x.wanted():
            extremes["entropy"] = (-float(scores.entropy.min()), "min() >= 0")
        for name, (extreme, right) in extremes.items():
            if not extreme <= 0:
                shown = x.shown(f"print(scores.{name}.{right.partition(' ')[0]})  # {right.partition(' ')[2]}")
                figure = f"{name_of(kind)}: {name} {extreme if name == 'log_prob' else -extreme:.2g}"
                return Finding("fail", figure, shown)
    return Finding("pass")


def large(adapter: Implementation, dtype: torch.dtype = torch.float32) -> Problem:
    """Return the problem of a dtype: a plain loss, or all scores."""
    if adapter.part == "losses":
        return asked(adapter, dtype=dtype, rows=512, vocab_size=1024)
    return asked(adapter, dtype=dtype, rows=256, vocab_size=1003)


def measured_problem(adapter: Implementation, rows: int) -> Problem:
    """Return the problem whose peak is measured."""
    return asked(adapter, BOTH, rows=rows, width=Growth.WIDTH, vocab_size=Growth.VOCAB)


def offered(adapter: Implementation, feature: str, setting: Any, otherwise: Any) -> Any:
    """Return a setting if the adapter has the feature for it."""
    return setting if feature in adapter.offers else otherwise


def also_bias(adapter: Implementation, change: str) -> str:
    """Return a change to whole numbers that rounds the bias too, if there is one."""
    return f"{change}{offered(adapter, 'bias', '; bias.data.round_()', '')}"


def given_classes(adapter: Implementation) -> Problem:
    """Return a problem of three given classes for each token, with their gradient alone."""
    x = asked(adapter, ("log_prob", "log_probs_at"))
    return replace(x, used=("log_probs_at",)) if x.used else x


def softcap(adapter: Implementation) -> list[Problem]:
    """Return problems with a softcap that most logits feel, alone and before a temperature."""
    temperatures = offered(adapter, "temperature", [1.0, 0.7], [1.0])
    return [asked(adapter, softcap=2.0, temperature=t, change="weight.data *= 3") for t in temperatures]


def chunk_sizes(adapter: Implementation) -> list[Problem]:
    """Return problems with chunks of 1, 7 and 64 in float32, and of 7 in bfloat16."""
    settings = [(torch.float32, size) for size in (1, 7, 64)]
    settings += offered(adapter, "bfloat16", [(torch.bfloat16, 7)], [])
    return [asked(adapter, dtype=dtype, chunk=size) for dtype, size in settings]


def frozen(*names: str) -> Problems:
    """Return a function that returns problems with frozen tensors: plain, and with every option that is offered."""

    def problems(adapter: Implementation) -> list[Problem]:
        temperatures = offered(adapter, "token temperature", "torch.rand(96) + 0.5", "")
        every = asked(
            adapter,
            softcap=offered(adapter, "softcap", 2.0, None),
            temperature=1.0 if temperatures else offered(adapter, "temperature", 0.7, 1.0),
            temperatures=temperatures,
            change=offered(adapter, "ignored", "target[::3] = -100", ""),
            frozen=names,
        )
        return [asked(adapter, frozen=names), every]

    return problems


def extreme_logits(adapter: Implementation) -> list[Problem]:
    """Return logits in the thousands, and integer logits about 512, of which nothing but the scores is rounded."""
    above = "hidden.data.round_()[:, 0] = 32; weight.data.mul_(2).round_()[:, 0] = 16"
    return [asked(adapter, change=change) for change in ("hidden.data *= 1000", also_bias(adapter, above))]


def last_tile(adapter: Implementation) -> list[Problem]:
    """Return vocabularies that no tile size divides, with all logits far below 0, where a tile padded with 0 shows."""
    change, chunk = "hidden.data.abs_(); weight.data.abs_().mul_(-2)", offered(adapter, "chunks", 1024, None)
    return [asked(adapter, rows=16, vocab_size=v, change=change, chunk=chunk) for v in (129, 4099)]


def row(name: str, problems: Problems, *needs: str, judged: Callable[[Any], Finding] = compare, **more: bool) -> Check:
    """Return a row of a table: what is asked of an adapter with these features, and how the answer is judged."""
    return Check(name, lambda adapter: judged(problems(adapter)), frozenset(needs), **more)


def ignoring(adapter: Implementation) -> list[Problem]:
    """Return problems in which a third of the targets, -100 or a class, is in no loss, score or gradient."""
    return [asked(adapter, ignore_index=i, change=f"target[::3] = {i}") for i in (-100, 3)]


ENTROPY = ("gradients", "entropy", "entropy gradient")
TOKENS = "torch.rand(96) + 0.5"
MASKED = "bias.data[1::3] = -torch.inf; target -= target % 3"
NONE_LEFT = "target[:] = -100"
SIXTEEN_LEFT = "target[torch.arange(512) % 32 != 12] = -100"
CERTAIN = "hidden.data *= 40; target = torch.nn.functional.linear(hidden, weight, bias).argmax(1)"
WHOLE = "hidden.data.round_(); weight.data.mul_(2).round_()"
DTYPES = tuple(
    row(name_of(kind), lambda a, kind=kind: large(a, kind), name_of(kind), judged=of_dtype)  # type: ignore[misc]
    for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
)
MEMORY = row(
    "memory by rows", lambda a: measured_problem(a, Growth.ROWS), "CPU memory", judged=memory_growth, is_cost=True
)
CHECKS: tuple[Check, ...] = (
    *DTYPES,
    row("any number of chunks", large, "chunks", judged=any_chunks),
    row("upstream factor", asked, judged=upstream),
    # Hidden needs no gradient but the weight does, as in training the head alone; and the reverse
    row("frozen trunk", lambda a: asked(a, frozen=("hidden",))),
    row("frozen head", lambda a: asked(a, frozen=("weight", "bias"))),
    row("second backward", asked, judged=second_backward),
    row("accumulation", asked, judged=accumulation),
    row("ignored targets", ignoring),
    # The mean is over the targets that are not ignored, wherever these are
    row("mean of kept targets", lambda a: asked(a, reduction="mean", change="target[:50] = -100"), "mean"),
    row("all ignored", lambda a: asked(a, change=NONE_LEFT), judged=no_target),
    row("target out of range", asked, judged=out_of_range),
    # As `torch.nn.CrossEntropyLoss` defines it
    row("label smoothing", lambda a: asked(a, label_smoothing=0.1), "smoothing"),
    # A softcap that most logits feel: softcap tanh(z / softcap) in place of z
    row("softcap", lambda a: asked(a, softcap=2.0), "softcap"),
    row("padding is not projected", large, judged=padding_cost, is_cost=True),
    MEMORY,
)
"""All checks of a loss, in the order of the table."""
SCORE_CHECKS: tuple[Check, ...] = (
    *DTYPES,
    # Where nothing else is asked for
    row("log-probability", lambda a: asked(a, ("log_prob",))),
    row("entropy gradient", lambda a: replace(asked(a, BOTH), used=("entropy",)), *ENTROPY),
    row("both gradients", lambda a: asked(a, BOTH), *ENTROPY),
    row("given classes", given_classes, "given classes"),
    row("top-k", lambda a: asked(a, ("log_prob",), top_k=5), "top-k", judged=top),
    # Integer logits have many of them
    row("ties in top-k", lambda a: asked(a, ("log_prob",), change=also_bias(a, WHOLE)), "top-k", "ties", judged=ties),
    row("temperature", lambda a: asked(a, temperature=0.7), "temperature"),
    row("temperature per token", lambda a: asked(a, temperatures=TOKENS), "token temperature"),
    row("softcap", softcap, "softcap"),
    # Classes with a bias of -inf have no part in entropy and gradients, and both are finite
    row("masked classes", lambda a: asked(a, BOTH, change=MASKED), "bias"),
    row("ignored tokens", ignoring, "ignored"),
    # The second of three responses of 32 tokens
    row(
        "empty response",
        lambda a: asked(a, chunk=offered(a, "chunks", 8, None), change="target[32:64] = -100"),
        "ignored",
    ),
    row("mostly ignored", lambda a: asked(a, rows=512, change=SIXTEEN_LEFT), "ignored"),
    row("no token", lambda a: asked(a, change=NONE_LEFT), "ignored", judged=no_target),
    row("any chunk size", chunk_sizes, "chunks"),
    row("in any batch", asked, judged=in_any_batch),
    row("frozen trunk", frozen("hidden"), "gradients"),
    row("frozen head", frozen("weight", "bias"), "gradients"),
    row("second backward", asked, "gradients", judged=second_backward),
    row("signs", lambda a: asked(a, BOTH, rows=256, change=CERTAIN), judged=signs),
    row("extreme logits", extreme_logits),
    row("last tile", last_tile),
    MEMORY,
)
"""All checks of token scores, in the order of the table."""

"""Check the scores of tokens: a row of `SCORE_CHECKS` for each claim, and the claims that take more than a comparison.

Every score in a loss has a random factor for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from conformance.adapter import Options, ScoreAdapter
from conformance.checks import compare, compares, dtype_check, judge, name_of, no_gradients, second_backward
from conformance.finding import Check, Finding
from conformance.memory import Growth, memory_growth
from conformance.problem import GRADIENTS, Answer, Problem, deviations, leaves, wide
from conformance.problem import score_problem as asked

QUIET = 8
"""The number of tokens whose scores are looked at while the rest of the batch changes."""
BOTH = ("log_prob", "entropy")


def large(adapter: ScoreAdapter, dtype: torch.dtype) -> Problem:
    """Return the problem of a dtype: all scores of 256 tokens."""
    return asked(adapter, rows=256, vocab_size=1003, options=Options(dtype=dtype))


def given_classes(adapter: ScoreAdapter) -> Problem:
    """Return a problem of three given classes for each token, with their gradient alone."""
    x = asked(adapter, ("log_prob", "log_probs_at"))
    return replace(x, used=("log_probs_at",)) if x.used else x


def ties(adapter: ScoreAdapter) -> Finding:
    """Check that of equally likely classes the lower comes first; integer logits have many of them."""
    change = _also_bias(adapter, "hidden.data.round_(); weight.data.mul_(2).round_()")
    found = [top(asked(adapter, ("log_prob",), Options(top_k=k), change=change)) for k in (1, 5)]
    return max(found, key=lambda finding: finding.verdict == "fail")


def _also_bias(adapter: ScoreAdapter, change: str) -> str:
    """Return a change to whole numbers that rounds the bias too, if there is one."""
    return f"{change}; bias.data.round_()" if "bias" in adapter.offers else change


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


def softcap(adapter: ScoreAdapter) -> list[Problem]:
    """Return problems with a softcap that most logits feel, alone and before a temperature."""
    temperatures = [1.0, 0.7] if "temperature" in adapter.offers else [1.0]
    options = [Options(softcap=2.0, temperature=temperature) for temperature in temperatures]
    return [asked(adapter, options=each, change="weight.data *= 3") for each in options]


def no_token(adapter: ScoreAdapter) -> Finding:
    """Check that without any token that counts all scores and gradients are 0, and backward works."""
    x = asked(adapter, change="target[:] = -100")
    found = x.answer()
    wrong = [name for name, t in found.items() if t is not None and not bool((t == 0).all())]
    if wrong:
        what = f"{wrong[0]}.grad" if wrong[0] in GRADIENTS else f"scores.{wrong[0]}"
        then = f"{x.backward_code}; " if x.used else ""
        return Finding("fail", f"{wrong[0]} is not 0", x.shown(f"{then}print({what}.abs().max())  # 0"))
    if x.used and all(found[name] is None for name in leaves(x.made())):
        return no_gradients(x)
    return Finding("pass", "0")


def any_chunks(adapter: ScoreAdapter) -> list[Problem]:
    """Return problems with chunks of 1, 7 and 64 in float32, and of 7 in bfloat16."""
    settings = [(torch.float32, size) for size in (1, 7, 64)]
    if "bfloat16" in adapter.offers:
        settings.append((torch.bfloat16, 7))
    return [asked(adapter, options=Options(dtype=dtype, chunk=size)) for dtype, size in settings]


def frozen(*names: str) -> Callable[[ScoreAdapter], list[Problem]]:
    """Return a function that returns problems with frozen tensors: plain, and with every option that is offered."""

    def problems(adapter: ScoreAdapter) -> list[Problem]:
        options = Options(softcap=2.0 if "softcap" in adapter.offers else None)
        change = "target[::3] = -100" if "ignored" in adapter.offers else ""
        temperature = "torch.rand(96) + 0.5" if "token temperature" in adapter.offers else ""
        if "temperature" in adapter.offers and not temperature:
            options = replace(options, temperature=0.7)
        every = asked(adapter, options=options, temperature=temperature, change=change, frozen=names)
        return [asked(adapter, frozen=names), every]

    return problems


def in_any_batch(adapter: ScoreAdapter) -> Finding:
    """Check eight tokens alone, among others, and beside tokens with logits 40 times as large."""
    x = asked(adapter)
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


def signs(adapter: ScoreAdapter) -> Finding:
    """Check that no log-probability is above 0 and no entropy below it, where the target is almost certain."""
    change = "hidden.data *= 40; target = torch.nn.functional.linear(hidden, weight, bias).argmax(1)"
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        if name_of(kind) not in adapter.offers:
            continue
        x = asked(adapter, BOTH, rows=256, options=Options(dtype=kind), change=change)
        scores = x.run(x.made())
        highest = float(scores.log_prob.max())
        if not highest <= 0:
            shown = x.shown("print(scores.log_prob.max())  # 0")
            return Finding("fail", f"{name_of(kind)}: log_prob {highest:.2g}", shown)
        if "entropy" in x.wanted() and not (lowest := float(scores.entropy.min())) >= 0:
            shown = x.shown("print(scores.entropy.min())  # >= 0")
            return Finding("fail", f"{name_of(kind)}: entropy {lowest:.2g}", shown)
    return Finding("pass")


def extreme_logits(adapter: ScoreAdapter) -> list[Problem]:
    """Return logits in the thousands, and integer logits about 512, of which nothing but the scores is rounded."""
    above = "hidden.data.round_()[:, 0] = 32; weight.data.mul_(2).round_()[:, 0] = 16"
    return [asked(adapter, change=change) for change in ("hidden.data *= 1000", _also_bias(adapter, above))]


def last_tile(adapter: ScoreAdapter) -> list[Problem]:
    """Return vocabularies that no tile size divides, with all logits far below 0, where a tile padded with 0 shows."""
    change = "hidden.data.abs_(); weight.data.abs_().mul_(-2)"
    options = Options(chunk=1024 if "chunks" in adapter.offers else None)
    return [asked(adapter, rows=16, vocab_size=v, change=change, options=options) for v in (129, 4099)]


def empty_response(adapter: ScoreAdapter) -> Problem:
    """Return three responses of 32 tokens of which the second is empty: all of its tokens are ignored."""
    options = Options(chunk=8 if "chunks" in adapter.offers else None)
    return asked(adapter, options=options, change="target[32:64] = -100")


def measured_problem(adapter: ScoreAdapter, rows: int) -> Problem:
    """Return the problem whose peak is measured."""
    return asked(adapter, BOTH, rows=rows, width=Growth.WIDTH, vocab_size=Growth.VOCAB)


def _of(*names: str) -> frozenset[str]:
    return frozenset(names)


GRADIENT = _of("gradients")
ENTROPY_GRADIENT = _of("gradients", "entropy", "entropy gradient")
MASKED = "bias.data[1::3] = -torch.inf; target -= target % 3"

SCORE_CHECKS: tuple[Check, ...] = (
    *(
        Check(name_of(kind), dtype_check(large, kind), _of(name_of(kind)))
        for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    ),
    # Where nothing else is asked for
    Check("log-probability", compares(lambda a: asked(a, ("log_prob",)))),
    Check("entropy gradient", compares(lambda a: replace(asked(a, BOTH), used=("entropy",))), ENTROPY_GRADIENT),
    Check("both gradients", compares(lambda a: asked(a, BOTH)), ENTROPY_GRADIENT),
    Check("given classes", compares(given_classes), _of("given classes")),
    Check("top-k", lambda a: top(asked(a, ("log_prob",), Options(top_k=5))), _of("top-k")),
    Check("ties in top-k", ties, _of("top-k", "ties")),
    Check("temperature", compares(lambda a: asked(a, options=Options(temperature=0.7))), _of("temperature")),
    Check(
        "temperature per token",
        compares(lambda a: asked(a, temperature="torch.rand(96) + 0.5")),
        _of("token temperature"),
    ),
    Check("softcap", compares(softcap), _of("softcap")),
    # Classes with a bias of -inf have no part in entropy and gradients, and both are finite
    Check("masked classes", compares(lambda a: asked(a, BOTH, change=MASKED)), _of("bias")),
    # A third of the tokens, ignored by -100 or as a class, has scores of 0 and no gradient
    Check(
        "ignored tokens",
        compares(lambda a: [asked(a, options=Options(ignore_index=i), change=f"target[::3] = {i}") for i in (-100, 3)]),
        _of("ignored"),
    ),
    Check("empty response", compares(empty_response), _of("ignored")),
    # All but sixteen
    Check(
        "mostly ignored",
        compares(lambda a: asked(a, rows=512, change="target[torch.arange(512) % 32 != 12] = -100")),
        _of("ignored"),
    ),
    Check("no token", no_token, _of("ignored")),
    Check("any chunk size", compares(any_chunks), _of("chunks")),
    Check("in any batch", in_any_batch),
    Check("frozen trunk", compares(frozen("hidden")), GRADIENT),
    Check("frozen head", compares(frozen("weight", "bias")), GRADIENT),
    Check("second backward", lambda adapter: second_backward(asked(adapter)), GRADIENT),
    Check("signs", signs),
    Check("extreme logits", compares(extreme_logits)),
    Check("last tile", compares(last_tile)),
    Check(
        "memory by rows",
        lambda a: memory_growth(measured_problem(a, Growth.ROWS)),
        _of("CPU memory"),
        is_cost=True,
    ),
)
"""All checks of token scores, in the order of the table."""

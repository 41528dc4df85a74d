"""Check an adapter of token scores: each check is about one claim and returns a finding, with five lines of code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from conformance.finding import Check, Finding
from conformance.memory import Growth, growth_finding
from conformance.problem import GRADIENTS, Answer, Deviation, deviations, leaves
from conformance.score_adapter import ScoreAdapter, ScoreOptions
from conformance.score_adapters import plain
from conformance.score_inputs import ScoreInputs, asked
from conformance.verdicts import error_finding, no_gradients, second_backward_finding

QUIET = 8
"""The number of tokens whose scores are looked at while the rest of the batch changes."""


def _verdict(x: ScoreInputs, found: list[Deviation] | None = None, rows: str = "") -> Finding:
    """Return the verdict on the worst score or gradient; `rows` is the index of the rows that were looked at."""
    worst = (found or deviations(x))[0]
    return error_finding(worst, x.options.dtype, lambda: _shown_deviation(x, worst, rows))


def _shown_deviation(x: ScoreInputs, worst: Deviation, rows: str = "") -> str:
    """Return the reproduction of a wrong score or gradient, with plain PyTorch's own error in a comment."""
    what = f"scores.{worst.name}{rows}"
    if worst.name in GRADIENTS:
        what = f"{worst.name}.grad{rows}"
    backward = f"; {x.backward_code}" if x.used else ""
    tensors = x.made()
    names = ", ".join(leaves(tensors))
    wide = f"{names} = (t.detach().double().requires_grad_() for t in ({names},))"
    right = f"scores = {plain(x.options_of(tensors), reference=True)}{backward}; right = {what}"
    allowed = f"at most {worst.allowed:.1e} is right"
    if x.options.dtype != torch.float64:
        allowed += f" (plain PyTorch in that dtype: {worst.plain:.1e})"
    compare = f"print(got if got is None else float(((got - right).norm() / right.norm()).detach()))  # {allowed}"
    return "\n".join([x.imports, x.code, f"{x.step_code}; got = {what}", f"{wide}; {right}", compare])


def _worst(problems: list[ScoreInputs]) -> Finding:
    """Return the finding of the problem with the largest error, relative to what is allowed."""
    found = [(x, deviations(x)) for x in problems]
    return _verdict(*max(found, key=lambda pair: pair[1][0].of_allowed))


def in_dtype(dtype: torch.dtype) -> Callable[[ScoreAdapter], Finding]:
    """Return a check of all scores and gradients: 1e-12 in float64, else at most twice plain PyTorch's own error."""
    return lambda adapter: _verdict(asked(adapter, rows=256, vocab_size=1003, options=ScoreOptions(dtype=dtype)))


def log_prob(adapter: ScoreAdapter) -> Finding:
    """Check the log-probability and its gradient, with a factor for each token, where nothing else is asked for."""
    return _verdict(asked(adapter, ("log_prob",)))


def both_gradients(adapter: ScoreAdapter) -> Finding:
    """Check log-probability and entropy in one loss, each with a factor for each token."""
    return _verdict(asked(adapter, ("log_prob", "entropy")))


def entropy_gradient(adapter: ScoreAdapter) -> Finding:
    """Check the entropy and its gradient alone, with a factor for each token."""
    return _verdict(replace(asked(adapter, ("log_prob", "entropy")), used=("entropy",)))


def given_classes(adapter: ScoreAdapter) -> Finding:
    """Check the log-probabilities of three given classes for each token, and their gradient alone."""
    x = asked(adapter, ("log_prob", "log_probs_at"))
    if not x.used:
        return _verdict(x)
    return _verdict(replace(x, used=("log_probs_at",)))


def top(adapter: ScoreAdapter) -> Finding:
    """Check the five largest log-probabilities, in descending order, and their classes."""
    x = asked(adapter, ("log_prob",), options=ScoreOptions(top_k=5))
    return _top_finding(x)


def ties(adapter: ScoreAdapter) -> Finding:
    """Check that of equally likely classes the lower comes first; integer logits have many of them."""
    change = "hidden.data.round_(); weight.data.mul_(2).round_()"
    if "bias" in adapter.offers:
        change += "; bias.data.round_()"
    findings = []
    for top_k in (1, 5):
        x = asked(adapter, ("log_prob",), options=ScoreOptions(top_k=top_k), change=change)
        findings.append(_top_finding(x))
    return max(findings, key=lambda finding: finding.verdict == "fail")


def _top_finding(x: ScoreInputs) -> Finding:
    """Return the verdict on values, classes and their order."""
    found = x.run(x.made()).top_ids
    right = x.plainly().run(_doubled(x.made())).top_ids
    assert found is not None
    assert right is not None
    wrong = (found != right).nonzero()
    if not len(wrong):
        return _verdict(x)
    row, place = wrong[0].tolist()
    truth = f"torch.nn.functional.linear(hidden, weight, bias)[{row}].sort(descending=True, stable=True).indices"
    shown = x.shown(f"print(scores.top_ids[{row}], {truth}[:{x.options.top_k}])  # the same")
    what = f"token {row} has class {int(found[row, place])} at place {place}, not {int(right[row, place])}"
    return Finding("fail", what, shown)


def _doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the leaves in float64."""
    return tensors | {name: t.detach().double() for name, t in leaves(tensors).items()}


def temperature(adapter: ScoreAdapter) -> Finding:
    """Check a temperature of 0.7."""
    return _verdict(asked(adapter, options=ScoreOptions(temperature=0.7)))


def token_temperature(adapter: ScoreAdapter) -> Finding:
    """Check a temperature of its own, from 0.5 to 1.5, for each token."""
    return _verdict(asked(adapter, temperature="torch.rand(96) + 0.5"))


def softcap(adapter: ScoreAdapter) -> Finding:
    """Check a softcap that most logits feel, alone and before a temperature."""
    change = "weight.data *= 3"
    problems = [asked(adapter, options=ScoreOptions(softcap=2.0), change=change)]
    if "temperature" in adapter.offers:
        problems.append(asked(adapter, options=ScoreOptions(softcap=2.0, temperature=0.7), change=change))
    return _worst(problems)


def masked_classes(adapter: ScoreAdapter) -> Finding:
    """Check that classes with a bias of -inf have no part in entropy and gradients, and that both are finite."""
    change = "bias.data[1::3] = -torch.inf; target -= target % 3"
    return _verdict(asked(adapter, ("log_prob", "entropy"), change=change))


def ignored(adapter: ScoreAdapter) -> Finding:
    """Check that a third of the tokens, ignored by -100 or as a class, has scores of 0 and no gradient."""
    return _worst(
        [
            asked(adapter, options=ScoreOptions(ignore_index=index), change=f"target[::3] = {index}")
            for index in (-100, 3)
        ]
    )


def empty_response(adapter: ScoreAdapter) -> Finding:
    """Check three responses of 32 tokens of which the second is empty: all of its tokens are ignored."""
    size = None
    if "chunks" in adapter.offers:
        size = 8
    return _verdict(asked(adapter, options=ScoreOptions(chunk_size=size), change="target[32:64] = -100"))


def mostly_ignored(adapter: ScoreAdapter) -> Finding:
    """Check a batch of 512 tokens of which all but sixteen are ignored."""
    return _verdict(asked(adapter, rows=512, change="target[torch.arange(512) % 32 != 12] = -100"))


def no_token(adapter: ScoreAdapter) -> Finding:
    """Check that without any token that counts all scores and gradients are 0, and backward works."""
    x = asked(adapter, change="target[:] = -100")
    found = x.answer()
    wrong = [name for name, t in found.items() if t is not None and not bool((t == 0).all())]
    if wrong:
        return Finding("fail", f"{wrong[0]} is not 0", x.shown(f"{_then(x)}print({_read(wrong[0])}.abs().max())  # 0"))
    if x.used and all(found[name] is None for name in leaves(x.made())):
        return no_gradients(x)
    return Finding("pass", "0")


def _then(x: ScoreInputs) -> str:
    """Return the code of backward, if there is one, before another statement."""
    if not x.used:
        return ""
    return f"{x.backward_code}; "


def _read(name: str) -> str:
    """Return the code that reads a score or a gradient."""
    if name in GRADIENTS:
        return f"{name}.grad"
    return f"scores.{name}"


def any_chunks(adapter: ScoreAdapter) -> Finding:
    """Check all scores and gradients with chunks of 1, 7 and 64 in float32, and of 7 in bfloat16."""
    settings = [(torch.float32, size) for size in (1, 7, 64)]
    if "bfloat16" in adapter.offers:
        settings.append((torch.bfloat16, 7))
    return _worst([asked(adapter, options=ScoreOptions(dtype=dtype, chunk_size=size)) for dtype, size in settings])


def frozen_trunk(adapter: ScoreAdapter) -> Finding:
    """Check all scores and gradients where hidden needs none but weight does."""
    return _worst(_with_options(adapter, ("hidden",)))


def frozen_head(adapter: ScoreAdapter) -> Finding:
    """Check all scores and gradients where weight and bias need none but hidden does."""
    return _worst(_with_options(adapter, ("weight", "bias")))


def _with_options(adapter: ScoreAdapter, frozen: tuple[str, ...]) -> list[ScoreInputs]:
    """Return problems with frozen tensors: plain, and with every option that is offered."""
    options = ScoreOptions()
    temperature = ""
    change = ""
    if "temperature" in adapter.offers:
        options = replace(options, temperature=0.7)
    if "token temperature" in adapter.offers:
        options = replace(options, temperature=1.0)
        temperature = "torch.rand(96) + 0.5"
    if "softcap" in adapter.offers:
        options = replace(options, softcap=2.0)
    if "ignored" in adapter.offers:
        change = "target[::3] = -100"
    every = asked(adapter, options=options, temperature=temperature, change=change, frozen=frozen)
    return [asked(adapter, frozen=frozen), every]


def second_backward(adapter: ScoreAdapter) -> Finding:
    """Check that `backward()` after `backward(retain_graph=True)` raises an error or gives twice the gradient."""
    return second_backward_finding(asked(adapter))


def in_any_batch(adapter: ScoreAdapter) -> Finding:
    """Check eight tokens alone, among others, and beside tokens with logits 40 times as large."""
    slices = "target, {names} = target[:8], {cut}; hidden = hidden.detach()[:8].requires_grad_()"
    x = asked(adapter)
    further = [name for name in ("u", "h", "g", "ids") if name in x.made()]
    alone = slices.format(names=", ".join(further), cut=", ".join(f"{name}[:8]" for name in further))
    if not further:
        alone = "target = target[:8]; hidden = hidden.detach()[:8].requires_grad_()"
    cases = [replace(x, change=change) for change in ("", "hidden.data[8:] *= 40", alone)]
    answer = _quiet(ScoreInputs.answer)
    found = [(case, deviations(case, answer, _quiet(ScoreInputs.truth))) for case in cases]
    finding = _verdict(*max(found, key=lambda pair: pair[1][0].of_allowed), rows="[:8]")
    bits = [answer(case) for case in cases]
    if finding.verdict == "pass" and all(_same(bits[0], other) for other in bits[1:]):
        return replace(finding, figure="the same bits")
    return finding


def _quiet(measured: Callable[[ScoreInputs], Answer]) -> Callable[[ScoreInputs], Answer]:
    """Return a function that measures the first tokens alone: their scores, and the gradient of their hidden states."""

    def first_rows(x: ScoreInputs) -> Answer:
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
        if str(kind).removeprefix("torch.") not in adapter.offers:
            continue
        x = asked(adapter, ("log_prob", "entropy"), rows=256, options=ScoreOptions(dtype=kind), change=change)
        scores = x.run(x.made())
        highest = float(scores.log_prob.max())
        where = str(kind).removeprefix("torch.")
        if not highest <= 0:
            return Finding("fail", f"{where}: log_prob {highest:.2g}", x.shown("print(scores.log_prob.max())  # 0"))
        if scores.entropy is not None and "entropy" in x.wanted():
            lowest = float(scores.entropy.min())
            if not lowest >= 0:
                return Finding("fail", f"{where}: entropy {lowest:.2g}", x.shown("print(scores.entropy.min())  # >= 0"))
    return Finding("pass")


def extreme_logits(adapter: ScoreAdapter) -> Finding:
    """Check logits in the thousands, and integer logits about 512, of which nothing but the scores is rounded."""
    above = "hidden.data.round_()[:, 0] = 32; weight.data.mul_(2).round_()[:, 0] = 16"
    if "bias" in adapter.offers:
        above += "; bias.data.round_()"
    return _worst([asked(adapter, change=change) for change in ("hidden.data *= 1000", above)])


def last_tile(adapter: ScoreAdapter) -> Finding:
    """Check vocabularies that no tile size divides, with all logits far below 0, where a tile padded with 0 shows."""
    change = "hidden.data.abs_(); weight.data.abs_().mul_(-2)"
    size = None
    if "chunks" in adapter.offers:
        size = 1024
    options = ScoreOptions(chunk_size=size)
    return _worst([asked(adapter, rows=16, vocab_size=v, change=change, options=options) for v in (129, 4099)])


def memory_growth(adapter: ScoreAdapter) -> Finding:
    """Check by the peaks of fresh processes at 1,024 and 4,096 rows that the logits of all rows never exist."""
    return growth_finding(measured_inputs(adapter, Growth.ROWS), "scores")


def measured_inputs(adapter: ScoreAdapter, rows: int) -> ScoreInputs:
    """Return the problem whose peak is measured."""
    names = ("log_prob", "entropy")
    return asked(adapter, names, rows=rows, width=Growth.WIDTH, vocab_size=Growth.VOCAB)


GRADIENT = frozenset({"gradients"})
ENTROPY_GRADIENT = GRADIENT | {"entropy", "entropy gradient"}
IGNORED = frozenset({"ignored"})

SCORE_CHECKS: tuple[Check[ScoreAdapter], ...] = (
    Check("float64", in_dtype(torch.float64), frozenset({"float64"})),
    Check("float32", in_dtype(torch.float32), frozenset({"float32"})),
    Check("bfloat16", in_dtype(torch.bfloat16), frozenset({"bfloat16"})),
    Check("float16", in_dtype(torch.float16), frozenset({"float16"})),
    Check("log-probability", log_prob),
    Check("entropy gradient", entropy_gradient, ENTROPY_GRADIENT),
    Check("both gradients", both_gradients, ENTROPY_GRADIENT),
    Check("given classes", given_classes, frozenset({"given classes"})),
    Check("top-k", top, frozenset({"top-k"})),
    Check("ties in top-k", ties, frozenset({"top-k", "ties"})),
    Check("temperature", temperature, frozenset({"temperature"})),
    Check("temperature per token", token_temperature, frozenset({"token temperature"})),
    Check("softcap", softcap, frozenset({"softcap"})),
    Check("masked classes", masked_classes, frozenset({"bias"})),
    Check("ignored tokens", ignored, IGNORED),
    Check("empty response", empty_response, IGNORED),
    Check("mostly ignored", mostly_ignored, IGNORED),
    Check("no token", no_token, IGNORED),
    Check("any chunk size", any_chunks, frozenset({"chunks"})),
    Check("in any batch", in_any_batch),
    Check("frozen trunk", frozen_trunk, GRADIENT),
    Check("frozen head", frozen_head, GRADIENT),
    Check("second backward", second_backward, GRADIENT),
    Check("signs", signs),
    Check("extreme logits", extreme_logits),
    Check("last tile", last_tile),
    Check("memory by rows", memory_growth, frozenset({"CPU memory"}), is_cost=True),
)
"""All checks of token scores, in the order of the table."""

"""Where the kit draws the line: on this side a loss is right, on that side wrong, and small cases are drawn as said."""

import importlib.metadata
import logging
import math
import os
import sys
import time
import warnings
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import Phase, given, settings

from seqpar.testing import precision, strategies
from seqpar.testing.causes import likely_cause
from seqpar.testing.conformance import CHECKS, KNOWN, KNOWN_LAYOUTS, KNOWN_SCORES, Adapter, layout_checks
from seqpar.testing.conformance import checks as checks_module
from seqpar.testing.conformance.__main__ import main
from seqpar.testing.conformance.adapter import Options, loaded, quietly, why_missing
from seqpar.testing.conformance.finding import Finding
from seqpar.testing.conformance.inputs import Inputs, plain_loss
from seqpar.testing.conformance.layout_adapter import LAYOUTS
from seqpar.testing.conformance.layout_cases import IGNORED, SHAPE, Answer, Case, cases
from seqpar.testing.conformance.layout_causes import _scale
from seqpar.testing.conformance.layout_checks import Fault, _ended, _smallest, fault
from seqpar.testing.conformance.memory import Growth
from seqpar.testing.conformance.problem import Deviation, deviations
from seqpar.testing.conformance.report import installed_version
from seqpar.testing.conformance.score_inputs import ScoreInputs
from seqpar.testing.conformance.verdicts import error_finding
from seqpar.testing.evidence import Evidence, ratio, same, spelt
from seqpar.testing.ranks import RankError

pytestmark = pytest.mark.unswitched

BY_NAME = {check.name: check for check in CHECKS}
JUST = pytest.mark.parametrize(("times", "right"), [(0.95, True), (1.05, False)])
"""How far a number is off, relative to what is allowed, and whether it is still right."""


def wide(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_an_error_is_relative_to_the_truth_and_infinite_without_a_number():
    assert precision.error(wide(3.0, 4.0), wide(0.0, 4.0)) == 0.75
    assert precision.error(wide(0.0, 4.0), wide(3.0, 4.0)) == 0.6
    assert precision.error(None, wide(1.0)) == precision.error(wide(math.nan), wide(1.0)) == math.inf
    assert precision.error(wide(0.0), wide(0.0)) == 0


@JUST
@pytest.mark.parametrize(
    ("plain", "allowed"), [([1e-3, 4e-3, 2e-3], 8e-3), ([0.0], 2 * torch.finfo(torch.float32).eps)]
)
@pytest.mark.parametrize("of_value", [True, False])
def test_without_float64_twice_the_largest_error_of_plain_pytorch_is_allowed(of_value, plain, allowed, times, right):
    """And two units in the last place of float32."""

    def result(off):
        value, gradient = (1.0 + off, 2.0) if of_value else (1.0, 2.0 + 2.0 * off)
        return wide(value)[0], {"w": wide(gradient)}

    said = precision.farther_than_twice_plain(result(times * allowed), [result(one) for one in plain], result(0.0))
    if right:
        assert not said
    else:
        assert said.startswith("the loss is off by" if of_value else "the gradient of w is off by")


def test_no_gradient_is_a_gradient_of_zero():
    value = wide(1.0)[0]
    nothing, zero, one = (value, {"w": None}), (value, {"w": wide(0.0)}), (value, {"w": wide(1.0)})
    assert not precision.farther_than_twice_plain(nothing, [nothing], nothing)
    assert not precision.farther_than_twice_plain(zero, [zero], nothing)
    assert precision.farther_than_twice_plain(one, [nothing], nothing)
    assert precision.farther_than_twice_plain(nothing, [one], one)


@pytest.mark.parametrize(
    ("dtype", "own", "allowed"),
    [
        (torch.float64, (1e-3, 3e-3, 2e-3), 1e-12),
        (torch.bfloat16, (1e-3, 3e-3, 2e-3), 6e-3),
        (torch.bfloat16, (0.0, 0.0, 0.0), 2.0**-8),
        (torch.float32, (0.0, 0.0, 0.0), 2.0**-24),
    ],
)
def test_the_allowed_error_is_twice_the_largest_of_three_draws_of_plain_pytorch(dtype, own, allowed):
    mine = Adapter("mine", plain_loss)
    x = Inputs(mine, options=checks_module._options(mine, dtype))

    def measured(x):
        off = 0.25 if x.adapter is mine else own[x.seed]
        return {"loss": wide(1 + off), "weight": wide(1.0)}

    worst, right = deviations(x, measured, lambda _: {"loss": wide(1.0), "weight": wide(1.0)})
    assert (worst.name, right.name, right.error) == ("loss", "weight", 0)
    assert worst.error == pytest.approx(0.25)
    assert (worst.plain, worst.allowed) == pytest.approx((max(own), allowed))
    assert worst.of_allowed == pytest.approx(0.25 / allowed)


def test_the_verdict_on_an_error_says_its_size_and_that_of_plain_pytorch():
    def verdict(name, error, plain=1e-3, allowed=2e-3, dtype=torch.float32):
        return error_finding(Deviation(name, error, plain, allowed), dtype, lambda: "shown")

    assert verdict("loss", 2e-3) == Finding("pass", "loss 2.0e-03, 2.0 x plain's")
    assert verdict("hidden", 3e-3) == Finding("fail", "hidden gradient off by 3.0e-03, 3.0 x plain's", "shown")
    assert verdict("loss", 2.001e-3).verdict == "fail"
    assert verdict("loss", 1e-3, plain=0.0) == Finding("pass", "loss 1.0e-03")
    assert verdict("bias", 1e-3, dtype=torch.float64) == Finding("pass", "bias 1.0e-03")
    assert verdict("weight", math.inf) == Finding("fail", "weight gradient: none, or not a number", "shown")


@JUST
def test_numbers_are_multiples_up_to_a_millionth(times, right):
    off = times * 1e-6
    assert same(wide(1 + off, 2 + 2 * off), wide(1.0, 2.0)) == right
    # Beside the direction of the plain gradient, and relative to its size
    found = ratio(wide(30.0, 30 * off), wide(10.0, 0.0))
    assert found == (pytest.approx(3) if right else None)
    assert ratio(wide(-3.0, -6.0), wide(1.0, 2.0)) == -3
    assert spelt((1 + off) * 2 / 7) == ("2/7" if right else "0.285715")


@JUST
def test_a_second_backward_and_a_factor_may_be_off_by_a_millionth(times, right, monkeypatch):
    class SecondTime(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, upstream):
            SecondTime.calls += 1
            # Of two gradients that are added, one: together they are off by half
            return upstream * (1 + (2e-6 * times if SecondTime.calls == 2 else 0))

    class OfAFactor(SecondTime):
        @staticmethod
        def backward(ctx, upstream):
            return upstream * (1 + (1e-6 * times if float(upstream) == 0.125 else 0))

    for name, wrong in (("second backward", SecondTime), ("upstream factor", OfAFactor)):
        finding = BY_NAME[name](Adapter("wrong", lambda *given, wrong=wrong: wrong.apply(plain_loss(*given))))
        assert finding.verdict == ("pass" if right else "fail"), finding


@pytest.mark.parametrize(
    ("work", "verdict"), [((100, 60), "pass"), ((100, 61), "fail"), ((100, 100), "fail"), ((0, 0), "fail")]
)
def test_half_of_the_rows_may_need_six_tenths_of_the_products(work, verdict, monkeypatch):
    left = iter(work)
    monkeypatch.setattr(checks_module, "products", lambda x: next(left))
    finding = BY_NAME["padding is not projected"](KNOWN["torch"])
    share = work[1] / work[0] if work[0] else 1
    assert (finding.verdict, finding.figure) == (verdict, f"{share:.0%} of the products for 50% of the rows")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_call_that_gives_no_answer_in_time_is_a_failure(device, monkeypatch):
    """In a fork, and in a new process, as beside a GPU."""
    monkeypatch.setattr(checks_module, "DEVICE", device)
    monkeypatch.setattr(checks_module, "SILENCE", 0.1)
    finding = BY_NAME["target out of range"](Adapter("sleeps", lambda *_: time.sleep(60)))
    assert finding.verdict == "fail"
    assert finding.figure == "target 128 of 128 classes gave no answer in 0.1 s, in silence"


# Causes


def evidence(times, off=0.0, more=(), **facts):
    """A loss and gradients, of weights and of three tokens' hidden states, that are a multiple of the plain ones."""
    plain = {"w": wide(1.0, 3.0, 2.0), "hidden": wide(*[1.0, 2.0, 3.0, 5.0, 7.0, 4.0]).view(3, 2)}
    got = {name: g * times * (1 + off) for name, g in plain.items()} | dict(more)
    value = wide(math.pi)[0]
    return Evidence((value * times * (1 + off), got), (value, plain), per_token=frozenset({"hidden"}), **facts)


def cause_of(found):
    return likely_cause(found).removeprefix("Likely cause: ").splitlines()[0]


HALVES = {"hidden": wide(1.0, 2.0, 3.0, 5.0, 0.0, 0.0).view(3, 2)}
NONE = "none of the usual ones; the gradients are not a simple multiple or fraction of the plain ones"


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (evidence(1 / 3, tokens=3, rows=6), "a mean instead of a sum: all gradients are 1/3 times the plain ones"),
        (evidence(1 / 6, tokens=3, rows=6), "a mean over all 6 targets, ignored padding counted"),
        (evidence(5 / 12, tokens=3, rows=6, divisor=5, world=2), "a mean over all 6 targets, ignored padding counted"),
        (evidence(1 / 6, tokens=6, rows=6), "a mean instead of a sum: all gradients are 1/6 times the plain ones"),
        (
            evidence(7, divisor=7),
            "a sum instead of a mean: all gradients are 7 times the plain ones, and the step has",
        ),
        (evidence(7 / 2, divisor=7, world=2), "a sum instead of a mean: all gradients are 7/2 times the plain ones"),
        (evidence(2), "accumulation: all gradients are 2 times the plain ones, as if never set to zero"),
        (evidence(1 / 2), "accumulation: all gradients are 1/2 of the plain ones"),
        (evidence(3 / 2), NONE),
        (evidence(3, off=1.2e-6), NONE),
        (evidence(3, off=0.8e-6), "accumulation: all gradients are 3 times the plain ones"),
        (evidence(2, world=2), "the world size: all gradients are 2 times the plain ones, multiplied by the number of"),
        (
            evidence(1 / 2, world=2),
            "the world size: all gradients are 1/2 times the plain ones, averaged over the rank",
        ),
        (evidence(1, off=0.9e-5), "float32 on the way: nothing is off by more than 9e-06 of its size"),
        (evidence(1, off=0.9e-5, is_float64=False), NONE),
        (evidence(1, off=1.1e-5), NONE),
        (evidence(math.nan, tokens=0), "a division by 0 tokens: every target is ignored"),
        (evidence(math.nan, tokens=1), NONE),
        (
            evidence(1.7, again=[math.pi, 3.0]),
            "random numbers, such as those of dropout in training mode: the plain lo",
        ),
        (evidence(1.7, again=[math.pi, math.pi * (1 + 0.9e-6)]), NONE),
        (evidence(1, more={"w": wide(0.0, 0.0, 0.0)}), "w: no gradient at all, so the loss is detached from it"),
        (
            evidence(1, more=HALVES),
            "the last chunk is dropped: hidden has no gradient in its last 1 rows, of 3, and the",
        ),
        (evidence(1, more={"hidden": HALVES["hidden"].roll(-1, 0)}), NONE),
        (
            evidence(1, world=2, more={"w": wide(2.0, 6.0, 4.0)}),
            "a gradient is reduced twice: that of w is 2 times the plain one, the number of ranks",
        ),
        (
            evidence(1.7, tokens=3, divisor=8, world=2, more={"hidden": evidence(8 / 3).got[1]["hidden"]}),
            "the local token count, without an all-reduce of it: here 3 of the step's 8 tokens, and hidden's gradient "
            "is 8/3 times the plain one, 8 / 3",
        ),
        (
            evidence(1.7, tokens=3, divisor=8, world=2, more={"hidden": evidence(4 / 3).got[1]["hidden"]}),
            "the local token count, without an all-reduce of it: here 3 of the step's 8 tokens, and hidden's gradient "
            "is 4/3 times the plain one, 8 / (3 x 2 ranks)",
        ),
    ],
)
def test_a_cause_is_named_by_the_numbers_alone(found, cause):
    assert cause_of(found).startswith(cause), cause_of(found)


def test_that_only_the_gradient_is_wrong_is_said_up_to_1e_12():
    for off, said in ((0.9e-12, True), (1.1e-12, False)):
        found = evidence(3)
        found = replace(found, got=(found.expected[0] * (1 + off), found.got[1]))
        assert cause_of(found).endswith("; the value is right, only the gradient is wrong") == said


@pytest.mark.parametrize(
    ("times", "cause"),
    [(1, "the upstream factor is ignored: "), (1 / 64, "the upstream factor is squared: "), (1 / 8, NONE)],
)
def test_what_becomes_of_the_upstream_factor_is_named(times, cause):
    found = evidence(1.7)
    eighth = found.got[0] / 8, {name: g * times for name, g in found.got[1].items()}
    assert cause_of(replace(found, eighth=eighth)).startswith(cause)


# What strategies draw


def drawn_by(strategy, examples):
    """What a strategy draws, the same in every run."""
    found = []

    @settings(max_examples=examples, database=None, derandomize=True, deadline=None, phases=[Phase.generate])
    @given(strategy)
    def draw(drawn):
        found.append(drawn)

    draw()
    return found


UNCUT = {"chunk_tokens": None, "chunk_size": None}
DRAWN = {
    "shapes": (strategies.shapes(2, 2), [(1, 1), (1, 2), (2, 1), (2, 2)]),
    "lengths": (strategies.lengths(2, 1), [[0, 0], [0, 1], [1, 0], [1, 1]]),
    "devices": (strategies.device_lists(most=2), [None, ["cpu"], ["cpu", "cpu"]]),
    "chunks": (
        strategies.chunkings(1, 2),
        [UNCUT, *(UNCUT | {"chunk_tokens": n} for n in range(1, 5)), *(UNCUT | {"chunk_size": n} for n in range(1, 5))],
    ),
    "splits": (strategies.vocabulary_splits(3, 2), [[0, 3], [1, 2], [2, 1], [3, 0]]),
    "splits without an empty part": (strategies.vocabulary_splits(4, 3, 1), [[1, 1, 2], [1, 2, 1], [2, 1, 1]]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_strategy_draws_all_of_its_range_and_nothing_else(name):
    strategy, wanted = DRAWN[name]
    found = drawn_by(strategy, 60)
    assert all(one in wanted for one in found)
    assert all(one in found for one in wanted)


def test_cases_have_all_sizes_that_they_are_said_to_have_and_no_others():
    found = drawn_by(strategies.cases(), 250)
    assert {case.vocab_size for case in found} == {*range(2, 14)}
    assert {case.batch for case in found} == {*range(1, 8)}
    assert {case.time for case in found} == {*range(1, 10)}
    assert {case.width for case in found} == {*range(1, 7)}
    assert {case.devices for case in found} == {*range(10)}
    assert {case.upstream for case in found} == {1.0, 1 / 7, -3.0, 0.0, 1e4}
    assert {case.padding_share for case in found} == {0.0, 0.3, 0.8, 1.0}
    assert {case.padding for case in found if not 0 <= case.padding < case.vocab_size} == {-100}
    assert any(case.padding == case.vocab_size - 1 for case in found)
    assert any(case.padding == 0 for case in found)
    for case in drawn_by(strategies.cases(padding_is_a_class=True), 40):
        assert 0 <= case.padding < case.vocab_size >= 3
    for case in found[:50]:
        ignored = case.targets() == case.padding
        assert case.padding_share or not ignored.any()
        assert case.padding_share < 1 or ignored.all()
        assert case.targets()[~ignored].lt(case.vocab_size).all()


# Over ranks


FEW = Case("data parallel", 2, ((5, 3), (4, 0)))


@JUST
@pytest.mark.parametrize(("offers", "allowed"), [({"float64"}, 1e-12), (set(), 1e-5)])
@pytest.mark.parametrize("part", ["loss", "embed.weight"])
def test_over_ranks_a_loss_may_be_off_by_1e_12_or_by_1e_5_in_float32(part, offers, allowed, times, right, monkeypatch):
    adapter = replace(KNOWN_LAYOUTS["seqpar"], offers=frozenset({"data parallel"} | offers))
    case = replace(FEW, ranks=4, groups=2)
    truths = [case.right(0), case.right(1)]
    factor = 1 + times * allowed

    def answers(name, case):
        last = truths[1]
        if part == "loss":
            wrong = last._replace(loss=last.loss * factor)
        else:
            wrong = last._replace(gradients={**last.gradients, part: last.gradients[part] * factor})
        return [truths[0], truths[0], last, wrong]

    monkeypatch.setattr(layout_checks, "answers", answers)
    found = fault(adapter, case)
    assert (found is None) == right
    if found:
        assert found.worst == part
        assert found.numbers.startswith("by rank: loss ")
        assert f"({truths[1].loss:.4g} is right), {part} off by" in found.numbers


def test_the_smallest_case_is_one_that_fails_for_the_same_reason(monkeypatch):
    def smallest(case, *answers, cause="a cause: all gradients are 3 times the right ones"):
        left, asked = iter(answers), []

        def scripted(adapter, case):
            asked.append(case.tokens)
            answer = next(left)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(layout_checks, "fault", scripted)
        found, again = _smallest(KNOWN_LAYOUTS["seqpar"], case, Fault(cause, "first", "loss"))
        return asked, found.tokens, again.numbers

    one, two = ((2,), (1,)), ((2, 2), (1, 0))
    again = Fault("a cause: all gradients are 2 times the right ones", "again", "loss")
    other = Fault("another: all gradients are 3 times the right ones", "other", "loss")
    assert smallest(FEW, again) == ([one], one, "again")
    assert smallest(FEW, None, again) == ([one, two], two, "again")
    assert smallest(FEW, other, again) == ([one, two], two, "again")
    assert smallest(FEW, RankError("hangs"), again) == ([one, two], two, "again")
    assert smallest(FEW, other, None) == ([one, two], FEW.tokens, "first")
    pipeline = Case("pipeline", 2, ((5, 3, 0, 1),))
    assert smallest(pipeline, again) == ([((2, 2, 0, 1),)], ((2, 2, 0, 1),), "again")


def test_of_ranks_that_end_the_one_that_raises_is_named_and_not_those_that_wait_for_it():
    waits = "Traceback\nRuntimeError: Timed out waiting 1000ms\n"
    fails = "Traceback\nKeyError: 'nobody'\nmore of it"
    assert _ended(f"rank 0: {waits}\nrank 1: {fails}") == "rank 1 raises KeyError: 'nobody'"
    assert _ended(f"rank 2: {fails}\nrank 3: {fails}") == "rank 2 raises KeyError: 'nobody'"
    assert _ended(f"rank 1: {waits}\nrank 3: {waits}") == "it hangs: rank 1, 3 waited for the others until the time-out"
    assert _ended("rank 0: exit code 3\n") == "rank 0 raises rank 0: exit code 3"
    assert _ended("rank 0: ValueError: " + "x" * 200) == "rank 0 raises rank 0: ValueError: " + "x" * 100


CHANGES = {
    "frozen head": {"frozen_head": True},
    "loss scale": {"loss_scale": 1024.0},
    "label smoothing": {"label_smoothing": 0.1},
    "tied weights": {"tied": True},
    "a rank without the targets' classes": {"few_classes": True},
    "odd vocabulary": {"vocab_size": 7},
    "the whole head passed as a shard": {"whole_head": True, "few_classes": True},
    "mean differentiated": {"reduction": "mean"},
}
SPLITS = {"a rank without the targets' classes", "odd vocabulary", "the whole head passed as a shard"}
ONLY = {
    "data parallel": {"mean differentiated"},
    "split vocabulary": SPLITS,
    "data x vocabulary": SPLITS,
    "pipeline": {"a micro-batch without tokens"},
}
"""The cases that few layouts have."""
WITHOUT = {
    "pipeline": {"tied weights", "a rank without tokens", "padding on one rank only"},
    "split vocabulary": {"a rank without tokens", "padding on one rank only"},
    "data x vocabulary": {"a group that is not the world"},
}
"""The cases that few layouts lack."""
MOST = {"unequal tokens", "a rank without tokens", "padding on one rank only", "frozen head", "loss scale"} | {
    "label smoothing", "tied weights", "a group that is not the world"
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_each_case_of_a_layout_differs_from_the_first_in_what_its_name_says(layout, seed):
    drawn = cases(layout, seed)
    assert drawn.keys() == (MOST | ONLY.get(layout, set())) - WITHOUT.get(layout, set())
    batches = {"accumulation": 3, "pipeline": 4}.get(layout, 1)
    for place, first in enumerate(drawn["unequal tokens"]):
        sizes = [size for part in first.tokens for size in part]
        data = {"split vocabulary": 1, "pipeline": 1, "data x vocabulary": first.ranks // 2}.get(layout, first.ranks)
        assert first.ranks == (4 if layout == "data x vocabulary" else (2, 4)[place])
        assert (len(first.tokens), {len(part) for part in first.tokens}) == (data, {batches})
        assert sizes[0] == 5
        assert sizes[-1] == (2 if len(sizes) > 1 else 5)
        assert all(1 <= size <= 6 for size in sizes)
        for name, changes in CHANGES.items():
            assert name not in drawn or drawn[name][place] == replace(first, **changes)
        if data > 1:
            assert drawn["a rank without tokens"][place].tokens == (*first.tokens[:-1], (0,) * batches)
            (*others, last) = drawn["padding on one rank only"][place].tokens
            assert (set(others), last) == ({(6,) * batches}, (0,) * (batches - 1) + (1,))
        elif batches > 1:
            ((_, *rest),) = first.tokens
            assert drawn["a micro-batch without tokens"][place].tokens == ((0, *rest),)
    if layout != "data x vocabulary":
        (half,) = drawn["a group that is not the world"]
        assert half == replace(drawn["unequal tokens"][0], ranks=4, groups=2)


def test_no_two_micro_batches_are_the_same_and_as_many_targets_count_as_said():
    case = Case("accumulation", 2, ((5, 3, 1), (6, 0, 4)))
    seen = set()
    for seed in (0, 1):
        for group in (0, 1):
            for place, part in enumerate(replace(case, seed=seed).parts(group)):
                for size, (tokens, target) in zip(case.tokens[place], part, strict=True):
                    assert tokens.shape == target.shape == torch.Size(SHAPE)
                    assert int((target != IGNORED).sum()) == size
                    seen.add(tuple(tokens.flatten().tolist()))
    assert len(seen) == 2 * 2 * 6
    assert case.count == 19
    assert isinstance(case.right(), Answer)
    few = Case("split vocabulary", 4, ((6,),), vocab_size=7, few_classes=True)
    assert [few.rows_of(place) for place in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert {few.part(0, 0)[0][1].max().item() for _ in range(2)} <= {0, 1}


@pytest.mark.parametrize(
    ("times", "name"),
    [
        (1 / 2, "divided by ranks twice"),
        (2, "multiplied by the number of ranks once too often"),
        (1 / 3, "divided by the number of micro-batches as well as by the tokens"),
        (1 / 6, "divided by the number of micro-batches as well as by the tokens"),
        (25, "not divided by the tokens"),
        (25 / 2, "not divided by the tokens"),
        (25 / 3, "not divided by the tokens"),
        (25 / 6, "not divided by the tokens"),
        (25 / 18, "divided by all rows, including padding"),
        (25 / 36, "divided by all rows, including padding"),
        (1 / 1024, "the loss scale is missing"),
        (1024, "the loss scale is applied twice"),
        (7, ""),
    ],
)
def test_a_factor_of_all_gradients_is_named_by_the_numbers_of_the_step(times, name):
    case = Case("accumulation", 2, ((5, 3, 1), (6, 6, 4)), loss_scale=1024.0)
    assert case.count == 25
    said = _scale(case, times)
    assert said.partition(": ")[0] == (name or said)
    assert said.endswith(f"all gradients are {spelt(times)} times the right ones")


# The problems as a reproduction shows them


def test_the_problem_of_a_loss_is_the_one_that_a_reproduction_shows():
    plainly = (
        "torch.manual_seed(0); hidden = torch.randn(512, 16).requires_grad_(); "
        "weight = torch.nn.Parameter((torch.randn(1024, 16) / 4)); bias = torch.nn.Parameter(torch.randn(1024)); "
        "target = torch.randint(1024, (512,))"
    )
    assert Inputs(KNOWN["torch"]).code == plainly
    changed = Inputs(
        replace(KNOWN["torch"], offers=frozenset()), 96, 64, 128, Options(dtype=torch.bfloat16), "target[0] = 1",
        frozen=("weight", "bias"), seed=2,
    )  # fmt: skip
    assert changed.code == (
        "torch.manual_seed(2); hidden = torch.randn(96, 64).to(torch.bfloat16).requires_grad_(); "
        "weight = torch.nn.Parameter((torch.randn(128, 64) / 8).to(torch.bfloat16)); bias = None; "
        "target = torch.randint(128, (96,)); target[0] = 1; weight.requires_grad_(False)"
    )
    tensors = Inputs(KNOWN["torch"], options=Options(dtype=torch.float64)).made()
    assert {t.dtype for name, t in tensors.items() if name != "target"} == {torch.float64}


def test_a_problem_of_scores_is_the_one_that_a_reproduction_shows():
    x = ScoreInputs(KNOWN_SCORES["torch"])
    assert x.code.startswith("torch.manual_seed(0); hidden = torch.randn(96, 16).requires_grad_(); ")
    assert "torch.randn(131, 16) / 4" in x.code
    assert "target = torch.randint(131, (96,))" in x.code
    assert "temperature" not in x.call + x.code
    assert "ids" not in x.code
    assert "entropy" not in x.call


@pytest.mark.parametrize(("bytes_", "right"), [(0.25, True), (0.2501, False)])
def test_the_peak_may_grow_by_a_quarter_of_the_logits_of_the_added_rows(bytes_, right):
    """Beside hidden's gradient: 3,072 rows of 64 and of 8,192 float32 numbers."""
    hidden, logits = 3 * 1024 * 64 * 4, 3 * 1024 * 8192 * 4
    found = Growth(1000, 1000 + hidden + int(bytes_ * logits))
    assert found.of_logits == pytest.approx(bytes_)
    assert (found.of_logits <= found.ALLOWED) == right


# What is not here


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere:x", "No module named 'nowhere'"),
        ("math:nothing", "module 'math' has no attribute 'nothing'"),
        (":x", "Empty module name"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_named_with_the_reason(name, why):
    with pytest.raises(ValueError, match=rf"^'{name}' cannot be loaded: {why}$"):
        loaded(name)


def test_why_a_package_cannot_be_imported_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "in_need.py").write_text("import nowhere_to_be_found")
    (tmp_path / "broken.py").write_text("raise RuntimeError('''\\n no GPU is here\\nand more''')")
    (tmp_path / "mute.py").write_text("raise OSError")
    assert why_missing("math") == why_missing("") == ""
    assert why_missing("nowhere_to_be_found.inner") == "not installed"
    assert why_missing("in_need") == "not installed: it needs nowhere_to_be_found"
    assert why_missing("broken") == "cannot be imported: no GPU is here"
    assert why_missing("mute") == "cannot be imported: OSError"


def test_what_a_package_says_and_sets_while_it_runs_leaves_no_trace(monkeypatch, caplog):
    monkeypatch.setenv("OF_THE_TEST", "before")

    def loud():
        os.environ["OF_THE_TEST"] = "after"
        warnings.warn("a warning is an error in tests", stacklevel=1)
        logging.getLogger("package").warning("in between")
        logging.getLogger("package").error("an error")
        return 3

    assert quietly(loud) == 3
    with pytest.raises(ZeroDivisionError):
        quietly(lambda: 1 / 0)
    logging.getLogger("package").warning("afterwards")
    assert [record.message for record in caplog.records] == ["an error", "afterwards"]
    assert os.environ["OF_THE_TEST"] == "before"


def test_a_page_that_is_not_there_is_an_error_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"^conformance: .*No such file or directory: '.*none\.md'$"):
        main(["--page", str(tmp_path / "none.md")])


def test_the_version_of_a_clone_is_the_one_that_it_says(monkeypatch):
    clone = ModuleType("a_clone")
    monkeypatch.setitem(sys.modules, "a_clone", clone)
    assert installed_version("a-clone") == installed_version("nowhere") == "not installed"
    clone.__version__ = "1.2"
    assert installed_version("a-clone") == "1.2"
    assert installed_version("torch") == importlib.metadata.version("torch")

"""Where the kit draws the line: on this side a loss is right, on that side wrong; and what a problem is."""

import math
import time
from dataclasses import replace

import pytest
import torch

from seqpar.testing import precision
from seqpar.testing.conformance import CHECKS, KNOWN, KNOWN_SCORES, Adapter
from seqpar.testing.conformance import checks as checks_module
from seqpar.testing.conformance.adapter import Options
from seqpar.testing.conformance.finding import Finding
from seqpar.testing.conformance.inputs import Inputs, plain_loss
from seqpar.testing.conformance.memory import Growth
from seqpar.testing.conformance.problem import Deviation, deviations
from seqpar.testing.conformance.score_inputs import ScoreInputs
from seqpar.testing.conformance.verdicts import error_finding
from seqpar.testing.evidence import ratio, same, shares_of, spelt

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


def test_a_sum_is_taken_apart_where_its_parts_can_be_told_apart():
    a, b, nothing = wide(10.0, 20.0, 0.0), wide(0.0, 1.0, 1.0), wide(0.0, 0.0, 0.0)
    assert shares_of(a + 2 * b, [a, b]) == pytest.approx([1, 2])
    assert shares_of(-b / 3, [a, b]) == [0, pytest.approx(-1 / 3)]
    assert shares_of(a, [nothing, a]) == [pytest.approx(math.nan, nan_ok=True), pytest.approx(1)]
    assert shares_of(wide(1.0, 1.0, 1.0), [a, b]) is None
    assert shares_of(a + 2 * b, [a, b, 3 * b]) is None
    assert shares_of(a, [nothing, nothing]) is None


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


@pytest.mark.parametrize("known", [KNOWN, KNOWN_SCORES])
def test_the_call_of_an_adapter_that_is_written_as_text_is_shown_as_it_is(known):
    assert known["torch"].call is not None
    inputs = Inputs if known is KNOWN else ScoreInputs
    assert inputs(known["torch"]).call == known["torch"].call(inputs(known["torch"]).options)


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

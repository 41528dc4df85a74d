"""Where the suite draws the line between right and wrong, and what a problem is."""

import math
import time
from dataclasses import replace

import pytest
import torch

from conformance import CHECKS, KNOWN, KNOWN_SCORES, Adapter, bad_target, checks
from conformance.adapter import Options
from conformance.checks import judge
from conformance.finding import Finding
from conformance.memory import Growth
from conformance.plain import plain_loss
from conformance.problem import Deviation, Problem, asked, deviations
from tests.seqpar.testing.test_edges_of_verdicts import JUST, wide

pytestmark = pytest.mark.unswitched

BY_NAME = {check.name: check for check in CHECKS}


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
    x = asked(mine, dtype=dtype)

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
        x = asked(KNOWN["torch"], dtype=dtype)
        finding = judge(x, Deviation(name, error, plain, allowed))
        shown = finding.reproduction and "shown"
        assert not shown or x.compared(name, "at most")[:40] in finding.reproduction
        return replace(finding, reproduction=shown)

    assert verdict("loss", 2e-3) == Finding("pass", "loss 2.0e-03, 2.0 x plain's")
    assert verdict("hidden", 3e-3) == Finding("fail", "hidden gradient off by 3.0e-03, 3.0 x plain's", "shown")
    assert verdict("loss", 2.001e-3).verdict == "fail"
    assert verdict("loss", 1e-3, plain=0.0) == Finding("pass", "loss 1.0e-03")
    assert verdict("bias", 1e-3, dtype=torch.float64) == Finding("pass", "bias 1.0e-03")
    assert verdict("weight", math.inf) == Finding("fail", "weight gradient: none, or not a number", "shown")


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
    monkeypatch.setattr(checks, "products", lambda x: next(left))
    finding = BY_NAME["padding is not projected"](KNOWN["torch"])
    share = work[1] / work[0] if work[0] else 1
    assert (finding.verdict, finding.figure) == (verdict, f"{share:.0%} of the products for 50% of the rows")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_call_that_gives_no_answer_in_time_is_a_failure(device, monkeypatch):
    """In a fork, and in a new process, as beside a GPU."""
    monkeypatch.setattr(bad_target, "DEVICE", device)
    monkeypatch.setattr(bad_target, "SILENCE", 0.1)
    finding = BY_NAME["target out of range"](Adapter("sleeps", lambda *_: time.sleep(60)))
    assert finding.verdict == "fail"
    assert finding.figure == "target 128 of 128 classes gave no answer in 0.1 s, in silence"


def test_the_problem_of_a_loss_is_the_one_that_a_reproduction_shows():
    plainly = (
        "torch.manual_seed(0); hidden = torch.randn(512, 16).requires_grad_(); "
        "weight = torch.nn.Parameter((torch.randn(1024, 16) / 4)); bias = torch.nn.Parameter(torch.randn(1024)); "
        "target = torch.randint(1024, (512,))"
    )
    assert Problem(KNOWN["torch"], 512, 16, 1024).code == plainly
    changed = Problem(
        replace(KNOWN["torch"], offers=frozenset()), 96, 64, 128, Options(dtype=torch.bfloat16), "target[0] = 1",
        frozen=("weight", "bias"), seed=2,
    )  # fmt: skip
    assert changed.code == (
        "torch.manual_seed(2); hidden = torch.randn(96, 64).to(torch.bfloat16).requires_grad_(); "
        "weight = torch.nn.Parameter((torch.randn(128, 64) / 8).to(torch.bfloat16)); bias = None; "
        "target = torch.randint(128, (96,)); target[0] = 1; weight.requires_grad_(False)"
    )
    tensors = asked(KNOWN["torch"], dtype=torch.float64).made()
    assert {t.dtype for name, t in tensors.items() if name != "target"} == {torch.float64}


def test_the_call_that_is_shown_has_the_options_that_are_not_at_their_default():
    assert asked(KNOWN["torch"]).call == "adapter.function(hidden, weight, target, bias, Options())"
    x = asked(KNOWN["torch"], dtype=torch.float16, label_smoothing=0.1)
    assert x.call.endswith("Options(dtype=torch.float16, label_smoothing=0.1))")
    x = asked(KNOWN_SCORES["torch"], temperatures="torch.ones(96)")
    assert x.call.endswith("Options(temperature=temperature, entropy=True, ids=ids))")


def test_a_problem_of_scores_is_the_one_that_a_reproduction_shows():
    x = asked(KNOWN_SCORES["torch"], ("log_prob",))
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

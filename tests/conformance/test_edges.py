"""Where the suite draws the line between right and wrong, and what a problem is."""

import math
import time
from dataclasses import replace

import pytest
import torch

from conformance import Adapter, adapter_of, bad_target, checks
from conformance.adapter import Options
from conformance.checks import CHECKS, verdict
from conformance.finding import Finding
from conformance.memory import Growth
from conformance.peers import KNOWN, KNOWN_SCORES
from conformance.plain import plain_loss
from conformance.problem import CHANGES, Deviation, Problem, asked, deviations
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
    def said(name, error, plain=1e-3, allowed=2e-3, dtype=torch.float32):
        return verdict(asked(KNOWN["torch"], dtype=dtype), Deviation(name, error, plain, allowed))

    assert said("loss", 2e-3) == Finding("pass", "loss 2.0e-03, 2.0 x plain's")
    assert said("hidden", 3e-3) == Finding("fail", "hidden gradient off by 3.0e-03, 3.0 x plain's")
    assert said("loss", 2.001e-3).verdict == "fail"
    assert said("loss", 1e-3, plain=0.0) == Finding("pass", "loss 1.0e-03")
    assert said("bias", 1e-3, dtype=torch.float64) == Finding("pass", "bias 1.0e-03")
    assert said("weight", math.inf) == Finding("fail", "weight gradient: none, or not a number")


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


SLEEPING = Adapter("sleeps", lambda *_: time.sleep(60))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_call_that_gives_no_answer_in_time_is_a_failure(device, monkeypatch):
    """In a fork, and in a new process, as beside a GPU."""
    monkeypatch.setattr(bad_target, "DEVICE", device)
    monkeypatch.setattr(bad_target, "SILENCE", 0.1)
    finding = BY_NAME["target out of range"](adapter_of("losses", f"{__name__}:SLEEPING"))
    assert finding.verdict == "fail"
    assert finding.figure == "target 128 of 128 classes gave no answer in 0.1 s, in silence"


def test_a_problem_is_written_as_the_call_that_makes_it():
    x = asked(KNOWN["torch"], dtype=torch.float16, label_smoothing=0.1, change="target 5 is V", frozen=("hidden",))
    assert repr(x) == (
        "Problem(adapter=adapter_of('losses', 'torch'), options=Options(dtype=torch.float16, label_smoothing=0.1), "
        "change='target 5 is V', frozen=('hidden',))"
    )
    names = {"Problem": Problem, "Options": Options, "adapter_of": adapter_of, "torch": torch}
    assert eval(repr(x), names) == x
    asked_for = asked(KNOWN_SCORES["torch"], token_temperature=True, top_k=2)
    assert eval(repr(asked_for), names) == asked_for
    assert repr(Options()) == "Options()"


def test_the_tensors_of_a_problem_are_drawn_from_its_seed_in_its_dtype():
    x = asked(KNOWN_SCORES["torch"], dtype=torch.float64, token_temperature=True, seed=2, frozen=("bias",))
    tensors = x.made()
    torch.manual_seed(2)
    assert torch.equal(tensors["hidden"], torch.randn(96, 16).double())
    assert torch.equal(tensors["weight"], torch.nn.Parameter((torch.randn(131, 16) / 4).double()))
    assert torch.equal(tensors["bias"], torch.randn(131).double())
    assert torch.equal(tensors["target"], torch.randint(131, (96,)))
    assert torch.equal(tensors["temperature"], torch.rand(96) + 0.5)
    assert torch.equal(tensors["ids"], torch.randint(131, (96, 3)))
    assert torch.equal(tensors["u"], torch.randn(96))
    assert {name for name, t in tensors.items() if t.requires_grad} == {"hidden", "weight"}
    plain = asked(replace(KNOWN["torch"], offers=frozenset()), width=64).made()
    assert plain.keys() == {"hidden", "weight", "target"}
    assert plain["weight"].detach().std() == pytest.approx(1 / 8, rel=0.05)


def test_each_change_is_what_it_is_called():
    """Of tensors with 96 rows, or the 512 for which one is meant."""

    def made(change, rows=96):
        return asked(KNOWN_SCORES["torch"], rows=rows, change=change).made()

    before = made("")
    ignored = {name: (made(name, 512)["target"] == -100).sum().item() for name in CHANGES if name.endswith("-100")}
    assert ignored == {
        "every second target is -100": 256,
        "every third target is -100": 171,
        "the first 50 targets are -100": 50,
        "the second 32 targets are -100": 32,
        "one target of 32 is not -100": 496,
        "all targets are -100": 512,
    }
    assert [int(made(f"target 5 is {name}")["target"][5]) for name in ("V", "V + 7", "-1")] == [131, 138, -1]
    assert made("every third target is 3")["target"][::3].unique().tolist() == [3]
    assert torch.equal(made("targets in reverse")["target"], before["target"].flip(0))
    assert torch.equal(made("3 x the weight")["weight"], 3 * before["weight"])
    assert torch.equal(made("1000 x the hidden states")["hidden"], 1000 * before["hidden"])
    loud = made("40 x the hidden states of all but the first 8")["hidden"]
    assert torch.equal(loud, torch.cat([before["hidden"][:8], 40 * before["hidden"][8:]]))
    alone = made("the first 8 alone")
    assert {name: len(t) for name, t in alone.items() if name not in ("weight", "bias")} == dict.fromkeys(
        ("hidden", "target", "ids", "u", "h", "g"), 8
    )
    assert alone["hidden"].is_leaf
    assert alone["hidden"].requires_grad
    whole, high, low, certain = (
        torch.nn.functional.linear(t["hidden"], t["weight"], t["bias"])
        for t in map(
            made, ("whole logits", "whole logits about 512", "logits far below 0", "targets that are almost certain")
        )
    )
    assert torch.equal(whole, whole.round())
    assert torch.equal(high, high.round())
    assert high.detach().mean() == pytest.approx(512, rel=0.01)
    assert low.mean() < -4
    assert torch.equal(certain.argmax(1), made("targets that are almost certain")["target"])
    assert certain.log_softmax(1).amax(1).median() > -1e-3
    masked = made("a bias of -inf for one class of three")
    assert masked["bias"].isinf().nonzero().flatten().tolist() == [*range(1, 131, 3)]
    assert not (masked["target"] % 3).any()
    assert len(CHANGES) == 1 + len(ignored) + 14


@pytest.mark.parametrize(("bytes_", "right"), [(0.25, True), (0.2501, False)])
def test_the_peak_may_grow_by_a_quarter_of_the_logits_of_the_added_rows(bytes_, right):
    """Beside hidden's gradient: 3,072 rows of 64 and of 8,192 float32 numbers."""
    hidden, logits = 3 * 1024 * 64 * 4, 3 * 1024 * 8192 * 4
    found = Growth(1000, 1000 + hidden + int(bytes_ * logits))
    assert found.of_logits == pytest.approx(bytes_)
    assert (found.of_logits <= found.ALLOWED) == right

"""Which pairs of generator and criterion `LossCompute` has by formula, and that the others keep their meaning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import seqpar
from models import Generator
from seqpar.core.chunks import rows_per_chunk
from seqpar.engine import device_losses
from seqpar.engine.formula_match import match_formula
from seqpar.engine.shards import Shard, one_for_each_device
from seqpar.testing import assert_same_results


class Twice(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Halved(nn.Sequential):
    """A linear layer and a log-softmax, with a forward of its own around them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Hot(nn.LogSoftmax):
    """A log-softmax of scores at a temperature."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / 2)


class Unknown(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="sum")


def with_hook(module: nn.Module) -> nn.Module:
    """A module whose output a hook doubles."""
    module.register_forward_hook(lambda _, __, output: 2 * output)
    return module


GENERATORS = {
    "linear": (lambda: nn.Linear(4, 7), True),
    "no bias": (lambda: nn.Linear(4, 7, bias=False), True),
    "a subclass with nothing of its own": (lambda: Generator(4, 7), True),
    "before a log-softmax": (lambda: nn.Sequential(nn.Linear(4, 7), nn.LogSoftmax(-1)), True),
    "before a softmax over rows": (lambda: nn.Sequential(nn.Linear(4, 7), nn.LogSoftmax(0)), False),
    "before a softmax over the second dimension": (lambda: nn.Sequential(nn.Linear(4, 7), nn.LogSoftmax(1)), False),
    "before another layer": (lambda: nn.Sequential(nn.Linear(4, 7), nn.ReLU()), False),
    "a subclass with its own forward": (lambda: Twice(4, 7), False),
    "a subclass of Sequential": (lambda: Halved(nn.Linear(4, 7), nn.LogSoftmax(-1)), False),
    "before a subclass of a log-softmax": (lambda: nn.Sequential(nn.Linear(4, 7), Hot(-1)), False),
    "hooked": (lambda: with_hook(nn.Linear(4, 7)), False),
    "hooked around a log-softmax": (lambda: with_hook(nn.Sequential(nn.Linear(4, 7), nn.LogSoftmax(-1))), False),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(4, 7)), False),
}
WEIGHTS = torch.arange(1.0, 8.0)
CRITERIA = {
    "cross-entropy": (lambda: seqpar.CrossEntropy(), True),
    "smoothing": (lambda: seqpar.LabelSmoothing(0.1, "fairseq", ignore_index=2), True),
    "harvard": (lambda: seqpar.LabelSmoothing(0.1, "harvard", ignore_index=0), True),
    "torch's": (lambda: nn.CrossEntropyLoss(WEIGHTS, ignore_index=3, reduction="sum", label_smoothing=0.2), True),
    "torch's, uniform": (lambda: nn.CrossEntropyLoss(reduction="sum", label_smoothing=1.0), False),
    "hooked": (lambda: with_hook(nn.CrossEntropyLoss(reduction="sum")), False),
    "one's own": (Unknown, False),
}


def results(engine, criterion, hidden, target, parameters):
    """The loss and all gradients, by the engine and plainly."""
    generator = engine.head["generator"]
    found = []
    for loss in (
        engine(hidden, target).total,
        criterion(generator(hidden), target),
    ):
        gradients = torch.autograd.grad(loss, [hidden, *parameters.values()])
        found.append((loss.detach(), dict(zip(["hidden", *parameters], gradients, strict=True))))
    return found


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("criterion", CRITERIA)
@settings(max_examples=settings.default.max_examples // 12)  # of each of 70 pairs
@given(chunk=st.sampled_from([1, 3, 50]), seed=st.integers(0, 99))
def test_each_pair_has_its_plain_gradient_by_the_path_that_explain_names(generator, criterion, chunk, seed):
    if generator == "before a softmax over rows":
        return  # mixes tokens: no engine can cut it
    torch.manual_seed(seed)
    (make, known), (make_criterion, criterion_known) = GENERATORS[generator], CRITERIA[criterion]
    module, loss = make().double(), make_criterion().double()
    engine = seqpar.LossCompute(module, loss, chunk_tokens=chunk)
    assert engine.explain().startswith("by formula (" if known and criterion_known else "by autograd, chunk by chunk (")
    hidden, target = torch.randn(9, 4, dtype=torch.float64, requires_grad=True), torch.randint(7, (9,))
    assert_same_results(*results(engine, loss, hidden, target, dict(module.named_parameters())))


DOUBLING = {
    "register_forward_pre_hook": lambda _, inputs: (2 * inputs[0],),
    "register_forward_hook": lambda _, __, output: 2 * output,
    "register_full_backward_pre_hook": lambda _, upstream: (2 * upstream[0],),
    "register_full_backward_hook": lambda _, gradient, __: (2 * gradient[0],),
}


@pytest.mark.parametrize("register", DOUBLING)
def test_a_hook_of_any_kind_has_its_effect_on_the_gradient(register):
    torch.manual_seed(0)
    module, loss = nn.Linear(4, 7).double(), seqpar.CrossEntropy()
    getattr(module, register)(DOUBLING[register])
    engine = seqpar.LossCompute(module, loss, chunk_tokens=4)
    assert "Linear has hooks" in engine.explain()
    hidden, target = torch.randn(9, 4, dtype=torch.float64, requires_grad=True), torch.randint(7, (9,))
    assert_same_results(*results(engine, loss, hidden, target, dict(module.named_parameters())))


def test_a_softmax_over_rows_is_not_taken_for_one_over_classes():
    engine = seqpar.LossCompute(GENERATORS["before a softmax over rows"][0](), seqpar.CrossEntropy())
    assert "the generator is a Sequential, not nn.Linear" in engine.explain()


@pytest.mark.unswitched
def test_explain_has_chunks_and_bytes_and_the_reason():
    engine = seqpar.LossCompute(nn.Linear(4, 1000), seqpar.CrossEntropy(), chunk_tokens=100)
    assert engine.explain(250) == (
        "by formula (Linear, CrossEntropy); 250 tokens in 3 chunks of at most 100, whose logits (1,000 each) "
        "take 0.4 MiB"
    )
    assert "; 200 tokens in 2 chunks of at most 100, whose" in engine.explain(200)
    assert "; 100 tokens in 1 chunk of at most 100, whose" in engine.explain(100)
    engine = seqpar.LossCompute(Twice(4, 1000), seqpar.CrossEntropy())
    assert engine.explain().endswith("will be known after the first call")
    engine(torch.randn(3, 4), torch.zeros(3).long())
    assert engine.explain(250).startswith(
        "by autograd, chunk by chunk (the generator is a Twice, not nn.Linear); 250 tok"
    )
    assert "hooks" in seqpar.LossCompute(with_hook(nn.Linear(4, 7)), seqpar.CrossEntropy()).explain()
    assert "5 time steps" in seqpar.LossCompute(nn.Linear(4, 7), seqpar.CrossEntropy(), chunk_size=5).explain()


@pytest.mark.unswitched
@pytest.mark.parametrize("generator", [nn.Linear, Twice])
def test_explain_has_the_bytes_of_float32_for_logits_in_bfloat16(generator):
    """Their softmax is computed in float32: 512 x 1,024 x 4 bytes are 2 MiB."""
    engine = seqpar.LossCompute(generator(4, 1024).bfloat16(), seqpar.CrossEntropy(), chunk_tokens=512)
    engine(torch.randn(3, 4).bfloat16(), torch.zeros(3).long())
    assert engine.explain(1000).endswith("2 chunks of at most 512, whose logits (1,024 each) take 2.0 MiB")


def batch(rows, padding, width=4):
    target = torch.randint(7, (rows,))
    target[:padding] = -100
    return torch.randn(rows, width), target


@pytest.mark.parametrize("generator", [nn.Linear, Twice])
def test_explain_speaks_of_the_latest_call(generator):
    engine = seqpar.LossCompute(generator(4, 7), seqpar.CrossEntropy(ignore_index=-100), chunk_tokens=100)
    engine(*batch(50, 10))
    engine(*batch(260, 20))
    assert "240 tokens in 3 chunks" in engine.explain()
    assert "50 tokens in 1 chunk of" in engine.explain(50)
    engine(*batch(5, 5))
    assert "1 tokens in 1 chunk of" in engine.explain()  # of a batch without tokens there is nothing to say


def test_explain_speaks_of_one_of_the_devices():
    engine = seqpar.LossCompute(nn.Linear(4, 7), seqpar.CrossEntropy(), ["cpu"] * 3, chunk_tokens=100)
    engine(*batch(301, 0))
    assert "101 tokens in 2 chunks" in engine.explain()
    engine([torch.randn(3, 4), torch.randn(2, 4), torch.randn(1, 4)], [torch.zeros(n).long() for n in (3, 2, 1)])
    assert "2 tokens in 1 chunk of" in engine.explain()


@pytest.mark.unswitched
@pytest.mark.parametrize("generator", [nn.Linear, Twice])
def test_explain_has_the_dtype_of_the_latest_call(generator):
    engine = seqpar.LossCompute(generator(64, 70_000), seqpar.CrossEntropy())
    sizes = {dtype: rows_per_chunk(70_000, dtype, "cpu") for dtype in (torch.float32, torch.bfloat16)}
    assert len({*sizes.values()}) == 2
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16), torch.no_grad():
            engine(*batch(9, 0, 64))
        assert f"chunks of at most {sizes[dtype]:,}, whose" in engine.explain(100_000)


def test_the_formula_path_calls_no_generator(monkeypatch):
    engine = seqpar.LossCompute(nn.Linear(4, 7), seqpar.CrossEntropy(), ["cpu", "cpu"])
    monkeypatch.setattr(device_losses, "project", lambda *_: pytest.fail("the generator was called"))
    engine(torch.randn(5, 4), torch.zeros(5).long()).total.backward()


def test_a_dtype_that_torch_refuses_is_refused():
    engine = seqpar.LossCompute(nn.Linear(4, 7), seqpar.CrossEntropy())
    with pytest.raises(TypeError, match=r"hidden has dtype torch.float64 and the generator's parameters torch.float32"):
        engine(torch.randn(5, 4, dtype=torch.float64), torch.zeros(5).long())


def test_autocast_brings_dtypes_together_as_it_does_for_the_module():
    torch.manual_seed(0)
    module, hidden, target = nn.Linear(64, 50), torch.randn(40, 64), torch.randint(50, (40,))
    engine = seqpar.LossCompute(module, seqpar.CrossEntropy(), chunk_tokens=7)
    with torch.autocast("cpu", torch.bfloat16):
        found = engine(hidden, target).total
        plain = F.cross_entropy(module(hidden).float(), target, reduction="sum")
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=0)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("generator", ["linear", "before a log-softmax"])
def test_a_pair_under_autocast_is_by_formula_as_without(generator):
    """Whose numbers are those of the pair up to bfloat16's rounding."""
    torch.manual_seed(0)
    hidden, target = torch.randn(40, 4, requires_grad=True), torch.randint(7, (40,))
    engine = seqpar.LossCompute(GENERATORS[generator][0](), nn.CrossEntropyLoss(reduction="sum"))
    for enabled in (True, False):
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=enabled):
            engine(hidden, target)
            assert engine.explain().startswith("by formula (")


def test_a_replicas_match_has_the_replicas_own_tensors():
    criterion = nn.CrossEntropyLoss(torch.rand(5), reduction="sum")
    head = nn.ModuleDict({"generator": nn.Sequential(nn.Linear(3, 5), nn.LogSoftmax(-1)), "criterion": criterion})
    (_, replica) = seqpar.replicate(head, ["cpu", "cpu"])
    here = match_formula(head["generator"], criterion).of_replica(replica)
    assert here.projection is replica["generator"][0]
    assert here.class_weight is replica["criterion"].weight is not criterion.weight


def test_rows_of_one_device_are_put_side_by_side_and_no_device_is_left_out():
    """Meta tensors stand in for those of a second device, because nothing is computed here."""
    devices = ["cpu", "meta", "cpu"]
    shards = []
    for i, device in enumerate(devices):
        target = torch.full((2, i + 1), i, device=device)
        shards.append(Shard(torch.ones(2, i + 1, 3, device=device), target, 2, {}))
    together = one_for_each_device(shards)
    assert [(s.hidden.device.type, s.hidden.shape, s.target.numel()) for s in together] == [
        ("cpu", (2 + 6, 3), 2 + 6),
        ("meta", (2, 2, 3), 4),
    ]
    assert together[0].counted.tolist() == [True] * 2 + [False] * 6

"""The loss inside what counts, traces, exports, transforms, and hooks saved tensors, as a checkpoint does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import seqpar

D, V = 8, 30


def batch(rows: int = 20) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    target = torch.randint(V, (rows,))
    target[:3] = -100
    return torch.randn(rows, D, dtype=torch.float64, requires_grad=True), target


class Both(nn.Module):
    """A module that ends in the loss, whose projection occurs twice in it."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.out = nn.Linear(D, V).double()
        self.engine = seqpar.LossCompute(self.out, seqpar.CrossEntropy(), chunk_tokens=6)
        self.own = seqpar.LossCompute(nn.Sequential(self.out, nn.Identity()), seqpar.CrossEntropy(), chunk_tokens=6)
        self.call = call

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return CALLS[self.call](self, hidden, target)


def soft(target: Tensor) -> seqpar.SparseTarget:
    return seqpar.SparseTarget(target.clamp(min=0).unsqueeze(1), torch.ones(len(target), 1, dtype=torch.float64))


CALLS = {
    "engine": lambda m, h, t: m.engine(h, t).total,
    "linear_cross_entropy": lambda m, h, t: seqpar.linear_cross_entropy(h, m.out.weight, t, bias=m.out.bias).total,
    "engine by autograd": lambda m, h, t: m.own(h, t).total,
    "soft target": lambda m, h, t: (
        seqpar.linear_cross_entropy(h, m.out.weight, t, bias=m.out.bias, soft_target=soft(t)).total
    ),
    "token_scores": lambda m, h, t: -seqpar.token_scores(h, m.out.weight, t, bias=m.out.bias).log_prob.sum(),
    "scored_loss": lambda m, h, t: seqpar.scored_loss(h, m.out.weight, t, lambda s: -s.log_prob, bias=m.out.bias).total,
    "engine's scores": lambda m, h, t: -m.engine.token_scores(h, t).log_prob.sum(),
}
EXPORTED = list(CALLS)[:2]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("call", EXPORTED)
def test_an_exported_loss_is_exact_for_other_targets_and_sizes(call, strict):
    module = Both(call)
    rows = torch.export.Dim("rows", min=2, max=100)
    sizes = {"hidden": {0: rows}, "target": {0: rows}}
    exported = torch.export.export(module, batch(), dynamic_shapes=sizes, strict=strict).module()
    for count in (20, 13):
        hidden, target = batch(count)
        target[5] = -100
        plain = F.cross_entropy(module.out(hidden), target, reduction="sum")
        torch.testing.assert_close(exported(hidden, target), plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("call", [call for call in CALLS if call not in EXPORTED])
def test_a_loss_that_torch_cannot_export_is_refused_with_the_one_it_can(call, strict):
    with pytest.raises(RuntimeError, match=r"torch.export can contain only seqpar.linear_cross_entropy"):
        torch.export.export(Both(call), batch(), strict=strict)


@pytest.mark.parametrize("call", [*CALLS, "compiled"])
def test_a_flop_counter_finds_three_products_in_every_loss(call):
    torch.manual_seed(0)
    rows = 64
    module = Both(call)
    hidden, target = torch.randn(rows, D, dtype=torch.float64, requires_grad=True), torch.randint(V, (rows,))
    if call == "compiled":
        module.call = "linear_cross_entropy"
        module.compile(backend="aot_eager")
    with FlopCounterMode(display=False) as plain:
        F.cross_entropy(module.out(hidden), target).backward()
    assert plain.get_total_flops() == 3 * 2 * rows * D * V
    # What the first call tries out is not part of a step
    module(hidden, target)
    with FlopCounterMode(display=False) as counted:
        module(hidden, target).backward()
    # These compute the product again in backward
    products = 4 if "scores" in call else 3
    assert counted.get_total_flops() == products * 2 * rows * D * V


def test_to_count_operations_changes_neither_the_way_nor_what_is_known():
    hidden, target = batch()
    module = Both("engine")
    with FlopCounterMode(display=False):
        module.engine(hidden, target)
    assert module.engine.explain().startswith("by formula")
    calls = []
    module.own.head["generator"][0].forward = lambda h, own=module.out: calls.append(1) or F.linear(h, own.weight)
    module.own(hidden, target)
    calls.clear()
    module.own(hidden, target)
    usual = len(calls)
    calls.clear()
    with FlopCounterMode(display=False):
        module.own(hidden, target)
    assert len(calls) == usual


class Rechecked(nn.Module):
    """A generator that computes one of its layers again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(D, D).double(), nn.Linear(D, V).double()
        self.reentrant = reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(checkpoint(lambda x: torch.tanh(self.mix(x)), hidden, use_reentrant=self.reentrant))


class RecheckedCriterion(seqpar.CrossEntropy):
    def token_loss(self, logits, target):
        return super().token_loss(checkpoint(lambda x: 2 * x, logits, use_reentrant=True), target)


def test_a_checkpoint_in_the_generator_is_exact():
    hidden, target = batch()
    generator = Rechecked(False)
    leaves = [hidden, *generator.parameters()]
    expected = torch.autograd.grad(F.cross_entropy(generator(hidden), target, reduction="sum"), leaves)
    loss = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)(hidden, target)
    for found, wanted in zip(torch.autograd.grad(loss.total, leaves), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-14)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    ("generator", "criterion"),
    [(Rechecked(True), seqpar.CrossEntropy()), (nn.Linear(D, V).double(), RecheckedCriterion())],
)
def test_a_reentrant_checkpoint_is_refused_by_name(generator, criterion):
    hidden, target = batch()
    engine = seqpar.LossCompute(generator, criterion, chunk_tokens=6)
    with pytest.raises(RuntimeError, match=r"generator or the loss has a checkpoint with use_reentrant=True.*: pass"):
        engine(hidden, target)
    with torch.no_grad():
        plain = criterion(generator(hidden), target)
        torch.testing.assert_close(engine(hidden, target).total, plain, rtol=1e-12, atol=0)


UNDER = {
    "jacobian": lambda f, h: jacobian(f, h),
    "vectorised": lambda f, h: jacobian(f, h, vectorize=True),
    "forward mode": lambda f, h: jacobian(f, h, vectorize=True, strategy="forward-mode"),
    "jacrev": lambda f, h: torch.func.jacrev(f)(h),
    "jacfwd": lambda f, h: torch.func.jacfwd(f)(h),
    "hessian": lambda f, h: hessian(f, h),
    "linearize": lambda f, h: torch.func.linearize(f, h),
}


@pytest.mark.unswitched
@pytest.mark.parametrize("under", UNDER)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in forward mode
@pytest.mark.parametrize("call", CALLS)
def test_a_jacobian_is_exact_or_refused_in_one_line(call, under):
    hidden, target = batch()
    module = Both(call)
    if under == "jacobian":
        found = jacobian(lambda h: module(h, target), hidden)
        loss = module(hidden, target)
        assert torch.equal(found, torch.autograd.grad(loss, hidden)[0])
        return
    with pytest.raises(RuntimeError, match=r"(; use |use torch\.nn|use the plain|use log_softmax)") as caught:
        UNDER[under](lambda h: module(h, target), hidden)
    assert "\n" not in str(caught.value)


def test_a_vectorised_jacobian_through_a_criterion_is_refused_in_one_line():
    hidden, target = batch()
    module = Both("engine")
    criterion = seqpar.LabelSmoothing(0.1, "torch")
    with pytest.raises(RuntimeError, match=r"by a batched gradient; .* use torch\.nn\.functional\.cross_entropy there"):
        jacobian(lambda h: criterion(module.out(h), target), hidden, vectorize=True)


TARGET = torch.tensor([1, 0, 6, 3, 2, 5, 4, 0, 1])
CALLED: list[int] = []


class Gated(nn.Module):
    """A generator without a closed form, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(D, D)
        self.out = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        CALLED.append(1)
        scores: Tensor = self.out(torch.tanh(self.mix(x)))
        return scores


class InPlace(Gated):
    """One that changes a tensor that its gradient needs."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tanh(self.mix(x))
        scores: Tensor = self.out(mixed)
        mixed.add_(1)
        return scores


def engine(generator: nn.Module, devices: list[str] | None) -> seqpar.LossCompute:
    return seqpar.LossCompute(generator.double(), seqpar.CrossEntropy(), devices=devices, chunk_tokens=2)


def step(loss: seqpar.LossCompute, around: Callable[..., Any]) -> list[Tensor]:
    """The loss of tokens behind a trained layer, and the gradients of that layer and the generator."""
    torch.manual_seed(1)
    below = nn.Linear(D, D).double()
    inputs = torch.randn(len(TARGET), D).double()
    total = around(lambda x: loss(torch.sin(below(x)), TARGET).total, inputs)
    total.backward()
    return [total.detach(), *(p.grad for p in [*below.parameters(), *loss.parameters()] if p.grad is not None)]


def plain(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
@pytest.mark.parametrize("first", [True, False])
def test_in_a_checkpoint_the_loss_is_recomputed_at_most_once(devices: list[str] | None, first: bool) -> None:
    expected = step(engine(Gated(), devices), plain)
    generator = Gated()
    loss = engine(generator, devices)
    if not first:
        step(loss, plain)
        loss.zero_grad()
    CALLED.clear()
    got = step(loss, lambda f, x: checkpoint(f, x, use_reentrant=False))
    in_checkpoint = len(CALLED)
    loss.zero_grad()
    CALLED.clear()
    step(loss, plain)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    # The first call also looks at the generator on a few rows
    assert in_checkpoint <= 2 * len(CALLED) + 80 * first


def test_the_hooks_are_given_no_tensor_of_a_chunk() -> None:
    sizes = []

    def seen(tensor: Tensor) -> Tensor:
        sizes.append(tuple(tensor.shape))
        return tensor

    loss = engine(Gated(), None)
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        step(loss, plain)
    assert sizes
    assert not [size for size in sizes if size and size[0] == 2]


def test_a_change_in_place_is_still_an_error() -> None:
    # torch.DoubleTensor on a CPU; an accelerator's tensors have another name
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[\S+Double\w+ \[\d, 8\]\]"):
        step(engine(InPlace(), None), plain)
    with (
        pytest.raises(RuntimeError, match=r"of shape \(\d, 8\) that is needed for the gradient was changed in place"),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        step(engine(InPlace(), None), plain)

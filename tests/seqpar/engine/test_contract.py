"""What a pair must not do is refused by name on the first call, or stays right; what it may do passes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import seqpar
from seqpar.testing import assert_same_results
from seqpar.testing.ranks import ranks
from tests.on_device import seeds

V = 11


class Head(nn.Module):
    """A projection with something done before it, after it, and to what it holds."""

    def __init__(self, before: Any = None, after: Any = None, of_weight: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, V).double()
        self.before, self.after, self.of_weight = before, after, of_weight
        self.steps = 0
        self.seen: list[int] = []
        self.recent: deque[int] = deque(maxlen=9)
        self.histogram = np.zeros(2)
        self.sums = {"most": 100, "rows": 0}
        self.total = torch.zeros((), dtype=torch.float64)
        # Not the first of the parameters
        self.late = nn.ParameterDict({"gate": torch.zeros(4, dtype=torch.float64)})
        self.frozen = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        self.names, self.inner = {"a"}, SimpleNamespace(steps=0)
        self.box, self.pair, self.cells, self.keys = [nn.Identity()], ([],), [torch.zeros(3)], {0: None}
        self.leaf, self.table, self.once = torch.zeros(2, requires_grad=True), torch.zeros(100), True
        self.chain = None
        for _ in range(400):
            self.chain = [self.chain]
        self.circle: list[Any] = []
        self.circle.append(self.circle)
        self.own = torch.Generator().manual_seed(1)
        self.twister, self.legacy, self.numpy = random.Random(1), np.random.RandomState(1), np.random.default_rng(1)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.before is not None:
            hidden = self.before(self, hidden * 1)
        if self.of_weight is None:
            scores = self.linear(hidden)
        else:
            weight = self.linear.weight * 1
            if weight.requires_grad:
                weight.register_hook(self.of_weight)
            scores = F.linear(hidden, weight, self.linear.bias)
        if self.after is not None:
            self.after(self, scores)
        return scores


def batch(rows: int = 20) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 4).double().requires_grad_(), torch.randint(V, (rows,))


def hooked(change: Any) -> Any:
    def before(self: Head, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            hidden.register_hook(change)
        return hidden

    return before


def on_weight(change: Any) -> Any:
    def after(self: Head, scores: Tensor) -> None:
        if scores.requires_grad:
            scores.register_hook(change)

    return after


def across(grad: Tensor) -> Tensor:
    """Add what a sum of all columns weighted by cos(1), cos(2), ... does not show."""
    change = torch.zeros_like(grad)
    change[..., :2] = grad.abs().sum(-1, keepdim=True) * torch.tensor([2.0, 1.0], device=grad.device).cos().to(grad)
    change[..., 1] *= -1
    return grad + change


OF_A_ROW = {
    "a change across": across,
    "a clamp": lambda g: g.clamp(-0.01, 0.01),
    "a unit norm of each row": lambda g: F.normalize(g, dim=-1),
    "a sign": torch.sign,
    "only increases": lambda g: g.clamp(min=0),
    "a clamp of what is left": lambda g: (g * 1e-9).clamp(-1e-11, 1e-11),
}
OF_THE_BATCH = {
    "the batch's norm": lambda g: g / g.norm(),
    "a quantile of all": lambda g: g * (g.abs() >= g.abs().quantile(0.5)),
    "what no sum over a row shows": lambda g: g + g.abs().max(0).values - g.abs().max(0).values.mean(),
    "one number more": lambda g: g + g.square().sum(),
    "one number less": lambda g: g - g.square().sum(),
    "the batch's norm, where it is small": lambda g: g / g.norm() if g.norm() < 0.5 else g,
}
"""The last one alone joins no rows at factor 1, where the probe's gradient is larger."""


def with_hook(change: Any, where: Any) -> Head:
    """A head that changes the gradient of hidden, or of the scores, or of a weight."""
    if where is Head:
        return Head(of_weight=change)
    return Head(before=hooked(change)) if where is hooked else Head(after=on_weight(change))


@pytest.mark.parametrize("where", [hooked, on_weight, Head])
@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_a_backward_that_joins_rows_is_refused(name: str, where: Any) -> None:
    generator = with_hook(OF_THE_BATCH[name], where)
    with pytest.raises(ValueError, match=r"backward through the pair is not linear|mixes rows"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)(*batch())


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu", "cpu"]])
@pytest.mark.parametrize("factor", [1 / 20, -3.0, 0.0])
@pytest.mark.parametrize("where", [hooked, on_weight])
@pytest.mark.parametrize("name", OF_A_ROW)
def test_a_backward_that_changes_each_row_alone_is_that_of_the_plain_loss_at_any_factor(
    name: str, where: Any, factor: float, devices: Any
) -> None:
    generator = with_hook(OF_A_ROW[name], where)
    hidden, target = batch()
    ends = [hidden, *generator.linear.parameters()]
    plain = torch.autograd.grad(factor * F.cross_entropy(generator(hidden), target, reduction="sum"), ends)
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices=devices, chunk_tokens=6)
    for scale in (1.0, 0.5):  # what the caller says of the factor changes nothing
        loss = engine(hidden, target, loss_scale=scale)
        for mine, expected in zip(torch.autograd.grad(factor * loss.total, ends), plain, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-15)
    assert ", and again in backward, as the gradient depends on the factor of the loss; " in engine.explain()


class Skipping(torch.autograd.Function):
    """The identity, with no gradient where none is larger than this."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return grad if grad.abs().max() > ctx.most else None, None


def gated(self: Head, x: Tensor) -> Tensor:
    return Skipping.apply(x, 0.0) * (x[..., :1] > 0)


def skipped(self: Head, x: Tensor) -> Tensor:
    return torch.cat([Skipping.apply(row, 0.05) for row in x.flatten(0, -2).split(1)]).view(x.shape)


@pytest.mark.parametrize("before", [gated, skipped])
def test_a_backward_that_gives_no_gradient_in_the_place_of_zeros_has_that_of_the_plain_loss(before: Any) -> None:
    """None in one half of the rows that are asked about, or for small factors alone."""
    generator, (hidden, target) = Head(before=before), batch()
    hidden = hidden.detach()
    hidden[:, 0] = torch.where(torch.arange(20) < 10, -1, 1)
    hidden.requires_grad_()
    losses = (
        seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)(hidden, target).total,
        F.cross_entropy(generator(hidden), target, reduction="sum"),
    )
    ends = [hidden, generator.linear.weight]
    mine, plain = (torch.autograd.grad(loss / 20, ends, materialize_grads=True) for loss in losses)
    for own, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-15)


def test_a_weights_gradient_that_does_not_add_up_is_refused_beside_dropout() -> None:
    generator = Head(lambda self, x: F.dropout(x, 0.5, self.training), of_weight=OF_THE_BATCH["a quantile of all"])
    with pytest.raises(ValueError, match=r"backward through the pair is not linear: the gradient of a half"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)(*batch())


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu", "cpu"]])
def test_a_backward_that_is_not_linear_is_that_of_the_autocast_of_forward(devices: Any) -> None:
    generator = with_hook(OF_A_ROW["a clamp"], hooked).float()
    hidden, target = (t.detach() if t.is_floating_point() else t for t in batch())
    hidden = hidden.float().requires_grad_()
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices=devices, chunk_tokens=6)
    with torch.autocast(hidden.device.type, torch.bfloat16):
        loss = engine(hidden, target)
        plain = F.cross_entropy(generator(hidden), target, reduction="sum")
    (mine,), (expected,) = (torch.autograd.grad(each / 20, hidden) for each in (loss.total, plain))
    assert (mine - expected).norm() <= 0.01 * expected.norm()


def clamped(after: Any = None) -> Head:
    return Head(before=hooked(OF_A_ROW["a clamp"]), after=after)


def test_the_gradient_of_padding_alone_is_0_though_a_backward_is_not_linear() -> None:
    engine = seqpar.LossCompute(clamped(), seqpar.CrossEntropy(ignore_index=0), chunk_tokens=6)
    hidden, target = batch()
    engine(hidden, target.clamp(min=1))
    loss = engine(hidden, torch.zeros_like(target))
    assert not torch.autograd.grad(loss.total / loss.tokens, hidden)[0].any()


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_a_change_in_place_before_a_backward_that_needs_the_tensor_is_noticed_however_small(
    name: str, devices: Any
) -> None:
    generator = clamped()
    hidden, target = batch()
    loss = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices=devices)(hidden, target)
    with torch.no_grad():
        {"hidden": hidden, "weight": generator.linear.weight}[name][0, 0] += 1e-12
    with pytest.raises(RuntimeError, match="that is needed for the gradient was changed in place after its use in the"):
        loss.total.backward()


def test_a_loss_of_nan_has_a_gradient_of_nan_where_backward_computes_it_again() -> None:
    generator, (hidden, target) = clamped(), batch()
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    engine(hidden, target)
    hidden = hidden.detach().index_fill(0, torch.tensor([3], device=target.device), torch.nan).requires_grad_()
    (mine,), (plain,) = (
        torch.autograd.grad(loss / 20, hidden)
        for loss in (engine(hidden, target).total, F.cross_entropy(generator(hidden), target, reduction="sum"))
    )
    torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-15, equal_nan=True)


def test_weights_that_change_before_a_backward_that_needs_them_are_noticed() -> None:
    generator = clamped()
    loss = seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    generator.linear.bias.data[0] += 0.001  # of which torch keeps no version
    with pytest.raises(RuntimeError, match=r"the loss was 5\d\.\d+ in forward and is 5\d\.\d+ in backward, where"):
        loss.total.backward()


@pytest.mark.parametrize(("reason", "made"), [("it is random", nn.Dropout()), ("calls add to its buffers", None)])
def test_a_pair_that_cannot_be_computed_twice_needs_a_linear_backward(reason: str, made: Any) -> None:
    class Twice(Head):
        def forward(self, hidden: Tensor) -> Tensor:
            if made is not None:
                return super().forward(made(hidden))
            self.rows.add_(hidden.size(0))
            return super().forward(hidden)

    generator = Twice(before=hooked(OF_A_ROW["a clamp"]))
    generator.register_buffer("rows", torch.zeros((), dtype=torch.int64))
    with pytest.raises(ValueError, match=f"cannot be computed again when the factor is known, as {reason}: clip"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)(*batch())


def test_a_pair_that_is_random_in_training_alone_needs_a_linear_backward_too() -> None:
    generator = Head(lambda self, x: hooked(OF_A_ROW["a clamp"])(self, F.dropout(x, 0.5, self.training)))
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)
    with pytest.raises(ValueError, match="cannot be computed again when the factor is known, as it is random: clip"):
        engine(*batch())
    generator.eval()
    assert engine(*batch()).total.isfinite()


@pytest.mark.parametrize("name", ["reversed", "scaled", "of a part"])
def test_a_linear_backward_passes(name: str) -> None:
    change = {
        "reversed": torch.neg,
        "scaled": lambda g: 0.1 * g,
        "of a part": lambda g: g * torch.arange(g.size(-1), device=g.device),
    }
    generator = Head(before=hooked(change[name]))
    hidden, target = batch()
    (plain,) = torch.autograd.grad(F.cross_entropy(generator(hidden), target, reduction="sum"), hidden)
    loss = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)(hidden, target)
    torch.testing.assert_close(torch.autograd.grad(loss.total, hidden)[0], plain, rtol=1e-12, atol=1e-15)


class Clamping(nn.Linear):
    """A projection that clamps the gradient of its input."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hooked(OF_A_ROW["a clamp"])(None, hidden * 1))


def refusal_of_a_unit(rank: int, world: int) -> str:
    """What is said of an FSDP2 unit whose backward is not linear."""
    generator = Clamping(4, V).double()
    fully_shard(generator)
    with pytest.raises(ValueError, match="is not linear") as refused:
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    return str(refused.value)


@pytest.mark.unswitched
def test_a_unit_of_fsdp2_cannot_be_computed_again_in_backward() -> None:
    for said in ranks(2, refusal_of_a_unit):
        assert "when the factor is known, as FSDP2 gathers its weights for forward alone: clip or normalise" in said


class OfTokens(nn.Module):
    """A generator or criterion whose gradient in a tensor of each token is changed."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, V).double(), change

    def forward(self, hidden: Tensor, shift: Tensor) -> Tensor:
        scores: Tensor = self.linear(hidden.detach() + hooked(self.change)(None, shift * 1))
        return scores


class Weighing(OfTokens):
    def forward(self, scores: Tensor, target: Tensor, shift: Tensor) -> Tensor:
        weight = hooked(self.change)(None, shift * 1).exp().mean(-1)
        return (F.cross_entropy(scores.detach(), target, reduction="none") * weight).sum()


@pytest.mark.parametrize("made", [OfTokens, Weighing])
@pytest.mark.parametrize("name", ["a clamp", "only increases", "the batch's norm"])
def test_the_gradient_of_a_tensor_of_each_token_is_asked_as_that_of_hidden_is(name: str, made: Any) -> None:
    module = made({**OF_A_ROW, **OF_THE_BATCH}[name])
    pair = (module, seqpar.CrossEntropy()) if made is OfTokens else (nn.Linear(4, V).double(), module)
    engine = seqpar.LossCompute(*pair, chunk_tokens=6)
    (hidden, target), shift = batch(), torch.randn(20, 4, dtype=torch.float64, requires_grad=True)
    if name in OF_THE_BATCH:
        with pytest.raises(ValueError, match=r"is not linear: .*(shift|loss)"):
            engine(hidden, target, shift=shift)
        return
    found = []
    for total in (
        engine(hidden, target, shift=shift).total,
        module(pair[0](hidden), target, shift) if made is Weighing else pair[1](module(hidden, shift), target),
    ):
        (grad,) = torch.autograd.grad(total / 20, shift)
        found.append((total.detach(), {"shift": grad}))
    assert_same_results(*found)


class Accumulating(torch.autograd.Function):
    """A product whose backward adds to the weight's gradient where there is one, and returns none."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.weight = weight
        return hidden @ weight.mT

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        grad = upstream.mT @ hidden
        if ctx.weight.grad is None:
            return upstream @ weight, grad
        ctx.weight.grad.add_(grad)
        return upstream @ weight, None


class Fused(nn.Module):
    def __init__(self, product: Any = Accumulating) -> None:
        super().__init__()
        self.product = product
        self.weight = nn.Parameter(torch.randn(V, 4).double())

    def forward(self, hidden: Tensor) -> Tensor:
        return self.product.apply(hidden, self.weight)


def test_a_backward_that_adds_to_a_gradient_that_is_there_is_refused_on_the_first_call() -> None:
    generator = Fused()
    with pytest.raises(ValueError, match=r"backward writes into generator\.weight\.grad"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    assert generator.weight.grad is None


class IntoMain(Accumulating):
    """A product whose backward adds to the weight's main_grad, as Megatron's fused accumulation does."""

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        hidden, weight = ctx.saved_tensors
        ctx.weight.main_grad.add_(upstream.flatten(0, -2).mT @ hidden.flatten(0, -2))
        return upstream @ weight, None


def test_a_backward_that_adds_to_main_grad_is_refused_and_has_added_nothing() -> None:
    generator = Fused(IntoMain)
    generator.weight.main_grad = torch.zeros(V, 4).double()
    with pytest.raises(ValueError, match=r"backward writes into generator\.weight\.main_grad"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    assert not generator.weight.main_grad.any()


class MakesMain(Accumulating):
    """The same where there is no main_grad yet: backward makes one."""

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        hidden, weight = ctx.saved_tensors
        ctx.weight.main_grad = upstream.flatten(0, -2).mT @ hidden.flatten(0, -2)
        return upstream @ weight, None


def test_a_backward_that_makes_a_main_grad_is_refused_and_leaves_none() -> None:
    generator = Fused(MakesMain)
    with pytest.raises(ValueError, match=r"backward writes into generator\.weight\.main_grad"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    assert not hasattr(generator.weight, "main_grad")


class ReplacesMain(Accumulating):
    """The same, where backward puts another tensor in the place of main_grad."""

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        hidden, weight = ctx.saved_tensors
        ctx.weight.main_grad = ctx.weight.main_grad + upstream.flatten(0, -2).mT @ hidden.flatten(0, -2)
        return upstream @ weight, None


def test_a_backward_that_replaces_a_main_grad_is_refused_and_leaves_the_old_one() -> None:
    generator = Fused(ReplacesMain)
    generator.weight.main_grad = before = torch.zeros(V, 4).double()
    with pytest.raises(ValueError, match=r"backward writes into generator\.weight\.main_grad"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    assert generator.weight.main_grad is before
    assert not before.any()


def test_no_gradient_is_taken_where_none_is_wanted_and_none_is_there_in_backward() -> None:
    found = []

    class Hooked(nn.Linear):
        @torch.enable_grad()
        def forward(self, hidden: Tensor) -> Tensor:
            scores = super().forward(hidden)
            if scores.requires_grad:
                scores.register_hook(lambda grad: found.append(self.weight.grad))
            return scores

    generator, criterion = Hooked(4, V).double(), seqpar.CrossEntropy()
    with torch.no_grad():
        seqpar.LossCompute(generator, criterion)(*batch())
    assert not found
    seqpar.LossCompute(generator, criterion)(*batch())
    assert {*found} == {None}


class Ignoring(nn.Module):
    def __init__(self, ignored: int, named: int | None = None) -> None:
        super().__init__()
        self.ignored = ignored
        if named is not None:
            self.ignore_index = named

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, ignore_index=self.ignored, reduction="sum")


@pytest.mark.parametrize("padding", [0, 1, 3, V - 1])
def test_padding_without_a_name_is_refused_with_its_target(padding: int) -> None:
    hidden, target = batch()
    target[15:] = padding
    with pytest.raises(ValueError, match=f"ignores target {padding} but has no ignore_index"):
        seqpar.LossCompute(nn.Linear(4, V).double(), Ignoring(padding))(hidden, target)
    with pytest.raises(ValueError, match=f"ignores target {padding} but its ignore_index is -100"):
        seqpar.LossCompute(nn.Linear(4, V).double(), Ignoring(padding, -100))(hidden, target)
    loss = seqpar.LossCompute(nn.Linear(4, V).double(), Ignoring(padding, padding))(hidden, target)
    assert loss.tokens == (target != padding).sum()


class CountsItself(Ignoring):
    def token_loss(self, logits: Tensor, target: Tensor) -> seqpar.TokenLoss:
        return seqpar.TokenLoss(super().forward(logits, target), (target != self.ignored).sum())

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.token_loss(logits, target).total


class CountsAll(CountsItself):
    """It counts tokens that it ignores."""

    def token_loss(self, logits: Tensor, target: Tensor) -> seqpar.TokenLoss:
        return super().token_loss(logits, target)._replace(tokens=torch.tensor(len(target)))


@pytest.mark.parametrize(
    ("targets", "padding", "found"),
    [(range(4, V), 3, True), (range(5, V), 4, False), (range(2), 3, False), (range(2), 2, False), (range(3), 2, True)],
)
@pytest.mark.parametrize("made", [Ignoring, CountsAll])
def test_padding_is_looked_for_among_the_first_four_targets_up_to_the_largest(
    made: Any, targets: range, padding: int, found: bool
) -> None:
    hidden, _ = batch()
    target = torch.arange(20) % len(targets) + targets.start
    engine = seqpar.LossCompute(nn.Linear(4, V).double(), made(padding))
    if found:
        with pytest.raises(ValueError, match=f"ignores target {padding} but has no ignore_index"):
            engine(hidden, target)
    else:
        engine(hidden, target)


@pytest.mark.parametrize("wanted", [True, False])
def test_padding_is_found_beside_a_masked_class_and_where_one_row_that_is_asked_about_has_it(wanted: bool) -> None:
    hidden, target = batch()
    target = target % 4 + 4
    target[5] = V - 2
    generator = nn.Linear(4, V).double()
    with torch.no_grad():
        generator.bias[V - 1] = -torch.inf
    found = pytest.raises(ValueError, match=f"ignores target {V - 2} but has no ignore_index")
    with torch.set_grad_enabled(wanted), found:
        seqpar.LossCompute(generator, Ignoring(V - 2))(hidden, target)


def test_padding_without_a_name_passes_where_the_criterion_counts_no_tokens_of_it() -> None:
    hidden, target = batch()
    target[15:] = 3
    loss = seqpar.LossCompute(nn.Linear(4, V).double(), CountsItself(3), chunk_tokens=6)(hidden, target)
    assert loss.tokens == (target != 3).sum()


@pytest.mark.parametrize(("counted", "silent"), [(0, 1), (1, 0), (2, 3), (3, 2)])
def test_padding_without_a_name_is_found_beside_one_of_which_the_criterion_counts_no_tokens(
    counted: int, silent: int
) -> None:
    class Both(CountsItself):
        def token_loss(self, scores: Tensor, target: Tensor) -> seqpar.TokenLoss:
            counts = target != counted
            losses = F.cross_entropy(scores, target, reduction="none") * (counts & (target != silent))
            return seqpar.TokenLoss(losses.sum(), counts.sum())

    hidden, target = batch()
    target[:] = torch.arange(len(target)) % 4
    with pytest.raises(ValueError, match=f"ignores target {silent} but has no ignore_index"):
        seqpar.LossCompute(nn.Linear(4, V).double(), Both(counted), chunk_tokens=6)(hidden, target)


@pytest.mark.parametrize("where", [slice(None, -1), slice(-1, None)], ids=["most common", "last"])
def test_padding_that_none_of_the_rows_asked_about_has_is_found(where: slice) -> None:
    hidden, target = batch()
    target[:] = torch.arange(len(target)) % 4
    target[where] = V - 2
    # The rows that are asked about
    target[::5] = torch.arange(4)
    with pytest.raises(ValueError, match=f"ignores target {V - 2} but has no ignore_index"):
        seqpar.LossCompute(nn.Linear(4, V).double(), Ignoring(V - 2))(hidden, target)


def test_padding_without_a_name_is_found_beside_more_that_has_one() -> None:
    hidden, target = batch()
    target[:] = torch.arange(len(target)) % 4
    # Neither the first rows nor those that are asked about
    target[1:9:2] = V - 2
    target[9:] = -1
    with pytest.raises(ValueError, match=f"ignores target {V - 2} but its ignore_index is "):
        seqpar.LossCompute(nn.Linear(4, V).double(), Ignoring(V - 2, named=-1))(hidden, target)


@pytest.mark.parametrize("named", [0, 2, V - 1])
def test_a_criterion_that_does_not_ignore_the_target_that_it_names_is_refused(named: int) -> None:
    with pytest.raises(ValueError, match=f"ignore_index is {named}, but its loss of target {named} is not 0"):
        seqpar.LossCompute(nn.Linear(4, V).double(), Ignoring(-100, named))(*batch())


class MeanTimesTokens(Ignoring):
    """A sum, but of ignored targets alone 0 / 0."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        mean = F.cross_entropy(logits, target, ignore_index=self.ignored)
        return mean * (target != self.ignored).sum()


def test_a_criterion_whose_loss_of_the_target_that_it_names_is_no_number_passes() -> None:
    hidden, target = batch()
    target[15:] = 3
    generator, criterion = nn.Linear(4, V).double(), MeanTimesTokens(3, 3)
    loss = seqpar.LossCompute(generator, criterion, chunk_tokens=6)(hidden, target)
    torch.testing.assert_close(loss.total, criterion(generator(hidden), target), rtol=1e-12, atol=0)


GATED = {
    "a running sum": lambda gate, x: gate * x.cumsum(0),
    "a detached mean": lambda gate, x: gate * x.mean(0).detach().expand_as(x),
    "a neighbour": lambda gate, x: gate * x.roll(1, 0),
    "a gate whose entries must differ": lambda gate, x: (gate - gate.mean()) * x.cumsum(0),
}


@pytest.mark.parametrize("name", GATED)
def test_mixing_behind_a_gate_that_is_closed_is_refused(name: str) -> None:
    generator = Head(before=lambda self, x: x + GATED[name](self.late["gate"], x))
    with pytest.raises(ValueError, match="the generator mixes rows"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())


def test_mixing_beside_dropout_that_only_values_show_is_refused() -> None:
    generator = Head(before=lambda self, x: F.dropout(x, 0.5, self.training) + x.mean(0).detach())
    with pytest.raises(ValueError, match=r"the generator mixes rows: a token's scores change with the other tokens"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())


def test_a_closed_gate_before_a_row_of_its_own_passes() -> None:
    generator = Head(before=lambda self, x: x + self.late["gate"] * x.tanh())
    assert seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch()).total.isfinite()
    assert not generator.late["gate"].any()


class Called(nn.Linear):
    def __call__(self, hidden: Tensor) -> Tensor:
        return 2 * super().__call__(hidden)


def stable_max(logits: Tensor, target: Tensor, *_: Any, reduction: str = "mean", **__: Any) -> Tensor:
    scores = torch.where(logits >= 0, logits + 1, 1 / (1 - logits))
    return F.nll_loss((scores / scores.sum(-1, keepdim=True)).log(), target, reduction=reduction)


class Halved(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result / 2 if function is F.linear else result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("wanted", [True, False])
def test_a_function_that_was_replaced_by_one_that_hardly_differs_is_called(
    dtype: torch.dtype, wanted: bool, monkeypatch: Any
) -> None:
    original, (hidden, target) = F.cross_entropy, batch()
    monkeypatch.setattr(F, "cross_entropy", lambda *given, **named: 1.01 * original(*given, **named))
    generator, criterion = nn.Linear(4, V).to(dtype), nn.CrossEntropyLoss(reduction="sum")
    hidden = hidden.to(dtype)
    with torch.set_grad_enabled(wanted):
        mine = seqpar.LossCompute(generator, criterion, chunk_tokens=6)(hidden, target).total
        torch.testing.assert_close(mine, criterion(generator(hidden), target))


class HalfOfTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return upstream[0] / 2


def doubled_linear(forward: Any) -> Any:
    def called(self: nn.Module, *given: Any) -> Any:
        result = forward(self, *given)
        return 2 * result if isinstance(self, nn.Linear) else result

    return called


def twice_the_loss(self: nn.Module, scores: Tensor, target: Tensor) -> Tensor:
    return 2 * F.cross_entropy(scores, target, reduction="sum")


PRODUCT, CALL, FORWARD = F.linear, nn.Module.__call__, nn.Linear.forward
"""What is replaced, as torch has it."""
REPLACED: dict[str, tuple[Any, str, Any]] = {
    "cross_entropy": (F, "cross_entropy", stable_max),
    "linear": (F, "linear", lambda *given: 2 * PRODUCT(*given)),
    "forward": (nn.Linear, "forward", lambda self, x: 3 * F.linear(x, self.weight, self.bias)),
    # The same value, and half of a gradient
    "gradient": (nn.Linear, "forward", lambda self, x: (FORWARD(self, x) + FORWARD(self, x).detach()) / 2),
    "of weight": (F, "linear", lambda x, w, b: PRODUCT(x, HalfOfTheGradient.apply(w), b)),
    "of bias": (F, "linear", lambda x, w, b: PRODUCT(x, w, HalfOfTheGradient.apply(b))),
    "module": (nn.Module, "__call__", doubled_linear(CALL)),
    "criterion": (nn.CrossEntropyLoss, "forward", twice_the_loss),
    "own criterion": (seqpar.CrossEntropy, "forward", twice_the_loss),
}


@pytest.mark.parametrize("first", ["", "training", "evaluation"])
@pytest.mark.parametrize("kind", [*REPLACED, "mode", "call"])
def test_what_was_replaced_is_called_also_after_the_first_call(kind: str, first: str, monkeypatch: Any) -> None:
    generator: nn.Module = (Called if kind == "call" else nn.Linear)(4, V).double()
    criterion = seqpar.CrossEntropy() if kind == "own criterion" else nn.CrossEntropyLoss(reduction="sum")
    engine = seqpar.LossCompute(generator, criterion, chunk_tokens=6)
    hidden, target = batch()
    if first == "training":
        engine(hidden, target)
    if kind in REPLACED:
        monkeypatch.setattr(*REPLACED[kind])
    with Halved() if kind == "mode" else torch.enable_grad():
        # Of which no gradient is compared
        if first == "evaluation":
            with torch.no_grad():
                engine(hidden, target)
        mine, plain = engine(hidden, target).total, criterion(generator(hidden), target)
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=0)
        grads = [torch.autograd.grad(total, [hidden, *generator.parameters()]) for total in (mine, plain)]
        assert engine.explain().startswith("by autograd, chunk by chunk (")
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)
    monkeypatch.undo()
    engine(hidden, target)
    assert engine.explain().startswith("by formula (") == (kind != "call")


LOG_SOFTMAX, LOG_SOFTMAX_FORWARD, TOKEN_LOSS = F.log_softmax, nn.LogSoftmax.forward, seqpar.CrossEntropy.token_loss
LATER: dict[str, tuple[Any, str, Any]] = {
    "log_softmax": (F, "log_softmax", lambda x, *given, **named: LOG_SOFTMAX(2 * x, *given, **named)),
    "LogSoftmax": (nn.LogSoftmax, "forward", lambda self, x: LOG_SOFTMAX_FORWARD(self, 2 * x)),
    "token_loss": (seqpar.LabelSmoothing, "token_loss", lambda self, z, y: TOKEN_LOSS(self, 2 * z, y)),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", LATER)
def test_what_a_pair_with_a_log_softmax_calls_may_be_replaced_too(kind: str, first: bool, monkeypatch: Any) -> None:
    generator = nn.Sequential(nn.Linear(4, V), nn.LogSoftmax(-1)).double()
    criterion = seqpar.CrossEntropy() if kind == "token_loss" else nn.CrossEntropyLoss(reduction="sum")
    engine = seqpar.LossCompute(generator, criterion, chunk_tokens=6)
    hidden, target = batch()
    if not first:
        engine(hidden, target)
    monkeypatch.setattr(*LATER[kind])
    mine, plain = engine(hidden, target).total, criterion(generator(hidden), target)
    torch.testing.assert_close(mine, plain, rtol=1e-12, atol=0)


def smoothed_twice(scores: Tensor, target: Tensor, *given: Any, label_smoothing: float = 0.0, **named: Any) -> Tensor:
    return CROSS_ENTROPY(scores, target, *given, label_smoothing=2 * label_smoothing, **named)


def weighted_twice(scores: Tensor, target: Tensor, weight: Any = None, *given: Any, **named: Any) -> Tensor:
    return CROSS_ENTROPY(scores, target, None if weight is None else 2 * weight, *given, **named)


CROSS_ENTROPY = F.cross_entropy


@pytest.mark.parametrize("kind", ["smoothing", "weight", "dimensions"])
def test_what_was_replaced_for_an_option_alone_is_called_once_that_is_used(kind: str, monkeypatch: Any) -> None:
    generator, criterion = nn.Linear(4, V).double(), nn.CrossEntropyLoss(reduction="sum")
    engine = seqpar.LossCompute(generator, criterion, chunk_tokens=6)
    hidden, target = batch()
    if kind == "dimensions":
        monkeypatch.setattr(F, "linear", lambda x, w, b: PRODUCT(x, w, b) * (x.dim() - 1))
    else:
        monkeypatch.setattr(F, "cross_entropy", smoothed_twice if kind == "smoothing" else weighted_twice)
    engine(hidden, target)
    if kind == "smoothing":
        criterion.label_smoothing = 0.2
    if kind == "weight":
        criterion.weight = torch.rand(V).double()
    if kind == "dimensions":
        hidden, target = hidden.view(4, 5, 4), target.view(4, 5)
    plain = criterion(generator(hidden).flatten(0, -2), target.flatten())
    torch.testing.assert_close(engine(hidden, target).total, plain, rtol=1e-12, atol=0)


def test_padding_without_a_name_is_found_on_whichever_device_it_is() -> None:
    hidden, target = torch.randn(4, 8, 4).double(), torch.arange(32).view(4, 8) % 4
    # Of a batch that is sorted by length
    target[2:, 2:] = V - 1
    for devices in (None, ["cpu"] * 2):
        with pytest.raises(ValueError, match=f"ignores target {V - 1} but has no ignore_index"):
            seqpar.LossCompute(nn.Linear(4, V).double(), Ignoring(V - 1), devices)(hidden, target)


class ReturnsAll(nn.Module):
    """A criterion that returns what it is told beside the loss."""

    def __init__(self, factor: float = 1.0, **more: Any) -> None:
        super().__init__()
        self.factor, self.more = factor, more

    def token_loss(self, scores: Tensor, target: Tensor) -> seqpar.TokenLoss:
        losses = F.cross_entropy(scores, target, reduction="none")
        made = {name: make(losses, target) for name, make in self.more.items()}
        return seqpar.TokenLoss(losses.sum(), **({"tokens": torch.tensor(len(target))} | made))

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return self.factor * self.token_loss(scores, target).total


class WithoutForward(nn.Module):
    def token_loss(self, scores: Tensor, target: Tensor) -> seqpar.TokenLoss:
        return ReturnsAll().token_loss(scores, target)


class Averages(nn.Module):
    """Its forward is the mean."""

    token_loss = WithoutForward.token_loss

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return self.token_loss(scores, target).mean


@pytest.mark.parametrize("chunk_tokens", [3, 20])
@pytest.mark.parametrize(
    ("criterion", "said"),
    [
        (
            ReturnsAll(tokens=lambda _, y: torch.tensor(len(y.unique()))),
            r"token_loss returns tokens \d for 8 rows, and 8",
        ),
        (
            ReturnsAll(nll=lambda z, _: z.mean().detach()),
            r"token_loss returns nll [\d.]+ for 8 rows, and [\d.]+ as the",
        ),
        (
            ReturnsAll(correct=lambda z, _: torch.tensor(1)),
            r"token_loss returns correct 1 for 8 rows, and 8 as the sum o",
        ),
        (ReturnsAll(1.1), r"token_loss gives [\d.]+ for 8 rows and its forward [\d.]+; both must be the same loss"),
        (ReturnsAll(nll=lambda z, _: z.sum().detach(), correct=lambda z, _: (z < 1).sum()), ""),
        (Averages(), ""),
        (WithoutForward(), ""),
    ],
)
def test_what_a_criterion_returns_beside_its_loss_must_add_up(criterion: Any, said: str, chunk_tokens: int) -> None:
    engine = seqpar.LossCompute(nn.Linear(4, V).double(), criterion, chunk_tokens=chunk_tokens)
    if not said:
        engine(*batch())
        return
    with pytest.raises(ValueError, match=said):
        engine(*batch())


class Gated(nn.Module):
    """A generator of which the gate, given for each token, has a gradient that joins rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, V).double()

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        shared = gate.mean(-1, keepdim=True)
        return self.linear(hidden * (gate + (shared - shared.detach())).unsqueeze(-1))


def test_a_gradient_of_a_per_token_tensor_alone_is_asked_about() -> None:
    hidden, target = (t.view(4, 5, *t.shape[1:]) for t in batch())
    gate = torch.rand(4, 5, dtype=torch.float64, requires_grad=True)
    engine = seqpar.LossCompute(Gated().requires_grad_(False), seqpar.CrossEntropy(), chunk_tokens=6)
    with pytest.raises(ValueError, match=r"off by [\d.]+ from that of all rows, for gate"):
        engine(hidden.detach(), target, gate=gate)


class ByShare(nn.Module):
    """A generator that divides by the largest share of a source in the batch, which only a few rows differ in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, V).double()

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        share = mask.to(hidden).mean(-1)
        return self.linear(hidden) * (share / share.amax()).unsqueeze(-1)


def test_rows_whose_masks_differ_in_their_sum_alone_are_asked_about() -> None:
    mask = torch.ones(4, 6, 5, dtype=torch.bool)
    mask[..., -1] = False
    mask[1, 3] = True
    mask[2, 1, 1:] = False
    hidden, target = torch.randn(4, 6, 4).double(), torch.randint(V, (4, 6))
    with pytest.raises(ValueError, match="generator mixes rows"):
        seqpar.LossCompute(ByShare(), seqpar.CrossEntropy(), chunk_tokens=5)(hidden, target, mask=mask)


@pytest.mark.parametrize("kind", ["linear", "forward", "module", "harmless"])
@pytest.mark.parametrize("ends", [False, True], ids=["projection", "with a log-softmax"])
def test_scores_are_refused_where_a_replaced_product_makes_others(kind: str, ends: bool, monkeypatch: Any) -> None:
    linear = nn.Linear(4, V).double()
    generator = nn.Sequential(linear, nn.LogSoftmax(-1)) if ends else linear
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)
    hidden, target = batch()
    if kind in REPLACED:
        monkeypatch.setattr(*REPLACED[kind])
    if kind == "harmless":
        monkeypatch.setattr(F, "linear", lambda x, w, b: (x.unsqueeze(-2) @ w.t()).squeeze(-2) + b)
    for scores in (
        lambda: -engine.token_scores(hidden, target).log_prob.sum(),
        lambda: engine.scored_loss(hidden, target, lambda s: -s.log_prob).total,
    ):
        if kind != "harmless":
            with pytest.raises(TypeError, match="a call of the generator gives others: something that it calls was"):
                scores()
            continue
        plain = F.cross_entropy(generator(hidden), target, reduction="sum")
        torch.testing.assert_close(scores(), plain, rtol=1e-12, atol=0)


class ClampedWeight(nn.Linear):
    """A weight of which the gradient is clamped, as in some ways to quantise it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Clamped.apply(self.weight), self.bias)


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return upstream[0].clamp(-0.05, 0.05)


@pytest.mark.parametrize("frozen", [["weight"], ["weight", "bias"]])
def test_a_parameter_that_is_unfrozen_is_asked_about(frozen: list[str]) -> None:
    hidden, target = batch()
    generator = ClampedWeight(4, V).double()
    engine = seqpar.LossCompute(generator, nn.CrossEntropyLoss(reduction="sum"), chunk_tokens=6)
    parameters = [getattr(generator, name) for name in frozen]
    for parameter in parameters:
        parameter.requires_grad_(False)
    engine(hidden, target)
    for parameter in parameters:
        parameter.requires_grad_()
    with pytest.raises(ValueError, match="backward through the pair is not linear"):
        engine(hidden, target)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_replaced_product_is_compared_again_with_a_parameter_that_is_unfrozen(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(*REPLACED[f"of {name}"])
    hidden, target = batch()
    generator, criterion = nn.Linear(4, V).double(), nn.CrossEntropyLoss(reduction="sum")
    engine = seqpar.LossCompute(generator, criterion, chunk_tokens=6)
    parameter = getattr(generator, name).requires_grad_(False)
    engine(hidden, target)
    parameter.requires_grad_()
    own, plain = (torch.autograd.grad(f(), parameter)[0] for f in (
        lambda: engine(hidden, target).total, lambda: criterion(generator(hidden), target)
    ))  # fmt: skip
    torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-14)


class CountingRows(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, V, dtype=torch.float64)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.rows += x[..., 0].numel()
        return super().forward(x)


@pytest.mark.parametrize("devices", [None, ["cpu"], ["cpu"] * 3])
def test_a_buffer_that_counts_has_counted_every_row_over_any_devices(devices: Any) -> None:
    generator = CountingRows()
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices, chunk_tokens=6)
    for calls in (1, 2):
        engine(*batch())
        assert generator.rows == 20 * calls


class TurnedRows(CountingRows):
    """Adds up, or keeps the largest, of imaginary parts."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.join = join
        self.register_buffer("rows", torch.zeros((), dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        self.rows.copy_(1j * self.join(self.rows.imag, x.detach().square().sum()))
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("devices", [None, ["cpu"] * 3])
def test_imaginary_parts_of_a_buffer_add_up_or_are_refused(devices: Any) -> None:
    generator, (hidden, target) = TurnedRows(torch.add), batch()
    seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices, chunk_tokens=6)(hidden, target)
    torch.testing.assert_close(generator.rows, 1j * hidden.detach().square().sum())
    with pytest.raises(ValueError, match=r"the buffer generator\.rows changes"):
        seqpar.LossCompute(TurnedRows(torch.maximum), seqpar.CrossEntropy(), devices)(hidden, target)


def test_a_buffer_counts_in_inference_mode_as_well() -> None:
    generator = CountingRows()
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)
    with torch.inference_mode():
        engine(*batch())
    assert generator.rows == 20


def test_a_buffer_that_a_new_one_replaces_is_refused() -> None:
    """The sum would be lost with the copy."""

    class Replacing(CountingRows):
        def forward(self, x: Tensor) -> Tensor:
            self.rows = self.rows + x[..., 0].numel()
            return F.linear(x, self.weight, self.bias)

    generator = Replacing()
    with pytest.raises(ValueError, match=r"the buffer generator\.rows changes"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    assert generator.rows == 0


def test_what_hangs_on_a_parameter_hangs_on_its_copies() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight.factor

    generator = Scaled(4, V).double()
    generator.weight.factor = 0.5
    hidden, target = batch()
    plain = F.cross_entropy(generator(hidden), target, reduction="sum")
    for devices in (None, ["cpu"] * 2):
        loss = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices)(hidden, target).total
        torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)


class SmallPart(nn.Module):
    """Of the gradient of a part that hardly matters only the batch's largest number is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.small = nn.Linear(4, V), nn.Linear(4, V)

    def forward(self, hidden: Tensor) -> Tensor:
        small = self.small(hidden.detach())
        if small.requires_grad:
            small.register_hook(lambda g: g * (g.abs() == g.abs().max()))
        scores: Tensor = self.out(hidden) + 0.01 * small
        return scores


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_small_gradient_that_does_not_add_up_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    hidden, target = batch()
    with pytest.raises(ValueError, match=r"the gradient of a half of the rows .* for generator\.small"):
        seqpar.LossCompute(SmallPart().to(dtype), seqpar.CrossEntropy())(hidden.detach().to(dtype), target)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gradient_of_which_only_rounding_is_left_is_no_fault(dtype: torch.dtype) -> None:
    for seed in seeds(20):
        torch.manual_seed(seed)
        # Width 1: its direction is a sign, whose gradient is 0
        generator = nn.Sequential(nn.Linear(3, 1), nn.utils.parametrizations.weight_norm(nn.Linear(1, V))).to(dtype)
        hidden = torch.randn(12, 3, dtype=dtype, requires_grad=True)
        seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=5)(hidden, torch.randint(V, (12,)))


@pytest.mark.parametrize("size", [1e-4, 2e-6, 2e-7])
def test_small_gradients_in_float16_are_no_fault_of_the_pair(size):
    """A GradScaler multiplies them before they underflow; the check of the factor divides them."""
    generator = nn.Sequential(nn.Linear(8, 11), nn.Identity()).half()
    with torch.no_grad():
        generator[0].weight.mul_(size)
    hidden, target = torch.randn(12, 8).half().requires_grad_(), torch.randint(11, (12,))
    loss = seqpar.LossCompute(generator, seqpar.CrossEntropy())(hidden, target)
    assert loss.total.isfinite()

"""A backward that is not linear, or joins rows: the plain loss's gradient at any factor, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import seqpar
from seqpar.testing import assert_same_results
from seqpar.testing.ranks import ranks
from tests.backward import with_gradient
from tests.on_device import seeds
from tests.seqpar.engine.pairs import Head, Made, V, assert_same, batch, cross_entropy, each_row, linear


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
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices=devices, chunk_tokens=6)
    for scale in (1.0, 0.5):  # what the caller says of the factor changes nothing
        total = engine(hidden, target, loss_scale=scale).total
        plain = cross_entropy(generator(hidden), target)
        assert_same(total, plain, [hidden, *generator.linear.parameters()], factor, atol=1e-15)
    assert ", and again in backward, as the gradient depends on the factor of the loss; " in engine.explain()


def above(most: float) -> Any:
    """No gradient where none is larger than this."""
    return lambda grad: grad if grad.abs().max() > most else None


def gated(self: Head, x: Tensor) -> Tensor:
    return with_gradient(x, above(0.0)) * (x[..., :1] > 0)


def skipped(self: Head, x: Tensor) -> Tensor:
    return torch.cat([with_gradient(row, above(0.05)) for row in x.flatten(0, -2).split(1)]).view(x.shape)


@pytest.mark.parametrize("before", [gated, skipped])
def test_a_backward_that_gives_no_gradient_in_the_place_of_zeros_has_that_of_the_plain_loss(before: Any) -> None:
    """None in one half of the rows that are asked about, or for small factors alone."""
    generator, (hidden, target) = Head(before=before), batch()
    hidden = hidden.detach()
    hidden[:, 0] = torch.where(torch.arange(20) < 10, -1, 1)
    hidden.requires_grad_()
    total = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)(hidden, target).total
    plain = cross_entropy(generator(hidden), target)
    assert_same(total, plain, [hidden, generator.linear.weight], 1 / 20, atol=1e-15)


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
        plain = cross_entropy(generator(hidden), target)
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
        for loss in (engine(hidden, target).total, cross_entropy(generator(hidden), target))
    )
    torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-15, equal_nan=True)


def test_weights_that_change_before_a_backward_that_needs_them_are_noticed() -> None:
    generator = clamped()
    loss = seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    generator.linear.bias.data[0] += 0.001  # of which torch keeps no version
    with pytest.raises(RuntimeError, match=r"the loss was 5\d\.\d+ in forward and is 5\d\.\d+ in backward, where"):
        loss.total.backward()


def counted(self: Any, hidden: Tensor) -> Tensor:
    self.rows.add_(hidden.size(0))
    return hidden


def dropped(self: Any, hidden: Tensor) -> Tensor:
    return F.dropout(hidden)


def dropped_in_training(self: Any, hidden: Tensor) -> Tensor:
    return F.dropout(hidden, 0.5, self.training)


@pytest.mark.parametrize(
    ("reason", "first"),
    [
        ("it is random", dropped),
        ("it is random", dropped_in_training),
        ("calls add to its buffers", counted),
    ],
)
def test_a_pair_that_cannot_be_computed_twice_needs_a_linear_backward(reason: str, first: Any) -> None:
    clamp = hooked(OF_A_ROW["a clamp"])
    generator = Head(before=lambda self, x: clamp(self, first(self, x)))
    generator.register_buffer("rows", torch.zeros((), dtype=torch.int64))
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)
    with pytest.raises(ValueError, match=f"cannot be computed again when the factor is known, as {reason}: clip"):
        engine(*batch())
    if first is dropped_in_training:
        generator.eval()
        assert engine(*batch()).total.isfinite()


LINEAR = {
    "reversed": torch.neg,
    "scaled": lambda g: 0.1 * g,
    "of a part": lambda g: g * torch.arange(g.size(-1), device=g.device),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_backward_passes(name: str) -> None:
    generator, (hidden, target) = Head(before=hooked(LINEAR[name])), batch()
    total = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)(hidden, target).total
    assert_same(total, cross_entropy(generator(hidden), target), [hidden], atol=1e-15)


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
        self.linear, self.change = linear(), change

    def forward(self, hidden: Tensor, shift: Tensor) -> Tensor:
        scores: Tensor = self.linear(hidden.detach() + hooked(self.change)(None, shift * 1))
        return scores


class Weighing(OfTokens):
    def forward(self, scores: Tensor, target: Tensor, shift: Tensor) -> Tensor:
        weight = hooked(self.change)(None, shift * 1).exp().mean(-1)
        return (each_row(scores.detach(), target) * weight).sum()


@pytest.mark.parametrize("made", [OfTokens, Weighing])
@pytest.mark.parametrize("name", ["a clamp", "only increases", "the batch's norm"])
def test_the_gradient_of_a_tensor_of_each_token_is_asked_as_that_of_hidden_is(name: str, made: Any) -> None:
    module = made({**OF_A_ROW, **OF_THE_BATCH}[name])
    pair = (module, seqpar.CrossEntropy()) if made is OfTokens else (linear(), module)
    engine = seqpar.LossCompute(*pair, chunk_tokens=6)
    (hidden, target), shift = batch(), torch.randn(20, 4, dtype=torch.float64, requires_grad=True)
    if name in OF_THE_BATCH:
        with pytest.raises(ValueError, match=r"is not linear: .*(shift|loss)"):
            engine(hidden, target, shift=shift)
        return
    total = engine(hidden, target, shift=shift).total
    plain = module(pair[0](hidden), target, shift) if made is Weighing else pair[1](module(hidden, shift), target)
    assert_same_results(
        *((each.detach(), {"shift": torch.autograd.grad(each / 20, shift)[0]}) for each in (total, plain))
    )


class Product(torch.autograd.Function):
    """A product whose backward writes the weight's gradient somewhere, and returns what that leaves to return."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, write: Any) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.weight, ctx.write = weight, write
        return hidden @ weight.mT

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        grad = upstream.flatten(0, -2).mT @ hidden.flatten(0, -2)
        return upstream @ weight, ctx.write(ctx.weight, grad), None


def add_to_gradient(weight: Any, grad: Tensor) -> Tensor | None:
    """Where there is one; else it is returned."""
    if weight.grad is None:
        return grad
    weight.grad.add_(grad)
    return None


def add_to_main(weight: Any, grad: Tensor) -> None:
    """As Megatron's fused accumulation does."""
    weight.main_grad.add_(grad)


def make_main(weight: Any, grad: Tensor) -> None:
    weight.main_grad = grad


def replace_main(weight: Any, grad: Tensor) -> None:
    weight.main_grad = weight.main_grad + grad


@pytest.mark.parametrize(
    ("write", "name", "is_there"),
    [
        (add_to_gradient, "grad", False),
        (add_to_main, "main_grad", True),
        (make_main, "main_grad", False),
        (replace_main, "main_grad", True),
    ],
)
def test_a_backward_that_writes_a_gradient_is_refused_on_the_first_call_and_has_written_none(
    write: Callable[[Any, Tensor], Tensor | None], name: str, is_there: bool
) -> None:
    weight: Any = nn.Parameter(torch.randn(V, 4).double())
    generator = Made(lambda self, x: Product.apply(x, self.weight, write), weight=weight)
    if is_there:
        weight.main_grad = torch.zeros(V, 4).double()
    before = dict(vars(weight))
    with pytest.raises(ValueError, match=rf"backward writes into generator\.weight\.{name},"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    assert weight.grad is None
    assert vars(weight).keys() == before.keys()
    assert all(vars(weight)[key] is value and not value.any() for key, value in before.items())


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


def gated_by_shares(self: Any, hidden: Tensor, gate: Tensor) -> Tensor:
    """The gate, given for each token, has a gradient that joins rows."""
    shared = gate.mean(-1, keepdim=True)
    return self.linear(hidden * (gate + (shared - shared.detach())).unsqueeze(-1))  # type: ignore[no-any-return]


def test_a_gradient_of_a_per_token_tensor_alone_is_asked_about() -> None:
    hidden, target = (t.view(4, 5, *t.shape[1:]) for t in batch())
    gate = torch.rand(4, 5, dtype=torch.float64, requires_grad=True)
    generator = Made(gated_by_shares, linear=linear()).requires_grad_(False)
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)
    with pytest.raises(ValueError, match=r"off by [\d.]+ from that of all rows, for gate"):
        engine(hidden.detach(), target, gate=gate)


def clamp(grad: Tensor) -> Tensor:
    return grad.clamp(-0.05, 0.05)


class ClampedWeight(nn.Linear):
    """A weight of which the gradient is clamped, as in some ways to quantise it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, with_gradient(self.weight, clamp), self.bias)


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

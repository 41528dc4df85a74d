"""Modules that others have changed: their calls keep their meaning, or one line says why they cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, parametrize

import seqpar
from seqpar.core.token_loss import TokenLoss
from seqpar.testing import assert_same_results

V = 7


def batch(rows: int = 9) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 4, dtype=torch.float64, requires_grad=True), torch.randint(V, (rows,))


def assert_plain(generator: nn.Module, criterion: nn.Module, chunk_tokens: int = 4) -> None:
    """The engine has the loss and the gradients of the plain calls."""
    hidden, target = batch()
    engine = seqpar.LossCompute(generator, criterion, chunk_tokens=chunk_tokens)
    found = []
    for loss in (engine(hidden, target).total, criterion(generator(hidden), target)):
        leaves = {"hidden": hidden, **dict(generator.named_parameters())}
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        found.append((loss.detach(), dict(zip(leaves, gradients, strict=True))))
    assert_same_results(*found)


class Doubled(seqpar.CrossEntropy):
    """Changes forward, and inherits a token_loss that does not know of it."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(logits, target)


class DoubledAgain(Doubled):
    pass


class BothDoubled(seqpar.LabelSmoothing):
    """Changes token_loss alone, which the inherited forward calls."""

    def token_loss(self, logits: Tensor, target: Tensor) -> TokenLoss:
        loss = super().token_loss(logits, target)
        return loss._replace(total=2 * loss.total)


def hooked() -> nn.Module:
    criterion = seqpar.CrossEntropy()
    criterion.register_forward_hook(lambda module, inputs, output: 2 * output)
    return criterion


def patched() -> nn.Module:
    criterion = seqpar.CrossEntropy()
    criterion.forward = lambda logits, target: F.cross_entropy(logits, target, reduction="sum") * 2
    return criterion


@pytest.mark.parametrize("make", [Doubled, DoubledAgain, hooked, patched])
def test_a_criterion_whose_call_was_changed_is_called_and_counts_nothing(make: type[nn.Module]) -> None:
    criterion = make()
    assert_plain(nn.Linear(4, V).double(), criterion)
    loss = seqpar.LossCompute(nn.Linear(4, V).double(), criterion)(*batch())
    assert loss.nll is None
    assert loss.correct is None


def test_a_criterion_that_changes_token_loss_alone_keeps_its_counts() -> None:
    criterion = BothDoubled(0.1, "torch")
    assert_plain(nn.Linear(4, V).double(), criterion)
    assert seqpar.LossCompute(nn.Linear(4, V).double(), criterion)(*batch()).correct is not None


def with_own_forward(nested: bool) -> nn.Module:
    linear = nn.Linear(4, V).double()
    linear.forward = lambda x: F.linear(x, linear.weight, linear.bias) * 0.1
    return nn.Sequential(linear, nn.LogSoftmax(-1)) if nested else linear


@pytest.mark.parametrize("nested", [False, True])
def test_a_forward_set_on_the_instance_is_called_and_refused_where_replicas_are_differentiated(nested: bool) -> None:
    generator = with_own_forward(nested)
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=4)
    assert "Linear has a forward of its own, set on the instance" in engine.explain()
    assert_plain(generator, seqpar.CrossEntropy(), chunk_tokens=4)
    replicas = seqpar.LossCompute(generator, seqpar.CrossEntropy(), ["cpu", "cpu"])
    # It keeps the original's parameters, whose gradient would be lost
    with pytest.raises(RuntimeError, match="forward that was set on the instance keeps the original's parameters"):
        replicas(*batch())


# On two devices in earnest the forward would mix the original's parameters with the replica's rows
@pytest.mark.unswitched
@pytest.mark.parametrize("nested", [False, True])
def test_replicas_that_are_not_differentiated_call_the_forward_set_on_the_instance(nested: bool) -> None:
    generator = with_own_forward(nested)
    hidden, target = batch()
    replicas = seqpar.LossCompute(generator, seqpar.CrossEntropy(), ["cpu", "cpu"])
    with torch.no_grad():
        plain = F.cross_entropy(generator(hidden), target, reduction="sum")
        torch.testing.assert_close(replicas(hidden, target).total, plain, rtol=1e-12, atol=0)


@pytest.fixture
def _no_global_hooks() -> Iterator[None]:
    yield
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.usefixtures("_no_global_hooks")
def test_hooks_of_all_modules_have_their_effect() -> None:
    def halved(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return (inputs[0] / 2,) if isinstance(module, nn.Linear) else None

    def scaled(module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        return output * 0.1 if isinstance(module, nn.Linear) else None

    for register, hook in ((register_module_forward_pre_hook, halved), (register_module_forward_hook, scaled)):
        handle = register(hook)  # type: ignore[operator]
        try:
            assert_plain(nn.Linear(4, V).double(), seqpar.CrossEntropy())
        finally:
            handle.remove()


class Halving(Tensor):
    """A weight that multiplies in its own way, as quantised weights do."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result.as_subclass(Tensor) / 2 if function is F.linear else result


class HalvingParameter(nn.Parameter):
    """The same, of a class that detaching loses."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result / 2 if function is F.linear else result


def test_a_weight_of_a_class_of_its_own_multiplies_in_its_own_way() -> None:
    linear = nn.Linear(4, V).double()
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Halving))
    engine = seqpar.LossCompute(linear, seqpar.CrossEntropy())
    assert "the generator's weight is a Halving, not a plain tensor" in engine.explain()
    assert_plain(linear, seqpar.CrossEntropy())


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
def test_a_weight_whose_class_is_lost_on_the_way_is_refused(devices: list[str] | None) -> None:
    linear = nn.Linear(4, V).double()
    linear.weight = HalvingParameter(linear.weight.detach())
    with pytest.raises(TypeError, match="a parameter is a HalvingParameter, whose class changes how it computes"):
        seqpar.LossCompute(linear, seqpar.CrossEntropy(), devices)(*batch())


class Scaling(nn.Module):
    """A generator that replaces its buffer, or changes it in place, whenever it is called."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, V).double()
        self.in_place = in_place
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) / self.scale
        if self.training and self.in_place:
            self.scale.mul_(0.9)
        elif self.training:
            self.scale = 0.9 * self.scale
        return y


class Centred(nn.Module):
    """A criterion with a running number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return F.cross_entropy(logits, target, reduction="sum")


class Averaging(nn.Module):
    """A criterion with a slow moving average of its loss, which half of the rows twice change by 1 % otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones((), dtype=torch.float64))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, target, reduction="none")
        if self.training:
            self.average.lerp_(losses.detach().mean(), 0.01)
        return losses.sum()


CHANGING = {
    "generator.scale": (lambda: Scaling(False), seqpar.CrossEntropy),
    "the same in place: generator.scale": (lambda: Scaling(True), seqpar.CrossEntropy),
    "generator.parametrizations.weight.0._": (
        lambda: parametrizations.spectral_norm(nn.Linear(4, V).double()),
        seqpar.CrossEntropy,
    ),
    "criterion.calls": (lambda: nn.Linear(4, V).double(), Centred),
    "criterion.average": (lambda: nn.Linear(4, V).double(), Averaging),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_buffer_that_would_change_once_a_chunk_is_refused_in_training_alone(name: str) -> None:
    make, make_criterion = CHANGING[name]
    generator, criterion = make(), make_criterion()
    engine = seqpar.LossCompute(generator, criterion)
    before = {key: value.clone() for key, value in engine.state_dict().items()}
    with pytest.raises(ValueError, match=rf"the buffer {name.split(': ')[-1]}\w* changes when the (gen|crit)"):
        engine(*batch())
    for key, value in engine.state_dict().items():
        assert torch.equal(value, before[key])
    engine.eval()
    assert_plain(generator, criterion)


def test_an_iteration_that_has_converged_before_the_first_call_is_refused_as_well() -> None:
    generator = parametrizations.spectral_norm(nn.Linear(4, V).double())
    for _ in range(200):
        generator.weight  # one step of the power iteration
    with pytest.raises(ValueError, match=r"the buffer generator.parametrizations.weight.0._\w changes when the gen"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())


class Counting(nn.Linear):
    """Counts rows and sums scores in place, neither of which changes the scores."""

    def __init__(self) -> None:
        super().__init__(4, V, dtype=torch.float64)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sums", torch.zeros(V, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.rows += len(x)
        self.sums += y.detach().sum(0)
        return y


class CountingRounded(Counting):
    """The same in float32, with a class whose sum is nan, and a count of what only the weights of now give."""

    def __init__(self) -> None:
        super().__init__()
        self.float().sums[3] = torch.nan
        self.register_buffer("now", torch.zeros((), dtype=torch.int64))
        self.first = self.weight[0, 0].item()

    def forward(self, x: Tensor) -> Tensor:
        self.now += len(x) * (self.weight[0, 0] == self.first)
        return super().forward(x.float())


class AveragingBeside(Counting):
    """The same with a moving average of small numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.small.lerp_(1e-7 * x.detach().abs().mean(), 0.1)
        return super().forward(x)


class Renewed(Counting):
    """The same with a buffer that is renewed, and has the same numbers."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.sums.new_ones(())
        self.register_buffer("scale", scale)
        return super().forward(x) * self.scale


class CountingMatters(Counting):
    """The same, and the scores depend on the count."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.rows


class CountingMattersLittle(Counting):
    """The same, and the scores depend on it in their sixth digit."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-6 * self.rows)


def test_a_generator_may_count_its_rows_if_the_scores_do_not_depend_on_it() -> None:
    generator = Counting()
    hidden, target = batch()
    seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=2)(hidden, target)
    assert generator.rows == len(hidden)
    plain = F.linear(hidden, generator.weight, generator.bias).sum(0)
    torch.testing.assert_close(generator.sums, plain, rtol=1e-12, atol=1e-12)
    for devices in (None, ["cpu"] * 2):
        rounded = CountingRounded()
        seqpar.LossCompute(rounded, seqpar.CrossEntropy(), devices)(hidden, target)
        assert (rounded.rows, rounded.now) == (len(hidden), len(hidden))
        seqpar.LossCompute(Renewed(), seqpar.CrossEntropy(), devices)(hidden, target)
    with pytest.raises(ValueError, match=r"the buffer generator.small changes when the generator is called"):
        seqpar.LossCompute(AveragingBeside(), seqpar.CrossEntropy())(hidden, target)
    for generator in (CountingMatters(), CountingMattersLittle()):
        with pytest.raises(ValueError, match=r"the buffer generator.rows changes when the generator is called"):
            seqpar.LossCompute(generator, seqpar.CrossEntropy())(hidden, target)


class Changing(nn.Linear):
    """Changes a buffer by each call."""

    def __init__(self, kept: Tensor, change: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(4, V, dtype=torch.float64)
        self.register_buffer("kept", kept)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.change(self.kept, y.detach().flatten(0, -2))
        return y


NO_SUMS: dict[str, tuple[Tensor, Callable[[Tensor, Tensor], Any]]] = {
    "classes that were found": (
        torch.zeros(V, dtype=torch.bool),
        lambda kept, y: kept.logical_or_(F.one_hot(y.argmax(-1), V).any(0)),
    ),
    "the largest score": (torch.zeros(()), lambda kept, y: kept.clamp_(min=y.max())),
    "one that was large": (torch.tensor(1000.0), lambda kept, y: kept.clamp_(min=1000 + y.max())),
    "a constant": (torch.zeros(3), lambda kept, y: kept.fill_(1)),
    "another size": (torch.zeros(3), lambda kept, y: kept.resize_(5).fill_(1)),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_a_buffer_that_is_no_sum_over_rows_is_right_on_one_device_and_refused_over_several(name: str) -> None:
    kept, change = NO_SUMS[name]
    generator, plain = (Changing(kept.clone(), change) for _ in range(2))
    plain.load_state_dict({**generator.state_dict(), "kept": kept})
    hidden, target = batch()
    several = seqpar.LossCompute(generator, seqpar.CrossEntropy(), ["cpu"] * 2)
    with pytest.raises(ValueError, match=r"the buffer generator.kept changes by other than a sum .* each device would"):
        several(hidden, target)
    assert torch.equal(generator.kept, kept)
    seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=2)(hidden, target)
    plain(hidden)
    torch.testing.assert_close(generator.kept, plain.kept)


@pytest.mark.parametrize("start", [128, -128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_a_sum_that_was_large_before_is_one_over_several_devices(dtype: torch.dtype, start: int) -> None:
    generator = Changing(torch.full((2,), start, dtype=dtype), lambda kept, y: kept.add_(len(y)))
    hidden, target = batch()
    seqpar.LossCompute(generator, seqpar.CrossEntropy(), ["cpu"] * 2)(hidden, target)
    assert generator.kept.tolist() == [start + len(hidden)] * 2


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
def test_what_is_infinite_or_no_number_stays_so_in_a_sum(devices: Any) -> None:
    generator = Changing(torch.tensor([torch.inf, -torch.inf, torch.nan, 5.0]), lambda kept, y: kept.add_(len(y)))
    hidden, target = batch()
    seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices)(hidden, target)
    wanted = torch.tensor([torch.inf, -torch.inf, torch.nan, 5.0 + len(hidden)])
    torch.testing.assert_close(generator.kept, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
def test_a_count_that_was_0_in_the_first_call_is_that_of_all_devices_later(devices: Any) -> None:
    least = [1e9]
    generator = Changing(torch.tensor(5), lambda kept, y: kept.add_((y[:, 0] > least[0]).sum()))
    engine, (hidden, target) = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices), batch()
    engine(hidden, target)
    assert generator.kept == 5
    least[0] = -1e9
    engine(hidden, target)
    assert generator.kept == 5 + len(hidden)


@pytest.mark.parametrize(
    ("kept", "later", "change"),
    [
        (torch.tensor(1e9), -1e9, lambda kept, y: kept.clamp_(min=y.max())),
        (torch.tensor(-1e9), 1e9, lambda kept, y: kept.clamp_(max=y.min())),
        (torch.tensor(-1.0), -1e9, lambda kept, y: kept.clamp_(min=y.max() - 100)),
        (torch.tensor(9), 0, lambda kept, y: kept.clamp_(min=len(y))),
        (torch.tensor(True), False, lambda kept, y: kept.logical_or_(torch.tensor(True))),
    ],
    ids=["largest", "smallest", "largest from -1 on", "longest", "any"],
)
def test_a_buffer_that_is_no_sum_is_refused_when_several_devices_first_change_it(
    kept: Tensor, later: float, change: Callable[[Tensor, Tensor], Any]
) -> None:
    generator = Changing(kept.clone(), change)
    engine, (hidden, target) = seqpar.LossCompute(generator, seqpar.CrossEntropy(), ["cpu"] * 2), batch()
    for _ in range(2):
        engine(hidden, target)
    assert torch.equal(generator.kept, kept)
    generator.kept.fill_(later)
    with pytest.raises(ValueError, match=r"the buffer generator.kept changes by other than a sum over rows"):
        engine(hidden, target)


class Detaching(nn.Linear):
    """Replaces a buffer by a view of itself."""

    def __init__(self) -> None:
        super().__init__(4, V, dtype=torch.float64)
        self.register_buffer("state", torch.tensor([1.0, torch.nan]))

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state.detach()
        return super().forward(x) * self.state[0]


def test_a_buffer_that_is_replaced_by_itself_is_no_sum() -> None:
    assert_plain(Detaching(), seqpar.CrossEntropy())
    seqpar.LossCompute(Detaching(), seqpar.CrossEntropy(), ["cpu"] * 2)(*batch())


class Replacing(nn.Linear):
    """Replaces a buffer by a sum, to which nothing is added yet."""

    def __init__(self) -> None:
        super().__init__(4, V, dtype=torch.float64)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.rows = self.rows + (y > 1e9).sum()
        return y


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
def test_a_buffer_that_is_replaced_by_a_sum_is_refused_though_nothing_is_added(devices: Any) -> None:
    with pytest.raises(ValueError, match=r"the buffer generator.rows changes when the generator is called"):
        seqpar.LossCompute(Replacing(), seqpar.CrossEntropy(), devices)(*batch())


class Hits(nn.Module):
    """Counts correct predictions in an attribute."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        hits = (logits.argmax(-1) == target).sum()
        self.kept = self.kept + (hits if isinstance(self.kept, Tensor) else type(self.kept)(hits))
        return F.cross_entropy(logits, target, reduction="sum")


def without_and_with_hits(generator: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    hidden, _ = batch()
    best = generator(hidden).argmax(-1)
    return hidden, (best + 1) % V, best


@pytest.mark.parametrize("kept", [0, 5, 0.0, 5.5])
def test_a_number_that_changes_after_the_first_call_is_kept_on_one_device_and_refused_over_several(kept: Any) -> None:
    generator = nn.Linear(4, V).double()
    hidden, wrong, right = without_and_with_hits(generator)
    alone, several = Hits(kept), Hits(kept)
    engine = seqpar.LossCompute(generator, alone, chunk_tokens=2)
    for target in (wrong, right):
        engine(hidden, target)
    assert alone.kept == kept + len(hidden)
    engine = seqpar.LossCompute(generator, several, ["cpu"] * 2)
    for _ in range(2):
        engine(hidden, wrong)
    with pytest.raises(ValueError, match=r"Hits\.kept changes with every call and is not a buffer that adds up"):
        engine(hidden, right)


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize("kept", [torch.zeros(()), torch.tensor(7), torch.zeros(3, dtype=torch.bfloat16)])
def test_a_tensor_that_is_replaced_by_a_sum_is_refused_though_nothing_is_added(kept: Tensor, devices: Any) -> None:
    generator = nn.Linear(4, V).double()
    hidden, wrong, _ = without_and_with_hits(generator)
    with pytest.raises(ValueError, match=r"Hits\.kept changes with every call and is not a buffer that adds up"):
        seqpar.LossCompute(generator, Hits(kept), devices)(hidden, wrong)


class Deriving(nn.Linear):
    """Computes a tensor and a mean of nothing anew in each call, and looks at another one without its graph."""

    def __init__(self) -> None:
        super().__init__(4, V, dtype=torch.float64)
        self.scale = torch.full((), 2.0)
        self.looked_at = torch.ones(3)
        self.mean = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        self.scale = torch.full((), 2.0)
        self.mean = self.mean * 1
        self.looked_at = self.looked_at.detach()
        return super().forward(x) * self.scale


LOOKED_AT: dict[str, tuple[Any, Callable[[Tensor], Any]]] = {
    "a tensor where a number was": (0, lambda logits: logits.detach()),
    "an array where a number was": (0.0, lambda logits: logits.detach().numpy()),
    "a tensor without memory": (torch.empty(3, device="meta"), lambda logits: torch.empty(3, device="meta")),
    "a sparse tensor": (torch.eye(3, device="cpu").to_sparse(), lambda logits: torch.eye(3, device="cpu").to_sparse()),
}


@pytest.mark.unswitched
@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_what_is_kept_to_be_looked_at_and_has_no_comparable_numbers_passes(name: str, devices: Any) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = LOOKED_AT[name][0]

        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            self.kept = LOOKED_AT[name][1](logits)
            return F.cross_entropy(logits, target, reduction="sum")

    generator, (hidden, target) = nn.Linear(4, V).double(), batch()
    engine = seqpar.LossCompute(generator, Keeping(), devices, chunk_tokens=2)
    for _ in range(2):
        plain = F.cross_entropy(generator(hidden), target, reduction="sum")
        torch.testing.assert_close(engine(hidden, target).total, plain, rtol=1e-12, atol=0)


class Growing(nn.Linear):
    """Adds a module in the first call of each copy, before one that has other numbers."""

    def __init__(self) -> None:
        super().__init__(4, V, dtype=torch.float64)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        drop = self._modules.pop("drop")
        self.also = nn.Dropout(0.25).eval()
        self.drop = drop
        return drop(self.also(super().forward(x)))


def test_a_call_that_adds_a_module_compares_none_with_another() -> None:
    generator, (hidden, target) = Growing(), batch()
    found = seqpar.LossCompute(generator, seqpar.CrossEntropy(), ["cpu"] * 2)(hidden, target).total
    plain = F.cross_entropy(F.linear(hidden, generator.weight, generator.bias), target, reduction="sum")
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)


def test_a_tensor_that_is_computed_anew_or_replaced_by_itself_is_no_sum() -> None:
    assert_plain(Deriving(), seqpar.CrossEntropy())
    seqpar.LossCompute(Deriving(), seqpar.CrossEntropy(), ["cpu"] * 2)(*batch())


def test_a_buffer_of_nan_does_not_count_as_changed() -> None:
    """Buffers that have changed would be looked into, with further calls."""
    calls: list[float] = []
    for number in (1.0, torch.nan):
        generator = Scaling(False).eval()
        generator.register_buffer("unused", torch.full((3,), number))
        generator.linear.register_forward_hook(lambda *_, number=number: calls.append(number))
        assert_plain(generator, seqpar.CrossEntropy())
    assert 2 * calls.count(1.0) == len(calls)


def test_a_reduction_that_was_set_after_the_engine_was_built_is_noticed() -> None:
    criterion = nn.CrossEntropyLoss(reduction="sum")
    engine = seqpar.LossCompute(nn.Linear(4, V).double(), criterion)
    engine(*batch())
    criterion.reduction = "mean"
    with pytest.raises(ValueError, match="the criterion has reduction='mean'"):
        engine(*batch())


def test_class_weights_that_want_a_gradient_are_refused() -> None:
    criterion = nn.CrossEntropyLoss(torch.ones(V, dtype=torch.float64, requires_grad=True), reduction="sum")
    with pytest.raises(ValueError, match="the criterion's weight requires a gradient"):
        seqpar.LossCompute(nn.Linear(4, V).double(), criterion)(*batch())


class Pointing(nn.Module):
    """As many classes as the source has positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4).double()

    def forward(self, hidden: Tensor, source: Tensor) -> Tensor:
        return torch.einsum("...d,...sd->...s", self.query(hidden), source)


def test_the_number_of_classes_may_differ_from_call_to_call() -> None:
    torch.manual_seed(0)
    engine = seqpar.LossCompute(Pointing(), nn.CrossEntropyLoss(reduction="sum"), chunk_tokens=4)
    for classes in (5, 8, 5, 3):
        hidden = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
        source = torch.randn(2, 3, classes, 4, dtype=torch.float64, requires_grad=True)
        target = torch.full((2, 3), classes - 1)
        loss = engine(hidden, target, source=source).total
        logits = engine.head["generator"](hidden, source).flatten(0, 1)
        plain = F.cross_entropy(logits, target.flatten(), reduction="sum")
        for mine, theirs in zip(*(torch.autograd.grad(x, [hidden, source]) for x in (loss, plain)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
        with pytest.raises(IndexError, match=rf"target {classes} at position \(0, 0\) is outside"):
            engine(hidden, target + 1, source=source)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_generator_may_change_its_input_in_place(ignored: bool) -> None:
    generator = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, V)).double()
    hidden, target = batch()
    if ignored:
        target[::2] = -100
    kept = hidden.detach().clone()
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=2)
    losses = (
        engine(hidden, target).total,
        F.cross_entropy(generator[1](hidden.relu()), target, reduction="sum"),
    )
    gradients = [torch.autograd.grad(loss, [hidden, *generator.parameters()]) for loss in losses]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert torch.equal(hidden, kept)


def loss_of(hidden: Tensor, target: Tensor, weight: Tensor, engine: seqpar.LossCompute | None) -> Tensor:
    if engine is None:
        return seqpar.linear_cross_entropy(hidden, weight, target).total
    return engine(hidden, target).total


class Own(nn.Linear):
    """A generator without a closed form."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's own jvp
@pytest.mark.parametrize("kind", ["function", "engine", "engine by autograd"])
def test_transforms_of_functions_are_refused_in_one_line(kind: str) -> None:
    hidden, target = batch()
    hidden = hidden.detach()
    weight = torch.randn(V, 4, dtype=torch.float64)
    engine = None
    if kind != "function":
        generator = (Own if kind.endswith("autograd") else nn.Linear)(4, V).double()
        engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())

    def one(x: Tensor) -> Tensor:
        return loss_of(x, target, weight, engine)

    for transform in (
        lambda: torch.func.grad(one)(hidden),
        lambda: torch.func.jvp(one, (hidden,), (hidden,)),
        lambda: torch.func.vmap(one)(hidden.expand(2, -1, -1)),
    ):
        with pytest.raises(RuntimeError, match=r"inside a transform of torch\.func"):
            transform()
    x = hidden.clone().requires_grad_()
    loss = one(x)
    with pytest.raises(RuntimeError, match="or by a batched gradient"):
        torch.autograd.grad(loss, x, torch.ones(3, dtype=loss.dtype), is_grads_batched=True)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(hidden, torch.ones_like(hidden))
        with pytest.raises(RuntimeError, match=r"shape \(9, 4\) has a forward-mode derivative"):
            one(dual)
        one(hidden)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("place", ["weight", "layer", "criterion", "scored_loss"])
def test_a_forward_mode_derivative_of_what_is_no_argument_is_refused(place: str, again: bool, grad: bool) -> None:
    """As the tutorial of torch gives parameters one: by deleting them, and setting dual tensors of their names."""
    hidden, weight = torch.randn(7, 4).double(), torch.randn(V, 4).double()
    target = torch.randint(V, (7,))
    criterion = Scaled(nn.CrossEntropyLoss(reduction="sum"))
    generator = nn.Linear(4, V).double() if place == "weight" else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, V))
    engine = seqpar.LossCompute(generator.double(), criterion, chunk_tokens=3)
    factor = torch.ones(7).double()

    def loss() -> Tensor:
        if place == "scored_loss":
            return seqpar.scored_loss(hidden, weight, target, lambda s: -s.log_prob * held[0]).total
        return engine(hidden, target).total

    held = [factor.mean()]
    if again:
        loss()
    module, name = (criterion, "scale")
    if place in ("weight", "layer"):
        module, name = (generator if place == "weight" else generator[0]), "weight"
    with torch.set_grad_enabled(grad), torch.autograd.forward_ad.dual_level():
        loss()
        given = getattr(module, name)
        delattr(module, name)
        setattr(module, name, torch.autograd.forward_ad.make_dual(given.detach(), torch.ones_like(given)))
        held[0] = torch.autograd.forward_ad.make_dual(held[0], torch.ones_like(held[0]))
        with pytest.raises(RuntimeError, match="has a forward-mode derivative; the chunked loss runs under plain auto"):
            loss()


class Scaled(nn.Module):
    """A criterion times a tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, torch.ones(()).double()

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.inner(scores * self.scale, target)
        return loss


class Keeping(nn.Linear):
    """A generator that keeps its latest scores, as many keep their attention."""

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        self.latest = scores.detach()
        return scores


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_what_a_generator_keeps_is_gone_with_its_chunk(nested: bool, there: bool) -> None:
    keeping = Keeping(4, V).double()
    if there:
        keeping.latest = None
    generator = nn.Sequential(nn.Identity(), keeping) if nested else keeping
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=4)
    for _ in range(2):
        engine(*batch()).total.backward()
        assert getattr(keeping, "latest", None) is None


class Tabled(nn.Module):
    """A generator with a row of a table for each token, or with what another module has computed alone."""

    def __init__(self, sparse: bool, alone: bool) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, V).double(), nn.Embedding(5, V, sparse=sparse).double()
        self.alone = alone

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        return self.linear(x.detach() if self.alone else x) + self.table(word)  # type: ignore[no-any-return]


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize(("sparse", "alone"), [(True, False), (False, True)])
def test_a_gradient_may_be_sparse_or_missing(sparse: bool, alone: bool, devices: list[str] | None) -> None:
    generator, (hidden, target), word = Tabled(sparse, alone), batch(), torch.arange(9) % 5
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices, chunk_tokens=4)
    losses = (
        engine(hidden, target, word=word).total,
        F.cross_entropy(generator(hidden, word), target, reduction="sum"),
    )
    found = [torch.autograd.grad(loss, [*generator.parameters()]) for loss in losses]
    for mine, plain in zip(*found, strict=True):
        assert mine.is_sparse == plain.is_sparse
        torch.testing.assert_close(mine.to_dense(), plain.to_dense(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_hook_of_a_parameter_runs_once_however_many_chunks(accumulated: bool) -> None:
    generator = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, V)).double()
    calls = []
    if accumulated:
        generator[0].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(1))
    else:
        generator[0].weight.register_hook(lambda gradient: calls.append(1))
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=4)
    engine(*batch()).total.backward()
    assert len(calls) == 1


def test_a_parametrized_generator_inside_a_cache_of_its_tensors_is_refused() -> None:
    generator = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 5)).double()
    engine = seqpar.LossCompute(generator, nn.CrossEntropyLoss(reduction="sum"), chunk_tokens=2)
    hidden = torch.randn(5, 4, dtype=torch.float64)
    target = torch.arange(5)
    with parametrize.cached(), pytest.raises(RuntimeError, match=r"inside torch.nn.utils.parametrize.cached\(\)"):
        engine(hidden, target)
    loss = engine(hidden, target).total
    wanted = nn.functional.cross_entropy(generator(hidden), target, reduction="sum")
    for own, plain in zip(
        torch.autograd.grad(loss, list(generator.parameters())),
        torch.autograd.grad(wanted, list(generator.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-14)

"""Modules that others have changed: their calls keep their meaning, or one line says why they cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, parametrize

import seqpar
from seqpar.core.token_loss import TokenLoss
from tests.seqpar.engine.pairs import Made, V, assert_plain, assert_same, batch, cross_entropy, linear


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
    criterion.forward = lambda logits, target: cross_entropy(logits, target) * 2
    return criterion


@pytest.mark.parametrize("make", [Doubled, DoubledAgain, hooked, patched])
def test_a_criterion_whose_call_was_changed_is_called_and_counts_nothing(make: type[nn.Module]) -> None:
    criterion = make()
    assert_plain(linear(), criterion)
    loss = seqpar.LossCompute(linear(), criterion)(*batch())
    assert loss.nll is None
    assert loss.correct is None


def test_a_criterion_that_changes_token_loss_alone_keeps_its_counts() -> None:
    criterion = BothDoubled(0.1, "torch")
    assert_plain(linear(), criterion)
    assert seqpar.LossCompute(linear(), criterion)(*batch()).correct is not None


@pytest.fixture(params=[False, True], ids=["alone", "before a log-softmax"])
def with_own_forward(request: pytest.FixtureRequest) -> nn.Module:
    projection = linear()
    projection.forward = lambda x: F.linear(x, projection.weight, projection.bias) * 0.1
    return nn.Sequential(projection, nn.LogSoftmax(-1)) if request.param else projection


def test_a_forward_set_on_the_instance_is_called_and_refused_where_replicas_are_differentiated(
    with_own_forward: nn.Module,
) -> None:
    engine = seqpar.LossCompute(with_own_forward, seqpar.CrossEntropy(), chunk_tokens=4)
    assert "Linear has a forward of its own, set on the instance" in engine.explain()
    assert_plain(with_own_forward, seqpar.CrossEntropy())
    replicas = seqpar.LossCompute(with_own_forward, seqpar.CrossEntropy(), ["cpu", "cpu"])
    # It keeps the original's parameters, whose gradient would be lost
    with pytest.raises(RuntimeError, match="forward that was set on the instance keeps the original's parameters"):
        replicas(*batch())


# On two devices in earnest the forward would mix the original's parameters with the replica's rows
@pytest.mark.unswitched
def test_replicas_that_are_not_differentiated_call_the_forward_set_on_the_instance(with_own_forward: nn.Module) -> None:
    hidden, target = batch()
    replicas = seqpar.LossCompute(with_own_forward, seqpar.CrossEntropy(), ["cpu", "cpu"])
    with torch.no_grad():
        plain = cross_entropy(with_own_forward(hidden), target)
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
            assert_plain(linear(), seqpar.CrossEntropy())
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
    generator = linear()
    generator.weight = nn.Parameter(generator.weight.detach().as_subclass(Halving))
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    assert "the generator's weight is a Halving, not a plain tensor" in engine.explain()
    assert_plain(generator, seqpar.CrossEntropy())


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
def test_a_weight_whose_class_is_lost_on_the_way_is_refused(devices: list[str] | None) -> None:
    generator = linear()
    generator.weight = HalvingParameter(generator.weight.detach())
    with pytest.raises(TypeError, match="a parameter is a HalvingParameter, whose class changes how it computes"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices)(*batch())


def test_what_hangs_on_a_parameter_hangs_on_its_copies() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight.factor

    generator = Scaled(4, V).double()
    generator.weight.factor = 0.5
    hidden, target = batch()
    plain = cross_entropy(generator(hidden), target)
    for devices in (None, ["cpu"] * 2):
        loss = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices)(hidden, target).total
        torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)


def test_a_reduction_that_was_set_after_the_engine_was_built_is_noticed() -> None:
    criterion = nn.CrossEntropyLoss(reduction="sum")
    engine = seqpar.LossCompute(linear(), criterion)
    engine(*batch())
    criterion.reduction = "mean"
    with pytest.raises(ValueError, match="the criterion has reduction='mean'"):
        engine(*batch())


def test_class_weights_that_want_a_gradient_are_refused() -> None:
    criterion = nn.CrossEntropyLoss(torch.ones(V, dtype=torch.float64, requires_grad=True), reduction="sum")
    with pytest.raises(ValueError, match="the criterion's weight requires a gradient"):
        seqpar.LossCompute(linear(), criterion)(*batch())


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
        assert_same(loss, cross_entropy(logits, target.flatten()), [hidden, source])
        with pytest.raises(IndexError, match=rf"target {classes} at position \(0, 0\) is outside"):
            engine(hidden, target + 1, source=source)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_generator_may_change_its_input_in_place(ignored: bool) -> None:
    generator = nn.Sequential(nn.ReLU(inplace=True), linear())
    hidden, target = batch()
    if ignored:
        target[::2] = -100
    kept = hidden.detach().clone()
    total = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=2)(hidden, target).total
    assert_same(total, cross_entropy(generator[1](hidden.relu()), target), [hidden, *generator.parameters()])
    assert torch.equal(hidden, kept)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's own jvp
@pytest.mark.parametrize("kind", ["function", "engine", "engine by autograd"])
def test_transforms_of_functions_are_refused_in_one_line(kind: str) -> None:
    hidden, target = batch(9)
    hidden = hidden.detach()
    weight = torch.randn(V, 4, dtype=torch.float64)
    generator = nn.Sequential(linear(), nn.Identity()) if kind.endswith("autograd") else linear()
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())

    def one(x: Tensor) -> Tensor:
        loss = seqpar.linear_cross_entropy(x, weight, target) if kind == "function" else engine(x, target)
        return loss.total

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
    criterion = Made(lambda self, z, y: cross_entropy(z * self.scale, y), scale=torch.ones(()).double())
    generator = linear() if place == "weight" else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, V))
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


class Tabled(nn.Module):
    """A generator with a row of a table for each token, or with what another module has computed alone."""

    def __init__(self, sparse: bool, alone: bool) -> None:
        super().__init__()
        self.linear, self.table = linear(), nn.Embedding(5, V, sparse=sparse).double()
        self.alone = alone

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        return self.linear(x.detach() if self.alone else x) + self.table(word)  # type: ignore[no-any-return]


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize(("sparse", "alone"), [(True, False), (False, True)])
def test_a_gradient_may_be_sparse_or_missing(sparse: bool, alone: bool, devices: list[str] | None) -> None:
    generator, (hidden, target), word = Tabled(sparse, alone), batch(9), torch.arange(9) % 5
    total = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices, chunk_tokens=4)(
        hidden, target, word=word
    ).total
    plain = cross_entropy(generator(hidden, word), target)
    found, expected = (torch.autograd.grad(loss, [*generator.parameters()]) for loss in (total, plain))
    assert [grad.is_sparse for grad in found] == [grad.is_sparse for grad in expected]
    dense = ([grad.to_dense() for grad in grads] for grads in (found, expected))
    torch.testing.assert_close(*dense, rtol=1e-12, atol=1e-14)


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
    total = engine(hidden, target).total
    assert_same(total, cross_entropy(generator(hidden), target), list(generator.parameters()))

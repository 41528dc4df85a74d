"""`torch.compile(fullgraph=True)` around the loss, and `torch.func.functional_call`: the numbers of the eager loss."""

import sys
from functools import partial
from types import MethodType

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.torch_version import TorchVersion

import seqpar
from seqpar.testing import assert_same_gradients
from tests.seqpar.linear.linear_loss import linear_cases, plain_loss

LEAVES = ("hidden", "weight", "bias", "token_weight")
NOTICES_ATTRIBUTES = pytest.mark.xfail(
    sys.version_info[:3] == (3, 13, 0) and TorchVersion(torch.__version__) < "2.12",
    reason="on Python 3.13.0 the graphs of torch 2.11 do not notice what is set on a module, seqpar's or not",
    strict=True,
)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@settings(max_examples=8)
@given(linear_cases())
def test_in_a_graph_it_has_the_plain_gradient(case):
    torch.compiler.reset()
    tensors = case.tensors()

    def step(tensors):
        return seqpar.linear_cross_entropy(**tensors, **case.options).total * case.upstream

    assert_same_gradients(
        lambda: torch.compile(step, fullgraph=True, backend="aot_eager")(tensors),
        lambda: plain_loss(**tensors, **case.options) * case.upstream,
        {name: tensors[name] for name in LEAVES if name in tensors},
    )


@pytest.mark.parametrize("trained", LEAVES)
def test_each_leaf_alone_gets_its_gradient(trained):
    torch.manual_seed(0)
    tensors = {"hidden": (6, 3), "weight": (11, 3), "bias": (11,), "token_weight": (6,)}
    tensors = {k: torch.randn(shape, dtype=torch.float64).requires_grad_(k == trained) for k, shape in tensors.items()}
    tensors["target"] = torch.randint(11, (6,))
    options = {"label_smoothing": 0.1, "chunk_tokens": 4}

    def step(tensors):
        return seqpar.linear_cross_entropy(**tensors, **options).total

    assert_same_gradients(
        lambda: torch.compile(step, fullgraph=True, backend="aot_eager")(tensors),
        lambda: step(tensors),
        {trained: tensors[trained]},
    )


class Tagger(nn.Module):
    """A small model with its loss."""

    def __init__(self, criterion):
        super().__init__()
        self.embed, self.hidden, self.generator = nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 30)
        self.engine = seqpar.LossCompute(self.generator, criterion, chunk_tokens=5)

    def forward(self, tokens, target):
        return self.engine(self.hidden(self.embed(tokens)).tanh(), target)


CRITERIA = {
    "fairseq": lambda: seqpar.LabelSmoothing(0.1, "fairseq", ignore_index=0),
    "harvard": lambda: seqpar.LabelSmoothing(0.2, "harvard", ignore_index=0),
    "torch": lambda: nn.CrossEntropyLoss(torch.rand(30), reduction="sum", label_smoothing=0.1),
}


@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_engine_in_a_compiled_model_has_the_eager_gradient_at_every_shape(criterion):
    torch.manual_seed(0)
    model = Tagger(CRITERIA[criterion]()).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for shape in ((2, 9), (3, 4), (5, 7)):
        tokens, target = torch.randint(30, shape), torch.randint(30, shape)
        assert_same_gradients(
            lambda t=tokens, y=target: compiled(t, y).total,
            lambda t=tokens, y=target: model(t, y).total,
            dict(model.named_parameters()),
        )
        eager = model(tokens, target)
        assert [float(t) for t in compiled(tokens, target)[1:]] == pytest.approx(
            [float(t) for t in eager[1:]], rel=1e-12
        )


def test_with_generated_code_and_autocast_the_gradient_is_the_eager_one():
    torch.manual_seed(0)
    model = Tagger(CRITERIA["fairseq"]())
    tokens, target = torch.randint(30, (4, 9)), torch.randint(30, (4, 9))
    compiled, found = torch.compile(model, fullgraph=True), []
    for forward in (model, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(tokens, target)
        found.append([loss.total, *torch.autograd.grad(loss.total, list(model.parameters()))])
    for eager, traced in zip(*found, strict=True):
        assert traced.dtype == eager.dtype == torch.float32
        assert (traced - eager).norm() <= 0.02 * eager.norm()


def test_a_target_out_of_range_raises_from_inside_the_graph():
    compiled = torch.compile(Tagger(CRITERIA["fairseq"]()), fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match=r"target 30 at position \(0, 1\)"):
        compiled(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1, 30]]))


def test_no_gradient_is_computed_where_none_is_wanted():
    model = Tagger(CRITERIA["fairseq"]())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens = torch.randint(1, 30, (2, 3))
    with torch.no_grad():
        assert compiled(tokens, tokens).total.grad_fn is None


@NOTICES_ATTRIBUTES
def test_a_list_of_hiddens_own_device_is_one_operator_too():
    model = Tagger(CRITERIA["fairseq"]()).double()
    tokens, target = torch.randint(30, (2, 9)), torch.randint(30, (2, 9))
    plain = model(tokens, target).total
    model.engine.devices = (torch.device("cpu"),)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(tokens, target).total, plain)
    model.engine.chunk_size = 2  # time steps
    with pytest.raises(RuntimeError, match="leave out fullgraph=True"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(tokens, target)


def test_functional_call_takes_other_parameters_and_gives_them_their_gradient():
    torch.manual_seed(0)
    model = Tagger(CRITERIA["fairseq"]()).double()
    other = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    tokens, target = torch.randint(30, (2, 5)), torch.randint(30, (2, 5))

    def plain():
        x = torch.nn.functional.embedding(tokens, other["embed.weight"])
        x = torch.tanh(x @ other["hidden.weight"].t() + other["hidden.bias"])
        logits = x @ other["generator.weight"].t() + other["generator.bias"]
        return model.engine.head["criterion"](logits.flatten(0, 1), target.flatten())

    own = dict(model.named_parameters(remove_duplicate=False))
    replaced = {n: next(other[m] for m, q in model.named_parameters() if q is p) for n, p in own.items()}
    assert_same_gradients(lambda: torch.func.functional_call(model, replaced, (tokens, target)).total, plain, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_a_graph_the_products_are_of_the_autocast_dtype(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    target = torch.randint(11, (6,))

    def step():
        with torch.autocast("cpu", dtype):
            return seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=4).total

    losses = step(), torch.compile(step, fullgraph=True, backend="aot_eager")()
    found = [[loss.detach(), *torch.autograd.grad(loss, (hidden, weight))] for loss in losses]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0] != seqpar.linear_cross_entropy(hidden, weight, target).total


def test_in_a_graph_float64_stays_float64_under_autocast():
    hidden, weight = torch.randn(6, 4).double(), torch.randn(9, 4).double()
    target = torch.randint(9, (6,))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return seqpar.linear_cross_entropy(hidden, weight, target).total

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")()
    assert compiled.dtype == torch.float64
    assert torch.equal(compiled, step())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("engine", [False, True])
def test_without_tokens_every_gradient_is_0_even_if_the_loss_is_divided_by_0(backend, engine):
    hidden = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    linear = nn.Linear(4, 9).double()
    target = torch.full((6,), -100)
    loss_of = seqpar.LossCompute(linear, seqpar.CrossEntropy())

    def mean(hidden):
        if engine:
            loss = loss_of(hidden, target)
        else:
            loss = seqpar.linear_cross_entropy(hidden, linear.weight, target, bias=linear.bias)
        return loss.total / loss.tokens

    torch.compile(mean, fullgraph=True, backend=backend)(hidden).backward()
    for leaf in (hidden, linear.weight, linear.bias):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def doubled(generator, hidden):
    return 2 * nn.Linear.forward(generator, hidden)


@NOTICES_ATTRIBUTES
@pytest.mark.parametrize("bound", [MethodType, partial])
def test_a_forward_that_is_set_after_compiling_is_called(bound):
    generator, criterion = nn.Linear(4, 9).double(), seqpar.CrossEntropy()
    hidden, target = torch.randn(6, 4, dtype=torch.float64), torch.randint(9, (6,))
    compiled = torch.compile(seqpar.LossCompute(generator, criterion), backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden, target).total, criterion(generator(hidden), target))
        generator.forward = bound(doubled, generator)
        torch.testing.assert_close(compiled(hidden, target).total, criterion(generator(hidden), target))
        del generator.forward
        torch.testing.assert_close(compiled(hidden, target).total, criterion(generator(hidden), target))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_second_derivative_is_refused_in_a_graph_as_well(backend):
    hidden = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weight, target = torch.randn(9, 4, dtype=torch.float64), torch.randint(9, (6,))

    def loss(hidden):
        return seqpar.linear_cross_entropy(hidden, weight, target).total

    # With aot_eager by torch itself
    total = torch.compile(loss, fullgraph=True, backend=backend)(hidden)

    def twice():
        (gradient,) = torch.autograd.grad(total, hidden, create_graph=True)
        gradient.square().sum().backward()

    # torch 2.11 returns a gradient without a graph there
    with pytest.raises(RuntimeError, match=r"second derivative|double backward|does not require grad"):
        twice()


WEIGHT = torch.linspace(-1, 1, 28, dtype=torch.float64).view(7, 4)


class Squared(nn.Module):
    """A criterion without a closed form."""

    def forward(self, logits, target):
        return (logits.square().sum(-1) * (target + 1)).sum()


def engine_over(devices, criterion):
    generator = nn.Linear(4, 7, bias=False).double()
    generator.weight.data.copy_(WEIGHT)
    return seqpar.LossCompute(generator, criterion, devices, chunk_tokens=3)


OVER_DEVICES = engine_over(["cpu", "cpu"], seqpar.CrossEntropy())
BY_AUTOGRAD = engine_over(None, Squared())
UNIFORM = engine_over(None, nn.CrossEntropyLoss(label_smoothing=1.0, reduction="sum"))
OUTSIDE = {
    "scores": lambda hidden, target: seqpar.token_scores(hidden, WEIGHT, target, entropy=True).entropy.sum(),
    "distillation": lambda hidden, target: (
        seqpar.linear_distillation(
            hidden, WEIGHT, seqpar.TeacherHidden(hidden.detach() + 1, WEIGHT), target, divergence="forward_kl"
        ).total
    ),
    "soft target": lambda hidden, target: (
        seqpar.linear_cross_entropy(
            hidden,
            WEIGHT,
            target,
            soft_target=seqpar.SparseTarget(target[:, None], torch.ones(len(target), 1).double()),
        ).total
    ),
    "devices": lambda hidden, target: OVER_DEVICES(hidden, target).total,
    "scores over devices": lambda hidden, target: OVER_DEVICES.token_scores(hidden, target).log_prob.sum(),
    "criterion of one's own": lambda hidden, target: BY_AUTOGRAD(hidden, target).total,
    "uniform targets": lambda hidden, target: UNIFORM(hidden, target).total,
}
"""What is computed in chunks between two graphs."""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, after each break
@pytest.mark.parametrize("name", OUTSIDE)
def test_chunks_stay_outside_the_graphs_at_every_shape(name):
    torch._dynamo.utils.counters.clear()
    step = OUTSIDE[name]
    compiled = torch.compile(lambda hidden, target: step(hidden * 2, target) * 3, backend="aot_eager")
    for rows in (9, 8, 7, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39):
        hidden = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
        target = torch.arange(rows) % 7
        losses = step(hidden * 2, target) * 3, compiled(hidden, target)
        found = [[loss.detach(), *torch.autograd.grad(loss, hidden)] for loss in losses]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    # Traced into, they would be 40 to 80
    assert torch._dynamo.utils.counters["frames"]["ok"] <= 20


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_whole_graph_with_chunks_in_it_is_refused_with_the_reason(name):
    compiled = torch.compile(OUTSIDE[name], backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"stays outside the graph: leave out fullgraph=True"):
        compiled(torch.randn(5, 4, dtype=torch.float64), torch.arange(5))


@pytest.mark.parametrize("turned", ["hidden", "weight", "token_weight"])
def test_a_tensor_that_is_not_adjacent_in_memory_gets_its_own_gradient(turned):
    """As the hidden states of a model with time first."""
    torch.manual_seed(0)
    target = torch.randint(7, (3, 4))

    def made():
        torch.manual_seed(1)
        found = {"hidden": torch.randn(3, 4, 5), "weight": torch.randn(7, 5), "token_weight": torch.rand(3, 4)}
        found = {name: t.double() for name, t in found.items()}
        found[turned] = found[turned].transpose(0, 1).contiguous()
        return {name: t.requires_grad_() for name, t in found.items()}

    def total(given):
        last = torch.eye(given[turned].size(-1), dtype=torch.float64)
        given = {**given, turned: nn.functional.linear(given[turned], last).transpose(0, 1)}
        return seqpar.linear_cross_entropy(target=target, **given).total

    expected, given = made(), made()
    total(expected).backward()
    torch.compile(total, fullgraph=True, backend="aot_eager")(given).backward()
    for name, leaf in given.items():
        torch.testing.assert_close(leaf.grad, expected[name].grad, rtol=1e-12, atol=1e-14)

"""Weights whose class replaces torch's functions: `F.linear` with them is more than a product."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar


class Ternary(Tensor):
    """A weight whose products are with numbers rounded to -s, 0 and s, and whose gradient is straight through."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            args = [ternary(t.as_subclass(Tensor)) if isinstance(t, cls) else t for t in args]
        return super().__torch_function__(function, types, args, kwargs or {})


def ternary(weight: Tensor) -> Tensor:
    scale = weight.detach().abs().mean()
    rounded = (weight.detach() / scale).round().clamp(-1, 1) * scale
    return weight + (rounded - weight.detach())


class Halved(Tensor):
    """A weight that keeps its numbers elsewhere, twice as large, and halves them in every operation."""

    @staticmethod
    def __new__(cls, twice):
        return Tensor._make_wrapper_subclass(
            cls, twice.shape, dtype=twice.dtype, device=twice.device, requires_grad=True
        )

    def __init__(self, twice):
        self.twice = twice

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        plain = torch.utils._pytree.tree_map(lambda t: t.twice / 2 if isinstance(t, cls) else t, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


class Named(nn.Parameter):
    """A parameter that knows what it is called."""


class Labelled(Tensor):
    """A tensor that may have further attributes."""


def layer(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    made = nn.Linear(8, 30, bias=bias is not None, dtype=torch.float64)
    made.weight = weight
    if bias is not None:
        made.bias = bias
    return made


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(20, 8, dtype=torch.float64, requires_grad=True), torch.randint(30, (20,))


CALLS = {
    "linear_cross_entropy": lambda h, w, t, **b: seqpar.linear_cross_entropy(h, w, t, **b),
    "token_scores": lambda h, w, t, **b: seqpar.token_scores(h, w, t, **b),
    "scored_loss": lambda h, w, t, **b: seqpar.scored_loss(h, w, t, lambda scores: -scores.log_prob, **b),
    "linear_distillation": lambda h, w, t, **b: seqpar.linear_distillation(
        h, w, seqpar.TeacherHidden(h.detach(), torch.ones(30, 8).double()), t, divergence="reverse_kl", **b
    ),
    "its teacher": lambda h, w, t, **b: seqpar.linear_distillation(
        h, torch.ones(30, 8).double(), seqpar.TeacherHidden(h.detach(), w, *b.values()), t, divergence="reverse_kl"
    ),
}


@pytest.mark.parametrize("made", [lambda w: nn.Parameter(w.as_subclass(Ternary)), Halved])
@pytest.mark.parametrize("call", CALLS)
def test_a_weight_that_computes_in_its_own_way_is_refused_by_name(call, made):
    hidden, target = batch()
    weight = made(torch.randn(30, 8, dtype=torch.float64))
    kind = type(weight).__name__
    with pytest.raises(TypeError, match=rf"weight is a {kind}, a class with its own .*; use seqpar.LossCompute"):
        CALLS[call](hidden, weight, target)


@pytest.mark.parametrize("call", CALLS)
def test_a_bias_that_computes_in_its_own_way_is_refused_by_name(call):
    hidden, target = batch()
    bias = nn.Parameter(torch.randn(30, dtype=torch.float64).as_subclass(Ternary))
    with pytest.raises(TypeError, match=r"bias is a Ternary, a class with its own .*; use seqpar.LossCompute"):
        CALLS[call](hidden, torch.randn(30, 8, dtype=torch.float64), target, bias=bias)


def test_a_compiled_loss_refuses_such_a_weight_too():
    hidden, target = batch()
    weight = nn.Parameter(torch.randn(30, 8, dtype=torch.float64).as_subclass(Ternary))
    loss = torch.compile(lambda h: seqpar.linear_cross_entropy(h, weight, target).total, backend="aot_eager")
    with pytest.raises(TypeError, match=r"weight is a Ternary, a class with its own"):
        loss(hidden)


@pytest.mark.parametrize("own", ["weight", "bias"])
@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
def test_the_engine_calls_the_layer_of_such_a_tensor(own, devices):
    hidden, target = batch()
    tensors = {"weight": torch.randn(30, 8, dtype=torch.float64), "bias": torch.randn(30, dtype=torch.float64)}
    tensors[own] = tensors[own].as_subclass(Ternary)
    generator = layer(*map(nn.Parameter, tensors.values()))
    plain = F.cross_entropy(generator(hidden), target, reduction="sum")
    plain.backward()
    expected = [hidden.grad, *(p.grad for p in generator.parameters())]
    hidden.grad = None
    generator.zero_grad()
    loss = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices, chunk_tokens=6)(hidden, target)
    loss.total.backward()
    torch.testing.assert_close(loss.total, plain, rtol=1e-12, atol=0)
    for found, wanted in zip([hidden.grad, *(p.grad for p in generator.parameters())], expected, strict=True):
        torch.testing.assert_close(found.as_subclass(Tensor), wanted.as_subclass(Tensor), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("made", [Named, lambda w: nn.Parameter(w.as_subclass(Labelled))])
def test_a_weight_of_a_class_without_functions_of_its_own_is_a_plain_one(made):
    hidden, target = batch()
    weight = made(torch.randn(30, 8, dtype=torch.float64))
    plain = F.cross_entropy(F.linear(hidden, weight), target, reduction="sum")
    torch.testing.assert_close(
        seqpar.linear_cross_entropy(hidden, weight, target).total.as_subclass(Tensor),
        plain.as_subclass(Tensor),
        rtol=1e-12,
        atol=0,
    )
    engine = seqpar.LossCompute(layer(weight), seqpar.CrossEntropy())
    torch.testing.assert_close(
        engine(hidden, target).total.as_subclass(Tensor), plain.as_subclass(Tensor), rtol=1e-12, atol=0
    )
    assert engine.explain().startswith("by formula")

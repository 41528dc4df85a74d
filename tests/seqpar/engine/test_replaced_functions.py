"""What somebody has replaced, of torch or of a pair with a closed form, is called, or the scores are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from tests.backward import with_gradient
from tests.seqpar.engine.pairs import V, assert_same, batch, cross_entropy, linear


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


def half(grad: Tensor) -> Tensor:
    return grad / 2


def doubled_linear(forward: Any) -> Any:
    def called(self: nn.Module, *given: Any) -> Any:
        result = forward(self, *given)
        return 2 * result if isinstance(self, nn.Linear) else result

    return called


def twice_the_loss(self: nn.Module, scores: Tensor, target: Tensor) -> Tensor:
    return 2 * cross_entropy(scores, target)


PRODUCT, CALL, FORWARD = F.linear, nn.Module.__call__, nn.Linear.forward
"""What is replaced, as torch has it."""


REPLACED: dict[str, tuple[Any, str, Any]] = {
    "cross_entropy": (F, "cross_entropy", stable_max),
    "linear": (F, "linear", lambda *given: 2 * PRODUCT(*given)),
    "forward": (nn.Linear, "forward", lambda self, x: 3 * F.linear(x, self.weight, self.bias)),
    # The same value, and half of a gradient
    "gradient": (nn.Linear, "forward", lambda self, x: (FORWARD(self, x) + FORWARD(self, x).detach()) / 2),
    "of weight": (F, "linear", lambda x, w, b: PRODUCT(x, with_gradient(w, half), b)),
    "of bias": (F, "linear", lambda x, w, b: PRODUCT(x, w, with_gradient(b, half))),
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
        total, plain = engine(hidden, target).total, criterion(generator(hidden), target)
        assert_same(total, plain, [hidden, *generator.parameters()])
        assert engine.explain().startswith("by autograd, chunk by chunk (")
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
    generator, criterion = linear(), nn.CrossEntropyLoss(reduction="sum")
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


@pytest.mark.parametrize("kind", ["linear", "forward", "module", "harmless"])
@pytest.mark.parametrize("ends", [False, True], ids=["projection", "with a log-softmax"])
def test_scores_are_refused_where_a_replaced_product_makes_others(kind: str, ends: bool, monkeypatch: Any) -> None:
    generator = nn.Sequential(linear(), nn.LogSoftmax(-1)) if ends else linear()
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
        plain = cross_entropy(generator(hidden), target)
        torch.testing.assert_close(scores(), plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_replaced_product_is_compared_again_with_a_parameter_that_is_unfrozen(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(*REPLACED[f"of {name}"])
    hidden, target = batch()
    generator, criterion = linear(), nn.CrossEntropyLoss(reduction="sum")
    engine = seqpar.LossCompute(generator, criterion, chunk_tokens=6)
    parameter = getattr(generator, name).requires_grad_(False)
    engine(hidden, target)
    parameter.requires_grad_()
    assert_same(engine(hidden, target).total, criterion(generator(hidden), target), [parameter])

"""A call leaves Python's and torch's state as it was, and its arguments; also a call that fails in the user's code."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torchs_modules

import seqpar
from seqpar.core.structures import leaves
from tests.seqpar.option_calls import CALLS, TARGET, V, leaf, linear
from tests.seqpar.test_every_option import outcome

pytestmark = pytest.mark.unswitched
CHANGES = {
    "ModelWithLoss": "its engine keeps what the first call has found",
    "MultiGPULossCompute.__call__": "the gradient is that of out",
    "TokenLoss.detach": "there is no call of it",
    "place": "hooks bring a layer its inputs",
}
"""Functions that are asked to leave something in their arguments, and what."""


def around() -> dict[str, object]:
    """What a call might change in the process."""
    hooks = [name for name in vars(torchs_modules) if name.startswith("_global_") and name.endswith("hooks")]
    replaced = {"F": F, "Tensor": Tensor, "Module": nn.Module, "Linear": nn.Linear, "autograd": torch.autograd}
    return {
        "torch's numbers": torch.get_rng_state().tolist(),
        "numpy's numbers": str(np.random.get_state()),
        "Python's numbers": random.getstate(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "algorithms": (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        "cores": torch.get_num_threads(),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "hooks of all modules": [list(getattr(torchs_modules, name)) for name in hooks],
        "counts": dict(COUNTS),
        "warnings": warnings.showwarning,
        "threads": frozenset(threading.enumerate()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "environment": dict(os.environ),
        "tracing": (sys.gettrace(), sys.getprofile(), sys.excepthook),
        **{f"{name}.{key}": value for name, owner in replaced.items() for key, value in vars(owner).items()},
    }


def inside(module: nn.Module) -> Iterator[tuple[object, object]]:
    """Names and values of what a module and its parts hold."""
    for name, part in module.named_modules():
        yield (name, "class"), type(part)
        for key, value in vars(part).items():
            yield (name, key), copy(value) if isinstance(value, (dict, list, set)) else value


def of_tensor(tensor: Tensor) -> object:
    numbers = None if tensor.is_meta else tensor.detach().clone()
    gradient = tensor.grad if tensor.is_leaf else None
    return tensor._version, tensor.requires_grad, gradient, list(tensor._backward_hooks or {}), vars(tensor), numbers


def state(arguments: Any) -> dict[object, object]:
    """Everything around a call, and in its arguments."""
    found: dict[object, object] = dict(around())
    for number, each in enumerate(leaves(arguments)):
        owned = [each] if isinstance(each, Tensor) else []
        if isinstance(each, nn.Module):
            found |= {(number, *key): value for key, value in inside(each)}  # type: ignore[misc]
            owned = [*each.parameters(), *each.buffers()]
        found |= {(number, place): of_tensor(tensor) for place, tensor in enumerate(owned)}
    return found


def changes(before: dict[object, object], after: dict[object, object]) -> list[object]:
    return [name for name in {**before, **after} if not same(before.get(name), after.get(name))]


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(a, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, frozenset) and isinstance(b, frozenset):
        # A thread of an earlier test may end
        return b <= a
    return a is b or a == b


@pytest.mark.parametrize("function", sorted(CALLS.keys() - CHANGES.keys()))
def test_a_call_leaves_everything_as_it_was(function: str) -> None:
    call = CALLS[function]
    arguments = call.arguments()
    before = state(arguments)
    outcome(call, arguments, call.see)
    assert changes(before, state(arguments)) == []


class FailureError(Exception):
    pass


LARGE = 1000.0
"""A number in the last row, by which a function knows that it has the last chunk."""


def fail(rows: Tensor, when: str) -> Tensor:
    """Fail at once, in the last chunk, or in the backward of either."""
    if when in ("at once", "in the last chunk") and (when == "at once" or bool((rows.detach().abs() >= LARGE).any())):
        raise FailureError
    if when != "in backward" or not rows.requires_grad:
        return rows

    def fail_there(gradient: Tensor) -> None:
        raise FailureError

    rows = rows.clone()
    rows.register_hook(fail_there)
    return rows


COUNTS = {"calls": 0}


def stir(when: str) -> None:
    """Count, and draw random numbers, where the engine's own rows are the only ones that are seen before it fails."""
    if when == "at once":
        COUNTS["calls"] += 1
        torch.rand(1)
        random.random()
        np.random.rand()


class Failing(nn.Module):
    """A generator that fails on its rows."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.inner, self.when = linear(2), when
        self.register_buffer("seen", torch.zeros(()))
        self.note: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        stir(self.when)
        if self.when == "at once":
            self.seen += 1
            self.note.append(1)
        return self.inner(fail(hidden, self.when)).tanh()  # type: ignore[no-any-return]


class FailingLoss(nn.Module):
    """A criterion that fails on its rows, the last of which is known by its target."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        stir(self.when)
        fail((target == TARGET[-1]) * LARGE, self.when)
        return F.cross_entropy(fail(logits, self.when), target, reduction="sum")


def rows() -> Tensor:
    hidden = leaf(1, 6, 4).detach()
    hidden[-1] = LARGE
    return hidden.requires_grad_()


def over(hidden: Tensor, loss: seqpar.TokenLoss) -> None:
    torch.autograd.grad(loss.total, hidden)


def engine(generator: nn.Module, criterion: nn.Module, devices: list[str] | None) -> tuple[list[Any], Any]:
    hidden = rows()
    compute = seqpar.LossCompute(generator, criterion, devices, chunk_tokens=2)
    return [hidden, generator, criterion], lambda: over(hidden, compute(hidden, TARGET))


def scored(when: str) -> tuple[list[Any], Any]:
    hidden, weight = rows(), leaf(2, V, 4)

    def loss(scores: Any, row: Tensor) -> Tensor:
        return -fail(scores.log_prob, when) - fail(row, when) * 0

    options = {"row": hidden.detach()[:, 0], "chunk_tokens": 2}
    return [hidden, weight], lambda: over(hidden, seqpar.scored_loss(hidden, weight, TARGET, loss, **options))


def walked(when: str) -> tuple[list[Any], Any]:
    hidden, weight = rows(), leaf(2, 4)

    def per_chunk(params: Any, given: Any, chunk: Any) -> seqpar.TokenLoss:
        return seqpar.TokenLoss((fail(given[0], when) @ params[0]).tanh().sum(), torch.tensor(len(given[0])))

    empty = seqpar.TokenLoss(torch.tensor(0.0).double(), torch.tensor(0))
    chunks = [slice(0, 2), slice(2, 4), slice(4, 6)]
    return [hidden, weight], lambda: over(
        hidden, seqpar.chunked_gradient(per_chunk, chunks, [hidden], [weight], empty=empty)
    )


def distilled(when: str) -> tuple[list[Any], Any]:
    hidden, weight = rows(), leaf(2, V, 4)

    def log_probs(chunk: Any) -> Tensor:
        fail(hidden[chunk], when)
        return leaf(3, 6, V).log_softmax(-1)[chunk]

    options = {"divergence": "forward_kl", "chunk_tokens": 2}
    teacher = seqpar.TeacherLogProbs(log_probs)
    return [hidden, weight], lambda: over(
        hidden,
        seqpar.linear_distillation(hidden, weight, teacher, TARGET, **options),  # type: ignore[arg-type]
    )


def accumulated(when: str) -> tuple[list[Any], Any]:
    hidden = rows()
    compute = seqpar.LossCompute(Failing(when), nn.CrossEntropyLoss(reduction="sum"), chunk_tokens=2)
    parts = [slice(0, 3), slice(3, 6)]
    # The gradient of an earlier micro-batch stays, as in a loop of one's own
    return [], lambda: seqpar.accumulate_gradients(
        parts, lambda part: compute(hidden[part], TARGET[part]), lambda _: torch.tensor(3), group=seqpar.THIS_PROCESS
    )


def of_2018(when: str) -> tuple[list[Any], Any]:
    generator, hidden = Failing(when), rows().detach().view(2, 3, 4).requires_grad_()
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    compute = seqpar.MultiGPULossCompute(generator, nn.CrossEntropyLoss(reduction="sum"), ["cpu"] * 2, optimizer)
    return [hidden, generator], lambda: compute(hidden, TARGET.view(2, 3), 6)


def in_parallel(when: str) -> tuple[list[Any], Any]:
    class Layer(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(fail(hidden, when))

    layer, hidden = Layer(4, 3).double(), rows()
    wrapped = seqpar.DataParallel(layer, ["cpu"] * 3)
    return [hidden, layer], lambda: torch.autograd.grad(wrapped(hidden).sum(), hidden)


FAILURES: dict[str, Callable[[str], tuple[list[Any], Any]]] = {
    "a generator": lambda when: engine(Failing(when), nn.CrossEntropyLoss(reduction="sum"), None),
    "a generator on two devices": lambda when: engine(Failing(when), seqpar.CrossEntropy(), ["cpu"] * 2),
    "a criterion": lambda when: engine(linear(2), FailingLoss(when), None),
    "a criterion on two devices": lambda when: engine(linear(2), FailingLoss(when), ["cpu"] * 2),
    "a loss of scores": scored,
    "a loss of chunks": walked,
    "a teacher": distilled,
    "a micro-batch": accumulated,
    "a loss of 2018": of_2018,
    "a layer": in_parallel,
}


WHEN = ("at once", "in the last chunk", "in backward")
# A teacher has no backward
PLACES = [(where, when) for where in FAILURES for when in WHEN if (where, when) != ("a teacher", "in backward")]


@pytest.mark.parametrize(("where", "when"), PLACES)
def test_a_call_that_fails_leaves_everything_as_it_was(where: str, when: str) -> None:
    arguments, call = FAILURES[where](when)
    before = state(arguments)
    with pytest.raises(FailureError):
        call()
    assert changes(before, state(arguments)) == []


def test_a_change_is_seen() -> None:
    generator, hidden = Failing("never"), rows()
    before = state([generator, hidden])
    torch.rand(1)
    generator.inner.register_forward_hook(print)
    generator.seen += 1
    hidden.grad = torch.ones_like(hidden)
    found = {str(name) for name in changes(before, state([generator, hidden]))}
    assert found == {"torch's numbers", "(0, 'inner', '_forward_hooks')", "(0, 2)", "(1, 0)"}

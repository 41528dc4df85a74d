"""What a pair keeps between calls is refused by name and put back; what is written and never read again passes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import seqpar
from seqpar.core import effects
from tests.seqpar.engine.pairs import Head, Made, V, assert_plain, assert_same, batch, cross_entropy, linear


def annealed(self: Head, hidden: Tensor) -> Tensor:
    self.scale = 0.9 * getattr(self, "scale", 1.0)
    return hidden * self.scale


def counted_beside(self: Head, scores: Tensor) -> None:
    """What is named is what evolves, and not what is written first."""
    self.attention = scores.detach()
    self.steps += 1


def of_a_leaf(self: Head, scores: Tensor) -> None:
    with torch.no_grad():
        self.leaf += 1


def of_a_key(self: Head, scores: Tensor) -> None:
    ((key, value),) = self.keys.items()
    del self.keys[key]
    self.keys[key + 1] = value


def only_once(self: Head, hidden: Tensor) -> Tensor:
    if hasattr(self, "once"):
        del self.once
        return hidden
    return hidden * 2


def of_a_mode(self: Head, hidden: Tensor) -> Tensor:
    hidden, self.training = F.dropout(hidden, 0.5, self.training), False
    return hidden


def remembered(self: Head, hidden: Tensor) -> Tensor:
    last = getattr(self, "last", torch.zeros_like(hidden[:1]))
    self.last = hidden.detach()[:1]
    return hidden + last


def warmed_up(self: Head, hidden: Tensor) -> Tensor:
    """Another result from the second call on, after which nothing changes any more."""
    if hasattr(self, "warm"):
        return hidden * 2
    self.warm = True
    return hidden


def warmed_up_backward(self: Head, hidden: Tensor) -> Tensor:
    """Another gradient alone."""
    if hasattr(self, "hot") and hidden.requires_grad:
        hidden.register_hook(lambda g: 2 * g)
    self.hot = True
    return hidden


def to(change: Any) -> dict[str, Any]:
    """What a head does after its projection, given itself and the scores."""
    return {"after": change}


STATE: dict[str, dict[str, Any]] = {
    "warm": {"before": warmed_up},
    "hot": {"before": warmed_up_backward},
    "steps": to(lambda self, scores: setattr(self, "steps", self.steps + 1)),
    "steps beside": {"after": counted_beside},
    "sums of another dict": to(
        lambda self, scores: setattr(self, "sums", {"most": 100, "rows": len(self.sums) + self.sums["rows"]})
    ),
    "names": to(lambda self, scores: self.names.add(str(len(self.names)))),
    "inner": to(lambda self, scores: setattr(self.inner, "steps", self.inner.steps + 1)),
    "box": to(lambda self, scores: setattr(self.box[0], "steps", getattr(self.box[0], "steps", 0) + 1)),
    "pair": to(lambda self, scores: self.pair[0].append(1)),
    "cells": to(lambda self, scores: self.cells.__setitem__(0, self.cells[0] + 1)),
    "keys": {"after": of_a_key},
    "leaf": {"after": of_a_leaf},
    "table": to(lambda self, scores: self.table[99:].add_(1)),
    "once": {"before": only_once},
    "span": to(lambda self, scores: setattr(self, "span", range(len(getattr(self, "span", ())) + 1))),
    "training": {"before": of_a_mode},
    "scale": {"before": annealed},
    "seen": to(lambda self, scores: self.seen.append(len(scores))),
    "recent": to(lambda self, scores: self.recent.append(len(scores))),
    "histogram": to(lambda self, scores: self.histogram.__iadd__([0, len(scores)])),
    "sums": to(lambda self, scores: self.sums.update(rows=self.sums["rows"] + len(scores))),
    "total": to(lambda self, scores: self.total.add_(scores.detach().sum())),
    "last": {"before": remembered},
    "aux": to(lambda self, scores: setattr(self, "aux", scores.logsumexp(-1).square().sum())),
    "kept": to(lambda self, scores: setattr(self, "kept", [scores.sum()])),
}


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize("name", STATE)
def test_what_a_pair_keeps_between_calls_is_refused_by_name_and_put_back(name: str, devices: Any) -> None:
    generator = Head(**STATE[name])
    version = generator.total._version
    # "of the last row" is found as mixing of rows, too
    with pytest.raises(
        ValueError, match=rf"generator\.{name.split()[0]} (changes with every call|holds a tensor with a graph)|mixes"
    ):
        seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices)(*batch())
    assert (generator.steps, generator.seen, generator.sums) == (0, [], {"most": 100, "rows": 0})
    assert (generator.names, generator.inner.steps, generator.pair) == ({"a"}, 0, ([],))
    assert (generator.keys, hasattr(generator.box[0], "steps"), generator.training) == ({0: None}, False, True)
    assert not any(t.any() for t in (*generator.cells, generator.leaf, generator.table))
    assert not generator.recent
    assert not generator.histogram.any()
    assert generator.total == 0
    assert generator.total._version == version
    assert not hasattr(generator, "scale")


def failing(self: Any, logits: Tensor, target: Tensor) -> Tensor:
    raise RuntimeError("a criterion's own error")


def test_what_a_pair_keeps_is_put_back_also_after_its_own_error() -> None:
    generator = Head(after=lambda *given: [STATE[name]["after"](*given) for name in ("seen", "recent", "histogram")])
    with pytest.raises(RuntimeError, match="a criterion's own error"):
        seqpar.LossCompute(generator, Made(failing))(*batch())
    assert not generator.seen
    assert not generator.recent
    assert not generator.histogram.any()


@torch.inference_mode()
def of_inference_mode(self: Head, scores: Tensor) -> None:
    self.kept += 1


def test_a_tensor_of_inference_mode_is_put_back_in_that_mode() -> None:
    generator = Head(after=of_inference_mode)
    with torch.inference_mode():
        generator.kept = torch.zeros(2)
    with pytest.raises(ValueError, match=r"generator\.kept changes with every call"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    assert not generator.kept.any()


class Metric(nn.Module):
    """Counts rows by a method that is set on the instance, and so belongs to it in every copy, as torchmetrics does."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.update = self.add

    def add(self, rows: int) -> None:
        self.rows += rows


def metered(self: Any, logits: Tensor, target: Tensor) -> Tensor:
    self.metric.update(len(target))
    return cross_entropy(logits, target)


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
def test_what_a_method_of_the_original_changes_is_refused_and_put_back(devices: Any) -> None:
    criterion: Any = Made(metered, metric=Metric())
    with pytest.raises(ValueError, match=r"criterion\.metric\.rows changes with every call"):
        seqpar.LossCompute(linear(), criterion, devices)(*batch())
    assert criterion.metric.rows == 0


def test_what_is_too_large_or_has_no_memory_is_not_looked_into(monkeypatch: Any) -> None:
    class Untouchable:
        __slots__ = ("number",)

        def __getattribute__(self, name: str) -> Any:
            if name == "number":
                raise MemoryError
            return super().__getattribute__(name)

    generator = Head(after=lambda self, scores: [part.add_(1) for part in self.parts])
    monkeypatch.setattr(effects, "MOST_NUMBERS", 600)
    generator.parts, generator.meta = [torch.zeros(300), torch.zeros(300)], torch.empty(2, device="meta")
    generator.objects = [*([] for _ in range(2_000)), Untouchable()]
    with pytest.raises(ValueError, match=r"generator\.parts changes with every call"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    # The second alone is too much beside the first
    generator.after = lambda self, scores: self.parts[1].add_(1)
    assert seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch()).total.isfinite()


def test_a_graph_is_found_beside_a_vocabulary_and_beside_more_numbers_than_are_copied(monkeypatch: Any) -> None:
    monkeypatch.setattr(effects, "MOST_NUMBERS", 600)
    generator = Head(**STATE["aux"])
    generator.parts, generator.vocab = [torch.zeros(601)], {str(i): i for i in range(3_000)}
    generator.config = SimpleNamespace(**generator.vocab)
    with pytest.raises(ValueError, match=r"generator\.aux holds a tensor with a graph"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())


def test_a_graph_that_was_there_before_the_call_is_no_fault_and_one_beside_a_weight_of_a_hook_is() -> None:
    generator = Head()
    generator.attention = torch.ones(3, requires_grad=True) * 2
    prune.identity(generator.linear, "weight")
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    assert engine(*batch()).total.isfinite()
    generator.linear.register_forward_hook(lambda module, _, scores: setattr(module, "auxiliary", scores.sum()))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"generator\.linear\.auxiliary holds a tensor with a graph"):
            engine(*batch())
        # As a plain call leaves it
        generator(batch()[0])


def random_numbers(self: Head, hidden: Tensor) -> Tensor:
    drawn = random.random() + self.twister.random() + self.legacy.rand() + self.numpy.random() + np.random.rand()
    return hidden * (1 + torch.rand((), generator=self.own) + drawn)


RIGHT = {
    "a time": to(lambda self, scores: setattr(self, "when", (time.perf_counter(), float("nan")))),
    "kept for a picture": to(lambda self, scores: setattr(self, "attention", scores.detach().softmax(-1))),
    "a cache": to(lambda self, scores: self.sums.update({f"mask of {scores.dim()}": 1})),
    "a number that stays": to(lambda self, scores: setattr(self, "width", scores.size(-1))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_written_and_never_read_again_passes(name: str) -> None:
    generator = Head(**RIGHT[name])
    hidden, target = batch()
    total = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=6)(hidden, target).total
    assert_same(total, cross_entropy(generator(hidden), target), [hidden, generator.linear.weight])


CALLS: list[int] = []


def counted_outside(self: Head, scores: Tensor) -> None:
    """Count in a global, and keep what depends on the random numbers."""
    CALLS.append(1)
    self.attention = scores.detach()


@pytest.mark.parametrize("after", [None, counted_outside])
def test_the_first_call_draws_no_random_number_of_any_source(after: Any) -> None:
    found = []
    for is_first in (True, False):
        torch.manual_seed(0)
        generator, (hidden, target) = Head(before=random_numbers, after=after), batch()
        engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
        if not is_first:
            engine(hidden, target)
        generator.own.manual_seed(1)
        generator.twister.seed(1)
        generator.legacy.seed(1)
        generator.numpy = np.random.default_rng(1)
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        found.append(engine(hidden, target).total)
    assert found[0] == found[1]


class Keeps(nn.Linear):
    """A generator that keeps a number for a picture."""

    def __init__(self, name):
        super().__init__(4, V, dtype=torch.float64)
        self.name = name
        setattr(self, name, 0.0)

    def forward(self, x):
        scores = super().forward(x)
        setattr(self, self.name, float(scores.detach().abs().max()))
        return scores


def of_rare(change: Any) -> Any:
    """A criterion's function that keeps something of a class which the first rows do not have."""

    def function(self: Any, scores: Tensor, target: Tensor) -> Tensor:
        if (target == V - 1).any():
            self.kept = change(self.kept)
        return cross_entropy(scores, target)

    return function


def without_and_with_the_class(engine: seqpar.LossCompute) -> tuple[Any, Any]:
    """The engine's calls of 40 rows, first without the rare class and then with it once."""
    hidden, target = torch.randn(40, 4).double(), torch.arange(40) % (V - 1)
    rare = target.clone()
    rare[33] = V - 1
    return lambda: engine(hidden, target), lambda: engine(hidden, rare)


@pytest.mark.parametrize("name", ["largest", "kept"])
def test_a_number_is_another_one_than_that_of_the_same_name_in_another_module(name: str) -> None:
    criterion = Made(of_rare(lambda kept: kept + 1), kept=0)
    without, with_it = without_and_with_the_class(seqpar.LossCompute(Keeps(name), criterion, chunk_tokens=8))
    without()
    with pytest.raises(ValueError, match=r"^Made\.kept changes with every call"):
        with_it()


LATER = {
    "number": (0, lambda kept: kept + 1),
    "flag": (False, lambda kept: True),
    "tensor": (torch.zeros((), device="cpu"), lambda kept: kept + 1),
    "text": ("", lambda kept: kept + "7"),
    "list": ([], lambda kept: [*kept, 7]),
    "tuple": ((), lambda kept: (*kept, 7)),
    "number for nothing": (None, lambda kept: 7),
    "nothing for a number": (3, lambda kept: None),
}


@pytest.mark.parametrize("name", LATER)
def test_what_first_changes_in_a_later_call_is_not_lost_with_a_copy(name: str) -> None:
    start, change = LATER[name]
    engine = seqpar.LossCompute(linear(), Made(of_rare(change), kept=start), ["cpu"] * 2, chunk_tokens=8)
    without, with_it = without_and_with_the_class(engine)
    without()
    with pytest.raises(ValueError, match=r"^Made\.kept changes with every call"):
        with_it()


@pytest.mark.parametrize("change", [lambda kept: kept.clone(), lambda kept: kept * 1.0])
@pytest.mark.parametrize("size", [3, 5000])
def test_a_tensor_of_the_same_numbers_or_of_many_is_not_compared(change: Any, size: int) -> None:
    criterion = Made(of_rare(change), kept=torch.ones(size))
    for call in without_and_with_the_class(seqpar.LossCompute(linear(), criterion, ["cpu"] * 2, chunk_tokens=8)):
        call()


RENEWED = {
    "weight_norm": lambda linear: nn.utils.weight_norm(linear),
    "prune the weight": lambda linear: prune.random_unstructured(linear, "weight", 0.3),
    "prune the bias": lambda linear: prune.random_unstructured(linear, "bias", 0.3),
    "prune nothing": lambda linear: prune.identity(linear, "weight"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
@pytest.mark.parametrize("name", RENEWED)
def test_what_a_hook_renews_from_parameters_may_change_with_them(name: str, devices: list[str] | None) -> None:
    """After a step of the optimizer it is another one than the original's, which is of the call before."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(RENEWED[name](nn.Linear(4, 7).double()))
    plain, generator = made
    criterion = nn.CrossEntropyLoss(reduction="sum")
    engine = seqpar.LossCompute(generator, criterion, devices, chunk_tokens=3)
    steps = [torch.optim.SGD(module.parameters(), 0.1) for module in (plain, generator)]
    hidden, target = torch.randn(6, 4).double(), torch.randint(7, (6,))
    for _ in range(3):
        expected, found = criterion(plain(hidden), target), engine(hidden, target).total
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        for loss, step in zip((expected, found), steps, strict=True):
            step.zero_grad()
            loss.backward()
            step.step()


class Hits(nn.Module):
    """Counts correct predictions in an attribute."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        hits = (logits.argmax(-1) == target).sum()
        self.kept = self.kept + (hits if isinstance(self.kept, Tensor) else type(self.kept)(hits))
        return cross_entropy(logits, target)


def without_and_with_hits(generator: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    hidden, _ = batch()
    best = generator(hidden).argmax(-1)
    return hidden, (best + 1) % V, best


@pytest.mark.parametrize("kept", [0, 5, 0.0, 5.5])
def test_a_number_that_changes_after_the_first_call_is_kept_on_one_device_and_refused_over_several(kept: Any) -> None:
    generator = linear()
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
    generator = linear()
    hidden, wrong, _ = without_and_with_hits(generator)
    with pytest.raises(ValueError, match=r"Hits\.kept changes with every call and is not a buffer that adds up"):
        seqpar.LossCompute(generator, Hits(kept), devices)(hidden, wrong)


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
    start, keep = LOOKED_AT[name]

    def function(self: Any, logits: Tensor, target: Tensor) -> Tensor:
        self.kept = keep(logits)
        return cross_entropy(logits, target)

    generator, (hidden, target) = linear(), batch()
    engine = seqpar.LossCompute(generator, Made(function, kept=start), devices, chunk_tokens=2)
    for _ in range(2):
        plain = cross_entropy(generator(hidden), target)
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
    plain = cross_entropy(F.linear(hidden, generator.weight, generator.bias), target)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)


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


def test_a_tensor_that_is_computed_anew_or_replaced_by_itself_is_no_sum() -> None:
    assert_plain(Deriving(), seqpar.CrossEntropy())
    seqpar.LossCompute(Deriving(), seqpar.CrossEntropy(), ["cpu"] * 2)(*batch())


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

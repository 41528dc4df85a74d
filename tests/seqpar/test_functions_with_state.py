"""What functions of one's own change around them, in `scored_loss` and `chunked_gradient`.

Counts are of the caller's rows alone, and a result that depends on them is refused by name.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from tests.backward import with_gradient
from tests.seqpar.engine.test_linear_backward import clamp

V, N = 7, 13
Rows = Callable[[Tensor], Tensor]
"""The losses of rows -> what becomes of them."""


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (N, V))
    return hidden, weight, torch.randint(V, (N,))


def scored(function: Rows, chunk_tokens: int = 4) -> Tensor:
    return seqpar.scored_loss(*batch(), lambda scores: function(-scores.log_prob), chunk_tokens=chunk_tokens).total


def scored_one_by_one(function: Rows) -> Tensor:
    return scored(function, chunk_tokens=1)


def over_devices(function: Rows) -> Tensor:
    hidden, weight, target = batch()
    generator = nn.Linear(4, V, bias=False)
    generator.weight = nn.Parameter(weight.detach())
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), ["cpu"] * 3, chunk_tokens=2)
    return engine.scored_loss(hidden, target, lambda scores: function(-scores.log_prob)).total


def chunked(function: Rows, ends: Sequence[int] = (0, 5, 9, N)) -> Tensor:
    hidden, weight, target = batch()

    def per_chunk(params: Any, rows: Any, chunk: Any) -> seqpar.TokenLoss:
        losses = F.cross_entropy(rows[0] @ params[0].T, target[chunk], reduction="none")
        return seqpar.TokenLoss(function(losses).sum(), torch.tensor(len(losses)))

    empty = seqpar.TokenLoss.zero(torch.float64, hidden.device, tells=False)
    chunks = [slice(*both) for both in itertools.pairwise(ends)]
    return seqpar.chunked_gradient(per_chunk, chunks, [hidden], [weight], empty).total


def chunked_one_by_one(function: Rows) -> Tensor:
    return chunked(function, range(N + 1))


DOORS = [scored, scored_one_by_one, over_devices, chunked, chunked_one_by_one]


class Meter(nn.Module):
    of_all = 0

    def __init__(self, slope: float = 0.0) -> None:
        super().__init__()
        self.slope, self.own = slope, 0
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64))

    def forward(self, losses: Tensor) -> Tensor:
        self.own += len(losses)
        self.sums += torch.stack([losses.detach().sum(), torch.ones(()).double() * len(losses)])
        return losses * (1 + self.slope * self.own)

    def by_class(self, losses: Tensor) -> Tensor:
        Meter.of_all += len(losses)
        return losses * (1 + self.slope * Meter.of_all)


def in_a_list(seen: list[int], slope: float, losses: Tensor) -> Tensor:
    seen.append(len(losses))
    return losses * (1 + slope * len(seen))


COUNTED = {"rows": 0}


def in_a_global(losses: Tensor) -> Tensor:
    COUNTED["rows"] += len(losses)
    return losses


@pytest.mark.parametrize("door", DOORS)
def test_counts_are_of_the_callers_rows_in_every_call(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    meter, seen = Meter(), list[int]()
    monkeypatch.setattr(Meter, "of_all", 0)
    monkeypatch.setitem(COUNTED, "rows", 0)
    for calls in (1, 2, 3):
        for function in (meter, meter.by_class, partial(in_a_list, seen, 0.0), in_a_global):
            total = door(function)
        assert meter.own == meter.sums[1] == Meter.of_all == sum(seen) == COUNTED["rows"] == N * calls
        torch.testing.assert_close(meter.sums[0], total.detach() * calls)


def over_a_count(numbers: Any, losses: Tensor) -> Tensor:
    return losses * next(numbers)


DEPENDENT: dict[str, tuple[Callable[[], Rows], str]] = {
    "attribute": (lambda: Meter(1e-9), "changes with every call, and so do the results"),
    "class": (lambda: Meter(1e-9).by_class, r"Meter\.of_all changes with every call, and so do the results"),
    "list": (lambda: partial(in_a_list, [], 1e-9), "changes with every call, and so do the results"),
    "iterator": (lambda: partial(over_a_count, itertools.count(1)), "is an iterator, and the results change from call"),
    "generator": (lambda: partial(over_a_count, (i for i in range(1, 999))), "is an iterator, and the results change"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", DEPENDENT)
def test_results_that_depend_on_how_often_a_function_was_called_are_refused(name: str, door: Any) -> None:
    make, said = DEPENDENT[name]
    with pytest.raises(ValueError, match=said):
        door(make())


@pytest.mark.parametrize("door", DOORS)
def test_an_iterator_that_changes_nothing_passes(door: Any) -> None:
    assert door(partial(over_a_count, itertools.repeat(1.0))).isfinite()


def kept(left: list[Tensor], losses: Tensor) -> Tensor:
    left.append(losses)
    return losses


@pytest.mark.parametrize("door", DOORS)
def test_a_tensor_that_is_left_with_a_graph_is_refused(door: Any) -> None:
    with pytest.raises(ValueError, match=r"holds a tensor with a graph after a call, which would be one chunk's"):
        door(partial(kept, []))


NOISE = {
    "torch": lambda losses: losses * torch.rand(()),
    "numpy": lambda losses: losses * np.random.rand(),
    "Python": lambda losses: losses * random.random(),
}


@pytest.mark.parametrize("door", [scored, chunked])
@pytest.mark.parametrize("name", NOISE)
def test_noise_passes_and_the_first_call_draws_none_of_its_own(name: str, door: Any) -> None:
    def call() -> float:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(5)
        return float(door(lambda losses: losses * 0 + NOISE[name](torch.ones_like(losses))).detach())

    # `batch` seeds torch anew
    assert call() == call()


class Prefetching:
    """Has a queue that another thread fills whenever it is empty."""

    def __init__(self) -> None:
        self.full, self.empty = queue.Queue[int](), threading.Semaphore(0)
        self.thread = threading.Thread(target=self.fill, daemon=True)
        self.thread.start()

    def fill(self) -> None:
        for item in itertools.count():
            self.empty.acquire()
            self.full.put(item)

    def loss(self, losses: Tensor) -> Tensor:
        self.empty.release()
        while self.full.empty():
            time.sleep(0.001)
        return losses


@pytest.mark.parametrize("door", DOORS)
def test_what_another_thread_puts_into_a_queue_meanwhile_stays_there(door: Any) -> None:
    prefetching = Prefetching()
    door(prefetching.loss)
    prefetching.empty.release()
    items = [prefetching.full.get(timeout=5) for _ in range(prefetching.full.qsize() + 1)]
    assert items == [*range(len(items))]


@pytest.mark.parametrize("door", DOORS)
def test_a_function_may_call_itself(door: Any) -> None:
    def halved(losses: Tensor, times: int = 2) -> Tensor:
        return halved(losses / 2, times - 1) if times else losses

    torch.testing.assert_close(door(halved) * 4, door(lambda losses: losses))


def flagged(is_on: bool) -> Rows:
    return lambda losses: losses - losses.mean().detach() if is_on else losses


def with_settings(losses: Tensor, *, is_plain: bool = False, mixes: bool = False, counts: Any = None) -> Tensor:
    if counts:
        counts.append(len(losses))
        losses = losses * 0.9 ** len(counts)
    return losses * losses.mean() if mixes else losses


def bound(mixes: bool) -> Rows:
    """With a setting in a default, as where a loop's variable is bound."""

    def function(losses: Tensor, mixes: bool = mixes) -> Tensor:
        return with_settings(losses, mixes=mixes)

    return function


def bound_by_name(mixes: bool) -> Rows:
    def function(losses: Tensor, *, mixes: bool = mixes) -> Tensor:
        return with_settings(losses, mixes=mixes)

    return function


PAIRS = {
    "another keyword": lambda: (partial(with_settings, is_plain=True), partial(with_settings, mixes=True)),
    "another value": lambda: (partial(with_settings, mixes=False), partial(with_settings, mixes=True)),
    "default": lambda: (bound(False), bound(True)),
    "default of a keyword": lambda: (bound_by_name(False), bound_by_name(True)),
}


@pytest.mark.parametrize("door", [scored, over_devices, chunked])
@pytest.mark.parametrize("name", PAIRS)
def test_other_settings_of_a_function_make_it_another_one(name: str, door: Any) -> None:
    first, second = PAIRS[name]()
    door(first)
    with pytest.raises(ValueError, match=r"(mixes|joins) rows"):
        door(second)


@pytest.mark.parametrize("door", DOORS)
def test_other_keywords_of_a_partial_may_make_it_count(door: Any) -> None:
    door(partial(with_settings, counts=()))
    with pytest.raises(ValueError, match="changes with every call, and so do the results"):
        door(partial(with_settings, counts=[1]))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_a_gradient_that_was_not_asked_for_before_is_asked_about(frozen: str) -> None:
    """Of a function that adds 0 to the value, and mixes rows in the gradient alone."""
    target = batch()[2]

    def per_chunk(params: Any, rows: Any, chunk: Any) -> seqpar.TokenLoss:
        hidden = rows[0] + (rows[0].mean(0) - rows[0].mean(0).detach())
        return seqpar.TokenLoss(F.cross_entropy(hidden @ params[0].T, target[chunk], reduction="sum"), torch.tensor(1))

    def loss(**tensors: Tensor) -> Tensor:
        empty = seqpar.TokenLoss.zero(torch.float64, target.device, tells=False)
        chunks = [slice(0, 5), slice(5, N)]
        return seqpar.chunked_gradient(per_chunk, chunks, [tensors["hidden"]], [tensors["weight"]], empty).total

    given = dict(zip(("hidden", "weight"), batch()[:2], strict=True))
    own = {name: t.detach() if frozen in (name, "both") else t for name, t in given.items()}
    if frozen == "weight":
        with pytest.raises(ValueError, match="joins rows"):
            loss(**own)
    else:
        loss(**own)
    with pytest.raises(ValueError, match="joins rows"):
        loss(**given)


class OfTheGradient:
    """A factor of the gradient alone, which becomes smaller with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, losses: Tensor) -> Tensor:
        self.calls += 1
        return losses.detach() + 0.9999**self.calls * (losses - losses.detach())


@pytest.mark.parametrize("door", DOORS)
def test_a_gradient_that_depends_on_how_often_a_function_was_called_is_refused(door: Any) -> None:
    with pytest.raises(ValueError, match=r"changes with every call, and so do the results|a row's gradient changes"):
        door(OfTheGradient())


EMPTY = seqpar.TokenLoss.zero(torch.float64, torch.device("cpu"), tells=False)


def by_chunks(per_token: Tensor, weight: Tensor, loss: Any, size: int = 5) -> Tensor:
    """The loss of rows in chunks, by a function of rows, the weight and the targets."""
    target = torch.arange(len(per_token)) % V

    def per_chunk(params: Any, rows: Any, chunk: Any) -> seqpar.TokenLoss:
        return seqpar.TokenLoss(loss(rows[0], params[0], target[chunk]), torch.tensor(len(rows[0])))

    chunks = [slice(start, start + size) for start in range(0, len(per_token), size)]
    return seqpar.chunked_gradient(per_chunk, chunks, [per_token], [weight], EMPTY).total


def sees_centred_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradient of the weight alone joins rows."""
    rows = hidden.detach()
    scores = hidden @ weight.detach().T + (rows - rows.mean(0)) @ (weight - weight.detach()).T
    return F.cross_entropy(scores, target, reduction="sum")


def clamped_hidden(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(with_gradient(hidden, clamp) @ weight.T, target, reduction="sum")


def clamped_weight(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ with_gradient(weight, clamp).T, target, reduction="sum")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (sees_centred_rows, r"per_chunk joins rows: the gradients of params from the halves of some rows are off by"),
        (clamped_hidden, r"backward through per_chunk is not linear: the gradient of -?[\d.]+ x its loss is off by"),
        (clamped_weight, r"backward through per_chunk is not linear: the gradient of -?[\d.]+ x its loss is off by"),
    ],
)
@pytest.mark.parametrize("size", [2, 5, 13])
def test_every_gradient_of_a_function_of_chunks_is_asked_about(loss: Any, said: str, size: int) -> None:
    hidden, weight, _ = batch()
    with pytest.raises(ValueError, match=said):
        by_chunks(hidden, weight, loss, size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_that_are_rounding_or_random_are_not_refused(dtype: torch.dtype) -> None:
    hidden, weight = (t.detach().to(dtype).requires_grad_() for t in batch()[:2])

    def shifted(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """With a number that is added to all scores, whose gradient is what rounding leaves."""
        scores = rows @ weight.T
        return F.cross_entropy((scores + weight.mean()).float(), target, reduction="sum")

    def dropped(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(rows @ weight.T, 0.5).float(), target, reduction="sum")

    for loss in (shifted, dropped):
        by_chunks(hidden, weight, loss).backward()
    tiny = (hidden.detach() * 1e-3).requires_grad_()
    by_chunks(tiny, weight, shifted).backward()


@pytest.mark.parametrize("ends", [(0, 0, 1, 2), (0, 0, 5, 13, 20), (0, 0)])
def test_empty_chunks_and_slices_beyond_the_last_row_are_no_trouble(ends: tuple[int, ...]) -> None:
    hidden, weight, _ = batch()
    target = torch.arange(N) % V

    def per_chunk(params: Any, rows: Any, chunk: Any) -> seqpar.TokenLoss:
        loss = F.cross_entropy(rows[0] @ params[0].T, target[chunk], reduction="sum")
        return seqpar.TokenLoss(loss, torch.tensor(len(rows[0])))

    chunks = [slice(*both) for both in itertools.pairwise(ends)]
    total = seqpar.chunked_gradient(per_chunk, chunks, [hidden], [weight], EMPTY).total
    plain = F.cross_entropy((hidden @ weight.T)[: ends[-1]], target[: ends[-1]], reduction="sum")
    torch.testing.assert_close(total, plain, rtol=1e-12, atol=0)


IS_ON = False


def with_a_global(losses: Tensor) -> Tensor:
    return losses * losses.mean() if IS_ON else losses


class Switched:
    is_on = False

    def __init__(self) -> None:
        self.own = False
        self.norm = nn.BatchNorm1d(1, affine=False).double().eval()

    def mixed(self, losses: Tensor) -> Tensor:
        return losses * losses.mean() if self.own or self.is_on else losses

    def normed(self, losses: Tensor) -> Tensor:
        return self.norm(losses.unsqueeze(1)).squeeze(1)


def switches(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Rows, Callable[[], object]]]:
    """Functions that join rows after something around them has changed."""
    switched, holder = Switched(), SimpleNamespace(inner=SimpleNamespace(on=False))
    return {
        "own": (switched.mixed, lambda: setattr(switched, "own", True)),
        "class": (switched.mixed, lambda: monkeypatch.setattr(Switched, "is_on", True)),
        "mode": (switched.normed, lambda: switched.norm.train()),
        "global": (with_a_global, lambda: monkeypatch.setitem(globals(), "IS_ON", True)),
        "closure": (
            lambda losses: losses * losses.mean() if holder.inner.on else losses,
            lambda: setattr(holder.inner, "on", True),
        ),
    }


@pytest.mark.parametrize("door", [scored, chunked])
@pytest.mark.parametrize("name", ["own", "class", "mode", "global", "closure"])
def test_a_setting_around_a_function_makes_it_another_one(
    name: str, door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, change = switches(monkeypatch)[name]
    door(function)
    change()
    with pytest.raises(ValueError, match=r"(mixes|joins) rows"):
        door(function)


def test_another_number_of_dimensions_is_asked_about() -> None:
    def over_dimension(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return rows.log_softmax(-2).square().sum() + 0 * weight.sum()

    weight = batch()[1]
    by_chunks(torch.randn(10, 3, 4).double().requires_grad_(), weight, over_dimension)
    with pytest.raises(ValueError, match="joins rows"):
        by_chunks(torch.randn(10, 4).double().requires_grad_(), weight, over_dimension)


# Rows that are all chunks of their own have nothing to be joined with
@pytest.mark.parametrize("door", [door for door in DOORS if door is not chunked_one_by_one])
def test_a_setting_in_a_closure_makes_it_another_function(door: Any) -> None:
    door(flagged(False))
    with pytest.raises(ValueError, match=r"(mixes|joins) rows"):
        door(flagged(True))


def test_a_function_that_changes_nothing_around_it_is_asked_in_every_call() -> None:
    """A statistic of the batch may act on a later batch alone."""
    hidden, weight, target = batch()

    def loss(scores: Any, w: Tensor) -> Tensor:
        return -scores.log_prob * (w / w.max() if bool((w != 1).any()) else w)

    seqpar.scored_loss(hidden, weight, target, loss, w=torch.ones(N).double())
    with pytest.raises(ValueError, match="loss mixes rows"):
        seqpar.scored_loss(hidden, weight, target, loss, w=torch.arange(1.0, N + 1).double())

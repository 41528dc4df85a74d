"""Counts, files, random numbers and iterators around the code of a pair are left as the caller's rows make them."""

from __future__ import annotations

import collections
import copy
import itertools
import random
import threading
import time
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from tests.seqpar.engine import pairs
from tests.seqpar.engine.pairs import Made, V, cross_entropy

ROWS = 20


def batch() -> tuple[Tensor, Tensor]:
    return pairs.batch(ROWS, torch.float32)


def beside(effect: Callable[[Any, Tensor], object]) -> Made:
    """A criterion that does something besides its loss, given itself and the targets."""

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        effect(self, y)
        return cross_entropy(z, y)

    return Made(function)


def call(criterion: nn.Module, times: int = 1) -> Tensor:
    """The loss of 20 rows in chunks of 5, in the last of some calls of one engine."""
    engine = seqpar.LossCompute(nn.Linear(4, V), criterion, chunk_tokens=5)
    for _ in range(times):
        total = engine(*batch()).total
    return total


class Meter:
    """What a program counts with."""

    everywhere = 0

    def __init__(self) -> None:
        self.rows = 0


class Metric(nn.Module):
    """A metric as torchmetrics has them: a module without parameters, that replaces its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(())
        self.register_buffer("sum", torch.zeros(()))

    def update(self, rows: int) -> None:
        self.rows = self.rows + rows
        self.sum += rows


ONE_AT_A_TIME = threading.Lock()
"""Each device has a thread, and sums of tensors let others run between reading and writing."""
NUMBER = 0
SUM: Tensor | None = None
EACH: tuple[int, ...] = ()
LEFT: list[float] = []
COUNTS: collections.Counter[str] = collections.Counter()
METER, METRIC = Meter(), Metric()
ARRAY, TENSOR = np.zeros(2), torch.zeros(())


class Counting(Made):
    """A criterion that counts its rows in every place around its code."""

    of_the_class = 0

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        global NUMBER, SUM, EACH
        with ONE_AT_A_TIME:
            NUMBER += len(y)
            SUM = torch.tensor(len(y)) if SUM is None else SUM + len(y)
            EACH = (*EACH, *y.tolist())
            COUNTS["rows"] += len(y)
            LEFT.extend([0.0] * len(y))
            METER.rows += len(y)
            METRIC.update(len(y))
            Meter.everywhere += len(y)
            Counting.of_the_class += len(y)
            ARRAY[1] += len(y)
            TENSOR.add_(len(y))
        return cross_entropy(z, y)


def counts() -> list[float]:
    tensors = (torch.zeros(()) if SUM is None else SUM, METRIC.rows, METRIC.sum, TENSOR)
    numbers = (NUMBER, len(EACH), COUNTS["rows"], len(LEFT), METER.rows, Meter.everywhere, Counting.of_the_class)
    return [*map(float, tensors), *numbers, ARRAY[1]]


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
def test_what_is_counted_around_the_code_is_of_the_callers_rows_alone(devices: Any) -> None:
    """Not of those on which the pair is asked in the first call, whether it then goes on or is refused."""
    hidden, target = batch()
    generator = nn.Linear(4, V)
    hooked: list[int] = []
    generator.register_forward_hook(lambda module, given, scores: hooked.append(len(scores)))
    before = counts()
    loss = seqpar.LossCompute(generator, Counting(None), devices, chunk_tokens=5)(hidden, target)
    assert torch.allclose(loss.total, cross_entropy(generator(hidden), target))
    assert {after - old for after, old in zip(counts(), before, strict=True)} == {ROWS}
    assert sum(hooked) == 2 * ROWS  # and those of the plain loss
    with pytest.raises(ValueError, match="mixes rows"):
        seqpar.LossCompute(nn.Sequential(nn.BatchNorm1d(4), generator), Counting(None), devices)(hidden, target)
    assert {after - old for after, old in zip(counts(), before, strict=True)} == {ROWS}


def test_what_a_first_call_makes_around_the_code_is_made_once() -> None:
    """Such as a file, or a run of a tracker: it stood for None."""
    opened: Any = None
    times: list[str] = []

    def effect(self: Any, y: Tensor) -> None:
        nonlocal opened
        if opened is None:
            opened = object()
            times.append("opened")

    call(beside(effect), times=2)
    assert opened is not None
    assert times == []  # it was put back, and nothing was made again


MADE: dict[str, tuple[Any, Any, Any]] = {
    "a counter": (collections.Counter, lambda made, rows: made.update(rows=rows), lambda made: made["rows"]),
    "a list": (list, list.append, sum),
    "a list in a list": (lambda: [[]], lambda made, rows: made[0].append(rows), lambda made: sum(made[0])),
    "an array": (lambda: np.zeros(1), lambda made, rows: made.__iadd__(rows), lambda made: made[0]),
    "an object": (Meter, lambda made, rows: setattr(made, "rows", made.rows + rows), lambda made: made.rows),
    "a metric": (Metric, Metric.update, lambda made: made.sum),
    "an iterator": (itertools.count, lambda made, rows: [next(made) for _ in range(rows)], next),
    "a generator": (
        lambda: (number for number in itertools.count()),
        lambda made, rows: [next(made) for _ in range(rows)],
        next,
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_what_a_first_call_makes_to_count_in_counts_the_callers_rows_alone(name: str) -> None:
    make, add, read = MADE[name]
    made: Any = None

    def effect(self: Any, y: Tensor) -> None:
        nonlocal made
        made = make() if made is None else made
        add(made, len(y))

    call(beside(effect))
    assert read(made) == ROWS


def on_a_function() -> tuple[Any, Any]:
    def function() -> None: ...

    return (lambda number: setattr(function, "begun", number)), lambda: getattr(function, "begun", 0)


def on_a_class() -> tuple[Any, Any]:
    class Owner: ...

    return (lambda number: setattr(Owner, "begun", number)), lambda: getattr(Owner, "begun", 0)


def in_a_global() -> tuple[Any, Any]:
    def write(number: Any) -> None:
        global BEGUN
        BEGUN = number

    return write, lambda: globals().get("BEGUN", 0)


def in_a_global_of_an_inner_function() -> tuple[Any, Any]:
    _, read = in_a_global()

    def outer(number: Any) -> None:
        def inner() -> None:
            global BEGUN
            BEGUN = number

        inner()

    return outer, read


@pytest.fixture(params=[on_a_function, on_a_class, in_a_global, in_a_global_of_an_inner_function])
def beginning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """How a name that the first call makes is written and read."""
    monkeypatch.delitem(globals(), "BEGUN", raising=False)
    return request.param()  # type: ignore[no-any-return]


def test_a_count_under_a_name_that_the_first_call_makes_is_of_the_callers_rows(beginning: Any) -> None:
    write, read = beginning
    call(beside(lambda self, y: write(read() + len(y))))
    assert read() == ROWS


def opened_in(folder: Path) -> Any:
    return (folder / f"{len([*folder.iterdir()])}").open("w")


def test_a_file_under_a_name_that_the_first_call_makes_is_opened_once(beginning: Any, tmp_path: Path) -> None:
    write, read = beginning
    call(beside(lambda self, y: read() or write(opened_in(tmp_path))))
    read().close()
    assert len([*tmp_path.iterdir()]) == 1


COUNTERS = {
    "UserDict": lambda: collections.UserDict({0: 0}),
    "ChainMap": lambda: collections.ChainMap({0: 0}),
    "UserList": lambda: collections.UserList([0]),
    "array": lambda: array("q", [0]),
    "bytearray": lambda: bytearray(1),
    "numpy": lambda: np.zeros(1, int),
}


@pytest.mark.parametrize("made", COUNTERS.values(), ids=COUNTERS)
def test_a_count_in_any_container_is_of_the_callers_rows(made: Any) -> None:
    held = made()
    call(beside(lambda self, y: held.__setitem__(0, held[0] + len(y))))
    assert held[0] == ROWS


@pytest.mark.parametrize("is_set", [True, False])
def test_a_count_in_a_context_variable_is_of_the_callers_rows(is_set: bool) -> None:
    variable: ContextVar[int] = ContextVar("rows", default=0)
    if is_set:
        variable.set(0)
    call(beside(lambda self, y: variable.set(variable.get() + len(y))))
    assert variable.get() == ROWS


@pytest.mark.parametrize(
    ("keep", "file_of", "rows_of"),
    [
        (lambda file: file, lambda kept: kept, lambda kept: []),
        (lambda file: [file, []], lambda kept: kept[0], lambda kept: kept[1]),
        (lambda file: {"log": file, "rows": []}, lambda kept: kept["log"], lambda kept: kept["rows"]),
    ],
    ids=["alone", "in a list", "in a dict"],
)
def test_a_file_that_a_first_call_opens_is_opened_once_under_whatever_name(
    keep: Any, file_of: Any, rows_of: Any, tmp_path: Path
) -> None:
    kept: Any = None

    def effect(self: Any, y: Tensor) -> None:
        nonlocal kept
        if kept is None:
            kept = keep(opened_in(tmp_path))
        rows_of(kept).append(len(y))

    call(beside(effect), times=2)
    assert len([*tmp_path.iterdir()]) == 1
    file_of(kept).close()


PUT: dict[type, Callable[[Any, Any], object]] = {
    dict: lambda held, item: held.update(log=item),
    list: lambda held, item: held.append(item),
    set: lambda held, item: held.add(item),
}


def items_of(held: Any) -> list[Any]:
    return [*(held.values() if isinstance(held, dict) else held)]


@pytest.mark.parametrize("held", [{}, [], {"log": None}, set()], ids=repr)
def test_what_a_first_call_opens_in_a_container_is_opened_once(held: Any, tmp_path: Path) -> None:
    """Around the code, and in an attribute."""

    def effect(self: Any, y: Tensor) -> None:
        for files in (held, self.held):
            if not any(items_of(files)):
                PUT[type(files)](files, opened_in(tmp_path))

    criterion: Any = beside(effect)
    criterion.held = copy.copy(held)
    call(criterion)
    assert len([*tmp_path.iterdir()]) == 2
    for files in (held, criterion.held):
        (file,) = items_of(files)
        file.close()


class Log:
    """An open file, for one."""

    def close(self) -> None: ...


@pytest.mark.parametrize("kind", PUT)
def test_what_a_call_opens_in_the_place_of_another_is_put_back(kind: Any) -> None:
    first = Log()
    held: Any = {"log": first} if kind is dict else kind([first])

    def function(self: Any, hidden: Tensor) -> Tensor:
        for files in (held, self.held):
            files.clear()
            PUT[kind](files, Log())
        return self.linear(hidden - hidden.mean(0))  # type: ignore[no-any-return]

    generator: Any = Made(function, linear=nn.Linear(4, V), held=copy.copy(held))
    with pytest.raises(ValueError, match="mixes rows"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    assert [*items_of(held), *items_of(generator.held)] == [first, first]


def test_what_is_open_in_a_list_that_grows_is_there_once() -> None:
    first = Log()
    held: list[Any] = [first]
    call(beside(lambda self, y: held.append(len(y))))
    assert held == [first, 5, 5, 5, 5]


def test_a_generator_that_a_first_call_makes_in_a_container_gives_its_numbers_to_the_callers_rows() -> None:
    held: dict[str, Any] = {"numbers": None}

    def effect(self: Any, y: Tensor) -> None:
        if held["numbers"] is None:
            held["numbers"] = (number for number in itertools.count())
        next(held["numbers"])

    call(beside(effect))
    assert next(held["numbers"]) == 4


EFFECTS = {
    "loss and gradient": lambda z, y, x: cross_entropy(z, y, label_smoothing=x),
    "loss": lambda z, y, x: cross_entropy(z, y) + x,
    "gradient": lambda z, y, x: cross_entropy(z, y) + x * (z - z.detach()).sum(),
    "a little": lambda z, y, x: cross_entropy(z, y, label_smoothing=min(0.5, x / 100_000)),
}
"""What a number changes."""


def around(taken_from: Any, effect: Any) -> nn.Module:
    """A criterion that takes a number from an iterator which stands around its code."""
    return Made(lambda self, z, y: effect(z, y, next(taken_from)))


def within(taken_from: Any, effect: Any) -> nn.Module:
    """One that takes it from an iterator in a list of its own."""
    return Made(lambda self, z, y: effect(z, y, next(self.held[0])), held=[taken_from])


ITERATORS = {
    "a cycle": lambda: itertools.cycle([0.0] * 5 + [0.1] * 5),
    "a warm-up of two calls": lambda: itertools.chain([0.1, 0.2], itertools.repeat(0.3)),
    "a list's": lambda: iter([number // 9 / 100 for number in range(900)]),
    "a generator": lambda: (number // 9 / 100 for number in itertools.count()),
}


@pytest.mark.parametrize(
    ("made", "held"), [(around, "taken_from in the closure of <lambda>"), (within, r"criterion\.held")]
)
@pytest.mark.parametrize("effect", [name for name in EFFECTS if name != "a little"])
@pytest.mark.parametrize("name", ITERATORS)
def test_results_that_depend_on_what_an_iterator_gives_are_refused_by_name(
    name: str, effect: str, made: Any, held: str
) -> None:
    engine = seqpar.LossCompute(nn.Linear(4, V), made(ITERATORS[name](), EFFECTS[effect]), chunk_tokens=3)
    with pytest.raises(ValueError, match=rf"^{held} is an iterator, and the results change from call to call[^\n]*$"):
        engine(*batch())


def test_results_that_change_a_little_with_what_is_taken_from_an_iterator_are_refused() -> None:
    """On the CPU, whose sums have one order."""
    criterion = around(itertools.count(), EFFECTS["a little"]).cpu()
    hidden, target = (t.cpu() for t in batch())
    with pytest.raises(ValueError, match=r"^taken_from in the closure of <lambda> is an iterator, and the results "):
        seqpar.LossCompute(nn.Linear(4, V).cpu(), criterion, chunk_tokens=3)(hidden, target)


def test_an_iterator_that_gives_the_same_passes() -> None:
    hidden, target = batch()
    generator = nn.Linear(4, V)
    criterion = around(itertools.repeat(0.1), EFFECTS["loss and gradient"])
    loss = seqpar.LossCompute(generator, criterion, chunk_tokens=5)(hidden, target)
    assert torch.allclose(loss.total, cross_entropy(generator(hidden), target, label_smoothing=0.1))


TORCHS = torch.Generator()
NUMPYS = np.random.default_rng(1)
LEGACY = np.random.RandomState(1)
TWISTER = random.Random(1)
DRAWING = {
    "torch's": (lambda shape: torch.rand(shape, generator=TORCHS), TORCHS.get_state, TORCHS.set_state),
    "numpy's": (
        lambda shape: torch.from_numpy(NUMPYS.random(shape)),
        lambda: NUMPYS.bit_generator.state,
        lambda state: setattr(NUMPYS.bit_generator, "state", state),
    ),
    "numpy's older": (lambda shape: torch.from_numpy(LEGACY.rand(*shape)), LEGACY.get_state, LEGACY.set_state),
    "Python's": (lambda shape: torch.full(shape, TWISTER.random()), TWISTER.getstate, TWISTER.setstate),
}


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
@pytest.mark.parametrize("kind", DRAWING)
def test_noise_of_a_generator_around_the_code_passes_and_the_first_call_draws_none(kind: str, devices: Any) -> None:
    draw, state, restore = DRAWING[kind]

    def noisy(self: Any, z: Tensor, y: Tensor) -> Tensor:
        with ONE_AT_A_TIME:
            noise = draw(z.shape)
        return cross_entropy(z * (1 + noise.to(z)), y)

    hidden, target = torch.randn(40, 4, requires_grad=True), torch.randint(V, (40,))
    head, criterion = nn.Linear(4, V), Made(noisy)
    before = state()
    loss = seqpar.LossCompute(head, criterion, devices=devices)(hidden, target)
    if devices is None:
        restore(before)
        torch.testing.assert_close(loss.total, criterion(head(hidden), target))


def with_dropout(self: Any, z: Tensor, y: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return cross_entropy(F.dropout(z, 0.3), y)


UNSEEDED = random.SystemRandom()
"""Whose numbers nothing repeats."""


def of_two_random_numbers(self: Any, z: Tensor, y: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    self.when = time.perf_counter()
    return cross_entropy(z, y) * self.source.choice([1, 2])


@pytest.mark.parametrize(("function", "wanted"), [(with_dropout, True), *[(of_two_random_numbers, False)] * 10])
def test_a_count_beside_random_numbers_is_not_taken_for_what_they_depend_on(function: Any, wanted: bool) -> None:
    with torch.set_grad_enabled(wanted):
        assert call(Made(function, source=UNSEEDED)).isfinite()

"""What calls change around the code of a pair: refused where results depend on it, or where a graph is left there."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import random
import sys
import threading
import time
import types
from array import array
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from seqpar.engine.module_calls import surroundings_of

V = 11
NUMBER = 0
LEFT: list[Any] = []
COUNTS: collections.Counter[str] = collections.Counter()
BOX: Any = types.ModuleType("box")
BOX.calls = 0


class Calling(nn.Module):
    """A criterion or generator that a function computes."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, V)

    def forward(self, *given: Tensor) -> Any:
        return self.function(self, *given)


def smoothed(z: Tensor, y: Tensor, calls: int) -> Tensor:
    """Annealed over 50,000 calls: a step changes a float32 loss by a few of its roundings."""
    return F.cross_entropy(z, y, reduction="sum", label_smoothing=min(0.5, calls / 100_000))


def of_a_global() -> nn.Module:
    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        global NUMBER
        NUMBER += 1
        return smoothed(z, y, NUMBER)

    return Calling(function)


def of_a_closure() -> nn.Module:
    calls = 0

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return smoothed(z, y, calls)

    return Calling(function)


def of_few_calls() -> nn.Module:
    """It no longer changes after the tenth call."""
    calls = [0]

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return F.cross_entropy(z, y, reduction="sum", label_smoothing=min(0.5, calls[0] / 20))

    return Calling(function)


def of_the_first_call() -> nn.Module:
    is_first = True

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        nonlocal is_first
        calls, is_first = 0 if is_first else 1, False
        return smoothed(z, y, calls)

    return Calling(function)


def of_every_thirteenth_call() -> nn.Module:
    calls = 0

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return smoothed(z, y, calls // 13)

    return Calling(function)


def of_a_default() -> nn.Module:
    def function(self: Any, z: Tensor, y: Tensor, calls: list[int] = [0]) -> Tensor:  # noqa: B006
        calls[0] += 1
        return smoothed(z, y, calls[0])

    return Calling(function)


def of_a_function() -> nn.Module:
    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        function.calls = getattr(function, "calls", 0) + 1  # type: ignore[attr-defined]
        return smoothed(z, y, function.calls)  # type: ignore[attr-defined]

    return Calling(function)


def of_a_class() -> nn.Module:
    class Annealed(nn.Module):
        _calls = 0

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            type(self)._calls += 1
            return smoothed(z, y, self._calls)

    return Annealed()


def of_another_class() -> nn.Module:
    class Schedule:
        calls = 0

        @classmethod
        def step(cls) -> int:
            cls.calls += 1
            return cls.calls

    return Calling(lambda self, z, y: smoothed(z, y, Schedule.step()))


def of_a_partial() -> nn.Module:
    def function(calls: dict[str, int], self: Any, z: Tensor, y: Tensor) -> Tensor:
        calls["n"] += 1
        return smoothed(z, y, calls["n"])

    return Calling(functools.partial(function, {"n": 0}))


class Schedule:
    calls = 0

    def step(self) -> int:
        self.calls += 1
        return self.calls


def of_a_method() -> nn.Module:
    step = Schedule().step
    return Calling(lambda self, z, y: smoothed(z, y, step()))


def of_what_a_partial_holds() -> nn.Module:
    def count(calls: dict[str, int]) -> int:
        calls["n"] += 1
        return calls["n"]

    step = functools.partial(count, {"n": 0})
    return Calling(lambda self, z, y: smoothed(z, y, step()))


def of_a_keyword_of_a_partial() -> nn.Module:
    def count(calls: dict[str, int]) -> int:
        calls["n"] += 1
        return calls["n"]

    step = functools.partial(count, calls={"n": 0})
    return Calling(lambda self, z, y: smoothed(z, y, step()))


def of_a_method_in_a_partial() -> nn.Module:
    step = functools.partial(Schedule().step)
    return Calling(lambda self, z, y: smoothed(z, y, step()))


def of_an_object() -> nn.Module:
    class Schedule:
        def __init__(self) -> None:
            self.name, self.most, self.at = "linear", 0.1, {"warmup": 4, "calls": 0}

        def __call__(self) -> int:
            self.at["calls"] += 1
            return self.at["calls"]

    schedule = Schedule()
    return Calling(lambda self, z, y: smoothed(z, y, schedule()))


def of_a_hook(kind: str) -> Any:
    """A count in the closure of a hook, of the kind that torch registers under that name."""

    def made() -> nn.Module:
        calls = 0

        def hook(module: nn.Module, *given: Any) -> Any:
            nonlocal calls
            calls += 1
            changed = given[0 if kind == "full_backward_hook" else -1]
            if isinstance(changed, Tensor):
                return changed * (1 + calls / 100_000)
            # Of targets there is no gradient, and they are no numbers
            return tuple(t * (1 + calls / 100_000) if t is not None and t.is_floating_point() else t for t in changed)

        # Beside a count without harm
        module = Calling(lambda self, z, y: COUNTS.update(calls=1) or F.cross_entropy(z, y, reduction="sum"))
        getattr(module, f"register_{kind}")(hook)
        return module

    return made


class Monitor:
    """A hook that is an object, or has one: it multiplies what it is given."""

    everywhere = 0

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, given: Any, returned: Tensor) -> Tensor:
        self.calls += 1
        return returned * (1 + self.calls / 100_000)

    def counted_by_the_class(self, module: nn.Module, given: Any, returned: Tensor) -> Tensor:
        Monitor.everywhere += 1
        return returned * (1 + Monitor.everywhere / 100_000)


class WithSlots(Monitor):
    """One whose attributes its class has named."""

    __slots__ = ("calls",)


class ByTheClass(Monitor):
    """One whose class counts."""

    __call__ = Monitor.counted_by_the_class


class Wrapping:
    """What calls something else."""

    def __init__(self, function: Any) -> None:
        self.func = function

    def __call__(self, *given: Any) -> Any:
        return self.func(*given)


def of_an_object_as_a_hook(hook: Any) -> Any:
    def made() -> nn.Module:
        module = Calling(lambda self, z, y: F.cross_entropy(z, y, reduction="sum"))
        module.register_forward_hook(hook())
        return module

    return made


def of_a_called_attribute() -> nn.Module:
    criterion: Any = Calling(lambda self, z, y: self.scale(self, None, F.cross_entropy(z, y, reduction="sum")))
    criterion.scale = ByTheClass()
    return criterion  # type: ignore[no-any-return]


class Counted:
    """What gives its class's number of calls, or that of a global, by a method or a descriptor."""

    calls = 0

    def __get__(self, owner: Any, kind: type) -> int:
        Counted.calls += 1
        return Counted.calls

    def step(self) -> int:
        BOX.calls += 1
        return int(BOX.calls)


class Described:
    """It has one as an attribute."""

    calls = Counted()


def of_a_method_of_an_object() -> nn.Module:
    counted = Counted()
    return Calling(lambda self, z, y: smoothed(z, y, counted.step()))


def of_a_method_of_an_attribute() -> nn.Module:
    criterion: Any = Calling(lambda self, z, y: smoothed(z, y, self.counted.step()))
    criterion.counted = Counted()
    return criterion  # type: ignore[no-any-return]


def of_a_descriptor() -> nn.Module:
    described = Described()
    return Calling(lambda self, z, y: smoothed(z, y, described.calls))


def of_a_thread() -> nn.Module:
    local = threading.local()
    local.calls = 0

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        local.calls += 1
        return smoothed(z, y, local.calls)

    return Calling(function)


def of_a_module_in_a_closure() -> nn.Module:
    box: Any = types.ModuleType("box")
    box.calls = 0

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        box.calls += 1
        return smoothed(z, y, box.calls)

    return Calling(function)


def of_an_import_of_its_own() -> nn.Module:
    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        import box  # type: ignore[import-not-found]

        box.calls += 1
        return smoothed(z, y, box.calls)

    return Calling(function)


def of_a_loaded_module() -> nn.Module:
    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        sys.modules["box"].calls += 1
        return smoothed(z, y, sys.modules["box"].calls)

    return Calling(function)


def of_a_name_as_text() -> nn.Module:
    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        globals()["NUMBER"] += 1
        return smoothed(z, y, globals()["NUMBER"])

    return Calling(function)


def of_an_attribute_as_text() -> nn.Module:
    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        setattr(BOX, "calls", getattr(BOX, "calls") + 1)  # noqa: B009, B010
        return smoothed(z, y, getattr(BOX, "calls"))  # noqa: B009

    return Calling(function)


def counter() -> Any:
    """Return a function that counts its calls."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def of_a_tensor() -> nn.Module:
    calls = torch.zeros(())
    return Calling(lambda self, z, y: smoothed(z, y, int(calls.add_(1))))


def of_a_set() -> nn.Module:
    calls: set[int] = set()

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        calls.add(len(calls))
        return smoothed(z, y, len(calls))

    return Calling(function)


def of_a_module() -> nn.Module:
    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        BOX.calls += 1
        return smoothed(z, y, BOX.calls)

    return Calling(function)


def of_a_keyword() -> nn.Module:
    def function(self: Any, z: Tensor, y: Tensor, *, calls: list[int] = [0]) -> Tensor:  # noqa: B006
        calls[0] += 1
        return smoothed(z, y, calls[0])

    return Calling(function)


def of_a_function_in_functions() -> nn.Module:
    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        def outer() -> Tensor:
            def inner() -> int:
                BOX.calls += 1
                return BOX.calls  # type: ignore[no-any-return]

            return smoothed(z, y, inner())

        return outer()

    return Calling(function)


def of_one_of_two_names() -> nn.Module:
    """Two closures whose functions and names are the same, of which the first counts."""
    first, second = counter(), counter()
    second()
    return Calling(lambda self, z, y: smoothed(z, y, first() if z is not None else second()))


def of_the_last_of_many() -> nn.Module:
    """A function that is reached through twenty others."""
    called = counter()
    for _ in range(20):
        called = functools.partial(lambda inner: inner(), called)
    return Calling(lambda self, z, y: smoothed(z, y, called()))


class Outer(nn.Module):
    """A criterion inside another."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.part(z, y)  # type: ignore[no-any-return]


def of_what_is_called(step: Any) -> nn.Module:
    return Calling(lambda self, z, y: smoothed(z, y, step()))


REACHED = {
    "a base": lambda count, forward: type("Derived", (type("Base", (nn.Module,), {"forward": forward}),), {})(),
    "its call": lambda count, forward: type("Called", (nn.Module,), {"__call__": forward})(),
    "a part": lambda count, forward: Outer(type("Part", (nn.Module,), {"forward": forward})()),
    "a property": lambda count, forward: type(
        "Asked",
        (nn.Module,),
        {"calls": property(lambda self: count()), "forward": lambda self, z, y: smoothed(z, y, self.calls)},
    )(),
    "a method of an object": lambda count, forward: of_what_is_called(
        type("Schedule", (), {"step": lambda self: count()})().step
    ),
    "a wrapper": lambda count, forward: of_what_is_called(functools.lru_cache(maxsize=0)(count)),
}
"""By where the code of a pair reaches a count in a closure."""


def of_what(reaches: Any) -> Any:
    def made() -> nn.Module:
        count = counter()
        return reaches(count, lambda self, z, y: smoothed(z, y, count()))  # type: ignore[no-any-return]

    return made


def of_a_value() -> nn.Module:
    """The loss alone changes, not its gradient."""
    count = counter()
    return Calling(lambda self, z, y: smoothed(z, y, 0) + count() / 1000)


def of_a_gradient() -> nn.Module:
    """The gradient alone changes."""
    count = counter()
    return Calling(lambda self, z, y: smoothed(z, y, 0) + count() / 1000 * (z - z.detach()).sum())


def of_a_late_parameter() -> nn.Module:
    """A parameter that later calls use has a gradient, and changes no number."""
    count = counter()

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        late = self.linear.bias if count() > 6 else z.detach()
        return smoothed(z, y, 0) + (late - late.detach()).sum()

    return Calling(function)


def of_slots() -> nn.Module:
    class Slotted:
        __slots__ = "calls"

    @dataclass(slots=True)
    class Config(Slotted):
        other: int = 0

        def __post_init__(self) -> None:
            self.calls = 0

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        self.config.calls += 1
        return smoothed(z, y, self.config.calls)

    made = Calling(function)
    made.config = Config()
    return made


def of_an_attribute_beside_slots() -> nn.Module:
    class Slotted:
        __slots__ = ("kind",)

    class Config(Slotted):
        def __init__(self) -> None:
            self.kind, self.calls = "linear", 0

        def step(self) -> int:
            self.calls += 1
            return self.calls

    config = Config()
    return Calling(lambda self, z, y: smoothed(z, y, config.step()))


class Drifting(torch.autograd.Function):
    """The identity, whose gradient is a millionth larger in every backward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, calls: list[int]) -> Tensor:
        ctx.calls = calls
        return z.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.calls[0] += 1
        return grad * (1 + 1e-6 * ctx.calls[0]), None


def of_a_backward() -> nn.Module:
    calls = [0]
    return Calling(lambda self, z, y: F.cross_entropy(Drifting.apply(z, calls), y, reduction="sum"))


def of_an_array() -> nn.Module:
    calls = array("q", [0])

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return smoothed(z, y, calls[0])

    return Calling(function)


def of_an_array_of_its_own() -> nn.Module:
    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        self.calls[0] += 1
        return smoothed(z, y, self.calls[0])

    criterion: Any = Calling(function)
    criterion.calls = bytearray(1)
    return criterion  # type: ignore[no-any-return]


def of_a_context_variable() -> nn.Module:
    calls: ContextVar[int] = ContextVar("calls", default=0)

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        calls.set(calls.get() + 1)
        return smoothed(z, y, calls.get())

    return Calling(function)


CHANGING = [
    (of_a_global, "the global NUMBER"),
    (of_a_closure, "calls in the closure of function"),
    (of_few_calls, "calls in the closure of function"),
    (of_the_first_call, "is_first in the closure of function"),
    (of_every_thirteenth_call, "calls in the closure of function"),
    (of_a_default, "a default of function"),
    (of_a_function, "function.calls"),
    (of_a_class, "Annealed._calls"),
    (of_a_tensor, "calls in the closure of <lambda>"),
    (of_a_backward, "calls in the closure of <lambda>"),
    (of_a_set, "calls in the closure of function"),
    (of_an_array, "calls in the closure of function"),
    (of_an_array_of_its_own, "criterion.calls"),
    (of_a_context_variable, "calls in the closure of function"),
    (of_a_module, "BOX.calls"),
    (of_a_keyword, "a default of function"),
    (of_a_function_in_functions, "BOX.calls"),
    (of_one_of_two_names, "calls in the closure of count"),
    (of_the_last_of_many, "calls in the closure of count"),
    *((of_what(reaches), "calls in the closure of count") for reaches in REACHED.values()),
    (of_a_value, "calls in the closure of count"),
    (of_a_gradient, "calls in the closure of count"),
    (of_a_late_parameter, "calls in the closure of count"),
    (of_another_class, "Schedule.calls"),
    (of_a_partial, "criterion.function"),
    (of_a_method, "step in the closure of <lambda>"),
    (of_what_a_partial_holds, "step in the closure of <lambda>"),
    (of_a_keyword_of_a_partial, "step in the closure of <lambda>"),
    (of_a_method_in_a_partial, "step in the closure of <lambda>"),
    (of_an_object, "schedule in the closure of <lambda>"),
    (of_slots, "criterion.config"),
    (of_an_attribute_beside_slots, "config in the closure of <lambda>"),
    (of_a_hook("forward_pre_hook"), "calls in the closure of hook"),
    (of_a_hook("forward_hook"), "calls in the closure of hook"),
    (of_a_hook("full_backward_pre_hook"), "calls in the closure of hook"),
    (of_a_hook("full_backward_hook"), "calls in the closure of hook"),
    (of_an_object_as_a_hook(Monitor), "a hook of criterion"),
    (of_an_object_as_a_hook(WithSlots), "a hook of criterion"),
    (of_an_object_as_a_hook(lambda: Monitor().__call__), "a hook of criterion"),
    (of_an_object_as_a_hook(lambda: functools.partial(Monitor.__call__, Monitor())), "a hook of criterion"),
    (of_an_object_as_a_hook(lambda: Wrapping(Monitor())), "a hook of criterion"),
    (of_an_object_as_a_hook(ByTheClass), "Monitor.everywhere"),
    (of_a_called_attribute, "Monitor.everywhere"),
    (of_a_method_of_an_object, "BOX.calls"),
    (of_a_method_of_an_attribute, "BOX.calls"),
    (of_a_descriptor, "Counted.calls"),
    (of_a_thread, "local in the closure of function"),
    (of_a_module_in_a_closure, "box.calls"),
    (of_an_import_of_its_own, "box.calls"),
    (of_a_loaded_module, "box.calls"),
    (of_a_name_as_text, "the global NUMBER"),
    (of_an_attribute_as_text, "BOX.calls"),
]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(20, 4, requires_grad=True), torch.randint(V, (20,))


@pytest.mark.parametrize(("made", "name"), CHANGING)
def test_results_that_depend_on_how_often_the_pair_was_called_are_refused_by_name(
    made: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "box", BOX)
    engine = seqpar.LossCompute(nn.Linear(4, V), made(), chunk_tokens=3)
    with pytest.raises(ValueError, match=rf"^(.* or )?{name}( or .*)? changes with every call") as error:
        engine(*batch())
    assert "\n" not in str(error.value)


def test_a_hook_of_all_modules_that_counts_is_refused() -> None:
    class OfCriteria(Monitor):
        def __call__(self, module: nn.Module, given: Any, returned: Tensor) -> Any:
            return super().__call__(module, given, returned) if isinstance(module, Calling) else None

    criterion = Calling(lambda self, z, y: F.cross_entropy(z, y, reduction="sum"))
    handle = nn.modules.module.register_module_forward_hook(OfCriteria())
    try:
        with pytest.raises(ValueError, match=r"^a hook of all modules changes with every call"):
            seqpar.LossCompute(nn.Linear(4, V), criterion, chunk_tokens=3)(*batch())
    finally:
        handle.remove()


def test_results_that_change_a_little_with_what_is_taken_from_an_iterator_are_refused() -> None:
    """On the CPU, whose sums have one order."""
    calls = itertools.count()
    criterion = Calling(lambda self, z, y: smoothed(z, y, next(calls))).cpu()
    hidden, target = (t.cpu() for t in batch())
    with pytest.raises(ValueError, match=r"^calls in the closure of <lambda> is an iterator, and the results change"):
        seqpar.LossCompute(nn.Linear(4, V).cpu(), criterion, chunk_tokens=3)(hidden, target)


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
SUM: Tensor | None = None
EACH: tuple[int, ...] = ()
METER = Meter()
METRIC = Metric()
ARRAY = np.zeros(2)
ROWS = torch.zeros(())


class Counting(Calling):
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
            ROWS.add_(len(y))
        return F.cross_entropy(z, y, reduction="sum")


def counts() -> list[float]:
    around = (
        NUMBER,
        0 if SUM is None else SUM,
        len(EACH),
        COUNTS["rows"],
        len(LEFT),
        METER.rows,
        METRIC.rows,
        METRIC.sum,
        Meter.everywhere,
    )
    return [float(number) for number in (*around, Counting.of_the_class, ARRAY[1], ROWS)]


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
def test_what_is_counted_around_the_code_is_of_the_callers_rows_alone(devices: Any) -> None:
    """Not of those on which the pair is asked in the first call, whether it then goes on or is refused."""
    hidden, target = batch()
    generator = nn.Linear(4, V)
    hooked: list[int] = []
    generator.register_forward_hook(lambda module, given, scores: hooked.append(len(scores)))
    before = counts()
    loss = seqpar.LossCompute(generator, Counting(None), devices, chunk_tokens=5)(hidden, target)
    assert torch.allclose(loss.total, F.cross_entropy(generator(hidden), target, reduction="sum"))
    assert {after - old for after, old in zip(counts(), before, strict=True)} == {target.numel()}
    assert sum(hooked) == 2 * target.numel()  # and those of the plain loss
    with pytest.raises(ValueError, match="mixes rows"):
        seqpar.LossCompute(nn.Sequential(nn.BatchNorm1d(4), generator), Counting(None), devices)(hidden, target)
    assert {after - old for after, old in zip(counts(), before, strict=True)} == {target.numel()}


def test_an_assertion_in_a_test_brings_nothing_of_pytests_own_with_it() -> None:
    """A first call looked at all that it reaches, and took ten times as long."""

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        assert len(z) == len(y)
        return F.cross_entropy(z, y, reduction="sum")

    names = [name for name, _ in surroundings_of(nn.ModuleList([Calling(function)])).values]
    assert "the global @pytest_ar" in names
    assert not [name for name in names if name.startswith("@pytest_ar.")]


def test_what_a_first_call_makes_around_the_code_is_made_once() -> None:
    """Such as a file, or a run of a tracker: it stood for None."""
    opened: Any = None
    times: list[str] = []

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        nonlocal opened
        if opened is None:
            opened = object()
            times.append("opened")
        return F.cross_entropy(z, y, reduction="sum")

    engine = seqpar.LossCompute(nn.Linear(4, V), Calling(function), chunk_tokens=5)
    for _ in range(2):
        engine(*batch())
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

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        nonlocal made
        made = make() if made is None else made
        add(made, len(y))
        return F.cross_entropy(z, y, reduction="sum")

    seqpar.LossCompute(nn.Linear(4, V), Calling(function), chunk_tokens=5)(*batch())
    assert read(made) == 20


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


BEGINNING = [on_a_function, on_a_class, in_a_global, in_a_global_of_an_inner_function]


@pytest.mark.parametrize("made", BEGINNING)
def test_a_count_under_a_name_that_the_first_call_makes_is_of_the_callers_rows(made: Any, monkeypatch: Any) -> None:
    monkeypatch.delitem(globals(), "BEGUN", raising=False)
    write, read = made()

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        write(read() + len(y))
        return F.cross_entropy(z, y, reduction="sum")

    seqpar.LossCompute(nn.Linear(4, V), Calling(function), chunk_tokens=5)(*batch())
    assert read() == 20


@pytest.mark.parametrize("made", BEGINNING)
def test_a_file_under_a_name_that_the_first_call_makes_is_opened_once(
    made: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.delitem(globals(), "BEGUN", raising=False)
    write, read = made()

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        if not read():
            write((tmp_path / f"{len([*tmp_path.iterdir()])}").open("w"))
        return F.cross_entropy(z, y, reduction="sum")

    seqpar.LossCompute(nn.Linear(4, V), Calling(function), chunk_tokens=5)(*batch())
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

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        held[0] += len(y)
        return F.cross_entropy(z, y, reduction="sum")

    seqpar.LossCompute(nn.Linear(4, V), Calling(function), chunk_tokens=5)(*batch())
    assert held[0] == 20


@pytest.mark.parametrize("is_set", [True, False])
def test_a_count_in_a_context_variable_is_of_the_callers_rows(is_set: bool) -> None:
    variable: ContextVar[int] = ContextVar("rows", default=0)
    if is_set:
        variable.set(0)

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        variable.set(variable.get() + len(y))
        return F.cross_entropy(z, y, reduction="sum")

    seqpar.LossCompute(nn.Linear(4, V), Calling(function), chunk_tokens=5)(*batch())
    assert variable.get() == 20


@pytest.mark.parametrize("keep", [lambda file: file, lambda file: [file, []], lambda file: {"log": file, "rows": []}])
def test_a_file_that_a_first_call_opens_is_opened_once_under_whatever_name(keep: Any, tmp_path: Any) -> None:
    kept: Any = None

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        nonlocal kept
        if kept is None:
            kept = keep((tmp_path / f"{len([*tmp_path.iterdir()])}").open("w"))
        if isinstance(kept, (list, dict)):
            kept[1 if isinstance(kept, list) else "rows"].append(len(y))
        return F.cross_entropy(z, y, reduction="sum")

    engine = seqpar.LossCompute(nn.Linear(4, V), Calling(function), chunk_tokens=5)
    for _ in range(2):
        engine(*batch())
    assert len([*tmp_path.iterdir()]) == 1
    (kept["log"] if isinstance(kept, dict) else kept[0] if isinstance(kept, list) else kept).close()


@pytest.mark.parametrize("held", [{}, [], {"log": None}, set()])
def test_what_a_first_call_opens_in_a_container_is_opened_once(held: Any, tmp_path: Any) -> None:
    """Around the code, and in an attribute."""

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        for files in (held, self.held):
            if not (any(files.values()) if isinstance(files, dict) else files):
                file = (tmp_path / f"{len([*tmp_path.iterdir()])}").open("w")
                if isinstance(files, dict):
                    files["log"] = file
                else:
                    files.append(file) if isinstance(files, list) else files.add(file)
        return F.cross_entropy(z, y, reduction="sum")

    criterion: Any = Calling(function)
    criterion.held = copy.copy(held)
    engine = seqpar.LossCompute(nn.Linear(4, V), criterion, chunk_tokens=5)
    engine(*batch())
    assert len([*tmp_path.iterdir()]) == 2
    for files in (held, criterion.held):
        (file,) = files.values() if isinstance(files, dict) else files
        file.close()


class Log:
    """An open file, for one."""

    def close(self) -> None: ...


@pytest.mark.parametrize("kind", [dict, list, set])
def test_what_a_call_opens_in_the_place_of_another_is_put_back(kind: Any) -> None:
    first = Log()
    held: Any = {"log": first} if kind is dict else kind([first])

    def function(self: Any, hidden: Tensor) -> Tensor:
        for files in (held, self.held):
            files.clear()
            files.update(log=Log()) if kind is dict else files.extend([Log()]) if kind is list else files.add(Log())
        return self.linear(hidden - hidden.mean(0))  # type: ignore[no-any-return]

    generator: Any = Calling(function)
    generator.held = copy.copy(held)
    with pytest.raises(ValueError, match="mixes rows"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())
    for files in (held, generator.held):
        assert [*files.values()] == [first] if kind is dict else [*files] == [first]


def test_what_is_open_in_a_list_that_grows_is_there_once() -> None:
    first = Log()
    held: list[Any] = [first]

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        held.append(len(y))
        return F.cross_entropy(z, y, reduction="sum")

    seqpar.LossCompute(nn.Linear(4, V), Calling(function), chunk_tokens=5)(*batch())
    assert held == [first, 5, 5, 5, 5]


def test_a_generator_that_a_first_call_makes_in_a_container_gives_its_numbers_to_the_callers_rows() -> None:
    held: dict[str, Any] = {"numbers": None}

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        if held["numbers"] is None:
            held["numbers"] = (number for number in itertools.count())
        next(held["numbers"])
        return F.cross_entropy(z, y, reduction="sum")

    seqpar.LossCompute(nn.Linear(4, V), Calling(function), chunk_tokens=5)(*batch())
    assert next(held["numbers"]) == 4


EFFECTS = {
    "loss and gradient": lambda z, y, x: F.cross_entropy(z, y, reduction="sum", label_smoothing=x),
    "loss": lambda z, y, x: F.cross_entropy(z, y, reduction="sum") + x,
    "gradient": lambda z, y, x: F.cross_entropy(z, y, reduction="sum") + x * (z - z.detach()).sum(),
}
"""What a number changes."""


def around(taken_from: Any, effect: Any) -> nn.Module:
    """A criterion that takes a number from an iterator which stands around its code."""
    return Calling(lambda self, z, y: effect(z, y, next(taken_from)))


def within(taken_from: Any, effect: Any) -> nn.Module:
    """One that takes it from an iterator in a list of its own."""
    made = Calling(lambda self, z, y: effect(z, y, next(self.held[0])))
    made.held = [taken_from]
    return made


ITERATORS = {
    "a cycle": lambda: itertools.cycle([0.0] * 5 + [0.1] * 5),
    "a warm-up of two calls": lambda: itertools.chain([0.1, 0.2], itertools.repeat(0.3)),
    "a list's": lambda: iter([number // 9 / 100 for number in range(900)]),
    "a generator": lambda: (number // 9 / 100 for number in itertools.count()),
}


@pytest.mark.parametrize(
    ("made", "held"), [(around, "taken_from in the closure of <lambda>"), (within, r"criterion\.held")]
)
@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("name", ITERATORS)
def test_results_that_depend_on_what_an_iterator_gives_are_refused_by_name(
    name: str, effect: str, made: Any, held: str
) -> None:
    engine = seqpar.LossCompute(nn.Linear(4, V), made(ITERATORS[name](), EFFECTS[effect]), chunk_tokens=3)
    with pytest.raises(ValueError, match=rf"^{held} is an iterator, and the results change from call to call[^\n]*$"):
        engine(*batch())


def test_an_iterator_that_gives_the_same_passes() -> None:
    hidden, target = batch()
    generator = nn.Linear(4, V)
    criterion = around(itertools.repeat(0.1), EFFECTS["loss and gradient"])
    loss = seqpar.LossCompute(generator, criterion, chunk_tokens=5)(hidden, target)
    plain = F.cross_entropy(generator(hidden), target, reduction="sum", label_smoothing=0.1)
    assert torch.allclose(loss.total, plain)


def with_dropout(self: Any, z: Tensor, y: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return F.cross_entropy(F.dropout(z, 0.3), y, reduction="sum")


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
        return F.cross_entropy(z * (1 + noise.to(z)), y, reduction="sum")

    hidden, target = torch.randn(40, 4, requires_grad=True), torch.randint(V, (40,))
    head, criterion = nn.Linear(4, V), Calling(noisy)
    before = state()
    loss = seqpar.LossCompute(head, criterion, devices=devices)(hidden, target)
    if devices is None:
        restore(before)
        torch.testing.assert_close(loss.total, criterion(head(hidden), target))


UNSEEDED = random.SystemRandom()
"""Whose numbers nothing repeats."""


def of_two_random_numbers(self: Any, z: Tensor, y: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    self.when = time.perf_counter()
    return F.cross_entropy(z, y, reduction="sum") * self.source.choice([1, 2])


@pytest.mark.parametrize(("function", "wanted"), [(with_dropout, True), *[(of_two_random_numbers, False)] * 10])
def test_a_count_beside_random_numbers_is_not_taken_for_what_they_depend_on(function: Any, wanted: bool) -> None:
    criterion: Any = Calling(function)
    criterion.source = UNSEEDED
    with torch.set_grad_enabled(wanted):
        assert seqpar.LossCompute(nn.Linear(4, V), criterion, chunk_tokens=5)(*batch()).total.isfinite()


class Large(np.ndarray[Any, Any]):
    """An array that must not be copied."""

    def copy(self, *_: Any) -> Any:
        raise MemoryError


def test_what_a_pair_may_reach_around_its_code_is_neither_copied_nor_in_its_way() -> None:
    """A graph of the caller's, a data set, another module, a name without a value, and a count in a 250th function."""
    graph, array, other = torch.ones(3, requires_grad=True).sum(), np.zeros(2**16 + 1).view(Large), nn.Linear(4, V)
    count = counter()
    for _ in range(250):
        count = functools.partial(lambda inner: inner(), count)

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        if len(y) < 0:
            return graph * array[0] * other.bias * unset
        return F.cross_entropy(z, y, reduction="sum") * (1 + 0 * count())

    assert seqpar.LossCompute(nn.Linear(4, V), Calling(function), chunk_tokens=5)(*batch()).total.isfinite()
    if function is None:
        unset = 1


def auxiliary(self: Any, hidden: Tensor) -> Tensor:
    scores: Tensor = self.linear(hidden)
    LEFT.append(scores.square().mean().expand(self.size))
    return scores


@pytest.mark.parametrize("size", [(), (2**16 + 1,)])
def test_a_tensor_with_a_graph_that_is_left_in_a_global_list_is_refused_and_taken_out(size: tuple[int, ...]) -> None:
    """Of any size, unlike a data set."""
    LEFT[:] = [torch.zeros(())]
    generator: Any = Calling(auxiliary)
    generator.size = size
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    with pytest.raises(ValueError, match=r"^the global LEFT holds a tensor with a graph after a call[^\n]*$"):
        engine(*batch())
    assert len(LEFT) == 1


def test_a_tensor_with_a_graph_that_is_left_under_a_name_for_nothing_is_refused_and_taken_out() -> None:
    kept: Any = None

    def function(self: Any, hidden: Tensor) -> Tensor:
        nonlocal kept
        scores: Tensor = self.linear(hidden)
        kept = [scores.mean()]
        return scores

    with pytest.raises(ValueError, match="kept in the closure of function holds a tensor with a graph"):
        seqpar.LossCompute(Calling(function), seqpar.CrossEntropy())(*batch())
    assert kept is None

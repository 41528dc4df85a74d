"""The first call's findings are used again only where everything that they depend on is the same."""

import copy
import dataclasses
import gc
import weakref
from enum import Enum
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import seqpar
from seqpar.engine import probe
from seqpar.engine.situation import Situation

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")

V, D = 7, 4


def nothing(*_):
    """Do nothing, as a hook."""


class Kind(Enum):
    ONE, TWO = range(2)


class Slotted:
    """A function with neither a dict nor references."""

    __slots__ = ("number",)

    def __call__(self, *_):
        """Do nothing."""


class Settings:
    """A configuration, which is equal to any other one."""

    def __init__(self):
        self.mixes, self.name, self.kind, self.number, self.function = False, "one", Kind.ONE, 1, nothing

    def __eq__(self, other):
        return True

    __hash__ = None


@dataclasses.dataclass(slots=True)
class Slots:
    """A configuration without a dict."""

    mixes: bool = False


class Called(Settings):
    """A configuration that may be called."""

    def __call__(self, *_):
        """Do nothing."""


class Projecting(nn.Module):
    """A generator with something of every kind; `shift` is a per-token tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, V)
        self.register_buffer("places", torch.zeros(2))
        self.parts = nn.ModuleDict({"one": nn.Tanh()})
        self.flag, self.kind, self.function, self.number = False, "one", torch.tanh, 1
        self.method = self.linear.extra_repr
        self.member, self.dtype, self.partial, self.slotted = Kind.ONE, torch.float32, partial(nothing, 1), Slotted()
        self.activation, self.settings, self.called = nn.GELU, Settings(), Called()
        self.options, self.table = {"mixes": False, "number": 1}, {str(word): False for word in range(65)}
        self.slots, self.outer, self.functions = Slots(), SimpleNamespace(inner=Settings()), [nothing]
        self.words, self.set, self.nothing = ("one",), {"one"}, None
        self.long = SimpleNamespace(mixes=False, **{f"a{number}": number for number in range(100)})
        self.linear.register_forward_hook(nothing)

    is_shared = False

    def helper(self):
        """Do nothing."""

    def forward(self, hidden, shift=0.0):
        return self.linear(hidden.to(self.linear.weight.dtype)) + shift


def of_the_class(name, value):
    """In a class of its own, which others do not have."""

    def change(engine, given):
        kind = type(engine.head["generator"])
        engine.head["generator"].__class__ = type("Derived", (kind,), {name: getattr(kind, name)})
        engine(**given)
        setattr(type(engine.head["generator"]), name, value)

    return change


def of_shapes(engine, given):
    engine.head["generator"].linear = nn.Linear(D, V + 1)


def of_another_buffer(engine, given):
    engine.head["generator"].places = torch.zeros(3)


class Own(nn.Parameter):
    """A parameter of another class."""


def of_a_class(engine, given):
    engine.head["generator"].linear.bias = Own(torch.zeros(V))


def of_attribute(name, value):
    return lambda engine, given: setattr(engine.head["generator"], name, value)


def of_setting(holder, name, value):
    def change(engine, given):
        held = getattr(engine.head["generator"], holder)
        held.update({name: value}) if isinstance(held, dict) else setattr(held, name, value)

    return change


def of_hook(kind, part=None):
    def change(engine, given):
        given["hidden"].requires_grad_()
        generator = engine.head["generator"]
        getattr(generator if part is None else getattr(generator, part), f"register_{kind}")(nothing)

    return change


def of_another_hook(engine, given):
    """One in the place of another."""
    linear = engine.head["generator"].linear
    linear._forward_hooks.clear()
    linear.register_forward_hook(nothing)


def of_criterion(engine, given):
    given["weight"] = torch.ones(12)


class Weighing(seqpar.CrossEntropy):
    """A criterion that may be given a tensor of each token."""

    def token_loss(self, logits, target, weight=1.0):
        return super().token_loss(logits, target)

    def forward(self, logits, target, weight=1.0):
        return self.token_loss(logits, target).total


def of_dtypes(engine, given):
    given["hidden"] = given["hidden"].double()


def of_wants_gradients(engine, given):
    engine.requires_grad_(False)


def of_leading(engine, given):
    given["hidden"], given["target"] = given["hidden"].view(3, 4, D), given["target"].view(3, 4)


def of_per_token(engine, given):
    given["shift"] = torch.zeros(12, V)


CHANGES = {
    "shapes": [of_shapes, of_another_buffer, of_a_class],
    "calls": [
        lambda engine, given: engine.eval(),
        *(
            of_hook(kind)
            for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
        ),
        of_hook("forward_hook", "linear"),
        of_another_hook,
        of_attribute("flag", True),
        of_attribute("kind", "two"),
        of_attribute("function", torch.sigmoid),
        of_attribute("function", nothing),
        of_attribute("method", nn.Linear(1, 1).extra_repr),
        of_attribute("member", Kind.TWO),
        of_attribute("dtype", torch.float64),
        of_attribute("partial", partial(nothing, 1)),
        of_attribute("activation", nn.ReLU),
        *(of_setting("settings", *new) for new in (("mixes", True), ("name", "two"), ("kind", Kind.TWO))),
        of_setting("settings", "function", torch.tanh),
        of_setting("called", "mixes", True),
        of_setting("options", "mixes", True),
        of_setting("slots", "mixes", True),
        lambda engine, given: setattr(engine.head["generator"].outer.inner, "mixes", True),
        of_setting("long", "mixes", True),
        lambda engine, given: engine.head["generator"].functions.__setitem__(0, torch.tanh),
        of_attribute("words", ("two",)),
        lambda engine, given: engine.head["generator"].set.add("two"),
        of_attribute("nothing", 2),
        of_the_class("is_shared", True),
        of_the_class("helper", nothing),
        of_the_class("forward", lambda self, hidden: self.linear(hidden)),
        of_attribute("parts", nn.ModuleDict({"one": nn.Sigmoid()})),
        of_attribute("parts", nn.ModuleDict({"two": nn.Tanh()})),
    ],
    "dtypes": [of_dtypes, lambda engine, given: engine.double()],
    "wants_gradients": [of_wants_gradients],
    "trained": [lambda engine, given: engine.head["generator"].linear.weight.requires_grad_(False)],
    "leading": [of_leading],
    "per_token": [of_per_token, of_criterion, lambda engine, given: given.update(shift=given["shift"].bool())],
}
"""Of each fact that the findings depend on, what changes it."""


def probed(engine, given):
    """Whether a call looked at some rows first."""
    with mock.patch.object(probe, "_facts_of", wraps=probe._facts_of) as asked:
        engine(**given)
    return asked.called


def test_every_fact_has_its_change():
    assert list(CHANGES) == list(Situation._fields), "say what changes the new one"


@pytest.mark.parametrize(("fact", "number"), [(fact, i) for fact, some in CHANGES.items() for i in range(len(some))])
def test_a_call_that_differs_in_one_fact_is_probed_again_and_only_once(fact, number):
    engine = seqpar.LossCompute(Projecting(), Weighing())
    given = {"hidden": torch.randn(12, D), "target": torch.randint(V, (12,))}
    if (fact, number) == ("per_token", 2):
        given["shift"] = torch.zeros(12, V)
    original = copy.copy(given)
    assert probed(engine, given)
    assert not probed(engine, given)
    CHANGES[fact][number](engine, given)
    assert probed(engine, given)
    assert not probed(engine, given)
    if fact in ("leading", "per_token"):
        assert not probed(engine, original)


def test_numbers_and_tools_that_only_look_on_change_nothing():
    engine = seqpar.LossCompute(Projecting(), seqpar.CrossEntropy())
    given = {"hidden": torch.randn(12, D), "target": torch.randint(V, (12,))}
    assert probed(engine, given)
    of_attribute("number", 2)(engine, given)
    of_attribute("slotted", Slotted())(engine, given)
    of_setting("settings", "number", 2)(engine, given)
    of_setting("options", "number", 2)(engine, given)
    # Of so many entries, which are data
    of_setting("table", "1", True)(engine, given)
    with FlopCounterMode(display=False):
        assert not probed(engine, given)


def test_gradients_are_wanted_of_whatever_requires_one_while_they_are_recorded():
    engine = seqpar.LossCompute(Projecting(), Weighing())
    given = {"hidden": torch.randn(12, D), "target": torch.randint(V, (12,)), "shift": torch.randn(12, V)}
    assert probed(engine, given)
    with torch.no_grad():
        assert probed(engine, given)
        engine.requires_grad_(False)
        assert not probed(engine, given)
    given["shift"].requires_grad_()
    assert probed(engine, given)
    given["shift"] = given["shift"].detach()
    given["hidden"].requires_grad_()
    assert not probed(engine, given)
    given["hidden"] = given["hidden"].detach()
    assert not probed(engine, given)


def test_only_the_latest_situations_are_remembered(monkeypatch):
    """A hook that is made anew for each step never comes back, and its situations would take up memory."""
    monkeypatch.setattr("seqpar.engine.probe.MOST_SITUATIONS", 2)
    engine = seqpar.LossCompute(Projecting(), seqpar.CrossEntropy())
    hidden, target = torch.randn(12, D), torch.randint(V, (12,))
    given = [{"hidden": hidden.view(*shape, D), "target": target.view(shape)} for shape in ((12,), (3, 4), (2, 2, 3))]
    assert [probed(engine, each) for each in given] == [True] * 3
    assert [probed(engine, each) for each in given[::-1]] == [False, False, True]


def test_a_function_at_the_address_of_the_former_one_is_another_one():
    """Where a function is freed, one that is made later may be in its place."""
    generator = Projecting()
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    given = {"hidden": torch.randn(12, D), "target": torch.randint(V, (12,))}
    # Once before, because it is then the last attribute
    del generator.function
    generator.function = lambda x: x
    assert probed(engine, given)
    address = id(generator.function)
    del generator.function
    gc.collect()
    made = []
    while not made or id(made[-1]) != address:
        made.append(lambda x: x)
        assert len(made) < 100_000, "the former function is still alive"
    generator.function = made[-1]
    assert probed(engine, given)


def test_a_function_that_is_made_anew_for_each_batch_is_not_kept_alive():
    engine = seqpar.LossCompute(Projecting(), seqpar.CrossEntropy())
    alive = []
    for _ in range(5):
        batch = torch.randn(12, D)
        alive.append(weakref.ref(batch))
        engine.head["generator"].of_batch = engine.head["generator"].settings.function = lambda batch=batch: batch
        engine(batch, torch.randint(V, (12,)))
    del batch, engine.head["generator"].of_batch, engine.head["generator"].settings.function
    gc.collect()
    assert [each() for each in alive] == [None] * 5

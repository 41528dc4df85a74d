"""The first call's findings are used again only where everything that they depend on is the same."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import seqpar
from seqpar.engine.situation import Situation

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")

V, D = 7, 4


CALLS = []


class Projecting(nn.Module):
    """A generator that counts its calls; `shift` is a per-token tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, V)

    def forward(self, hidden, shift=0.0):
        CALLS.append(1)
        return self.linear(hidden.to(self.linear.weight.dtype)) + shift


def of_shapes(engine, given):
    engine.head["generator"].linear = nn.Linear(D, V + 1)


def of_calls(engine, given):
    engine.head["generator"].register_forward_hook(lambda *_: None)


def of_dtypes(engine, given):
    given["hidden"] = given["hidden"].double()


def of_wants_gradients(engine, given):
    engine.requires_grad_(False)


def of_leading(engine, given):
    given["hidden"], given["target"] = given["hidden"].view(3, 4, D), given["target"].view(3, 4)


def of_per_token(engine, given):
    given["shift"] = torch.zeros(12, V)


CHANGES = {
    "shapes": [of_shapes],
    "calls": [of_calls, lambda engine, given: engine.eval()],
    "dtypes": [of_dtypes, lambda engine, given: engine.double()],
    "wants_gradients": [of_wants_gradients],
    "leading": [of_leading],
    "per_token": [of_per_token],
}
"""Of each fact that the findings depend on, what changes it."""


def probed(engine, given):
    """Whether a call looked at some rows first."""
    before = len(CALLS)
    engine(**given)
    return len(CALLS) - before > 1


def test_every_fact_has_its_change():
    assert list(CHANGES) == list(Situation._fields), "say what changes the new one"


@pytest.mark.parametrize(("fact", "number"), [(fact, i) for fact, some in CHANGES.items() for i in range(len(some))])
def test_a_call_that_differs_in_one_fact_is_probed_again_and_only_once(fact, number):
    engine = seqpar.LossCompute(Projecting(), seqpar.CrossEntropy())
    given = {"hidden": torch.randn(12, D), "target": torch.randint(V, (12,))}
    original = copy.copy(given)
    assert probed(engine, given)
    assert not probed(engine, given)
    CHANGES[fact][number](engine, given)
    assert probed(engine, given)
    assert not probed(engine, given)
    if fact in ("leading", "per_token"):
        assert not probed(engine, original)


def test_only_the_latest_situations_are_remembered(monkeypatch):
    """A hook that is made anew for each step never comes back, and its situations would take up memory."""
    monkeypatch.setattr("seqpar.engine.probe.MOST_SITUATIONS", 2)
    engine = seqpar.LossCompute(Projecting(), seqpar.CrossEntropy())
    hidden, target = torch.randn(12, D), torch.randint(V, (12,))
    given = [{"hidden": hidden.view(*shape, D), "target": target.view(shape)} for shape in ((12,), (3, 4), (2, 2, 3))]
    assert [probed(engine, each) for each in given] == [True] * 3
    assert [probed(engine, each) for each in given[::-1]] == [False, False, True]


def test_a_function_that_is_made_anew_for_each_batch_is_not_kept_alive():
    engine = seqpar.LossCompute(Projecting(), seqpar.CrossEntropy())
    alive = []
    for _ in range(5):
        batch = torch.randn(12, D)
        alive.append(weakref.ref(batch))
        engine.head["generator"].of_batch = lambda batch=batch: batch
        engine(batch, torch.randint(V, (12,)))
    del batch, engine.head["generator"].of_batch
    gc.collect()
    assert [each() for each in alive] == [None] * 5

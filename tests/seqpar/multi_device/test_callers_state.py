"""What the caller has set around a call holds for the modules of every device, as it would without threads.

`side_by_side` starts threads for any two places, so that no accelerator is needed.
"""

import contextvars
import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from seqpar.multi_device.parallel_apply import side_by_side

PLACES = ["here", "there", "here"]
SETTING: contextvars.ContextVar[float] = contextvars.ContextVar("setting", default=0.0)


def everywhere(function):
    """Return what a function of no arguments returns in each of three jobs, of which one has its own thread."""
    return side_by_side(lambda _: function(), PLACES)


def test_jobs_of_two_places_run_outside_the_callers_thread():
    assert threading.get_ident() not in everywhere(threading.get_ident)


def test_a_thread_has_the_callers_context_variables():
    token = SETTING.set(5.0)
    try:
        assert everywhere(SETTING.get) == [5.0] * 3
    finally:
        SETTING.reset(token)


def test_what_a_job_sets_in_its_context_stays_there():
    everywhere(lambda: SETTING.set(7.0))
    assert SETTING.get() == 0.0


@pytest.mark.parametrize("outer", ["cpu", "meta"])
def test_a_thread_has_the_callers_default_device(outer):
    with torch.device("meta"):
        assert {t.device.type for t in everywhere(lambda: torch.ones(1))} == {"meta"}
        with torch.device(outer):
            assert {t.device.type for t in everywhere(lambda: torch.ones(1))} == {outer}
    torch.set_default_device("meta")
    try:
        assert {t.device.type for t in everywhere(lambda: torch.ones(1))} == {"meta"}
    finally:
        torch.set_default_device(None)
    assert {t.device.type for t in everywhere(lambda: torch.ones(1))} == {"cpu"}


@pytest.mark.parametrize(
    "state",
    [
        torch.is_grad_enabled,
        torch.is_inference_mode_enabled,
        torch.is_autocast_cache_enabled,
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        torch.is_anomaly_enabled,
        torch.are_deterministic_algorithms_enabled,
    ],
)
@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_thread_has_the_callers_modes(state, around):
    with around():
        assert everywhere(state) == [state()] * 3


def test_hooks_of_saved_tensors_see_those_of_every_job():
    x = torch.randn(4, requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        everywhere(x.exp)
    assert len(packed) == 3


def test_a_checkpoint_around_several_places_gives_the_plain_gradient():
    """Its tensors are told apart by their order, which is a race between threads."""
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()).double() for _ in PLACES]
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def total(x):
        return sum(y.square().sum() for y in side_by_side(lambda i: layers[i](x), PLACES))

    parameters = [x, *(p for module in layers for p in module.parameters())]
    expected = torch.autograd.grad(total(x), parameters)
    for _ in range(20):
        found = torch.autograd.grad(checkpoint(total, x, use_reentrant=False), parameters)
        # Threads decide in which order the gradients of x are added
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.ops.aten.exp.default
        return function(*args, **(kwargs or {}))


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is torch.exp else result


@pytest.mark.unswitched
def test_modes_of_torch_reach_every_job():
    x = torch.zeros(3)
    with Seen() as seen:
        everywhere(lambda: torch.exp(x))
    assert seen.calls == 3
    with torch.device("cpu"), Doubled():
        assert all(torch.equal(y, torch.full((3,), 2.0)) for y in everywhere(lambda: torch.exp(x)))
    with FlopCounterMode(display=False) as counted:
        everywhere(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    assert counted.get_total_flops() == 3 * 2 * 2 * 3 * 4


def test_a_transform_of_torch_reaches_every_job():
    x = torch.randn(3, dtype=torch.float64)
    found = torch.func.grad(lambda x: sum(y.sum() for y in everywhere(lambda: x.exp())))(x)
    torch.testing.assert_close(found, 3 * x.exp(), rtol=1e-15, atol=0)

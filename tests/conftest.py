"""Hypothesis profiles, and what the tests need to know of the machine."""

import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.internal.conjecture.engine
import pytest
import torch
from hypothesis import HealthCheck, settings

from seqpar.testing import ranks as ranks_module
from seqpar.testing.ranks import close_all
from tests.on_device import Nowhere

slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=slow_is_fine)
# What runs again and again in CI draws the same examples each time: a rare one is for dev and nightly to find
settings.register_profile("quick", settings.get_profile("dev"), derandomize=True)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, suppress_health_check=slow_is_fine)
settings.register_profile("nightly", max_examples=2_000, deadline=None, suppress_health_check=slow_is_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Nor is anything collected while tests are found, which would take a fifth of that time, in each worker
gc.disable()

SHRINKING_SECONDS = 30
"""After a failure hypothesis looks for a smaller one so long, and no longer: its own five minutes are more than a test
has (`timeout` in pyproject.toml), which would end it before the example is shown."""


def bound_shrinking(seconds: float) -> None:
    """Give the search for a smaller failure so long; hypothesis has no setting for it."""
    hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS = seconds


bound_shrinking(SHRINKING_SECONDS)

SWITCHED = os.environ.get("SEQPAR_TEST_DEVICE", "")
if SWITCHED:
    from tests import on_device

    on_device.switch(SWITCHED)

torch.set_num_threads(1)  # the cases are tiny: more threads only wait for each other


TORCH_STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "gradients enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
}
"""How the state of torch that changes numbers is read and set: two threads round a sum differently, for one."""
AT_FIRST = {name: get() for name, (get, _) in TORCH_STATE.items()}


@pytest.fixture(autouse=True)
def torch_as_at_first() -> Iterator[None]:
    """A test that leaves torch in another state fails: the numbers of whatever test is next would depend on it."""
    yield
    left = {name: get() for name, (get, _) in TORCH_STATE.items()}
    changed = {name: found for name, found in left.items() if found != AT_FIRST[name]}
    for name in changed:
        TORCH_STATE[name][1](AT_FIRST[name])
    assert not changed, f"the test leaves torch with {changed}; it found {AT_FIRST}"


@pytest.fixture(autouse=True, scope="module")
def ranks_of_a_file() -> Iterator[None]:
    """Ranks end with the file that used them: the threads of every group that was made in them take time."""
    yield
    close_all()


@pytest.fixture
def impatient_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks that wait three seconds for each other, for this test alone."""
    monkeypatch.setattr(ranks_module, "COLLECTIVE_TIMEOUT", 3.0)
    close_all()
    yield
    close_all()


@pytest.fixture(scope="module")
def nothing_on_the_default_device() -> Iterator[None]:
    """What the library makes in a file's tests is where its inputs are, or has no numbers (`Nowhere`)."""
    with Nowhere():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Under the switch, a test skips that needs what the device or the switch lacks, and fails if streams race."""
    if SWITCHED:
        on_device.races_since(SWITCHED)
    try:
        result = yield
    except Exception as error:
        reason = SWITCHED and on_device.reason_to_skip(error)
        if reason:
            pytest.skip(reason)
        raise
    if SWITCHED and (races := on_device.races_since(SWITCHED)):
        pytest.fail("streams race: " + "; ".join(dict.fromkeys(races)), pytrace=False)
    return result


BEGUN_FIRST = (
    "test_compilation",
    "test_torchrun",
    "test_memory_limit",
    "test_examples",
    "test_recipe",
    "test_tutorials",
    "test_hf_models",
)
"""The files that take longest: one that began last would run alone in the end, and leave a core idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without a GPU, or without the corpora, say so when they skip; nothing else skips."""
    items.sort(key=lambda item: item.path.stem not in BEGUN_FIRST)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("unswitched") and SWITCHED:
            item.add_marker(pytest.mark.skip(reason="chooses its devices itself"))
        if item.get_closest_marker("data") and not Path(os.environ.get("SEQPAR_DATA", "/nowhere")).is_dir():
            item.add_marker(pytest.mark.skip(reason="needs SEQPAR_DATA, the folder of the corpora"))


def pytest_collection_finish() -> None:
    """Leave what is there before the first test out of every garbage collection, here and in forked ranks.

    It is a million objects of imported packages, which stay anyway: half a second of each collection that a test, or a
    trainer in it, asks for.
    """
    gc.freeze()
    gc.enable()


NOT_HERE = re.compile(r"(?:needs )?([\w-]+)(?:: not installed| is not here| \(pip install| \d+\.\d)")
"""How a test says which package it would need."""


def names_not_here(reasons: Iterable[str]) -> list[str]:
    """Return the packages that are named by reasons to skip."""
    found = (NOT_HERE.match(reason.removeprefix("Skipped: ")) for reason in reasons)
    return sorted({match[1] for match in found if match})


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter):
    """Say last which packages nothing was compared with: among other skips they are overlooked."""
    yield
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    if names := names_not_here(skipped):
        terminalreporter.write_line(f"not installed, so not compared with: {', '.join(names)}")

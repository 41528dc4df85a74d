"""What the recipe's tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqpar.testing.ranks import close_all
from tests.recipes.files.watching import Event, not_on_the_disk, watched


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """A training over ranks may take longer than a test of the library: on a busy machine, one took more than 60 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqpar.testing.ranks.TIMEOUT", 240.0)
        yield


@pytest.fixture(autouse=True)
def fresh_ranks() -> Iterator[None]:
    """Ranks end with their test: a training leaves gloo groups in them, whose threads wake a hundred times a second."""
    yield
    close_all()


@pytest.fixture(autouse=True)
def durable(request: pytest.FixtureRequest) -> Iterator[list[Event]]:
    """A power failure after any test would lose nothing that has its name."""
    with watched() as events:
        yield events
    if "killed_before" not in request.fixturenames:
        assert not not_on_the_disk(events)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes on only where a test turns it."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


class KilledError(BaseException):
    """The process is dead: nothing catches this, and no later call changes the disk."""


@pytest.fixture
def killed_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], bool]:
    """Call a function, and fail its n-th call that changes the disk and every later one; whether it got that far."""
    calls = [0, 0]

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[0] += 1
            if calls[1] and calls[0] >= calls[1]:
                raise KilledError
            return function(*arguments, **keywords)

        return call

    for name in ("write", "fsync", "unlink", "rmdir", "rename", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for name in ("mkdir", "rename", "write_text", "unlink", "rmdir", "chmod"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))

    def run(number: int, work: Callable[[], None]) -> bool:
        calls[:] = [0, number]
        try:
            work()
        except KilledError:
            return True
        finally:
            calls[:] = [0, 0]
        return False

    return run

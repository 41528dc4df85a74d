"""The application around a model of the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from recipes.translation.serve.app import application
from recipes.translation.serve.batching import Batcher, Wanted
from recipes.translation.serve.bodies import Limits
from recipes.translation.serve.guard import Guard
from tests.recipes.serve.recorder import Recorder

GOOD = {"q": "a", "source": "en", "target": "de"}


@contextmanager
def serving(model: Recorder, loopback: bool = False, **limits: Any) -> Iterator[Guard]:
    """The application around one model; `loopback`, it answers only to the names of this machine."""
    models: Any = [model]
    bounds = Limits(**limits)
    batcher = Batcher(models, bounds.queued_lines)
    try:
        yield application(models, batcher, bounds, ["localhost", "127.0.0.1", "[::1]"] if loopback else ["*"])
    finally:
        model.gate.set()
        batcher.close(20)


def client_of(app: Guard) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@contextmanager
def batching(model: Recorder, most: int = 100) -> Iterator[Batcher]:
    """A batcher whose thread is busy with a first line, so that what follows waits."""
    models: Any = [model, model]
    batcher = Batcher(models, most)
    try:
        batcher.submit(Wanted(0, 1), ["first"])
        assert model.begun.wait(20)
        yield batcher
    finally:
        model.gate.set()
        batcher.close(20)

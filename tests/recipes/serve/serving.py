"""The application around a model of the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from recipes.translation.serve.app import Guard, application
from recipes.translation.serve.asked import Limits
from recipes.translation.serve.batching import Batcher, Line, Wanted
from tests.recipes.serve.recorder import Recorder

GOOD = {"q": "a", "source": "en", "target": "de"}


@contextmanager
def serving(model: Recorder, loopback: bool = False, **limits: Any) -> Iterator[Guard]:
    """The application around one model; `loopback`, it answers only to the names of this machine."""
    models: Any = [model]
    bounds = Limits(**limits)
    names = ["localhost", "127.0.0.1", "[::1]"] if loopback else ["*"]
    try:
        yield application(models, Batcher(models, bounds.queued_lines), bounds, names)
    finally:
        model.gate.set()


def client_of(app: Guard) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30)


def asked(app: Guard, method: str, path: str, **request: Any) -> httpx.Response:
    """Send one request, as httpx takes it, and return the answer."""

    async def send() -> httpx.Response:
        async with client_of(app) as client:
            return await client.request(method, path, **request)

    return asyncio.run(send())


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def batched(model: Recorder, clients: Callable[[Batcher], Awaitable[None]], most: int = 100) -> None:
    """Run clients of a batcher whose thread is busy with a first line, so that what follows waits."""
    models: Any = [model, model]

    async def all_of_them() -> None:
        batcher = Batcher(models, most)
        first = asyncio.ensure_future(batcher.translate(Wanted(0, 1), ["first"]))
        await until(model.begun.is_set)
        try:
            async with asyncio.timeout(20):
                await clients(batcher)
        finally:
            model.gate.set()
            await first

    asyncio.run(all_of_them())


async def waiting(batcher: Batcher, wanted: Wanted, lines: Sequence[str]) -> asyncio.Task[list[Line]]:
    """Lines that are in the queue, and will be translated."""
    task = asyncio.create_task(batcher.translate(wanted, lines))
    await asyncio.sleep(0)
    return task

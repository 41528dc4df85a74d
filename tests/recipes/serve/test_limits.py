"""Every limit of the service: at its number, one below and one above."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from recipes.translation.commands.served_models import served_models
from recipes.translation.serve.app import wait_for_answer
from recipes.translation.serve.asked import Limits, body_of, too_large
from recipes.translation.serve.batching import Batcher, Wanted
from recipes.translation.serve.server import listening, server_of
from tests.recipes.random_translator import random_translator
from tests.recipes.serve.recorder import Recorder
from tests.recipes.serve.serving import GOOD, asked, batched, serving, waiting

LIMIT = 200
T = TypeVar("T")


def content_of(size: int) -> bytes:
    """A good request of so many bytes."""
    short = len(json.dumps({**GOOD, "q": ""}))
    return json.dumps({**GOOD, "q": "a" * (size - short)}).encode()


async def in_pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 70):
        yield content[start : start + 70]


def status(content: bytes, announced: bool, **limits: int) -> int:
    body = content if announced else in_pieces(content)
    model = Recorder()
    model.gate.set()
    with serving(model, **limits) as app:
        return asked(app, "POST", "/translate", content=body, headers={"Content-Type": "application/json"}).status_code


def status_of(q: str, **limits: int) -> int:
    return status(json.dumps({**GOOD, "q": q}).encode(), True, **limits)


def queued(lines: int) -> int:
    """The status of a request of so many lines, where one line waits."""
    found = []

    async def clients(batcher: Batcher) -> None:
        one = await waiting(batcher, Wanted(0, 1), ["a"])
        others = await waiting(batcher, Wanted(0, 1), ["a"] * (lines - 1))
        model.gate.set()
        found.extend(await asyncio.gather(one, others, return_exceptions=True))

    model = Recorder()
    batched(model, clients, LIMIT)
    return 503 if isinstance(found[1], HTTPException) else 200


HEAD = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connected(clients: int) -> int:
    """The status of a request of the last of so many clients, of which the others send the body of theirs slowly."""

    async def clients_of(port: int) -> int:
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(clients - 1)]
        for _, writer in slow:
            writer.write(HEAD + b"Content-Length: 100\r\n\r\n{")
            await writer.drain()
        await asyncio.sleep(0.2)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            answer = await client.get("/health")
        for _, writer in slow:
            writer.close()
        if answer.status_code != 200:
            assert "requests are being answered" in answer.json()["error"]
        return answer.status_code

    return answered(clients_of)


def answered(clients_of: Callable[[int], Coroutine[Any, Any, T]], **limits: Any) -> T:
    """What clients find, given the port of a service."""

    async def both() -> T:
        given = {"connections": 20, **limits}
        with serving(Recorder(), **given) as app, listening("127.0.0.1", 0) as taken:
            server = server_of(app, Limits(**given))
            serves = asyncio.ensure_future(server.serve(sockets=[taken]))
            try:
                return await clients_of(taken.getsockname()[1])
            finally:
                server.should_exit = True
                await serves

    return asyncio.run(both())


def test_many_silent_clients_keep_nobody_from_being_answered() -> None:
    async def clients_of(port: int) -> list[int]:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            found = [(await client.get("/health")).status_code]
            for _, writer in silent[40:]:
                writer.write(b"GET /health HT")
            await asyncio.sleep(0)
            found.append((await client.get("/health")).status_code)
        for _, writer in silent:
            writer.close()
        return found

    assert answered(clients_of) == [200, 200]


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHo"])
def test_a_client_that_sends_no_header_in_time_is_closed(sent: bytes) -> None:
    async def client_of(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"}")
        writer.write(sent)
        found = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return found

    assert answered(client_of, header_seconds=0.3) == b""


def test_two_lengths_of_a_body_are_refused_and_the_connection_is_closed() -> None:
    async def client_of(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /")
        found = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return found

    answer = answered(client_of)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"Content-Length and Transfer-Encoding are both given" in answer


LIMITS: dict[str, tuple[Callable[[int], int], int, int]] = {
    "body_bytes announced": (lambda n: status(content_of(n), True, body_bytes=LIMIT), LIMIT, 413),
    "body_bytes": (lambda n: status(content_of(n), False, body_bytes=LIMIT), LIMIT, 413),
    "characters": (lambda n: status_of("a" * (n - 5) + "\n" + "b" * 5, characters=LIMIT), LIMIT, 413),
    "lines": (lambda n: status_of("\n".join("a" * n), lines=LIMIT), LIMIT, 413),
    "queued_lines": (queued, LIMIT, 503),
    "connections": (connected, 20, 503),
}


def test_the_page_of_the_service_states_its_limits() -> None:
    limits = Limits()
    page = " ".join((Path(__file__).parents[3] / "docs" / "serve.md").read_text().split())
    for stated in (
        f"more than {limits.body_seconds:g} seconds",
        f"above {limits.body_bytes >> 20} MiB, {limits.characters:,} characters or {limits.lines:,} lines",
        f"{limits.queued_lines:,} lines are waiting, or {limits.connections:,} requests are being answered",
        f"no translation within {limits.answer_seconds:g} seconds",
    ):
        assert stated in page
    assert f"at most {limits.body_bytes:,} are read" in str(too_large("3,000,000", limits))


def test_every_limit_that_counts_is_here() -> None:
    counted = {field.name for field in dataclasses.fields(Limits) if not field.name.endswith("seconds")}
    assert {name.partition(" ")[0] for name in LIMITS} == counted


@pytest.mark.parametrize(("ask", "limit", "above"), LIMITS.values(), ids=list(LIMITS))
def test_a_limit_is_reached_and_not_exceeded(ask: Callable[[int], int], limit: int, above: int) -> None:
    assert [ask(limit - 1), ask(limit), ask(limit + 1)] == [200, 200, above]


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is that of its next timer as soon as nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.select, self._selector.select = self._selector.select, self.pass_time

    def time(self) -> float:
        return self.now

    def pass_time(self, timeout: float | None) -> Any:
        self.now += timeout or 0.0
        return self.select(0)


def request_of(parts: list[tuple[float, bytes]]) -> Request:
    """A request whose body comes in parts, each after so many seconds, and whose client stays."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        pause, part = left.pop(0) if left else (1e6, b"")
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    return Request({"type": "http", "headers": []}, receive)


async def body_after(seconds: float) -> int:
    """The status of a body of which each half takes half of the time."""
    try:
        await body_of(request_of([(seconds / 2, b"{"), (seconds / 2, b"}")]), Limits(body_seconds=100))
    except HTTPException as error:
        return error.status_code
    return 200


async def answer_after(seconds: float) -> int:
    """The status of a request whose translation takes so long."""
    try:
        await wait_for_answer(request_of([]), asyncio.sleep(seconds, []), 100)
    except HTTPException as error:
        return error.status_code
    return 200


@pytest.mark.parametrize(("ask", "above"), [(body_after, 408), (answer_after, 504)])
def test_a_limit_of_time_is_that_of_the_whole_wait(
    ask: Callable[[float], Coroutine[Any, Any, int]], above: int
) -> None:
    with asyncio.Runner(loop_factory=Clock) as runner:
        assert [runner.run(ask(seconds)) for seconds in (99, 101)] == [200, above]


def test_a_line_may_be_exactly_as_long_as_the_model_reads(tmp_path: Path) -> None:
    translator = random_translator(tmp_path)
    line = "The train to Vienna leaves at half past seven."
    longest = len(translator.source.encode([line])[0])
    found = []
    for most in (longest - 1, longest, longest + 1):
        config = translator.config
        config = replace(config, training=replace(config.training, max_length=most))
        (model,) = served_models("run", replace(translator, config=config), None)
        assert config.decoding.max_length < most
        found.append(bool(model.translate([line], 1, False)[0].refused))
    assert found == [True, False, False]

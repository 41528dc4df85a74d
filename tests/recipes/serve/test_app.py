"""The application with small limits and a model that waits: what a real service would take too long to show."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from recipes.translation.errors import ConfigError
from recipes.translation.serve.app import Guard
from recipes.translation.serve.server import listening, names_of
from tests.recipes.serve.recorder import Recorder
from tests.recipes.serve.serving import GOOD, asked, client_of, serving, until

SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "path": "/translate",
    "headers": [(b"content-type", b"application/json"), (b"host", b"service")],
    "query_string": b"",
}


def test_clients_are_told_to_try_again_when_the_queue_is_full() -> None:
    async def clients(app: Guard) -> None:
        async with client_of(app) as client:
            begun = asyncio.ensure_future(client.post("/translate", json=GOOD))
            await until(model.begun.is_set)
            waits = asyncio.ensure_future(client.post("/translate", json={**GOOD, "q": "b\nc"}))
            await asyncio.sleep(0.05)
            full = await client.post("/translate", json={**GOOD, "q": "d\ne"})
            assert (full.status_code, full.headers["retry-after"]) == (503, "1")
            assert "2 lines are waiting, and 2 more would exceed 3" in full.json()["error"]
            model.gate.set()
            assert [(await one).json()["translatedText"] for one in (begun, waits)] == ["A", "B\nC"]

    model = Recorder()
    with serving(model, queued_lines=3) as app:
        asyncio.run(clients(app))


def test_a_body_that_stalls_is_given_up() -> None:
    async def stalling() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(20)
        yield b"}"

    with serving(Recorder(), body_seconds=0.05) as app:
        answer = asked(app, "POST", "/translate", content=stalling(), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.headers["connection"]) == (408, "close")
    assert "did not arrive within 0.05 seconds" in answer.json()["error"]


def test_a_translation_that_takes_too_long_is_given_up_and_not_begun_later() -> None:
    async def clients(app: Guard) -> None:
        async with client_of(app) as client:
            first, second = await asyncio.gather(
                client.post("/translate", json=GOOD), client.post("/translate", json={**GOOD, "q": "b"})
            )
            model.gate.set()
            assert (await client.post("/translate", json={**GOOD, "q": "c"})).status_code == 200
        assert (first.status_code, second.status_code) == (504, 504)
        assert "no translation within 0.5 seconds" in first.json()["error"]

    model = Recorder()
    with serving(model, answer_seconds=0.5) as app:
        asyncio.run(clients(app))
    assert model.batches in ([["a"], ["c"]], [["a", "b"], ["c"]])


def test_work_of_a_client_that_has_gone_is_not_begun() -> None:
    async def gone(app: Guard) -> None:
        async with client_of(app) as client:
            first = asyncio.ensure_future(client.post("/translate", json=GOOD))
            await until(model.begun.is_set)
            messages = [
                {"type": "http.request", "body": json.dumps({**GOOD, "q": "gone"}).encode(), "more_body": False},
                {"type": "http.disconnect"},
            ]

            async def receive() -> dict[str, Any]:
                return messages.pop(0)

            async def send(message: Any) -> None:
                pass

            await app(SCOPE, receive, send)
            model.gate.set()
            assert (await first).json() == {"translatedText": "A"}
            assert (await client.post("/translate", json={**GOOD, "q": "next"})).status_code == 200

    model = Recorder()
    with serving(model) as app:
        asyncio.run(gone(app))
    assert model.batches == [["a"], ["next"]]


def test_work_that_is_cut_off_at_the_end_of_the_time_to_finish_is_answered_with_503() -> None:
    async def cut_off(app: Guard) -> list[Any]:
        sent = []
        body = [{"type": "http.request", "body": json.dumps(GOOD).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await asyncio.sleep(60)
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {**SCOPE, "headers": [*SCOPE["headers"], (b"content-length", b"9")]}
        task = asyncio.ensure_future(app(scope, receive, send))
        await until(model.begun.is_set)
        task.cancel(msg="as uvicorn does")
        await task
        return sent

    model = Recorder()
    with serving(model) as app:
        start, body = asyncio.run(cut_off(app))
    assert start["status"] == 503
    assert json.loads(body["body"])["error"].startswith("the service is stopping")


def test_an_error_of_the_service_is_answered_as_one() -> None:
    model = Recorder()
    model.gate.set()
    with serving(model) as app:
        answer = asked(app, "POST", "/translate", json={**GOOD, "q": "poison"})
    assert answer.status_code == 500
    assert answer.json() == {"error": "the service failed; its own output says why"}


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("no host", "."),
        ("a..b", "."),
        ("a" * 70, "."),  # which Python cannot encode
        ("192.0.2.1", "Cannot assign"),
    ],
)
def test_a_host_that_is_no_address_or_another_machines_is_named(host: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"--host {re.escape(host)} --port 0 cannot be used: {reason}"):
        listening(host, 0)


def test_a_port_in_use_is_one_line() -> None:
    with listening("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"--host 127.0.0.1 --port {port} cannot be used: it is in use: name another"
        ):
            listening("127.0.0.1", port)


def test_what_only_this_machine_can_reach_answers_only_to_its_names() -> None:
    for host, names in (("127.0.0.1", ["localhost", "127.0.0.1", "[::1]", "127.0.0.1"]), ("0.0.0.0", ["*"])):
        with listening(host, 0) as taken:
            assert names_of(taken) == names

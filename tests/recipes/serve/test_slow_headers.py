"""A client whose headers do not arrive is dropped, and no other one: over real sockets, with a short limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from recipes.translation.serve.server import Connection, bound, server_of
from tests.recipes.serve.recorder import Recorder
from tests.recipes.serve.serving import serving, until

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"q": "a", "source": "en", "target": "de"}'
POST = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Impatient(Connection):
    header_seconds = 0.1


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def over_sockets(model: Recorder, clients: Callable[[int], Awaitable[None]]) -> None:
    """Run the clients, which are given the port, against a server of this process."""

    async def both() -> None:
        started = asyncio.Event()
        taken = bound("127.0.0.1", 0)
        with serving(model) as app, taken:
            server = server_of(app, Impatient, started.set)
            serves = asyncio.ensure_future(server.serve(sockets=[taken]))
            try:
                async with asyncio.timeout(10):
                    await started.wait()
                    await clients(taken.getsockname()[1])
            finally:
                model.gate.set()
                server.should_exit = True
                await serves

    asyncio.run(both())


async def received(reader: asyncio.StreamReader) -> bytes:
    """Read until the connection is closed, or reset because bytes were still on their way when it was."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while part := await reader.read(1 << 16):
            answer += part
    return answer


async def sent_slowly(client: Client) -> bytes:
    """Send headers without end, a byte at a time, until the connection is closed; return what was answered."""
    reader, writer = client
    answer = asyncio.ensure_future(received(reader))
    while not answer.done():
        writer.write(b"x")
        await asyncio.sleep(0.01)
    writer.close()
    return answer.result()


def test_a_client_that_sends_its_headers_slowly_is_dropped_without_an_answer() -> None:
    async def clients(port: int) -> None:
        silent_reader, silent = await asyncio.open_connection("127.0.0.1", port)
        slow = await asyncio.open_connection("127.0.0.1", port)
        slow[1].write(HEAD.removesuffix(b"\r\n") + b"X-Slow: ")
        assert await sent_slowly(slow) == b""
        assert await silent_reader.read() == b""  # it sent nothing at all
        silent.close()

    over_sockets(Recorder(), clients)


def test_a_second_request_whose_headers_are_slow_is_dropped_after_the_answer_to_the_first() -> None:
    async def clients(port: int) -> None:
        client = await asyncio.open_connection("127.0.0.1", port)
        client[1].write(HEAD + HEAD.removesuffix(b"\r\n") + b"X-Slow: ")
        answer = await sent_slowly(client)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"HTTP/1.1") == 1

    over_sockets(Recorder(), clients)


def test_a_client_that_waits_for_its_translation_is_not_dropped() -> None:
    async def clients(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST % len(BODY) + BODY)
        await until(model.begun.is_set)
        await asyncio.sleep(3 * Impatient.header_seconds)
        model.gate.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()

    model = Recorder()
    over_sockets(model, clients)

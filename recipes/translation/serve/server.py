"""The server: a socket, and uvicorn until a signal stops it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from recipes.translation.errors import ConfigError
from recipes.translation.serve.guard import Guard

FINISH_SECONDS = 30
"""How long the requests that have arrived can take after the signal to stop."""


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address; ConfigError says why it cannot be."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error}") from None
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of connections that have just ended
        taken.bind(address)
    except OSError as error:
        taken.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use: name another one with --port, or 0 for any that is free"
            ) from None
        raise ConfigError(f"--host {host} --port {port} cannot be used: {error.strerror}") from None
    return taken


def address_of(taken: socket.socket) -> str:
    """Return the address of the page."""
    host, port, *_ = taken.getsockname()
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}/"


def is_loopback(taken: socket.socket) -> bool:
    """Return whether a socket can be reached only from this machine."""
    return ipaddress.ip_address(taken.getsockname()[0]).is_loopback


def serve(app: Guard, taken: socket.socket, started: Callable[[], None]) -> int:
    """Serve until SIGINT or SIGTERM; answer what has arrived, and return the exit status: 130 or 0."""
    server = server_of(app, Connection, started)
    asyncio.run(server.serve(sockets=[taken]))
    if server.stopped_by == signal.SIGINT:
        return 130
    return 0


def server_of(app: Guard, connection: type[Connection], started: Callable[[], None]) -> Server:
    """Return a server that calls `started` once it accepts connections."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=connection,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=FINISH_SECONDS,
    )
    return Server(config, started)


class Server(uvicorn.Server):
    """A server that notes the signal which stopped it, rather than sending it to itself once more."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self.stopped_by: signal.Signals | None = None
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections, and say so."""
        await super().startup(sockets)
        self._started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Within the block, let SIGINT and SIGTERM stop the server."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second signal does so at once."""
        if self.stopped_by is None:
            print(f"\n[serve] {signal.Signals(sig).name}: stopping; once more to stop at once", flush=True)
            self.stopped_by = signal.Signals(sig)
            self.should_exit = True
        else:
            self.force_exit = True


class Connection(H11Protocol):
    """A connection that is closed when the headers of a request do not arrive: uvicorn would wait for ever."""

    header_seconds = 10.0
    """How long a connection can be without a request whose headers have arrived."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look for requests."""
        super().connection_made(transport)
        self._seen: object = None
        self._timer = self.loop.call_later(self.header_seconds, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no longer."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Close the connection if it has had no request since the last look, and none is being answered."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._timer = self.loop.call_later(self.header_seconds, self._look)

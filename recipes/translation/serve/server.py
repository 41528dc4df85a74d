"""The server: a socket, and uvicorn until a signal stops it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from recipes.translation.errors import ConfigError
from recipes.translation.serve.app import Guard
from recipes.translation.serve.bodies import Limits

FINISH_SECONDS = 30
"""How long the requests that have arrived can take after the signal to stop."""


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address; ConfigError says why it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # the latter where Python cannot encode the name
        reason = getattr(error, "strerror", error)
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            reason = "it is in use: name another one with --port, or 0 for any that is free"
        raise ConfigError(f"--host {host} --port {port} cannot be used: {reason}") from None


def address_of(taken: socket.socket) -> str:
    """Return the address of the page."""
    host, port, *_ = taken.getsockname()
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}/"


def names_of(taken: socket.socket) -> list[str]:
    """Return the names by which clients may call the service: any, unless only this machine can reach it."""
    host = taken.getsockname()[0]
    if ipaddress.ip_address(host).is_loopback:
        return ["localhost", "127.0.0.1", "[::1]", host]
    return ["*"]


class Connection(H11Protocol):
    """Uvicorn's protocol of a connection, which is closed where no request arrives in time.

    Where more clients are connected than the limits have requests, the one that has sent none for longest is closed: it
    costs a descriptor, of which a process has about a thousand.
    """

    limits: Limits
    silent: dict[Connection, None]
    """Those of which a request is awaited, in their order."""
    expiry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.wait()
        oldest = next(iter(self.silent), self)
        if len(self.connections) > self.limits.connections and oldest is not self:
            oldest.transport.close()

    def data_received(self, data: bytes) -> None:
        self.wait()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_waiting()
        super().connection_lost(exc)

    def wait(self) -> None:
        """Begin to wait for a request, unless the connection does."""
        if self.expiry is None and not self.transport.is_closing():
            self.expiry = self.loop.call_later(self.limits.header_seconds, self.transport.close)
            self.silent[self] = None

    def stop_waiting(self) -> None:
        """Wait no longer, since a request has arrived."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None
        self.silent.pop(self, None)


def server_of(app: Guard, limits: Limits) -> uvicorn.Server:
    """Return a server that answers until SIGINT or SIGTERM, and then only what has arrived."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=type("OfThisServer", (Connection,), {"limits": limits, "silent": {}}),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=FINISH_SECONDS,
    )
    return uvicorn.Server(config)

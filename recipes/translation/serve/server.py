"""The server: a socket, and uvicorn, which runs until a signal stops it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from recipes.translation.errors import ConfigError
from recipes.translation.serve.app import Guard
from recipes.translation.serve.asked import Limits

FINISH_SECONDS = 30
"""How long requests that have already arrived can take after the signal to stop."""


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address; raise ConfigError, with the reason, if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # the latter if Python cannot encode the name
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
    """Return the host names that clients may use for the service: any, unless only this machine can reach it."""
    host = taken.getsockname()[0]
    if ipaddress.ip_address(host).is_loopback:
        return ["localhost", "127.0.0.1", "[::1]", host]
    return ["*"]


class Connection(H11Protocol):
    """Uvicorn's protocol for a connection, which is closed if no request arrives in time.

    If there are more connections than the limits allow, the one that has been without a request for longest is closed:
    each costs a file descriptor, of which a process has about a thousand.
    """

    limits: Limits
    silent: dict[Connection, None]
    """The connections that are waiting for a request, longest first."""
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
        """Start waiting for a request, unless the connection already does."""
        if self.expiry is None and not self.transport.is_closing():
            self.expiry = self.loop.call_later(self.limits.header_seconds, self.transport.close)
            self.silent[self] = None

    def stop_waiting(self) -> None:
        """Stop waiting, since a request has arrived or the connection is lost."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None
        self.silent.pop(self, None)


def server_of(app: Guard, limits: Limits) -> uvicorn.Server:
    """Return a server that runs until SIGINT or SIGTERM, and then answers only what has already arrived."""
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

"""The server: a socket, and uvicorn until a signal stops it."""

from __future__ import annotations

import errno
import ipaddress
import socket

import uvicorn

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


def server_of(app: Guard, limits: Limits) -> uvicorn.Server:
    """Return a server that answers until SIGINT or SIGTERM, and then only what has arrived."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=limits.connections + 1,  # the first number that is refused
        timeout_graceful_shutdown=FINISH_SECONDS,
    )
    return uvicorn.Server(config)

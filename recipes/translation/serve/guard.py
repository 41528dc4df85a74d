"""What every request passes: the check of where it comes from, the limit of requests at a time, headers for safety."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Set
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recipes.translation.serve.bodies import CLOSE, Limits, error_response
from recipes.translation.serve.metrics import Metrics

SAFETY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer: the page loads its own files and speaks to its own server, and nothing else."""


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Set[str], limits: Limits, loopback: bool) -> None:
        self.app = app
        self.metrics = metrics
        self.paths = paths
        self.limits = limits
        self.loopback = loopback
        self.present = 0
        """Requests that are being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have the application answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        headers = Headers(scope=scope)
        unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        started = False

        async def received() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body"))
            return message

        async def send_safely(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                # A client that waits before it sends the body needs not send it
                if unread and "expect" not in headers and not stopping:
                    await self.discard(received)
                started = True
                path = scope["path"] if scope["path"] in self.paths else "other"
                self.metrics.count(path, message["status"])
                MutableHeaders(scope=message).update(SAFETY)
            await send(message)

        stopping = False
        app = self.refusal(scope["method"], headers) or self.app
        self.present += 1
        try:
            await app(scope, received, send_safely)
        except asyncio.CancelledError:  # by a second signal, or at the end of the time to finish
            stopping = True
            if not started:
                stopped = error_response(503, "the service is stopping: send the request again later", CLOSE)
                await stopped(scope, receive, send_safely)
        finally:
            self.present -= 1

    async def discard(self, receive: Receive) -> None:
        """Read for a second what is left of a body, without keeping it.

        Many clients look for an answer only after they have sent everything, and the end of a connection with unread
        data would make their system discard the answer.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(min(1.0, self.limits.body_seconds)):
                while (await receive()).get("more_body"):
                    pass

    def refusal(self, method: str, headers: Headers) -> JSONResponse | None:
        """Return why a request is not answered; None if it is."""
        host = headers.get("host", "")
        if self.loopback and not is_local(host):
            # Another site's name that was made to mean this machine ("DNS rebinding")
            message = "this service answers only this machine: call it localhost, 127.0.0.1 or [::1]"
            return error_response(421, message, CLOSE)
        if method == "POST" and is_from_elsewhere(headers):
            message = "a page of another site cannot ask for translations: open the service's own page"
            return error_response(403, message, CLOSE)
        if self.present >= self.limits.requests:
            message = f"{self.present:,} requests are being answered, which is the limit: try again in a moment"
            return error_response(503, message, {**CLOSE, "Retry-After": "1"})
        return None


def is_from_elsewhere(headers: Headers) -> bool:
    """Return whether a page of another site makes a browser send a request; programs have neither of these headers."""
    if site := headers.get("sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


def is_local(host: str) -> bool:
    """Return whether the name in a Host header can mean nothing but this machine."""
    name, colon, port = host.lower().rpartition(":")
    if not colon or not (port.isdecimal() or not port):
        name = host.lower()
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return name == "localhost"

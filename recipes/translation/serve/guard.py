"""What every request passes: the check of where it comes from, and headers for safety."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recipes.translation.serve.bodies import error_response

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

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have the application answer it."""
        started = False

        async def send_safely(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update(SAFETY)
            await send(message)

        app = self.app
        if scope["method"] == "POST" and is_from_elsewhere(Headers(scope=scope)):
            app = error_response(403, "a page of another site cannot ask for translations: open the service's own page")
        try:
            await app(scope, receive, send_safely)
        except asyncio.CancelledError:  # by a second signal, or at the end of the time to finish
            if not started:
                stopped = error_response(503, "the service is stopping: send the request again later")
                await stopped(scope, receive, send_safely)


def is_from_elsewhere(headers: Headers) -> bool:
    """Return whether a page of another site makes a browser send a request; programs have neither of these headers."""
    if site := headers.get("sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()

"""The HTTP application: the page, translation in the format of LibreTranslate's clients, and health."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recipes.translation.errors import DataError
from recipes.translation.serve.asked import Limits, error_response, fields_of, line_answer, parse_lines, parse_translate
from recipes.translation.serve.batching import Batcher, Line, Model, Wanted

PAGE = Path(__file__).parent / "page"


SAFETY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response: the page may load only its own files and talk only to its own server."""


def application(models: Sequence[Model], batcher: Batcher, limits: Limits, names: Sequence[str]) -> Guard:
    """Return the application, which answers only to these host names, "*" for any.

    Otherwise another site could point a name of its own at this machine ("DNS rebinding").
    """
    service = Service(models, batcher, limits)
    routes = [
        Route("/translate", service.translate, methods=["POST"]),
        Route("/lines", service.lines, methods=["POST"]),
        Route("/languages", service.languages),
        Route("/models", service.page_models),
        Route("/health", service.health),
        Mount("/", StaticFiles(directory=PAGE, html=True)),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=names)],
        exception_handlers={
            404: no_such_page,
            405: no_such_page,
            HTTPException: refusal_response,
            ClientDisconnect: client_gone,
            Exception: failure_response,
        },
    )
    return Guard(app, limits)


class Service:
    """The endpoints and what they share."""

    def __init__(self, models: Sequence[Model], batcher: Batcher, limits: Limits) -> None:
        self.models = models
        self.batcher = batcher
        self.limits = limits

    async def translate(self, request: Request) -> Response:
        """Translate one or several texts."""
        asked = parse_translate(await fields_of(request, self.limits), self.models, self.limits)
        found = await self.wait_for_lines(request, asked.wanted, asked.lines)
        for number, line in enumerate(found, start=1):
            if line.refused:
                raise HTTPException(400, f"line {number:,} {line.refused}")
        return JSONResponse(asked.answer(found))

    async def lines(self, request: Request) -> Response:
        """Translate lines for the page, with scores and, if wanted, alignments; a refused line gets an error."""
        wanted, lines = parse_lines(await fields_of(request, self.limits), self.models, self.limits)
        found = await self.wait_for_lines(request, wanted, lines)
        return JSONResponse({"lines": [line_answer(*each) for each in zip(lines, found, strict=True)]})

    async def wait_for_lines(self, request: Request, wanted: Wanted, lines: Sequence[str]) -> list[Line]:
        """Queue lines and wait for their translations."""
        try:
            return await wait_for_answer(request, self.batcher.translate(wanted, lines), self.limits.answer_seconds)
        except DataError as error:
            raise HTTPException(400, str(error)) from None

    async def languages(self, request: Request) -> Response:
        """Return the source languages, each with its targets."""
        targets: dict[str, dict[str, None]] = {}  # each once, in order
        for model in self.models:
            targets.setdefault(model.source, {})[model.target] = None
        return JSONResponse([{"code": code, "name": code, "targets": list(names)} for code, names in targets.items()])

    async def page_models(self, request: Request) -> Response:
        """Return the models for the page."""
        shown = ("name", "engine", "source", "target", "beam", "aligns")
        return JSONResponse([{name: getattr(model, name) for name in shown} for model in self.models])

    async def health(self, request: Request) -> Response:
        """Report that the service is up."""
        return JSONResponse({"status": "ok"})


async def wait_for_answer(request: Request, answer: Coroutine[Any, Any, list[Line]], seconds: float) -> list[Line]:
    """Wait for an answer, and give it up when the client disconnects or the time is over."""
    found = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(wait_for_disconnect(request))
    try:
        both: set[asyncio.Future[Any]] = {found, gone}
        await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if found.done():
            return found.result()
        if gone.done():
            raise ClientDisconnect
        raise HTTPException(504, f"there was no translation within {seconds:g} seconds: send less at a time")
    finally:
        found.cancel()
        gone.cancel()


async def wait_for_disconnect(request: Request) -> None:
    """Wait until the client of a request whose body has been read disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def refusal_response(request: Request, error: Exception) -> Response:
    """Respond to an invalid request."""
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, error.headers)


async def no_such_page(request: Request, error: Exception) -> Response:
    """Respond to a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    message = (
        f"{request.method} {request.url.path} does not exist here: the service has POST /translate, GET /languages"
    )
    return error_response(error.status_code, message, dict(error.headers or {}))


async def client_gone(request: Request, error: Exception) -> Response:
    """End a request whose client no longer reads the response."""
    return Response(status_code=499)  # nobody sees it


async def failure_response(request: Request, error: Exception) -> Response:
    """Respond after an error in the service, which is printed on stderr."""
    return error_response(500, "the service failed; its own output says why")


class Guard:
    """An ASGI application that wraps another."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits
        self.running = 0
        """Number of requests that are being answered."""

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
        if {"content-length", "transfer-encoding"} <= set(Headers(scope=scope).keys()):
            # A proxy in front may go by the other header (request smuggling)
            message = "Content-Length and Transfer-Encoding are both given: send one of them"
            app = error_response(400, message, {"Connection": "close"})
        if self.running >= self.limits.connections:
            message = f"{self.running:,} requests are being answered: send it again in a second"
            app = error_response(503, message, {"Retry-After": "1"})
        self.running += 1
        try:
            await app(scope, receive, send_safely)
        except asyncio.CancelledError:  # by a second signal, or when the time to finish is over
            if not started:
                stopped = error_response(503, "the service is stopping: send the request again later")
                await stopped(scope, receive, send_safely)
        finally:
            self.running -= 1


def is_from_elsewhere(headers: Headers) -> bool:
    """Return whether a browser sends this request for a page of another site; programs set neither of these headers."""
    if site := headers.get("sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()

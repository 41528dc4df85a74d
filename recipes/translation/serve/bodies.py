"""Request bodies: read within limits of size and time, and decoded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request


@dataclass(frozen=True)
class Limits:
    """What the service takes on."""

    body_bytes: int = 2**20
    body_seconds: float = 20.0
    """Within which a request's body must have arrived."""
    characters: int = 50_000
    """Of a request."""
    lines: int = 1_000
    """Of a request."""
    queued_lines: int = 5_000
    """Of all requests that wait."""
    requests: int = 512
    """That are answered at the same time."""
    answer_seconds: float = 120.0
    """From the end of a request's body to its translation."""


class RefusedError(Exception):
    """A request is not answered; `status` is HTTP's, and the message one line."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


CLOSE = {"Connection": "close"}
"""For an answer before the body's end, of which the server would otherwise read the rest."""


async def fields_of(request: Request, limits: Limits) -> dict[str, object]:
    """Read a JSON object or a form; raise RefusedError for anything else, and for what is too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", "application/x-www-form-urlencoded"):
        raise RefusedError(
            415,
            f"Content-Type is {kind or 'missing'}: send application/json or application/x-www-form-urlencoded",
            CLOSE,
        )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RefusedError(415, "Content-Encoding is not supported: send the body uncompressed", CLOSE)
    body = await body_of(request, limits)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RefusedError(400, f"the body is not UTF-8 text, at byte {error.start:,}") from None
    if kind == "application/json":
        return object_of(text)
    return form_of(text)


async def body_of(request: Request, limits: Limits) -> bytes:
    """Read the body; raise RefusedError once it is known to be above the limit, or takes too long."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.body_bytes:
        await discard(request, int(announced), limits)
        raise too_large(f"{int(announced):,}", limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise too_large(f"more than {limits.body_bytes:,}", limits)
    except TimeoutError:
        raise RefusedError(
            408, f"the body did not arrive within {limits.body_seconds:g} seconds: send the request again", CLOSE
        ) from None
    return bytes(body)


def too_large(size: str, limits: Limits) -> RefusedError:
    """Return the error for a body of this size."""
    return RefusedError(
        413, f"the body has {size} bytes, and at most {limits.body_bytes:,} are read: send less at a time", CLOSE
    )


async def discard(request: Request, size: int, limits: Limits) -> None:
    """Read for a second, without keeping it, what is up to four times the limit.

    Many clients look for an answer only after they have sent everything, and the end of a connection with unread data
    would make their system discard the answer.
    """
    if size > 4 * limits.body_bytes:
        return
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(min(1.0, limits.body_seconds)):
            async for _ in request.stream():
                pass


def object_of(text: str) -> dict[str, object]:
    """Decode a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, RecursionError):
            reason = "too many levels"
        raise RefusedError(400, f"the body is not JSON: {reason}") from None
    if not isinstance(found, dict):
        raise RefusedError(400, 'the body is not a JSON object: send {"q": ..., "source": ..., "target": ...}')
    return found


def form_of(text: str) -> dict[str, object]:
    """Decode a form; each field may be given once."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), errors="strict")
    except ValueError as error:
        raise RefusedError(400, f"the body is not a form in UTF-8: {' '.join(str(error).split())}") from None
    fields: dict[str, object] = dict(pairs)
    if len(fields) < len(pairs):
        raise RefusedError(400, "a field of the form is given twice: send lists as JSON")
    return fields

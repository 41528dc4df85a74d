"""Request bodies: read within limits on size and time, and decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from recipes.translation.files.json_fields import parse_json


@dataclass(frozen=True)
class Limits:
    """How much the service accepts."""

    body_bytes: int = 2**20
    body_seconds: float = 20.0
    """Time within which a request's body must have arrived."""
    characters: int = 50_000
    """Per request."""
    lines: int = 1_000
    """Per request."""
    queued_lines: int = 5_000
    """In all waiting requests together."""
    connections: int = 512
    """The most connections, and also the most requests, at the same time."""
    header_seconds: float = 10.0
    """Time within which a client must have sent the header of a request."""
    answer_seconds: float = 120.0
    """Time from the end of a request's body to its translation."""


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error in LibreTranslate's format."""
    return JSONResponse({"error": message}, status, headers)


JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


async def fields_of(request: Request, limits: Limits) -> dict[str, object]:
    """Read the fields of the query string and of the body, a JSON object or a form.

    Raises HTTPException, with a one-line detail, for anything else, for a field that is given twice, and for a body
    that is too large or too slow.
    """
    query = request.scope["query_string"]
    asked = form_of(text_of(query, "query string"), "query string")
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    if query and empty:
        return asked
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (JSON, FORM):
        raise HTTPException(415, f"Content-Type is {kind or 'missing'}: send {JSON} or {FORM}")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "Content-Encoding is not supported: send the body uncompressed")
    text = text_of(await body_of(request, limits), "body")
    fields = object_of(text) if kind == JSON else form_of(text, "body")
    return once([*asked.items(), *fields.items()])


def text_of(content: bytes, what: str) -> str:
    """Decode UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"the {what} is not UTF-8 text, at byte {error.start:,}") from None


async def body_of(request: Request, limits: Limits) -> bytes:
    """Read the body; raise HTTPException as soon as it is known to exceed the limit, or if it takes too long."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.body_bytes:
        raise too_large(f"{int(announced):,}", limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise too_large(f"more than {limits.body_bytes:,}", limits)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_seconds:g} seconds: send the request again"
        raise HTTPException(408, message, {"Connection": "close"}) from None
    return bytes(body)


def too_large(size: str, limits: Limits) -> HTTPException:
    """Return the error for a body of this size."""
    return HTTPException(
        413, f"the body has {size} bytes, and at most {limits.body_bytes:,} are read: send less at a time"
    )


def object_of(text: str) -> dict[str, object]:
    """Decode a JSON object."""
    try:
        found = parse_json(text, once)
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise HTTPException(400, 'the body is not a JSON object: send {"q": ..., "source": ..., "target": ...}')
    return found


def form_of(text: str, what: str) -> dict[str, object]:
    """Decode a form."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), errors="strict")
    except ValueError as error:
        raise HTTPException(400, f"the {what} is not a form in UTF-8: {' '.join(str(error).split())}") from None
    return once(pairs)


def once(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Return fields by name; raise HTTPException for a field that is given twice, since one value would be lost."""
    fields: dict[str, object] = {}
    for name, value in pairs:
        if name in fields:
            raise HTTPException(400, f"{quote(name)} is given twice: send it once, and several texts as a list in JSON")
        fields[name] = value
    return fields


def quote(value: object) -> str:
    """Return a value as it is shown in an error, shortened if it is long."""
    text = ascii(value)
    if len(text) > 60:
        text = text[:60] + "..."
    return text

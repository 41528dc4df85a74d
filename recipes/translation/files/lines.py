"""Reading of text files as lines. Only a newline, after an optional carriage return, ends a line."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from recipes.translation.errors import DataError
from recipes.translation.files.contents import Opened, opened

GZIP = b"\x1f\x8b"
"""The first bytes of a compressed file."""


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file, plain or compressed by gzip; raises OSError, and DataError as `lines_of` does."""
    return lines_of(unpacked(path.read_bytes(), str(path)), str(path))


def unpacked(content: bytes, where: str) -> bytes:
    """Return the content of a file, without gzip's compression; raise DataError if it is damaged."""
    if not content.startswith(GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{where} cannot be unpacked: {error}; copy it once more") from error


def each_line(path: Path, open_file: Opened = opened) -> Iterator[str]:
    """Yield the lines of a text file one by one, as `read_lines` returns them; the file is never whole in memory."""
    with ExitStack() as held:
        plain = held.enter_context(open_file(path))
        file: io.BufferedReader | gzip.GzipFile = plain
        if plain.peek(len(GZIP)).startswith(GZIP):
            file = held.enter_context(gzip.GzipFile(fileobj=plain))
        try:
            for number, line in enumerate(file, start=1):
                if number > 1:
                    yield _decoded(line, str(path), number).removesuffix("\r\n").removesuffix("\n")
                else:
                    yield from lines_of(line, str(path))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} cannot be unpacked: {error}; copy it once more") from error


def lines_of(content: bytes, where: str) -> list[str]:
    """Decode the lines of UTF-8 text, without its byte order mark; DataError names a line in another encoding."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{where} cannot be read: it is UTF-16; convert it, as with iconv -f utf-16 -t utf-8")
    content = content.removeprefix(codecs.BOM_UTF8)
    text = _decoded(content, where, 1)
    if not text:
        return []
    if "\n" not in text and "\r" in text.rstrip("\r"):
        raise DataError(f"{where} has carriage returns as its line ends; convert it, as with tr '\\r' '\\n'")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def _decoded(content: bytes, where: str, first: int) -> str:
    """Decode UTF-8 text whose first line has the number `first`."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = first + content.count(b"\n", 0, error.start)
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise DataError(
            f"{where} cannot be read: line {line:,} is not UTF-8 text (byte {content[error.start]:#04x} at position "
            f"{column:,} of the line); convert it: if it is Latin-1, with iconv -f latin1 -t utf-8"
        ) from None

"""Reading of text files as lines. Only a newline, after an optional carriage return, ends a line."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path

GZIP = b"\x1f\x8b"
"""The first bytes of a compressed file."""


class DataError(ValueError):
    """Data is missing, or does not fit the settings; the message is one line."""


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file, plain or compressed by gzip; raises OSError, and DataError as `lines_of` does."""
    content = path.read_bytes()
    if content.startswith(GZIP):
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} cannot be unpacked: {error}; copy it once more") from error
    return lines_of(content, str(path))


def lines_of(content: bytes, where: str) -> list[str]:
    """Decode the lines of UTF-8 text, without its byte order mark; DataError names a line in another encoding."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{where} cannot be read: it is UTF-16; convert it, as with iconv -f utf-16 -t utf-8")
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise DataError(
            f"{where} cannot be read: line {line:,} is not UTF-8 text (byte {content[error.start]:#04x} at position "
            f"{column:,} of the line); convert it: if it is Latin-1, with iconv -f latin1 -t utf-8"
        ) from None
    if not text:
        return []
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")

"""Text files as lines. Only a newline ends one (with or without a carriage return before it), nothing else does."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path

GZIP = b"\x1f\x8b"
"""How a compressed file begins."""


class DataError(ValueError):
    """Data that is missing or not what the settings say it is; the message is one line."""


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, plain or compressed by gzip. OSError where it cannot be opened, else as `lines_of`."""
    content = path.read_bytes()
    if content.startswith(GZIP):
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} cannot be unpacked: {error}; copy it once more") from error
    return lines_of(content, str(path))


def lines_of(content: bytes, where: str) -> list[str]:
    """The lines of UTF-8 text, without a byte order mark; DataError names the line that is in another encoding."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{where} cannot be read: it is UTF-16; convert it, as with iconv -f utf-16 -t utf-8")
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        place = error.start - content.rfind(b"\n", 0, error.start)
        raise DataError(
            f"{where} cannot be read: line {line:,} is not UTF-8 text (byte {content[error.start]:#04x} at place "
            f"{place:,} of the line); convert it: if it is Latin-1, with iconv -f latin1 -t utf-8"
        ) from None
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []

"""Reading of text files as lines. Only a newline, after an optional carriage return, ends a line."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

from recipes.translation.errors import DataError

GZIP = b"\x1f\x8b"
"""The first bytes of a compressed file."""


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file as `each_line` does."""
    return list(each_line(path))


def lines_of(content: bytes, where: str) -> list[str]:
    """Return the lines of a file's bytes as `each_line` does; errors name it as `where`."""
    return list(_lines_in(io.BufferedReader(io.BytesIO(content)), where))


Hashes = dict[Path, tuple[int, bytes]]
"""The size and the SHA-256 of files."""


def hashed(file: io.BufferedReader) -> tuple[int, bytes]:
    """Return the size and the SHA-256 of an open file, which is then at its start again."""
    digest = hashlib.file_digest(file, "sha256").digest()
    size = file.tell()
    file.seek(0)
    return size, digest


def each_line(path: Path, hashes: Hashes | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 text file, plain or compressed by gzip, without its byte order mark.

    The file is never whole in memory; `hashes` gets that of the very file that is read. Raises OSError, and DataError
    for a damaged file or text in another encoding, whose line it names.
    """
    with path.open("rb") as file:
        if hashes is not None and path not in hashes:
            hashes[path] = hashed(file)
        yield from _lines_in(file, str(path))


def _lines_in(plain: io.BufferedReader, where: str) -> Iterator[str]:
    file: io.BufferedReader | gzip.GzipFile = plain
    if plain.peek(len(GZIP)).startswith(GZIP):
        file = gzip.GzipFile(fileobj=plain)
    try:
        for number, line in enumerate(file, start=1):
            if number == 1:
                if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise DataError(
                        f"{where} cannot be read: it is UTF-16; convert it, as with iconv -f utf-16 -t utf-8"
                    )
                line = line.removeprefix(codecs.BOM_UTF8)
            text = _decoded(line, where, number)
            if number == 1 and "\n" not in text and "\r" in text.rstrip("\r"):
                raise DataError(f"{where} has carriage returns as its line ends; convert it, as with tr '\\r' '\\n'")
            if text:
                yield text.removesuffix("\r\n").removesuffix("\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{where} cannot be unpacked: {error}; copy it again") from error


def _decoded(line: bytes, where: str, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} cannot be read: line {number:,} is not UTF-8 text (byte {line[error.start]:#04x} at position "
            f"{error.start + 1:,} of the line); convert it: if it is Latin-1, with iconv -f latin1 -t utf-8"
        ) from None

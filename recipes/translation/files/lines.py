"""Reading of text files as lines. Only a newline, after an optional carriage return, ends a line."""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from recipes.translation.errors import DataError


def is_plain(start: bytes) -> bool:
    """Return whether a file that begins with these bytes may be plain UTF-8 text: not UTF-16, and not compressed."""
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, *(each.magic for each in COMPRESSIONS))
    return not start.startswith(marks)


def _by_pyarrow(file: io.BufferedReader, codec: str) -> Any:
    """Unpack what Python itself cannot; pyarrow comes with `datasets`."""
    import pyarrow

    return pyarrow.CompressedInputStream(file, codec)


PACKED = 1 << 16
"""How many compressed bytes are read at a time."""


class _Streams(io.RawIOBase):
    """The text of a file that consists of one or several compressed streams.

    Python's own `LZMAFile` and `BZ2File` mistake a damaged later stream for the end of the file.
    """

    def __init__(self, file: io.BufferedReader, decompressor: Callable[[], Any]) -> None:
        super().__init__()
        self._file = file
        self._decompressor = decompressor
        self._stream = decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = b""
        while not found:
            packed = b""
            if self._stream.eof:
                packed = self._stream.unused_data
                # Zeros between streams, and at the end, are padding
                while not (packed := packed.lstrip(b"\0")):
                    packed = self._file.read(PACKED)
                    if not packed:
                        return 0
                self._stream = self._decompressor()
            elif self._stream.needs_input:
                packed = self._file.read(PACKED)
                if not packed:
                    raise EOFError("it ends within a compressed stream")
            found = self._stream.decompress(packed, len(buffer))
        buffer[: len(found)] = found
        return len(found)


class Compression(NamedTuple):
    """A compression format: the end of file names, the first bytes, and what unpacks it."""

    suffix: str
    magic: bytes
    opened: Callable[[io.BufferedReader], Any] | None = None
    """Unpacks while reading; None for formats that hold several files or cannot be unpacked here."""
    way: str = ""
    """The command that unpacks such a file, if it cannot be read here."""


COMPRESSIONS = (
    Compression(".gz", b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    Compression(".xz", b"\xfd7zXZ\x00", lambda file: _Streams(file, lzma.LZMADecompressor)),
    Compression(".bz2", b"BZh", lambda file: _Streams(file, bz2.BZ2Decompressor)),
    Compression(".zst", b"\x28\xb5\x2f\xfd", lambda file: _by_pyarrow(file, "zstd")),
    # A skippable frame, which pzstd starts with
    Compression(".zst", b"\x50\x2a\x4d\x18", lambda file: _by_pyarrow(file, "zstd")),
    Compression(".lz4", b"\x04\x22\x4d\x18", lambda file: _by_pyarrow(file, "lz4")),
    Compression(".zip", b"PK\x03\x04", way="unzip"),
    Compression(".7z", b"7z\xbc\xaf\x27\x1c", way="7z x"),
    Compression(".rar", b"Rar!", way="unrar x"),
)
TAR = (257, b"ustar")
"""The position and bytes of a tar archive's signature."""


def without_compression(name: str) -> str:
    """Return a file's name without the ending that says how it is compressed."""
    for each in COMPRESSIONS:
        if name.lower().endswith(each.suffix):
            return name[: -len(each.suffix)]
    return name


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file as `each_line` does."""
    return list(each_line(path))


def lines_of(content: bytes, where: str, first: int = 1) -> list[str]:
    """Return the lines in a file's bytes as `each_line` does; the first of them is line `first` of `where`."""
    with _explain_errors(where):
        file: io.BufferedIOBase = io.BytesIO(content)
        if first == 1:
            # Later lines may start with any bytes
            file = _unpack(io.BufferedReader(io.BytesIO(content)), where)
        return list(_lines_in(file, where, first))


Hashes = dict[Path, tuple[int, bytes]]
"""The size and the SHA-256 of files."""


def hash_file(file: io.BufferedReader) -> tuple[int, bytes]:
    """Return the size and the SHA-256 of an open file, and rewind it to its start."""
    digest = hashlib.file_digest(file, "sha256").digest()
    size = file.tell()
    file.seek(0)
    return size, digest


def each_line(path: Path, hashes: Hashes | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 text file, plain or compressed (see COMPRESSIONS), without its byte order mark.

    The file is never in memory as a whole; `hashes` receives the hash of the very file that is read. Raises OSError,
    and DataError for a damaged file, for text in another encoding, naming the line, and for a file whose hash differs
    from the one in `hashes`.
    """
    with open_unpacked(path, hashes) as file:
        yield from _lines_in(file, str(path))


@contextmanager
def open_unpacked(path: Path, hashes: Hashes | None = None) -> Iterator[io.BufferedIOBase]:
    """Open a file, plain or compressed, and add its hash to `hashes`; explain errors in unpacking it."""
    with path.open("rb") as file:
        if hashes is not None and hashes.setdefault(path, found := hash_file(file)) != found:
            raise DataError(f"{path} has changed since this run started reading it: start again")
        with _explain_errors(str(path)):
            yield _unpack(file, str(path))


@contextmanager
def _explain_errors(where: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if getattr(error, "errno", None) is not None:  # from the system, not from damaged content
            raise
        raise DataError(f"{where} cannot be unpacked: {error}; copy it again") from error


def _unpack(plain: io.BufferedReader, where: str) -> io.BufferedIOBase:
    """Return a file's unpacked contents; raise DataError for an archive or a compression that cannot be read."""
    start = plain.peek(8)
    packed = next((each for each in COMPRESSIONS if start.startswith(each.magic)), None)
    if packed is None:
        found: io.BufferedIOBase = plain
    elif packed.opened is None:
        raise DataError(f"{where} is a {packed.suffix} file: unpack it first, with {packed.way} {where}")
    else:
        found = io.BufferedReader(packed.opened(plain))
    place, mark = TAR
    if found.peek(place + len(mark))[place:].startswith(mark):  # type: ignore[attr-defined]
        raise DataError(f"{where} is a tar archive: unpack it first, with tar -xf {where}, and name its files")
    return found


def _lines_in(file: io.BufferedIOBase, where: str, first: int = 1) -> Iterator[str]:
    for number, line in enumerate(file, start=first):
        if number == 1:
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(f"{where} cannot be read: it is UTF-16; convert it with iconv -f utf-16 -t utf-8")
            line = line.removeprefix(codecs.BOM_UTF8)
        text = _decode_line(line, where, number)
        if number == 1 and "\n" not in text and "\r" in text.rstrip("\r"):
            raise DataError(
                f"{where} has carriage returns as line endings; convert it, for example with tr '\\r' '\\n'"
            )
        if text:
            yield text.removesuffix("\r\n").removesuffix("\n")


def _decode_line(line: bytes, where: str, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} cannot be read: line {number:,} is not UTF-8 text (byte {line[error.start]:#04x} at position "
            f"{error.start + 1:,} of the line); convert it: if it is Latin-1, with iconv -f latin1 -t utf-8"
        ) from None

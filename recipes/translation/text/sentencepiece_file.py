"""The file of a sentencepiece model, taken apart and put together again.

It is a message of Protocol Buffers, `ModelProto` in sentencepiece_model.proto of
https://github.com/google/sentencepiece: the pieces are its field 1, the trainer's settings field 2, and from 200 up
fields are free for others. Only what is needed of the wire format is here
(https://protobuf.dev/programming-guides/encoding), so that no compiler of such messages has to be installed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

PIECES, TRAINER, NORMALIZER, OURS = 1, 2, 3, 200
"""The fields of a model that are read or written here. The last one has our own notes, as JSON."""
MODEL_TYPE, UNK_SURFACE, UNK, BOS, EOS, PAD = 3, 44, 45, 46, 47, 48
"""The fields of the trainer's settings, likewise: what an unknown piece is decoded as, and the names of the special
pieces."""


NORMALIZER_NAME, CHARSMAP = 1, 2
"""The fields of the normaliser's settings: a name, and the rules, compiled by sentencepiece."""
NUMBERS = {"unigram": 1, "bpe": 2, "word": 3, "char": 4}
"""The values of MODEL_TYPE."""


class Kind(IntEnum):
    """What a piece is; the numbers are the format's own."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Never found in a text, and decoded as nothing."""
    USER_DEFINED = 4
    """Always one piece, wherever it occurs."""
    UNUSED = 5
    """Never found in a text."""
    BYTE = 6


class Piece(NamedTuple):
    """A subword."""

    text: str
    score: float = 0.0
    kind: Kind = Kind.NORMAL


class Field(NamedTuple):
    """A field of a message."""

    number: int
    value: bytes | int
    raw: bytes
    """The whole field as it is in the message."""


def fields_of(message: bytes) -> Iterator[Field]:
    """Yield the fields of a message in order; raise ValueError where it is not one."""
    at = 0
    while at < len(message):
        start = at
        key, at = _read_varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _read_varint(message, at)
            yield Field(key >> 3, value, message[start:at])
            continue
        if wire == 2:
            size, at = _read_varint(message, at)
        elif wire in (1, 5):
            size = {1: 8, 5: 4}[wire]
        else:
            raise ValueError(f"byte {start} is not a field of wire type 0, 1, 2 or 5")
        if at + size > len(message):
            raise ValueError(f"the field at byte {start} ends after the message")
        yield Field(key >> 3, message[at : at + size], message[start : at + size])
        at += size


def pieces_of(model: bytes) -> list[Piece]:
    """Return the pieces of a model."""
    return [_piece(field.value) for field in fields_of(model) if field.number == PIECES and type(field.value) is bytes]


def kind_of_model(model: bytes) -> str:
    """Return unigram, bpe, word or char: how the model divides words."""
    number = 1
    for field in fields_of(_joined(model, TRAINER)):
        if field.number == MODEL_TYPE and isinstance(field.value, int):
            number = field.value
    return {value: name for name, value in NUMBERS.items()}.get(number, str(number))


def notes_of(model: bytes) -> Mapping[str, Any]:
    """Return the notes that `with_pieces` has written; none if there are none."""
    found = _joined(model, OURS)
    if not found:
        return {}
    notes: dict[str, Any] = json.loads(found)
    return notes


def with_pieces(model: bytes, pieces: Sequence[Piece], names: Mapping[int, str], notes: Mapping[str, object]) -> bytes:
    """Return the model with other pieces, all its other settings, and our notes.

    `names` are those of the special pieces, by UNK, BOS, EOS and PAD. An unknown piece is decoded as nothing.
    """
    kept = [field.raw for field in fields_of(model) if field.number not in (PIECES, OURS)]
    # A field that is there twice counts the last time, and messages that are there twice are merged
    trainer = b"".join(_field(number, text.encode()) for number, text in {**names, UNK_SURFACE: ""}.items())
    own = [_field(TRAINER, trainer), _field(OURS, json.dumps(notes, sort_keys=True).encode())]
    return b"".join([*(_field(PIECES, _encoded(piece)) for piece in pieces), *kept, *own])


def new_model(kind: str, pieces: Sequence[Piece], charsmap: bytes) -> bytes:
    """Return a model of these pieces and rules of normalisation, all other settings as sentencepiece has them."""
    trainer = _varint(MODEL_TYPE << 3) + _varint(NUMBERS[kind])
    normalizer = _field(NORMALIZER_NAME, b"given") + _field(CHARSMAP, charsmap)
    own = [_field(TRAINER, trainer), _field(NORMALIZER, normalizer)]
    return b"".join([*(_field(PIECES, _encoded(piece)) for piece in pieces), *own])


def _joined(model: bytes, number: int) -> bytes:
    return b"".join(
        field.value for field in fields_of(model) if field.number == number and isinstance(field.value, bytes)
    )


def _piece(message: bytes) -> Piece:
    piece = Piece("")
    for field in fields_of(message):
        if field.number == 1 and isinstance(field.value, bytes):
            piece = piece._replace(text=field.value.decode())
        elif field.number == 2 and isinstance(field.value, bytes):
            piece = piece._replace(score=struct.unpack("<f", field.value)[0])
        elif field.number == 3 and isinstance(field.value, int):
            piece = piece._replace(kind=Kind(field.value))
    return piece


def _encoded(piece: Piece) -> bytes:
    score = _varint(2 << 3 | 5) + struct.pack("<f", piece.score)
    return _field(1, piece.text.encode()) + score + _varint(3 << 3) + _varint(piece.kind)


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    """Return a number in groups of 7 bits, the lowest first; all but the last have the high bit."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 64, 7):
        if at >= len(message):
            raise ValueError("the message ends in the middle of a number")
        byte = message[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise ValueError(f"byte {at} is not a 64-bit number")

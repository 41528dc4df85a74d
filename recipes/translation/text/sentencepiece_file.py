"""The file of a sentencepiece model, parsed and reassembled.

It is a Protocol Buffers message, whose classes come with sentencepiece:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. Its fields from 200 up are free for
extensions; 200 has our own notes, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

from recipes.translation.files.json_fields import parse_json

Piece: TypeAlias = ModelProto.SentencePiece
"""A subword: its text, `piece`, its `score`, and its `type`: NORMAL, UNKNOWN, CONTROL (never found in a text, and
decoded to nothing), USER_DEFINED (always one piece, wherever it occurs), UNUSED (never found in a text) or BYTE."""


def _notes_field() -> Any:
    file = FileDescriptorProto(name="seqpar_notes.proto", package="seqpar", dependency=["sentencepiece_model.proto"])
    file.extension.add(
        name="notes",
        number=200,
        extendee=".sentencepiece.ModelProto",
        type=FieldDescriptorProto.TYPE_BYTES,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )
    Default().AddSerializedFile(file.SerializeToString())
    return Default().FindExtensionByName("seqpar.notes")


NOTES = _notes_field()
"""The field with our own notes."""


def model_of(content: bytes) -> ModelProto:
    """Return the model in a file; raise ValueError if there is none."""
    try:
        return ModelProto.FromString(content)
    except DecodeError as error:
        raise ValueError(str(error)) from None


def kind_of_model(model: ModelProto) -> str:
    """Return unigram, bpe, word or char: how the model splits words."""
    return str(TrainerSpec.ModelType.Name(model.trainer_spec.model_type)).lower()


def notes_of(content: bytes) -> Mapping[str, Any]:
    """Return the notes that `with_pieces` wrote; empty if there are none."""
    found = model_of(content).Extensions[NOTES]
    if not found:
        return {}
    notes: dict[str, Any] = parse_json(found)
    return notes


def with_pieces(
    model: ModelProto, pieces: Sequence[Piece], names: Mapping[str, str], notes: Mapping[str, object]
) -> bytes:
    """Return the file of the model with other pieces, otherwise the same settings, and our notes.

    `names` are the names of the special pieces, keyed by pad, unk, bos and eos. An unknown piece is decoded to nothing.
    """
    changed = ModelProto()
    changed.CopyFrom(model)
    del changed.pieces[:]
    changed.pieces.extend(pieces)
    for special, name in names.items():
        setattr(changed.trainer_spec, f"{special}_piece", name)
    changed.trainer_spec.unk_surface = ""
    changed.Extensions[NOTES] = json.dumps(notes, sort_keys=True).encode()
    content: bytes = changed.SerializeToString()
    return content

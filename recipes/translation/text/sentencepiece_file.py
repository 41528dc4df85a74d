"""The file of a sentencepiece model: parsed, reassembled, and its rules for normalising text before it is split.

It is a Protocol Buffers message, whose classes come with sentencepiece:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. Its fields from 200 up are free for
extensions; 200 has our own notes, as JSON. Every program that reads the file, CTranslate2 and transformers included,
follows the same rules of normalisation.
"""

from __future__ import annotations

import functools
import itertools
import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import sentencepiece
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceNormalizer
from sentencepiece.sentencepiece_model_pb2 import ModelProto, NormalizerSpec, TrainerSpec

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


SENTENCEPIECE = {"nfc": "nfc", "nfkc": "nmt_nfkc", "none": "identity"}
"""What sentencepiece calls the rules in NORMALIZATIONS; it has none named nfc."""


@functools.cache
def rules_of(name: str) -> NormalizerSpec:
    """Return the rules for a row of NORMALIZATIONS, in the form of a model's file."""
    named = SENTENCEPIECE[name]
    sentencepiece.set_min_log_level(2)  # it would print how large the rules are
    normalizer = (
        SentencePieceNormalizer(norm_map=list(nfc_rules().items()))
        if name == "nfc"
        else SentencePieceNormalizer(rule_name=named)
    )
    found = NormalizerSpec.FromString(normalizer.serialized_normalizer_spec())
    return NormalizerSpec(name=named, precompiled_charsmap=found.precompiled_charsmap)


def with_rules(content: bytes, name: str) -> bytes:
    """Return a model's file with different rules."""
    model = model_of(content)
    model.normalizer_spec.MergeFrom(rules_of(name))
    changed: bytes = model.SerializeToString()
    return changed


def setting_of(rules: str) -> str:
    """Return the name in NORMALIZATIONS of what sentencepiece calls `rules`, or `rules` if there is none."""
    names = {theirs: ours for ours, theirs in SENTENCEPIECE.items()}
    return names.get(rules, rules or "rules without a name")


def compose(text: str, rules: str) -> str:
    """Return text in the form that the rules that sentencepiece calls `rules` expect.

    They replace sequences of characters, and cannot reorder accents that compose with nothing as NFC does.
    """
    return unicodedata.normalize("NFC", text) if rules == SENTENCEPIECE["nfc"] else text


def compose_all(texts: list[str], rules: str) -> list[str]:
    """Apply `compose` to each of the texts."""
    # Every part of a text in NFC is in NFC, and many texts are checked faster together than one by one
    if rules != SENTENCEPIECE["nfc"] or unicodedata.is_normalized("NFC", " ".join(texts)):
        return texts
    return [compose(text, rules) for text in texts]


def normalize(text: str, name: str) -> str:
    """Normalise text by a row of NORMALIZATIONS, before there is a model."""
    found: str = _normalizer(name).normalize(compose(text, SENTENCEPIECE[name]))
    return found


@functools.cache
def _normalizer(name: str) -> SentencePieceNormalizer:
    return SentencePieceNormalizer(normalizer_spec=rules_of(name), add_dummy_prefix=False, escape_whitespaces=False)


def nfc_rules() -> dict[str, str]:
    """Return NFC's replacements; control characters are removed, or become blanks if they end a line or a column."""
    found: dict[str, str] = {}
    for character in map(chr, itertools.chain(range(1, 0xD800), range(0xE000, 0x110000))):
        # A character that cannot be decomposed, as all but one in eighty, has no other spelling
        if not unicodedata.is_normalized("NFD", character):
            found |= _spellings(character)
    for control in map(chr, [*range(1, 0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]):
        found[control] = " " if control.isspace() else ""
    return found


def _spellings(character: str) -> dict[str, str]:
    """Return every spelling of a character that NFC changes, with what it becomes."""
    whole = unicodedata.normalize("NFC", character)
    base, *accents = list(unicodedata.normalize("NFD", character))
    found = {} if whole == character else {character: whole}
    for order in set(itertools.permutations(accents)) if accents else ():
        apart = base + "".join(order)
        if unicodedata.normalize("NFC", apart) == whole:
            ways = {unicodedata.normalize("NFC", apart[:end]) + apart[end:] for end in range(1, len(apart) + 1)}
            found |= dict.fromkeys(ways - {whole}, whole)
    return found

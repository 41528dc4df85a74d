"""The subwords of a published model as sentencepiece models with the ids that every model has here.

Such a model has sentencepiece models and, separately, ids for their pieces. Here the sentencepiece model itself
determines the ids. So the same pieces are written in the order of our ids: padding, the unknown subword, the start and
the end symbol first, then all others in their original order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sentencepiece.sentencepiece_model_pb2 import ModelProto

from recipes.translation.errors import CheckpointError
from recipes.translation.text.segmentations import BLANK
from recipes.translation.text.sentencepiece_file import Piece, kind_of_model


class Vocabulary(NamedTuple):
    """The subwords of a published model in one language."""

    model: ModelProto
    """Splits a text into pieces."""
    ids: Mapping[str, int]
    """The id of every piece and special subword."""
    special: Mapping[str, str]
    """The names of pad, unk, bos and eos."""
    size: int
    """Number of rows in its embedding, some of which may belong to no piece."""
    where: str
    """The folder."""
    tags: frozenset[str] = frozenset()
    """Pieces that are not text, such as language tags."""


def order_of(vocabulary: Vocabulary) -> list[int]:
    """Return the published ids in the order of ours; raise CheckpointError for ids that contradict the embedding."""
    ids, size = vocabulary.ids, vocabulary.size
    names = {each: name for name, each in ids.items()}
    for name, each in ids.items():
        if type(each) is not int or not 0 <= each < size or names[each] != name:
            raise CheckpointError(
                f"the vocabulary of {vocabulary.where}: {name} has id {each!r}: it must be its own, and one of the "
                f"{size:,} rows of the model's embedding"
            )
    if lacking := sorted({vocabulary.special[each] for each in ("pad", "unk", "eos")} - ids.keys()):
        raise CheckpointError(f"the vocabulary of {vocabulary.where} has no {lacking[0]}, which every model needs")
    pad, unk, eos = (ids[vocabulary.special[each]] for each in ("pad", "unk", "eos"))
    # If the model has no start symbol, any subword may get its id: the decoder then starts with a different token
    bos = ids.get(vocabulary.special["bos"], next(each for each in range(size) if each not in (pad, unk, eos)))
    first = [pad, unk, bos, eos]
    return [*first, *(each for each in range(size) if each not in first)]


def pieces_in_order(vocabulary: Vocabulary, order: Sequence[int]) -> list[Piece]:
    """Return the pieces of a sentencepiece model by our ids, followed by those that the vocabulary does not have.

    A word is split as before: pieces that only the vocabulary has, such as those of the other language, are never found
    in a text; pieces that only the sentencepiece model has are found, and then unknown.

    Raises CheckpointError for a bpe model without some of the vocabulary's pieces: bpe would merge them.
    """
    model = vocabulary.model
    own = {piece.piece: piece for piece in model.pieces}
    names = {each: name for name, each in vocabulary.ids.items()}
    found = [_piece(names.get(each), each, own, vocabulary) for each in order]
    absent = [piece.piece for piece in found if piece.type == Piece.UNUSED and piece.piece not in own]
    if absent and kind_of_model(model) != "unigram":
        raise CheckpointError(
            f"the vocabulary of {vocabulary.where} has {len(absent):,} pieces that a sentencepiece model there does "
            f"not have, such as {absent[0]!r}; a unigram model can be imported all the same, but it is a "
            f"{kind_of_model(model)} one"
        )
    never = (Piece.CONTROL, Piece.UNKNOWN)
    # A tag is >>fra<< in the vocabulary, and has the blank before it in a file that was exported here
    there = {*vocabulary.ids, *(piece.piece for piece in found)}
    return [*found, *(piece for name, piece in own.items() if name not in there and piece.type not in never)]


def _piece(name: str | None, number: int, own: Mapping[str, Piece], vocabulary: Vocabulary) -> Piece:
    if name is None:
        return Piece(piece=f"<row {number}>", type=Piece.CONTROL)
    if name == vocabulary.special["unk"]:
        return Piece(piece=name, type=Piece.UNKNOWN)
    if name in {*vocabulary.special.values(), *vocabulary.tags} or re.fullmatch(r"madeupword\d+", name):
        return Piece(piece=name, type=Piece.CONTROL)
    if re.fullmatch(">>.+<<", name):  # a target-language tag in Marian's models, a word in front of the sentence
        return Piece(piece=BLANK + name, type=Piece.USER_DEFINED)
    return own.get(name, Piece(piece=name, type=Piece.UNUSED))

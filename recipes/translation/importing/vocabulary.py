"""The subwords of a published model as sentencepiece models with the ids that every model has here.

Such a model has sentencepiece models and, beside them, its own ids of their pieces. Here a sentencepiece model knows
the ids itself. So the same pieces are written in the order of our ids: padding, the unknown subword, the start and the
end symbol first, then all others as they were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from recipes.translation.errors import CheckpointError
from recipes.translation.text.segmentations import BLANK
from recipes.translation.text.sentencepiece_file import BOS, EOS, PAD, UNK, Kind, Piece, kind_of_model, pieces_of


class Special(NamedTuple):
    """The names of the special subwords."""

    pad: str = "<pad>"
    unk: str = "<unk>"
    bos: str = "<s>"
    eos: str = "</s>"


class Vocabulary(NamedTuple):
    """The ids that a published model has, and where they come from."""

    ids: Mapping[str, int]
    """Of every piece and special subword."""
    special: Special
    size: int
    """Rows of its embedding, some of which may belong to no piece."""
    tags: frozenset[str] = frozenset()
    """Pieces that are not text, such as the tags of languages."""
    where: str = "vocab.json"


def order_of(vocabulary: Vocabulary) -> list[int]:
    """Return the ids there, in the order of ours."""
    check(vocabulary)
    ids, special = vocabulary.ids, vocabulary.special
    first = [ids[special.pad], ids[special.unk]]
    last = [ids[special.eos]]
    rest = [each for each in range(vocabulary.size) if each not in {*first, *last}]
    # Without a start symbol of its own any subword may have its id: the decoder then starts with another one
    bos = ids.get(special.bos, rest[0])
    rest.remove(bos)
    return [*first, bos, *last, *rest]


def check(vocabulary: Vocabulary) -> None:
    """Raise CheckpointError for a vocabulary that lacks a special subword, or does not fit its embedding."""
    ids, special, where = vocabulary.ids, vocabulary.special, vocabulary.where
    for name in (special.pad, special.unk, special.eos):
        if name not in ids:
            raise CheckpointError(f"{where} has no {name}, which every model needs")
    if len(set(ids.values())) != len(ids):
        raise CheckpointError(f"{where} has {len(ids):,} subwords with {len(set(ids.values())):,} different ids")
    outside = [name for name, each in ids.items() if not 0 <= each < vocabulary.size]
    if outside:
        raise CheckpointError(
            f"{where}: {outside[0]} has id {ids[outside[0]]:,}, outside the {vocabulary.size:,} rows of the model's "
            "embedding"
        )


def pieces_in_order(model: bytes, vocabulary: Vocabulary, order: Sequence[int], where: str) -> list[Piece]:
    """Return the pieces of a sentencepiece model by our ids, and after them those that the vocabulary does not have.

    A word is divided as before: pieces that only the vocabulary has, such as those of the other language, are never
    found in a text; what only the sentencepiece model has is found and then unknown.

    Raises CheckpointError for a bpe model without some of the vocabulary's pieces: bpe would merge them.
    """
    own = {piece.text: piece for piece in pieces_of(model)}
    names = {each: name for name, each in vocabulary.ids.items()}
    found = [_piece(names.get(each), each, own, vocabulary) for each in order]
    absent = [piece.text for piece in found if piece.kind == Kind.UNUSED and piece.text not in own]
    if absent and kind_of_model(model) != "unigram":
        raise CheckpointError(
            f"{vocabulary.where} has {len(absent):,} pieces that {where} does not have, such as {absent[0]!r}; "
            f"a unigram model can be imported all the same, but it is a {kind_of_model(model)} one"
        )
    never = (Kind.CONTROL, Kind.UNKNOWN)
    return [*found, *(piece for name, piece in own.items() if name not in vocabulary.ids and piece.kind not in never)]


def _piece(name: str | None, number: int, own: Mapping[str, Piece], vocabulary: Vocabulary) -> Piece:
    special = vocabulary.special
    if name is None:
        return Piece(f"<row {number}>", kind=Kind.CONTROL)
    if name == special.unk:
        return Piece(name, kind=Kind.UNKNOWN)
    if name in special or name in vocabulary.tags or re.fullmatch(r"madeupword\d+", name):
        return Piece(name, kind=Kind.CONTROL)
    if re.fullmatch(">>.+<<", name):  # the tag of a target language in Marian's models, a word before the sentence
        return Piece(BLANK + name, kind=Kind.USER_DEFINED)
    return own.get(name, Piece(name, kind=Kind.UNUSED))


def names_of(special: Special) -> dict[int, str]:
    """Return the names of the special pieces by their fields in the file of a sentencepiece model."""
    return {PAD: special.pad, UNK: special.unk, BOS: special.bos, EOS: special.eos}

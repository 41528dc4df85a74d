"""A published model's tokenizer, turned into sentencepiece models with our ids and the symbols of a run's sentences.

Such a model has sentencepiece models and, separately, ids for their pieces. Here the sentencepiece model itself
determines the ids. So the same pieces are written in the order of our ids: padding, the unknown subword, the start and
the end symbol first, then all others in their original order.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from transformers import (
    AutoTokenizer,
    M2M100Tokenizer,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
)

from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.importing.folder import OWN, reading
from recipes.translation.text.segmentations import BLANK
from recipes.translation.text.sentencepiece_file import Piece, kind_of_model, model_of, with_pieces
from recipes.translation.text.subwords import EOS, Subwords, Symbols
from recipes.translation.text.tokenizer_json import sentencepiece_model

SPM = "sentencepiece.bpe.model"


class Tokenizer(NamedTuple):
    """What a published tokenizer becomes."""

    source: Subwords
    target: Subwords
    source_ids: list[int]
    """The published ids in the order of ours."""
    target_ids: list[int]
    languages: tuple[str, str]


def our_tokenizer(folder: Path, config: Any, start: int | None, languages: tuple[str, str]) -> Tokenizer:
    """Return what the tokenizer in a folder becomes.

    `start` is the id that the decoder starts with, and `languages` are those given by the user, or empty.

    Raises CheckpointError if the files contradict each other, and ConfigError for a language that does not exist.
    """
    with reading("the tokenizer", folder):
        theirs = AutoTokenizer.from_pretrained(folder, **OWN)
    tags: dict[str, str] = {}
    if isinstance(theirs, MarianTokenizer):
        source, target = _marian(theirs, folder, config)
        named = (languages[0] or theirs.source_lang or "en", languages[1] or theirs.target_lang or "de")
    elif isinstance(theirs, (M2M100Tokenizer, NllbTokenizer, MBartTokenizer, MBart50Tokenizer)):
        source, tags = _multilingual(theirs, folder, config)
        target = source
        named = (_check_language(languages[0], "source", tags), _check_language(languages[1], "target", tags))
        theirs.src_lang, theirs.tgt_lang = named
    else:
        raise CheckpointError(f"{folder}: its tokenizer is a {type(theirs).__name__}, not that of one of these models")
    _check_symbols(config, target)
    source_ids = order_of(source)
    target_ids = order_of(target)
    first = _start(start, target, tags, named[1])
    with reading("the tokenizer", folder):
        # An empty sentence has only what surrounds any sentence: the language tag and the end symbol
        around = [source_ids.index(each) for each in theirs("").input_ids]
        end = around.index(EOS)
        symbols = Symbols(tuple(around[:end]), tuple(around[end:]), tuple(target_ids.index(each) for each in first))
        sides = (_renumber(source, source_ids, symbols), _renumber(target, target_ids, symbols))
    return Tokenizer(*sides, source_ids, target_ids, named)


def _check_symbols(config: Any, vocabulary: Vocabulary) -> None:
    """Raise CheckpointError if config.json and the tokenizer disagree on the id of padding or of the end symbol."""
    for key, name in (("pad_token_id", vocabulary.special["pad"]), ("eos_token_id", vocabulary.special["eos"])):
        given = getattr(config, key)
        if given is not None and given != vocabulary.ids.get(name, given):
            raise CheckpointError(
                f"config.json: {key} is {given}, and in {vocabulary.where} {name} is {vocabulary.ids[name]}: one of "
                "the two files belongs to another model"
            )


def _start(start: Any, target: Vocabulary, tags: Mapping[str, str], language: str) -> list[int]:
    """Return the ids before a target: what the decoder starts with, then the language tag, unless they are the same."""
    tag = [target.ids[tags[language]]] if tags else []
    if start is None and tag:  # mBART, which starts with the language
        return tag
    if start not in range(target.size):
        raise CheckpointError(f"{target.where}: decoder_start_token_id is {start!r}, not the id of a subword")
    other = [name for name, each in tags.items() if target.ids[each] == start and name != language]
    if other:
        raise ConfigError(
            f"--target: this model's decoder starts with {other[0]}, not with {language}: give {other[0]}"
        )
    return tag if [start] == tag else [start, *tag]


def _renumber(vocabulary: Vocabulary, order: list[int], symbols: Symbols) -> Subwords:
    notes = {**symbols._asdict(), "size": len(order)}
    model = with_pieces(vocabulary.model, pieces_in_order(vocabulary, order), vocabulary.special, notes)
    return Subwords(sentencepiece.SentencePieceProcessor(model_proto=model))


def _marian(theirs: Any, folder: Path, config: Any) -> tuple[Vocabulary, Vocabulary]:
    encoders = (theirs.encoder, theirs.target_encoder if theirs.separate_vocabs else theirs.encoder)
    sizes = (config.vocab_size, config.decoder_vocab_size)
    source, target = (
        Vocabulary(model_of(spm.serialized_model_proto()), ids, _special(theirs), size, str(folder))
        for spm, ids, size in zip((theirs.spm_source, theirs.spm_target), encoders, sizes, strict=True)
    )
    return source, target


def _multilingual(theirs: Any, folder: Path, config: Any) -> tuple[Vocabulary, dict[str, str]]:
    """Return the subwords that both languages share, and the tag of each language."""
    special = _special(theirs)
    if isinstance(theirs, M2M100Tokenizer):
        ids = {**theirs.encoder, **theirs.lang_token_to_id}
        tags = dict(theirs.lang_code_to_token)
        model = model_of(theirs.sp_model.serialized_model_proto())
    else:
        ids = theirs.get_vocab()
        added = theirs.get_added_vocab()
        tags = {name: name for name in added if name not in special.values() and not name.startswith("<")}
        with reading("the sentencepiece model", folder):
            if (folder / SPM).is_file():
                model = model_of((folder / SPM).read_bytes())
            else:
                model = sentencepiece_model(theirs.backend_tokenizer.to_str(), {*special.values(), *added})
    tokens = frozenset([*tags.values(), "<mask>"])
    return Vocabulary(model, ids, special, config.vocab_size, str(folder), tokens), tags


def _special(theirs: Any) -> dict[str, str]:
    """Return the names of the special subwords, with the usual one for any that the model lacks."""
    usual = {"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>"}
    return {each: getattr(theirs, f"{each}_token") or name for each, name in usual.items()}


def _check_language(language: str, side: str, tags: Mapping[str, str]) -> str:
    """Return a language that the model has; raise ConfigError for any other, and for none."""
    if language in tags:
        return language
    if not tags:
        raise CheckpointError("the tokenizer has no language tags among its added tokens: it belongs to another model")
    near = difflib.get_close_matches(language, tags, n=3) or list(tags)[:3]
    given = f"{language!r} is not a language of this model"
    if not language:
        given = "the model has several languages"
    raise ConfigError(f"--{side}: {given}: give one of its {len(tags)} languages, such as {', '.join(near)}")


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
                f"the vocabulary of {vocabulary.where}: {name} has id {each!r}: it must be unique, and one of the "
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

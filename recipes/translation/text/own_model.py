"""The user's own subwords: a sentencepiece model, a Hugging Face tokenizer.json, or a list of words.

Their pieces and normalisation rules stay as they are. The special pieces come first, as in every model here, and each
tag and symbol in the settings that is not among the pieces is added as a piece.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

from recipes.translation.errors import DataError
from recipes.translation.files.lines import read_lines
from recipes.translation.settings.data import KINDS
from recipes.translation.text.segmentations import BLANK
from recipes.translation.text.sentencepiece_file import Piece, model_of, rules_of
from recipes.translation.text.tokenizer_json import sentencepiece_model

SPECIAL = {
    "pad": ("<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
    "bos": ("<s>", "[BOS]", "<bos>"),
    "eos": ("</s>", "[EOS]", "<eos>"),
}
"""The special pieces in the order of their ids, with their names in a tokenizer.json or a list of words."""


def own_model(path: Path, kind: str, rule: str, added: Sequence[str]) -> bytes:
    """Return the model in a file with our ids, and with those of the pieces `added` that it lacks.

    With `kind` none the file is a list of words, one per line, most frequent first, where a count after a blank is not
    part of the word; or it is Marian's vocab.yml or .json, which has an id for each word. `rule` is the row of
    NORMALIZATIONS for such a list, which has no rules of its own.
    """
    try:
        if KINDS[kind].words:
            model = _words(path, rule)
        elif path.suffix == ".json":
            model = sentencepiece_model(path.read_text(encoding="utf-8"), set().union(*SPECIAL.values()))
        else:
            model = model_of(path.read_bytes())
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"subwords.model: {path} is not a {_expectation(kind, path)}: {error}") from None
    if not any(piece.type == Piece.NORMAL for piece in model.pieces):
        raise DataError(f"subwords.model: {path} is not a {_expectation(kind, path)}: it has no pieces")
    _check_blanks(model, path)
    return _with_our_ids(model, added)


def _check_blanks(model: ModelProto, path: Path) -> None:
    """Raise DataError unless every word starts with the mark of the blank before it, which separates words."""
    needed = (
        (model.normalizer_spec, "add_dummy_prefix", True),
        (model.trainer_spec, "treat_whitespace_as_suffix", False),
    )
    for options, name, usual in needed:
        if getattr(options, name) != usual:
            raise DataError(
                f"subwords.model: {path} has {name} {str(not usual).lower()}, so its words do not begin with "
                f"{BLANK}: make it with {name} {str(usual).lower()}, or leave subwords.model out"
            )


def _expectation(kind: str, path: Path) -> str:
    if KINDS[kind].words:
        return f"list of words, as subwords.kind {kind} expects it"
    return "tokenizer.json of pieces" if path.suffix == ".json" else "sentencepiece model"


def _words(path: Path, rule: str) -> ModelProto:
    if path.suffix in (".yml", ".yaml", ".json"):
        words = _by_id(path)
    else:
        words = list(dict.fromkeys(re.sub(r" \d+$", "", line).strip() for line in read_lines(path)))
    special = set().union(*SPECIAL.values(), [""])
    if broken := next((word for word in words if len(word.split()) > 1), None):
        raise ValueError(f"its line {broken!r} has several words")
    model = ModelProto()
    model.trainer_spec.model_type = TrainerSpec.WORD
    model.normalizer_spec.MergeFrom(rules_of(rule))
    pieces = [word for word in words if word not in special]
    model.pieces.extend(Piece(piece=BLANK + word, score=-rank) for rank, word in enumerate(pieces))
    return model


def _by_id(path: Path) -> list[str]:
    """Return the words in a file with "word: id" on each line, in the order of their ids; JSON is YAML, too."""
    try:
        # Every word exactly as written: YAML would turn 1 into a number, and null into nothing
        found = yaml.compose(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(found, yaml.MappingNode):
        raise TypeError("it has no word with an id, as in Hello: 3")
    words = [(word.value, number.value) for word, number in found.value]
    if odd := next((word for word, number in words if not (isinstance(number, str) and number.isdecimal())), None):
        raise ValueError(f"{odd!r} has no whole number as its id")
    for column, what in zip(zip(*words, strict=True), ("word", "id"), strict=False):
        if twice := next((each for each, count in Counter(column).items() if count > 1), None):
            raise ValueError(f"the {what} {twice!r} occurs twice")
    return [word for word, _ in sorted(words, key=lambda each: int(each[1]))]


def _with_our_ids(model: ModelProto, added: Sequence[str]) -> bytes:
    """Return the file of a model with the special pieces first, and the pieces `added` last."""
    if model.trainer_spec.model_type == TrainerSpec.WORD:
        # Such a model splits text only at blanks
        added = [BLANK + name.removeprefix(BLANK) for name in added]
    names = _special_names(model)
    own = {piece.piece: piece for piece in model.pieces}
    first = []
    for which, name in names.items():
        kind = Piece.UNKNOWN if which == "unk" else Piece.CONTROL
        first.append(Piece(piece=name, type=kind))
        setattr(model.trainer_spec, f"{which}_piece", name)
        setattr(model.trainer_spec, f"{which}_id", len(first) - 1)
    never = (Piece.CONTROL, Piece.UNKNOWN)
    others = [piece for name, piece in own.items() if name not in names.values() and piece.type not in never]
    for piece in others:
        if piece.piece in added:
            piece.type = Piece.USER_DEFINED
    new = [Piece(piece=name, type=Piece.USER_DEFINED) for name in added if name not in own]
    del model.pieces[:]
    model.pieces.extend([*first, *others, *new])
    model.trainer_spec.vocab_size = len(model.pieces)
    content: bytes = model.SerializeToString()
    return content


def _special_names(model: ModelProto) -> Mapping[str, str]:
    """Return the names of the special pieces: the model's own, or the usual ones if it has none."""
    pieces = {piece.piece for piece in model.pieces}
    unknown = [piece.piece for piece in model.pieces if piece.type == Piece.UNKNOWN]
    found = {}
    for which, usual in SPECIAL.items():
        own = getattr(model.trainer_spec, f"{which}_piece")
        found[which] = own if own in pieces else usual[0]
    if unknown:
        found["unk"] = unknown[0]
    return found

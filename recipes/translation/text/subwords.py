"""Sentencepiece subword models: train one on sentences in memory, and use it."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import sentencepiece

from recipes.translation.errors import ConfigError, DataError
from recipes.translation.files.json_fields import each, fields, is_whole, value
from recipes.translation.settings.config import SubwordConfig
from recipes.translation.settings.data import KINDS, NORMALIZATIONS
from recipes.translation.text.segmentations import BLANK, Sampler
from recipes.translation.text.sentencepiece_file import (
    Piece,
    compose,
    compose_all,
    kind_of_model,
    model_of,
    normalize,
    notes_of,
    setting_of,
    with_rules,
)

PAD, UNK, BOS, EOS = 0, 1, 2, 3
"""Ids of padding, the unknown subword, start and end symbols, the same in every model that `train_subwords` makes."""


class Symbols(NamedTuple):
    """What surrounds the subwords of a sentence in a model's input."""

    prefix: tuple[int, ...] = ()
    """Before a source: its language tag, in imported models that have such tags."""
    suffix: tuple[int, ...] = (EOS,)
    """After a source."""
    start: tuple[int, ...] = (BOS,)
    """Before a target, which ends with EOS."""

    @property
    def only_end(self) -> bool:
        """Return whether a source has only an end symbol besides its subwords."""
        return (self.prefix, self.suffix) == ((), (EOS,))

    def source(self, ids: Sequence[int]) -> list[int]:
        """Return what the encoder reads."""
        return [*self.prefix, *ids, *self.suffix]

    def target(self, ids: Sequence[int]) -> list[int]:
        """Return a target with its start and end: the decoder reads all but the last and predicts all but the first."""
        return [*self.start, *ids, EOS]


ORDINARY = Symbols()
"""The symbols of every model that is trained from scratch here."""


def normalizations(config: SubwordConfig) -> tuple[str, str]:
    """Return how the source and the target are normalised if new subwords are made."""
    given = config.normalization or "nfc"
    return (given, given) if isinstance(given, str) else given


def subword_names(config: SubwordConfig) -> tuple[str, str]:
    """Return the names of the source's and the target's subword models: a file has only one normalisation rule."""
    source, target = normalizations(config)
    if config.joint and source == target:
        return "joint", "joint"
    return "source", "target"


MAX_BYTES = 1 << 16
"""The longest sentence that subwords are made from: sentencepiece takes quadratic time, and silently leaves out longer
ones."""


def train_subwords(
    sentences: Iterable[str], path_prefix: Path, config: SubwordConfig, tags: Sequence[str] = (), rule: str = ""
) -> None:
    """Train a model on `sentences` and write it to `<path_prefix>.model`.

    `rule` is the row of NORMALIZATIONS by which it normalises text; the default is the source's in the settings.

    The same sentences and settings give the same bytes. With `byte_fallback`, except for kind none, characters outside
    the vocabulary are spelled in UTF-8 bytes (256 of the subwords), so that no text is ever unknown. Each symbol in the
    settings is one subword; each of the `tags`, like every word with kind none, is one together with the blank before
    it. Sentences above MAX_BYTES are left out, with a note on stderr. Raises ConfigError for a vocabulary size that
    does not fit the text, with one that would.
    """
    model = io.BytesIO()
    rule = rule or normalizations(config)[0]
    # sentencepiece itself uses tabs to separate sentences
    sentences = [normalize(sentence, rule).replace("\t", " ") for sentence in sentences]
    _note_long(sentences)
    # With whole words, text is split only at blanks
    before = BLANK if KINDS[config.kind].words else ""
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type=KINDS[config.kind].trainer,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            vocab_size=config.vocab_size,
            user_defined_symbols=[*(BLANK + tag for tag in tags), *(before + symbol for symbol in config.symbols)],
            normalization_rule_name="identity",
            byte_fallback=config.byte_fallback and not KINDS[config.kind].words,
            character_coverage=config.character_coverage,
            max_sentence_length=MAX_BYTES,
            num_threads=4,  # fixed, because the rounding of sums over threads changes the result
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _plain_error(str(error), config) from None
    path = path_prefix.with_name(path_prefix.name + ".model")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(with_rules(model.getvalue(), rule))


def _note_long(sentences: Sequence[str]) -> None:
    if long := sum(len(sentence.encode()) > MAX_BYTES for sentence in sentences):
        print(
            f"[prepare] sentences longer than {MAX_BYTES:,} bytes, left out of the subwords' text: {long:,}",
            file=sys.stderr,
        )


def _plain_error(message: str, config: SubwordConfig) -> ValueError:
    """Translate sentencepiece's message into one in terms of the settings."""
    # sentencepiece raises RuntimeError for everything, and the sizes that would fit are only in its message
    size = f"subwords.vocab_size {config.vocab_size:,}"
    if found := re.search(r"value <= (\d+)", message):
        return ConfigError(
            f"{size} is too large for the training text; the largest possible is {int(found[1]):,}: set it to that, or "
            "less"
        )
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return ConfigError(
            f"{size} is too small: the special subwords, 256 bytes and the characters of the training text "
            f"are {int(found[1]):,}: set it to that, or more"
        )
    if "sentences_.empty()" in message:
        return DataError("there is no training text to make subwords from: every sentence is empty; see data.train")
    return DataError(f"sentencepiece cannot train on this text: {' '.join(message.split())}")


def check_notes(notes: Any, pieces: int) -> None:
    """Raise WrongFieldError unless an imported model's notes, if there are any, refer to subwords that it has."""
    if notes == {}:
        return
    size = value(f"a whole number from 1 to {pieces:,}", lambda found: is_whole(found) and 1 <= found <= pieces)
    fields({"size": size})(notes, "")
    a_subword = value("the number of a subword", lambda found: is_whole(found) and 0 <= found < notes["size"])
    checks = dict.fromkeys(Symbols._fields, each(a_subword))
    fields(checks, lambda found: bool(found["start"]), "notes with at least one subword in start")(notes, "")


TAG = ">>[^<>\\s]+<<"
"""The target-language tag in front of a sentence, in Marian's models."""


class Subwords:
    """A trained model: sentences to subword ids and back.

    An imported model's file has notes: the symbols around its sentences, and the size of the vocabulary; pieces beyond
    that size are unknown to the model.
    """

    pad, unk, bos, eos = PAD, UNK, BOS, EOS

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._rules: str = model_of(self.model_bytes()).normalizer_spec.name
        notes = notes_of(self.model_bytes())
        self.symbols = ORDINARY
        self._size = int(processor.get_piece_size())
        self._imported = bool(notes)
        if notes:
            self.symbols = Symbols(*(tuple(cast(list[int], notes[name])) for name in Symbols._fields))
            self._size = cast(int, notes["size"])

    @classmethod
    def load(cls, path: str | Path) -> Subwords:
        """Read a model file; raise DataError if it is missing, damaged, or has other special ids."""
        path = Path(path)
        if not path.is_file():
            raise DataError(f"there is no subword model {path}; `prepare` makes it")
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except RuntimeError as error:
            raise DataError(f"{path} is not a sentencepiece model; remove it and `prepare` again") from error
        try:
            check_notes(notes_of(processor.serialized_model_proto()), processor.get_piece_size())
            subwords = cls(processor)
            subwords.pieces()
        except ValueError as error:
            reason = str(error)
            if isinstance(error, UnicodeDecodeError):
                reason = f"the piece {error.object!r} is not UTF-8 text"
            raise DataError(f"{path} is damaged: {reason}; restore it from a copy, or `prepare` again") from None
        found = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
        if BOS not in subwords.symbols.start:  # an imported model may have no start symbol of its own
            found = (found[0], found[1], BOS, found[3])
        if found != (PAD, UNK, BOS, EOS):
            raise DataError(f"{path} has pad, unk, bos, eos = {found}, not {(PAD, UNK, BOS, EOS)}; train it here")
        return subwords

    def save(self, path: Path) -> None:
        """Write the model file that `load` reads."""
        path.write_bytes(self.model_bytes())

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the model."""
        return hashlib.sha256(self.model_bytes()).hexdigest()

    def encode(self, sentences: list[str], threads: int = 1) -> list[list[int]]:
        """Encode each sentence as ids, without start and end symbols."""
        sentences = self._as_read(sentences)
        ids: list[list[int]] = self._processor.encode(sentences, num_threads=threads)
        if not self._imported:
            return ids
        return [self._by_text(sentence, row) for sentence, row in zip(sentences, ids, strict=True)]

    def places(self, sentence: str) -> tuple[str, list[tuple[int, int]]]:
        """Return a sentence in the form that is split, and the span of characters that each subword covers in it."""
        (read,) = self._as_read([sentence])
        places: list[tuple[int, int]] = self._processor.encode(read, return_type="offset_mapping")["offsets"]
        return read, places

    def _as_read(self, sentences: list[str]) -> list[str]:
        if self.tags:
            sentences = [self._tag_apart(sentence) for sentence in sentences]
        return compose_all(sentences, self._rules)

    @cached_property
    def tags(self) -> frozenset[str]:
        """Return the language tags that are one subword each, such as >>fra<<, in imported models."""
        return frozenset(piece.removeprefix(BLANK) for piece in self.pieces() if re.fullmatch(BLANK + TAG, piece))

    def _tag_apart(self, sentence: str) -> str:
        """Return a sentence with a blank after its tag, so that what follows is a word."""
        return re.sub(rf"^\s*({TAG})(?=\S)", r"\1 ", sentence)

    def _by_text(self, sentence: str, ids: list[int]) -> list[int]:
        """Return the ids of an imported model's subwords by their text, as its own tokenizer looks them up.

        What is unknown to this language's sentencepiece model may be a subword in the shared vocabulary.
        """
        if UNK not in ids and max(ids, default=0) < self._size:
            return ids
        pieces: list[str] = self._processor.encode(sentence, out_type=str)
        return [self._ids.get(piece, UNK) for piece in pieces]

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces())}

    def sample(self, plain: Sequence[Sequence[int]], seeds: Iterable[int], amount: float) -> list[list[int]]:
        """Draw a segmentation of each sentence, given as ids; it depends only on these, the seed and `amount`.

        A bpe model skips each merge with probability `amount` (BPE-dropout, Provilkov et al. 2020). A unigram model
        draws from all segmentations, in proportion to their probability to the power `amount` (Kudo 2018, section 3.3):
        the smaller it is, the more often rare segmentations occur. The model's own symbols, including tags, are never
        split.
        """
        drawn = [self._sampler.draw(ids, int(seed), amount) for ids, seed in zip(plain, seeds, strict=True)]
        if not self._imported:
            return drawn
        return [[each if each < self._size else UNK for each in row] for row in drawn]

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self._processor, self.kind)

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Decode each list of ids; padding, start and end symbols are ignored."""
        if not ids:
            return []
        sentences: list[str] = self._processor.decode(ids, num_threads=1)
        return sentences

    @property
    def kind(self) -> str:
        """Return which of KINDS the model is."""
        trainer = kind_of_model(model_of(self.model_bytes()))
        return next(name for name, kind in KINDS.items() if kind.trainer == trainer)

    @property
    def normalization(self) -> str:
        """Return the name of the model's normalisation rules: one in NORMALIZATIONS, or sentencepiece's own."""
        return setting_of(self._rules)

    def normalize(self, sentence: str) -> str:
        """Return what a sentence's subwords spell, if each of its characters has some; blanks are collapsed."""
        found: str = self._processor.normalize(compose(sentence, self._rules))
        return found.replace(BLANK, " ").strip(" ")

    def leaves(self, sentence: str) -> bool:
        """Return whether the rules are known not to change a sentence, apart from blanks; False may mean either."""
        if not sentence.isprintable() or BLANK in sentence or self.normalization not in NORMALIZATIONS:
            return False
        return sentence.isascii() or (self.normalization == "nfc" and unicodedata.is_normalized("NFC", sentence))

    def respell(self, sentences: Sequence[str]) -> list[str]:
        """Return each sentence as its subwords spell it out."""
        return self.decode(self.encode(list(sentences)))

    def pieces(self) -> list[str]:
        """Return the text of each subword; a blank is written as U+2581."""
        return [self._processor.id_to_piece(number) for number in range(len(self))]

    @cached_property
    def texts(self) -> list[str]:
        """Return the text of each subword, or "" for those that are no text: bytes, control and unknown pieces."""
        pieces = model_of(self.model_bytes()).pieces[: len(self)]
        return [piece.piece if piece.type in (Piece.NORMAL, Piece.USER_DEFINED) else "" for piece in pieces]

    def model_bytes(self) -> bytes:
        """Return the bytes of the model file."""
        content: bytes = self._processor.serialized_model_proto()
        return content

    def __len__(self) -> int:
        return self._size

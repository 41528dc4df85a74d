"""Write the tokenizer of an imported M2M-100, NLLB-200 or mBART model as transformers reads it.

The run has a sentencepiece model with our ids, which has the language tags as pieces that occur in no text. In
transformers the sentencepiece model has only pieces of text, and the tags come after them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentencepiece.sentencepiece_model_pb2 import ModelProto
from transformers import M2M100Tokenizer, MBart50Tokenizer, MBartTokenizer, NllbTokenizer

from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import SavedModel
from recipes.translation.text.sentencepiece_file import NOTES, Piece, model_of
from recipes.translation.text.subwords import EOS, Subwords

SPM = "sentencepiece.bpe.model"


def write_multilingual_tokenizer(saved: SavedModel, ids: Sequence[int], folder: Path) -> None:
    """Write the tokenizer's files, in which our ids are in the order `ids`.

    Raises ConfigError if transformers' tokenizer of that kind would have different ids, as it has a list of languages
    of its own.
    """
    subwords = saved.source
    names = [subwords.pieces()[each] for each in ids]
    # By the model's own tags: the settings may name the languages in another way, such as the columns of a file
    of_source = next(each for each in (*subwords.symbols.prefix, *subwords.symbols.suffix) if each != EOS)
    of_target = saved.target.symbols.start[-1]
    pieces = subwords.pieces()
    languages = {"src_lang": pieces[of_source].strip("_"), "tgt_lang": pieces[of_target].strip("_")}
    (folder / SPM).write_bytes(_of_text(subwords))
    tags = [names[each] for each in _tags(subwords)]
    with warnings.catch_warnings(action="ignore"):
        if tags[0].startswith("__"):
            _write_m2m100(names, tags, languages, folder)
            found: Any = M2M100Tokenizer.from_pretrained(folder)
        elif any(tag.endswith("Latn") for tag in tags):
            before = len(subwords.symbols.prefix) > 0
            kind = {**languages, "legacy_behaviour": not before}
            found = NllbTokenizer.from_pretrained(folder, additional_special_tokens=tags, **kind)
            found.save_pretrained(folder)
        else:
            of_fifty = len(saved.target.symbols.start) > 1
            found = (MBart50Tokenizer if of_fifty else MBartTokenizer).from_pretrained(
                folder, bos_token="<s>", **languages
            )
            found.save_pretrained(folder)
    known = {**found.get_vocab(), **getattr(found, "lang_token_to_id", {})}
    other = [name for number, name in enumerate(names) if name in known and known[name] != number]
    if other or not set(tags) <= known.keys():
        raise ConfigError(
            f"{type(found).__name__} of transformers gives {(other or tags)[0]} a different id from the model: only "
            "models with the published languages are exported to hf; export it --to ctranslate2 or safetensors"
        )


def _of_text(subwords: Subwords) -> bytes:
    """Return the sentencepiece model with only the pieces of text, after sentencepiece's own three special ones."""
    model = model_of(subwords.model_bytes())
    pieces = list(model.pieces)
    text = [piece for piece in pieces[EOS + 1 :] if piece.type not in (Piece.CONTROL, Piece.UNKNOWN)]
    made = ModelProto()
    made.CopyFrom(model)
    made.ClearExtension(NOTES)
    del made.pieces[:]
    made.pieces.append(Piece(piece="<unk>", type=Piece.UNKNOWN))
    made.pieces.extend(Piece(piece=name, type=Piece.CONTROL) for name in ("<s>", "</s>"))
    made.pieces.extend(text)
    made.trainer_spec.unk_id, made.trainer_spec.bos_id, made.trainer_spec.eos_id = 0, 1, 2
    made.trainer_spec.pad_id = -1
    for special, name in (("unk", "<unk>"), ("bos", "<s>"), ("eos", "</s>")):
        setattr(made.trainer_spec, f"{special}_piece", name)
    content: bytes = made.SerializeToString()
    return content


def _tags(subwords: Subwords) -> list[int]:
    """Return the ids of the language tags, which are among the pieces that occur in no text."""
    pieces = model_of(subwords.model_bytes()).pieces[: len(subwords)]
    never = ("<", "madeupword")
    return [
        number
        for number, piece in enumerate(pieces)
        if number > EOS and piece.type == Piece.CONTROL and not piece.piece.startswith(never)
    ]


def _write_m2m100(names: Sequence[str], tags: Sequence[str], languages: dict[str, str], folder: Path) -> None:
    """Write the vocabulary, up to the first tag, and the settings."""
    before = names[: names.index(tags[0])]
    vocabulary = {name: number for number, name in enumerate(before)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False) + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "M2M100Tokenizer",
        "language_codes": "m2m100" if len(tags) > 20 else "wmt21",
        "num_madeup_words": len(names) - len(before) - len(tags),
        "additional_special_tokens": list(tags),
        **languages,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

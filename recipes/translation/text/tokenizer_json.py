"""A sentencepiece model made from a tokenizer.json, for folders in which transformers has saved only that file.

Such a tokenizer belongs to Hugging Face's library `tokenizers`; transformers has converted it from a sentencepiece
model. For a unigram model it has the pieces, their scores and the compiled normalisation rules. For a bpe model it has,
instead of scores, every pair of pieces that makes up a third one, in the order of that third piece's score; the scores
0, -1, -2, ... of a trained model can therefore be restored from the order of the ids.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sentencepiece import SentencePieceNormalizer
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

from recipes.translation.files.json_fields import parse_json
from recipes.translation.text.segmentations import BLANK
from recipes.translation.text.sentencepiece_file import Piece

FIRST = 4
"""Number of special subwords at the beginning."""
OF_BLANKS = ((" {2,}", " "), (" {2,}", BLANK), (r"\A +| +\z", ""), (" ", BLANK), (rf"\A{BLANK}", BLANK * 2))
"""What a normaliser may replace after the compiled rules, since sentencepiece treats blanks in the same way."""
OTHER_MERGES = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
"""Options of a bpe model that sentencepiece does not have."""


def sentencepiece_model(content: str, symbols: set[str]) -> ModelProto:
    """Return the sentencepiece model that a tokenizer.json was made from by transformers, without its `symbols`.

    Raises an error if the file was made from anything else, or has been changed.
    """
    found = parse_json(content)
    rules, *others = _steps(found["normalizer"], "normalizers") or [{}]
    if "precompiled_charsmap" not in rules:
        raise ValueError("there is none, and the tokenizer has no compiled rules of normalisation to make one from")
    model = ModelProto()
    model.normalizer_spec.precompiled_charsmap = base64.b64decode(rules["precompiled_charsmap"])
    model.trainer_spec.model_type = {"Unigram": TrainerSpec.UNIGRAM, "BPE": TrainerSpec.BPE}[found["model"]["type"]]
    scores = found["model"]["vocab"]
    if model.trainer_spec.model_type == TrainerSpec.BPE:
        if odd := next((name for name in OTHER_MERGES if found["model"].get(name)), None):
            raise ValueError(f"it has {odd}, which no sentencepiece model has: use a file without it")
        _check_merges(scores, found["model"]["merges"], symbols)
        scores = [(name, FIRST - number) for name, number in scores.items()]
    pieces = [Piece(piece=name, score=score) for name, score in scores if name not in symbols]
    if found["model"].get("byte_fallback"):
        for piece in pieces:
            if re.fullmatch("<0x[0-9A-F]{2}>", piece.piece):
                piece.type = Piece.BYTE
    model.pieces.extend(pieces)
    _check_steps(others, _steps(found["pre_tokenizer"], "pretokenizers"), model)
    return model


def _steps(part: Any, several: str) -> list[Any]:
    """Return the steps of a normaliser or a pre-tokenizer, in order."""
    if not part:
        return []
    return list(part[several]) if part["type"] == "Sequence" else [part]


def _check_steps(normalizers: Sequence[Any], dividers: Sequence[Any], model: ModelProto) -> None:
    """Raise ValueError for a step after the compiled rules that the sentencepiece model does not take as well."""
    odd = [step["type"] for step in normalizers if step["type"] != "Strip" and not _is_of_blanks(step)]
    odd += [step["type"] for step in dividers if step["type"] not in ("Metaspace", "WhitespaceSplit")]
    try:
        keeps = "\xa0" in SentencePieceNormalizer(normalizer_spec=model.normalizer_spec).normalize("a\xa0a")
    except RuntimeError as error:
        raise ValueError(f"its compiled rules of normalisation are damaged ({error}): restore it from a copy") from None
    if keeps:  # sentencepiece splits only at blanks, and would keep other white space
        odd += [step["type"] for step in dividers if step["type"] == "WhitespaceSplit"]
    if odd:
        raise ValueError(f"it has the step {odd[0]}, which no sentencepiece model supports: use a file without it")
    marks = [step for step in dividers if step["type"] == "Metaspace"]
    # Files of earlier versions have add_prefix_space in place of prepend_scheme
    begins = all(step.get("add_prefix_space", True) and step.get("prepend_scheme") != "never" for step in marks)
    if [step["replacement"] for step in marks] != [BLANK] or not begins:
        raise ValueError(f"it does not mark the first word with {BLANK} too: use a file whose prepend_scheme is always")
    if marks[0].get("split", True):
        over = re.compile(f"[^{BLANK}]{BLANK}")
        if piece := next((each.piece for each in model.pieces if over.search(each.piece)), None):
            raise ValueError(f"it divides a text at blanks, but has the piece {piece!r}: use a file without it")


def _is_of_blanks(step: Any) -> bool:
    replaces = step["type"] == "Replace"
    return replaces and any(
        step["pattern"] in ({"Regex": pattern}, {"String": pattern}) and step["content"] == content
        for pattern, content in OF_BLANKS
    )


def _check_merges(ids: Mapping[str, int], merges: Sequence[Sequence[str]], symbols: set[str]) -> None:
    """Raise ValueError unless all pairs of pieces that make up a third one are merges, in the order of its id."""
    made = [ids[left + right] for left, right in merges]
    texts = ids.keys() - symbols
    pairs = sum(name[:cut] in texts and name[cut:] in texts for name in texts for cut in range(1, len(name)))
    if made != sorted(made) or pairs != len(merges):
        raise ValueError(f"its {len(merges):,} merges are not in the order of its pieces, or not all {pairs:,} of them")

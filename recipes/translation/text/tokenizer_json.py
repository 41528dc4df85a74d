"""A sentencepiece model made of a tokenizer.json, as folders have in which transformers has saved nothing but that.

Such a tokenizer is one of Hugging Face's library `tokenizers`, which transformers has converted from a sentencepiece
model. Of a unigram model it has the pieces, their scores and the compiled rules of normalisation. Of a bpe model it
has, in place of scores, every pair of pieces that makes up a third one, in the order of the third one's score; so the
scores 0, -1, -2, ... of a trained model are known from the order of the ids.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence

from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

from recipes.translation.files.json_fields import parse_json
from recipes.translation.text.sentencepiece_file import Piece

FIRST = 4
"""The special subwords at the beginning."""


def sentencepiece_model(content: str, symbols: set[str]) -> ModelProto:
    """Return the sentencepiece model from which transformers has made a tokenizer.json, whose symbols are no text.

    Raises an error where it was made from anything else, or has been changed.
    """
    found = parse_json(content)
    rules = (found["normalizer"] or {}).get("normalizers", [{}])[0]
    if "precompiled_charsmap" not in rules:
        raise ValueError("there is none, and the tokenizer has no compiled rules of normalisation to make one of it")
    model = ModelProto()
    model.normalizer_spec.precompiled_charsmap = base64.b64decode(rules["precompiled_charsmap"])
    model.trainer_spec.model_type = {"Unigram": TrainerSpec.UNIGRAM, "BPE": TrainerSpec.BPE}[found["model"]["type"]]
    scores = found["model"]["vocab"]
    if model.trainer_spec.model_type == TrainerSpec.BPE:
        _check_merges(scores, found["model"]["merges"], symbols)
        scores = [(name, FIRST - number) for name, number in scores.items()]
    pieces = [Piece(piece=name, score=score) for name, score in scores if name not in symbols]
    if found["model"].get("byte_fallback"):
        for piece in pieces:
            if re.fullmatch("<0x[0-9A-F]{2}>", piece.piece):
                piece.type = Piece.BYTE
    model.pieces.extend(pieces)
    return model


def _check_merges(ids: Mapping[str, int], merges: Sequence[Sequence[str]], symbols: set[str]) -> None:
    """Raise ValueError unless any two pieces that make up a third one are a merge, in the order of its id."""
    made = [ids[left + right] for left, right in merges]
    texts = ids.keys() - symbols
    pairs = sum(name[:cut] in texts and name[cut:] in texts for name in texts for cut in range(1, len(name)))
    if made != sorted(made) or pairs != len(merges):
        raise ValueError(f"its {len(merges):,} merges are not in the order of its pieces, or not all {pairs:,} of them")

"""A sentencepiece model made of tokenizer.json, for folders in which recent transformers has saved nothing else.

The file is of the format of Hugging Face's library `tokenizers`, which transformers has converted from a sentencepiece
model. Of a unigram model it has the pieces, their scores and the compiled rules of normalisation. Of a bpe model it
has, in place of scores, every pair of pieces that makes up a third one, in the order of the third one's score; so the
scores 0, -1, -2, ... of a trained model are known from the order of the ids. Any other file of the format is refused.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.translation.errors import CheckpointError
from recipes.translation.importing.folder import check_subwords
from recipes.translation.importing.vocabulary import Special
from recipes.translation.text.sentencepiece_file import Kind, Piece, new_model

FIRST = 4
"""The special subwords at the beginning."""


def sentencepiece_model(found: Mapping[str, Any], special: Special, where: str) -> bytes:
    """Return the sentencepiece model from which transformers has made the file.

    Raises CheckpointError where it was made from anything else, or has been changed.
    """
    try:
        charsmap = base64.b64decode(_charsmap(found), validate=True)
        names, scores = _pieces(found["model"])
        added = {str(each["content"]) for each in found["added_tokens"]}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is not what transformers makes of a sentencepiece model: {error!r}") from None
    first = [special.bos, special.pad, special.eos, special.unk]
    end = next((place for place in range(FIRST, len(names)) if names[place] in added), len(names))
    if names[:FIRST] != first or added.isdisjoint(first) or not added.issuperset(names[end:]):
        raise CheckpointError(
            f"{where} begins with {', '.join(names[:FIRST])}: the vocabulary of a sentencepiece model has "
            f"{', '.join(first)} there, then the pieces, and added_tokens after them"
        )
    controls = [Piece(special.bos, kind=Kind.CONTROL), Piece(special.eos, kind=Kind.CONTROL)]
    normal = [Piece(name, score) for name, score in zip(names[FIRST:end], scores[FIRST:end], strict=True)]
    kind = {"Unigram": "unigram", "BPE": "bpe"}[found["model"]["type"]]
    model = new_model(kind, [Piece(special.unk, kind=Kind.UNKNOWN), *controls, *normal], charsmap)
    check_subwords(model, f"{where} has pieces that are empty or there twice, or rules that sentencepiece cannot read")
    return model


def _charsmap(found: Mapping[str, Any]) -> str:
    """Return the rules of normalisation; raise ValueError where they or the mark of blanks are not sentencepiece's."""
    rules = found["normalizer"]
    first, *others = rules.get("normalizers", [rules])
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    if first["type"] != "Precompiled" or others not in ([], [spaces]):
        raise ValueError("its normalizer is not Precompiled")
    blanks = found["pre_tokenizer"]
    if blanks["type"] != "Metaspace" or blanks["prepend_scheme"] != "always" or blanks["replacement"] != "\u2581":
        raise ValueError("its pre_tokenizer is not Metaspace")
    return str(first["precompiled_charsmap"])


def _pieces(model: Mapping[str, Any]) -> tuple[list[str], list[float]]:
    """Return all names in the order of their ids, with their scores."""
    if model["byte_fallback"]:
        raise ValueError("it has byte_fallback")
    if model["type"] == "Unigram":
        return [str(name) for name, _ in model["vocab"]], [float(score) for _, score in model["vocab"]]
    if model["type"] != "BPE":
        raise ValueError(f"its model is {model['type']}, not Unigram or BPE")
    ids: Mapping[str, int] = model["vocab"]
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError("its ids have gaps")
    _check_merges(ids, model["merges"])
    names = sorted(ids, key=ids.__getitem__)
    return names, [-float(max(0, ids[name] - FIRST)) for name in names]


def _check_merges(ids: Mapping[str, int], merges: Sequence[Sequence[str]]) -> None:
    """Raise ValueError unless any two pieces that make up a third one are a merge, in the order of its id."""
    made = [ids[left + right] for left, right in merges]
    texts = {name for name, number in ids.items() if number >= FIRST}
    pairs = sum(name[:cut] in texts and name[cut:] in texts for name in texts for cut in range(1, len(name)))
    if made != sorted(made) or pairs != len(merges):
        raise ValueError(f"its {len(merges):,} merges are not in the order of its pieces, or not all {pairs:,} of them")

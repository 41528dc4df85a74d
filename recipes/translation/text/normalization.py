"""How text is normalised before it is divided into subwords, as sentencepiece does it: by rules in the model's file.

Whatever reads the file, CTranslate2 and transformers included, follows the same rules.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata

import sentencepiece
from sentencepiece import SentencePieceNormalizer
from sentencepiece.sentencepiece_model_pb2 import NormalizerSpec

from recipes.translation.text.sentencepiece_file import model_of

SENTENCEPIECE = {"nfc": "nfc", "nfkc": "nmt_nfkc", "none": "identity"}
"""What sentencepiece calls the rules of NORMALIZATIONS; it has none of the name nfc."""


@functools.cache
def rules_of(name: str) -> NormalizerSpec:
    """Return the rules of a row of NORMALIZATIONS, as the file of a model has them."""
    named = SENTENCEPIECE[name]
    sentencepiece.set_min_log_level(2)  # it would say how large the rules are
    normalizer = (
        SentencePieceNormalizer(norm_map=list(nfc_rules().items()))
        if name == "nfc"
        else SentencePieceNormalizer(rule_name=named)
    )
    found = NormalizerSpec.FromString(normalizer.serialized_normalizer_spec())
    return NormalizerSpec(name=named, precompiled_charsmap=found.precompiled_charsmap)


def with_rules(content: bytes, name: str) -> bytes:
    """Return the file of a model with other rules."""
    model = model_of(content)
    model.normalizer_spec.MergeFrom(rules_of(name))
    changed: bytes = model.SerializeToString()
    return changed


def setting_of(rules: str) -> str:
    """Return the name in NORMALIZATIONS of what sentencepiece calls `rules`, or else that name."""
    names = {theirs: ours for ours, theirs in SENTENCEPIECE.items()}
    return names.get(rules, rules or "rules without a name")


def compose(text: str, rules: str) -> str:
    """Return text as the rules that sentencepiece calls `rules` expect it.

    They replace characters that follow each other, and cannot put accents that compose with nothing into NFC's order.
    """
    return unicodedata.normalize("NFC", text) if rules == SENTENCEPIECE["nfc"] else text


def compose_all(texts: list[str], rules: str) -> list[str]:
    """Return texts as `compose` does each of them."""
    # Each part of text in NFC is in NFC, and of many texts this is known faster than of each
    if rules != SENTENCEPIECE["nfc"] or unicodedata.is_normalized("NFC", " ".join(texts)):
        return texts
    return [compose(text, rules) for text in texts]


def normalize(text: str, name: str) -> str:
    """Return text by a row of NORMALIZATIONS, before there is a model."""
    found: str = _normalizer(name).normalize(compose(text, SENTENCEPIECE[name]))
    return found


@functools.cache
def _normalizer(name: str) -> SentencePieceNormalizer:
    return SentencePieceNormalizer(normalizer_spec=rules_of(name), add_dummy_prefix=False, escape_whitespaces=False)


def nfc_rules() -> dict[str, str]:
    """Return what NFC replaces, by what; controls are removed, and what ends a line or a column becomes a blank."""
    found: dict[str, str] = {}
    for character in map(chr, itertools.chain(range(1, 0xD800), range(0xE000, 0x110000))):
        # One that cannot be decomposed is its only spelling: all but one in eighty
        if not unicodedata.is_normalized("NFD", character):
            found |= _spellings(character)
    for control in map(chr, [*range(1, 0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]):
        found[control] = " " if control.isspace() else ""
    return found


def _spellings(character: str) -> dict[str, str]:
    """Return every way to write a character that NFC changes, with what it becomes."""
    whole = unicodedata.normalize("NFC", character)
    base, *accents = list(unicodedata.normalize("NFD", character))
    found = {} if whole == character else {character: whole}
    for order in set(itertools.permutations(accents)) if accents else ():
        apart = base + "".join(order)
        if unicodedata.normalize("NFC", apart) == whole:
            ways = {unicodedata.normalize("NFC", apart[:end]) + apart[end:] for end in range(1, len(apart) + 1)}
            found |= dict.fromkeys(ways - {whole}, whole)
    return found

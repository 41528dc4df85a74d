"""The tokenizer files of a published model, read into a vocabulary and the symbols of its sentences."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.importing.folder import Folder
from recipes.translation.importing.tokenizer_json import sentencepiece_model
from recipes.translation.importing.vocabulary import Special, Vocabulary, names_of, order_of, pieces_in_order
from recipes.translation.text.sentencepiece_file import Kind, pieces_of, with_pieces
from recipes.translation.text.subwords import EOS, Symbols

SPM = "sentencepiece.bpe.model"
M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy "
    "id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru "
    "sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
"""The languages of M2M-100 in the order of their ids, after the pieces (Fan et al. 2020, table 1); its files do not
contain them."""


class Tokenizer(NamedTuple):
    """What a published tokenizer becomes."""

    source: bytes
    """A sentencepiece model with our ids."""
    target: bytes
    source_ids: list[int]
    """The ids there, in the order of ours."""
    target_ids: list[int]
    languages: tuple[str, str]
    start: tuple[int, ...]
    """Our ids of the tokens before a translation."""


class Side(NamedTuple):
    """The subwords of one language."""

    model: bytes
    where: str
    vocabulary: Vocabulary


def read_tokenizer(
    folder: Folder, settings: Mapping[str, Any], generation: Mapping[str, Any], languages: tuple[str, str]
) -> Tokenizer:
    """Read the files of a tokenizer; `languages` are those given by the user, or empty.

    Raises CheckpointError where the files contradict each other, and ConfigError for a language that is not there.
    """
    own = folder.json_or_nothing("tokenizer_config.json")
    kind = settings["model_type"]
    if kind == "marian":
        source, target = _marian(folder, settings, own)
        named = (languages[0] or own.get("source_lang") or "en", languages[1] or own.get("target_lang") or "de")
        tags: dict[str, str] = {}
    else:
        source, tags = _multilingual(folder, settings, own)
        target = source
        named = (_known(languages[0], "source", tags), _known(languages[1], "target", tags))
    _check_symbols(settings, target.vocabulary)
    source_ids = order_of(source.vocabulary)
    target_ids = order_of(target.vocabulary)
    new = {old: number for number, old in enumerate(target_ids)}
    start = generation.get("decoder_start_token_id", settings.get("decoder_start_token_id"))
    codes = {language: new[target.vocabulary.ids[tag]] for language, tag in tags.items()}
    symbols = Symbols(start=_start(start, new, codes, named[1]))
    if tags:
        symbols = _around_source(symbols, codes[named[0]], own, kind)
    return Tokenizer(
        _renumbered(source, source_ids, symbols),
        _renumbered(target, target_ids, symbols),
        source_ids,
        target_ids,
        named,
        symbols.start,
    )


def _check_symbols(settings: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Raise CheckpointError if config.json has other ids of padding or end symbol than the tokenizer."""
    for key, name in (("pad_token_id", vocabulary.special.pad), ("eos_token_id", vocabulary.special.eos)):
        given = settings.get(key)
        if given is not None and given != vocabulary.ids.get(name, given):
            raise CheckpointError(
                f"config.json: {key} is {given}, and in {vocabulary.where} {name} is {vocabulary.ids[name]}: one of "
                "the two files belongs to another model"
            )


def _start(start: object, new: Mapping[int, int], codes: Mapping[str, int], language: str) -> tuple[int, ...]:
    """Return the tokens before a target: what the decoder starts with, then the language's tag, unless they are one.

    `codes` are our ids of the tags, by language.
    """
    tag = tuple(code for name, code in codes.items() if name == language)
    if start is None and tag:  # mBART's, which starts with the language
        return tag
    if not isinstance(start, int) or start not in new:
        raise CheckpointError(f"config.json: decoder_start_token_id is {start!r}, not the id of a subword")
    other = [name for name, code in codes.items() if code == new[start] and name != language]
    if other:
        raise ConfigError(
            f"--target: this model's decoder starts with {other[0]}, not with {language}: give {other[0]}"
        )
    if tag == (new[start],):
        return tag
    return (new[start], *tag)


def _around_source(symbols: Symbols, code: int, own: Mapping[str, Any], kind: str) -> Symbols:
    """Return the symbols with the source's tag: in front, or after the end in mBART and old NLLB models."""
    behind = own.get("legacy_behaviour", False)
    if kind == "mbart":
        behind = not str(own.get("tokenizer_class", "")).startswith("MBart50")
    if behind:
        return symbols._replace(suffix=(EOS, code))
    return symbols._replace(prefix=(code,))


def _renumbered(side: Side, order: list[int], symbols: Symbols) -> bytes:
    pieces = pieces_in_order(side.model, side.vocabulary, order, side.where)
    notes = {**symbols._asdict(), "size": len(order)}
    return with_pieces(side.model, pieces, names_of(side.vocabulary.special), notes)


def _marian(folder: Folder, settings: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Side, Side]:
    sizes = (settings["vocab_size"], settings.get("decoder_vocab_size") or settings["vocab_size"])
    names = ("vocab.json", "vocab.json")
    if own.get("separate_vocabs", False):
        names = ("vocab.json", "target_vocab.json")
    special = _special(own)
    source, target = (
        Side(folder.subwords(spm), spm, Vocabulary(folder.json(name), special, size, where=str(folder.path / name)))
        for spm, name, size in zip(("source.spm", "target.spm"), names, sizes, strict=True)
    )
    return source, target


def _multilingual(folder: Folder, settings: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Side, dict[str, str]]:
    """Return the subwords that both languages share, and the tag of each language."""
    special = _special(own)
    if not (folder.path / SPM).is_file() and (folder.path / "tokenizer.json").is_file():
        model = sentencepiece_model(folder.json("tokenizer.json"), special, str(folder.path / "tokenizer.json"))
    else:
        model = folder.subwords(SPM)
    if settings["model_type"] == "m2m_100" and (folder.path / "vocab.json").is_file():
        ids, tags = _m2m100(folder.json("vocab.json"), settings, own)
        where = "vocab.json"
    else:
        ids = _fairseq_ids(model, special)
        where = "tokenizer.json"
        added = {each["content"]: each["id"] for each in folder.json(where).get("added_tokens", ())}
        for name, number in added.items():
            if ids.setdefault(name, number) != number:
                raise CheckpointError(f"{where} has {name} as {number}, and by {SPM} it is {ids[name]}")
        tags = {name: name for name in added if name not in special and not name.startswith("<")}
        if not tags:
            raise CheckpointError(f"{where} has no language tags among its added_tokens")
    vocabulary = Vocabulary(
        ids, special, settings["vocab_size"], frozenset([*tags.values(), "<mask>"]), str(folder.path / where)
    )
    return Side(model, SPM, vocabulary), tags


def _m2m100(
    ids: dict[str, int], settings: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, str]]:
    """Return M2M-100's ids with those of its languages, which follow the pieces, before some rows without use."""
    codes = own.get("language_codes", "m2m100")
    unused = own.get("num_madeup_words", 8)
    languages = M2M100.split()
    total = len(ids) + len(languages)
    if codes != "m2m100" or not total <= settings["vocab_size"] <= total + unused:
        raise CheckpointError(
            f"vocab.json has {len(ids):,} pieces and the model {settings['vocab_size']:,} rows: with M2M-100's "
            f"{len(languages)} languages and at most {unused} unused rows they would fit, but not with those of {codes}"
        )
    tags = {language: f"__{language}__" for language in languages}
    return {**ids, **{tag: len(ids) + number for number, tag in enumerate(tags.values())}}, tags


def _fairseq_ids(model: bytes, special: Special) -> dict[str, int]:
    """Return the ids of NLLB and mBART: fairseq has four special subwords first, where sentencepiece has three."""
    pieces = pieces_of(model)
    kinds = [piece.kind for piece in pieces[:3]]
    if kinds != [Kind.UNKNOWN, Kind.CONTROL, Kind.CONTROL]:
        raise CheckpointError(
            f"{SPM} begins with {', '.join(piece.text for piece in pieces[:3])}, not with <unk>, <s> and </s>: its ids "
            "are not those of fairseq"
        )
    first = (special.bos, special.pad, special.eos, special.unk)
    return {name: number for number, name in enumerate([*first, *(piece.text for piece in pieces[3:])])}


def _special(own: Mapping[str, Any]) -> Special:
    found = {}
    for name, usual in Special()._asdict().items():
        value = own.get(f"{name}_token") or usual
        if isinstance(value, dict):  # as earlier versions wrote it
            value = value.get("content", usual)
        found[name] = str(value)
    return Special(**found)


def _known(language: str, side: str, tags: Mapping[str, str]) -> str:
    """Return a language that the model has; raise ConfigError for any other, and for none."""
    if language in tags:
        return language
    near = difflib.get_close_matches(language, tags, n=3) or list(tags)[:3]
    given = f"{language!r} is not a language of this model"
    if not language:
        given = "the model has several languages"
    raise ConfigError(f"--{side}: {given}: give one of its {len(tags)} languages, such as {', '.join(near)}")

"""The fields that are read from the JSON files of a published model, their types, and the check of what a file has."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypedDict, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from recipes.translation.atomic_folder import CheckpointError


class Generation(TypedDict, total=False):
    """Settings of translation: generation_config.json, or earlier config.json."""

    num_beams: int | None
    length_penalty: float | None
    max_length: int | None
    max_new_tokens: int | None
    decoder_start_token_id: int | None
    forced_bos_token_id: int | None
    pad_token_id: int | None
    eos_token_id: int | list[int] | None
    bad_words_ids: list[list[int]] | None
    suppress_tokens: list[int] | None


class Sizes(TypedDict):
    """What every config.json has."""

    vocab_size: int
    d_model: int
    encoder_layers: int
    decoder_layers: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int


class Config(Generation, Sizes, total=False):
    """The architecture: config.json."""

    model_type: str
    architectures: list[str] | None
    activation_function: str
    scale_embedding: bool
    dropout: float
    share_encoder_decoder_embeddings: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    decoder_vocab_size: int | None


class Symbol(TypedDict, total=False):
    """A special subword, as earlier versions of transformers write it."""

    content: str


class TokenizerConfig(TypedDict, total=False):
    """Settings of the tokenizer: tokenizer_config.json."""

    tokenizer_class: str | None
    source_lang: str | None
    target_lang: str | None
    separate_vocabs: bool
    language_codes: str
    num_madeup_words: int
    legacy_behaviour: bool
    pad_token: str | Symbol | None
    unk_token: str | Symbol | None
    bos_token: str | Symbol | None
    eos_token: str | Symbol | None


class AddedToken(TypedDict):
    """A subword beside those of the sentencepiece model."""

    content: str
    id: int


class TokenizerJson(TypedDict, total=False):
    """What is read of tokenizer.json beside the sentencepiece model in it, which is checked as a whole."""

    added_tokens: list[AddedToken]


class Index(TypedDict):
    """The file of each weight: model.safetensors.index.json."""

    weight_map: dict[str, str]


FILES: dict[str, Any] = {
    "config.json": Config,
    "generation_config.json": Generation,
    "tokenizer_config.json": TokenizerConfig,
    "tokenizer.json": TokenizerJson,
    "vocab.json": dict[str, int],
    "target_vocab.json": dict[str, int],
    "model.safetensors.index.json": Index,
}
"""What each file has."""
WORDS: dict[Any, str] = {
    int: "a whole number of 32 bits",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object with names",
}


class Misfit(NamedTuple):
    """A value that is not what its field should have."""

    field: str
    value: str
    expected: str


def check_fields(found: object, name: str, where: str) -> None:
    """Raise CheckpointError if the content of the file `name` has a field of another type, or lacks one."""
    misfit = next(_misfits(found, FILES[name], ""), None)
    if misfit is not None:
        raise CheckpointError(
            f"{where}: {misfit.field} is {misfit.value}; it must be {misfit.expected}: correct it, or download the "
            "file again"
        )


def _misfits(value: object, kind: Any, field: str) -> Iterator[Misfit]:
    """Yield what does not fit a type, from the outside to the inside."""
    base = get_origin(kind) or kind
    if base in (Union, types.UnionType):
        yield from _misfits_of_all(value, get_args(kind), field)
    elif not _is(value, base):
        yield Misfit(field, _shown(value), _words(kind))
    elif is_typeddict(base):
        yield from _misfits_of_names(cast(dict[str, object], value), base, field)
    elif base is list:
        for place, each in enumerate(cast(list[object], value)):
            yield from _misfits(each, get_args(kind)[0], f"{field}[{place}]")
    elif base is dict:
        for name, each in cast(dict[str, object], value).items():
            yield from _misfits(each, get_args(kind)[1], _inside(field, name))


def _misfits_of_names(value: Mapping[str, object], kind: Any, field: str) -> Iterator[Misfit]:
    """Yield the misfits of an object whose names have types of their own."""
    for name, own in get_type_hints(kind).items():
        if name in value:
            yield from _misfits(value[name], own, _inside(field, name))
        elif name in kind.__required_keys__:
            yield Misfit(_inside(field, name), "missing", _words(own))


def _misfits_of_all(value: object, kinds: tuple[Any, ...], field: str) -> Iterator[Misfit]:
    """Yield a misfit if the value fits none of the types: the one deepest inside, of the type that fits best."""
    first = [next(_misfits(value, kind, field), None) for kind in kinds]
    deepest = max((each for each in first if each is not None), key=lambda each: len(each.field), default=None)
    if None in first or deepest is None:
        return
    if deepest.field == field:
        deepest = deepest._replace(expected=" or ".join(_words(kind) for kind in kinds if kind is not type(None)))
    yield deepest


def _is(value: object, base: Any) -> bool:
    """Tell whether a value of JSON is of a type, without what is inside; whole numbers are numbers, nan is none."""
    if base is float:
        return _is(value, int | float) and abs(cast(float, value)) <= sys.float_info.max
    if base is int:  # larger sizes would fill the memory before the weights contradict them
        return _is(value, int | float) and isinstance(value, int) and -(2**31) <= value < 2**31
    if is_typeddict(base):
        base = dict
    return isinstance(value, base) and (base is bool or not isinstance(value, bool))


def _words(kind: Any) -> str:
    base = get_origin(kind) or kind
    if base in (Union, types.UnionType):
        return " or ".join(_words(each) for each in get_args(kind) if each is not type(None))
    if is_typeddict(base):
        base = dict
    return WORDS.get(base, "null")


def _inside(field: str, name: str) -> str:
    return f"{field}.{name}".removeprefix(".")


def _shown(value: object) -> str:
    """Return a value as the file has it, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > 60:
        return f"{text[:57]}..."
    return text

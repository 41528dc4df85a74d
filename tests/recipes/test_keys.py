"""What is made once and found again has a key with every fact that it is made from, and with no other.

The facts are the settings, from the dataclasses themselves, the files, and the models; each is changed alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.translation.data import corpora as corpora_module
from recipes.translation.data import corpus as corpus_module
from recipes.translation.data import prepare
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import ids_folder
from recipes.translation.run_folder.checkpoint import load_translator, save_model
from recipes.translation.run_folder.translator import Translator, tensors_of
from recipes.translation.settings.config import SCHEMA, CorpusConfig, RunConfig
from recipes.translation.settings.schema import Schema
from recipes.translation.text.subwords import Subwords
from recipes.translation.training.student_data import origin
from tests.recipes.random_translator import random_translator

LINES = ["a dog", "two cats"]


def all_of(section: str) -> set[str]:
    return {f"{section}.{name}" for name in SCHEMA.sections[section]}


TEXT = {"data.format", "data.path", "data.train", "data.source", "data.target", "data.builtin_pairs"}
TEXT |= {"data.language_tags", "corpora", *all_of("cleaning"), "subwords.lowercase"}
NEW_SUBWORDS = ("vocab_size", "kind", "joint", "symbols", "normalization", "train_pairs", "model")
NEW_SUBWORDS += ("character_coverage", "byte_fallback")
SPELLING = {f"subwords.{name}" for name in NEW_SUBWORDS}
OF_CORPUS = {"train", "format", "path", "source", "target", "tag"}


class Keys:
    """The keys of one translator's settings."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator

    def subwords(self, config: RunConfig) -> object:
        return prepare.inputs_of(Corpora(config))

    def tokens(self, config: RunConfig) -> object:
        return ids_folder(Corpora(config), self.translator.source, self.translator.target).name

    def text(self, config: RunConfig) -> object:
        return Corpora(config).text_key

    def translations(self, config: RunConfig) -> object:
        return origin(replace(self.translator, config=config), LINES, "")


FACTS: dict[str, set[str]] = {
    "subwords": TEXT | SPELLING,
    "tokens": {*TEXT, "subwords.symbols"},
    "text": {*TEXT, "subwords.symbols"} - {"data.language_tags"},
    "translations": {
        *("data.language_tags", "data.target", "corpora", "subwords.lowercase"),
        *("training.max_length", *all_of("decoding")),
    },
}
"""The settings in each key."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(random_translator(tmp_path_factory.mktemp("keys")))


@pytest.fixture(autouse=True)
def text_is_known_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is read: as if its contents were its name."""
    monkeypatch.setattr(
        "recipes.translation.data.corpora.fingerprint", lambda data, split, _: f"{split} {data.path} {data.train}"
    )


def another(schema: Schema, name: str, value: Any) -> Any:
    """A value of the setting that it does not have."""
    setting = schema.settings[name]
    words = [choice for choice in (*setting.choices, "another") if choice != value]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return (words[0], *value)
    return words[0] if str in setting.kinds else 2


def changed(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """The settings with each of them changed alone."""
    for name in SCHEMA.settings:
        section, _, key = name.rpartition(".")
        if name == "corpora":
            yield name, replace(config, corpora={"c": CorpusConfig(tag="<c>")})
            continue
        holder = getattr(config, section) if section else config
        value = replace(holder, **{key: another(SCHEMA, name, getattr(holder, key))})
        yield name, replace(config, **{section: value}) if section else value


@pytest.mark.parametrize("kind", FACTS)
@pytest.mark.parametrize("format", ["builtin", "text"])
def test_a_key_changes_with_every_setting_that_is_in_it_and_with_no_other(kind: str, format: Any, keys: Keys) -> None:
    plain = keys.translator.config
    config = replace(plain, data=replace(plain.data, format=format, language_tags=True))
    key_of: Callable[[RunConfig], object] = getattr(keys, kind)
    before = key_of(config)
    assert key_of(copy.deepcopy(config)) == before
    assert {name for name, other in changed(config) if key_of(other) != before} == FACTS[kind]


@pytest.mark.parametrize("kind", ["subwords", "tokens"])
def test_a_key_changes_with_every_fact_of_each_corpus(kind: str, keys: Keys) -> None:
    schema = Schema(CorpusConfig)
    own = CorpusConfig(train=("a",), format="text", path="x", source="fr", target="it", tag="<b>")
    config = replace(keys.translator.config, corpora={"a": CorpusConfig(), "b": own})
    key_of: Callable[[RunConfig], object] = getattr(keys, kind)

    def with_b(corpus: CorpusConfig) -> object:
        return key_of(replace(config, corpora={**config.corpora, "b": corpus}))

    moved = set()
    for field in dataclasses.fields(CorpusConfig):
        other = replace(own, **{field.name: another(schema, field.name, getattr(own, field.name))})
        if with_b(other) != key_of(config):
            moved.add(field.name)
    assert moved == OF_CORPUS
    assert key_of(replace(config, corpora={"a": CorpusConfig(), "c": own})) != key_of(config)
    if kind == "tokens":  # whose pairs stand in the order of the corpora
        assert key_of(replace(config, corpora={"b": own, "a": CorpusConfig()})) != key_of(config)


def test_keys_change_with_the_subwords_of_either_side(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: Subwords = random_translator(tmp_path, corpus=9).source
    assert other.digest != keys.translator.source.digest
    for side in ("source", "target"):
        changed = Keys(replace(keys.translator, **{side: other}))
        assert changed.tokens(keys.translator.config) != keys.tokens(keys.translator.config)
        assert changed.translations(keys.translator.config) != keys.translations(keys.translator.config)
    before = keys.tokens(keys.translator.config)
    for module in (corpus_module, corpora_module):
        monkeypatch.setattr(module, "LAYOUT", module.LAYOUT + 1)
        after = keys.tokens(keys.translator.config)
        assert after != before, "as when the file is written in another way"
        before = after


def test_the_key_of_translations_changes_with_sentences_tag_and_every_weight(keys: Keys, tmp_path: Path) -> None:
    teacher = keys.translator
    before = origin(teacher, LINES, "")
    for lines, tag in (
        (LINES, "<2de>"),
        (LINES[:1], ""),
        (LINES[::-1], ""),
        (["a dogtwo cats"], ""),
        (["a", " dog"], ""),
    ):
        assert origin(teacher, lines, tag) != before
    save_model(tmp_path / "best", teacher, {"step": 1})
    before = origin(load_translator(tmp_path / "best"), LINES, "")
    save_model(tmp_path / "best", teacher, {"step": 2})
    assert origin(load_translator(tmp_path / "best"), LINES, "") == before
    for name in tensors_of(teacher.model):
        model = copy.deepcopy(teacher.model)
        with torch.no_grad():
            tensors_of(model)[name].view(-1)[-1] += 1
        save_model(tmp_path / "best", replace(teacher, model=model), {"step": 1})
        assert origin(load_translator(tmp_path / "best"), LINES, "") != before, name

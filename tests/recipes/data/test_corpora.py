"""Several corpora: each with its own files, languages and tags, in one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.prepare import prepare
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.settings.config import CorpusConfig, RunConfig, load_config, save_config
from recipes.translation.text.model_text import ModelText, check_symbols
from recipes.translation.text.subwords import Subwords
from recipes.translation.train import train
from recipes.translation.translating.alignments import align
from recipes.translation.translating.sentences import source_ids
from tests.recipes.tiny import tiny

BOTH: dict[str, Any] = {
    "data.language_tags": True,
    "corpora": {"forward": {}, "back": {"source": "de", "target": "en", "tag": "<bt>"}},
    "data.builtin_pairs": 100,
}


def pieces(side: Subwords, ids: Any) -> list[str]:
    every = side.pieces()
    return [every[int(each)] for each in ids]


def test_each_corpus_has_its_languages_and_its_tags_as_single_subwords(tmp_path: Path) -> None:
    corpus = load_corpus(tiny(tmp_path / "run", BOTH))
    assert len(corpus.train.sources) == 200
    assert {tuple(pieces(corpus.source, ids[:1])) for ids in corpus.train.sources[:100]} == {("\u2581<2de>",)}
    assert {tuple(pieces(corpus.source, ids[:2])) for ids in corpus.train.sources[100:]} == {
        ("\u2581<2en>", "\u2581<bt>")
    }
    texts = corpus.source.decode([list(ids) for ids in (*corpus.train.sources, *corpus.train.targets)])
    forward, back, translated, translated_back = (texts[start : start + 100] for start in range(0, 400, 100))
    assert back == [f"<2en> <bt> {text}" for text in translated]
    assert forward == [f"<2de> {text}" for text in translated_back]
    assert {tuple(pieces(corpus.source, ids[:1])) for ids in corpus.valid[0].batches.sources} == {("\u2581<2de>",)}


def test_only_sources_have_tags_where_each_side_has_its_own_subwords(tmp_path: Path) -> None:
    source, target = prepare(
        Corpora(tiny(tmp_path / "run", {**BOTH, "subwords.joint": False, "subwords.symbols": ["<url>"]}))
    )
    every = {side: set(model.pieces()) for side, model in (("s", source), ("t", target))}
    assert {"\u2581<2de>", "\u2581<2en>", "\u2581<bt>", "<url>"} <= every["s"]
    assert "<url>" in every["t"]
    assert not {"\u2581<2de>", "\u2581<bt>"} & every["t"]


def test_a_sentence_is_translated_into_data_target_unless_it_names_another_language(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", {**BOTH, "training.steps": 1})
    train(config)
    translator = load_translator(tmp_path / "run" / "last")
    sentences = ["One dog.", "<2en> Ein Hund.", "<2de> One dog.", ""]
    found = source_ids(translator.source, translator.text, sentences)
    assert [pieces(translator.source, ids[:1]) for ids in found] == [
        ["\u2581<2de>"], ["\u2581<2en>"], ["\u2581<2de>"], []
    ]  # fmt: skip
    assert found[0] == found[2]
    (linked,) = align(translator, ["One dog."], ["Ein Hund."])
    assert {source for source, _ in linked} <= {0, 1}


def test_a_corpus_takes_from_data_what_it_does_not_set(tmp_path: Path) -> None:
    config = load_config(
        None,
        {
            "data.path": "folder",
            "data.valid": ["v.en", "v.de"],
            "data.source": "en",
            "corpora": {"a": {"train": ["a.en", "a.de"]}, "b": {"train": "b.tsv", "path": "other", "target": "fr"}},
        },
    )
    first, second = (corpus.data for corpus in Corpora(config).training)
    assert (first.format, first.path, first.train, first.source, first.target) == (
        "text", "folder", ("a.en", "a.de"), "en", "de"
    )  # fmt: skip
    assert (second.format, second.path, second.train, second.target) == ("tsv", "other", ("b.tsv",), "fr")
    assert ModelText.of(config).tags == ()


def test_corpora_come_back_from_the_file_that_a_run_saves(tmp_path: Path) -> None:
    config = RunConfig(corpora={"a.b": CorpusConfig(train=("x", "y"), weight=2.5), "c": CorpusConfig(tag="<bt>")})
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_a_small_corpus_is_drawn_as_often_as_weight_and_temperature_say(tmp_path: Path) -> None:
    given = {**BOTH, "corpora": {"a": {"weight": 3}, "b": {"source": "de", "target": "en"}}}
    corpus = load_corpus(tiny(tmp_path / "run", given))
    drawn = [pair for batch in corpus.train.epoch(0) for pair in batch]
    assert len(drawn) == 200
    assert sum(pair < 100 for pair in drawn) == 150


def test_subwords_are_sampled_from_the_pairs_that_a_mixture_draws(tmp_path: Path) -> None:
    given = {**BOTH, "corpora": {"a": {"weight": 3}, "b": {"source": "de", "target": "en"}}, "subwords.sampling": 0.1}
    corpus = load_corpus(tiny(tmp_path / "run", given))
    for epoch in (0, 1):
        batches = corpus.train.epoch(epoch)
        drawn = [index - 200 * epoch for batch in batches for index in batch]
        assert len(drawn) == 200
        assert sum(pair < 100 for pair in drawn) == 150
        texts = corpus.source.decode(corpus.train.batch(batches[0]).src.tolist())
        assert all(text.startswith(("<2de> ", "<2en> ")) for text in texts)


def test_subwords_without_a_tag_or_symbol_of_the_settings_are_refused(tmp_path: Path) -> None:
    source, target = prepare(Corpora(tiny(tmp_path / "run", {"data.builtin_pairs": 100})))
    config = tiny(tmp_path / "run", {**BOTH, "subwords.symbols": ["<url>"]})
    with pytest.raises(ConfigError, match="do not have <2de>, <2en>, <bt>, <url>, a tag or symbol"):
        load_corpus(config, subwords_of=lambda _: (source, target))


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        (
            "nfc",
            {"subwords.symbols": ["cafe\u0301"]},
            r"'cafe\\u0301', a .* read it as 'caf\\xe9' \(subwords.normalization nfc",
        ),
        (
            "nfkc",
            {"corpora": {"a": {"tag": "\uff3bBT\uff3d"}}},
            r"'\\uff3bBT\\uff3d', a tag or symbol .* read it as '\[BT\]'",
        ),
    ],
)
def test_a_tag_or_symbol_that_normalisation_changes_is_refused(
    rule: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = tiny(tmp_path / "run", {"data.builtin_pairs": 100, "subwords.normalization": rule, **changes})
    with pytest.raises(ConfigError, match=message):
        load_corpus(config)


def write(folder: Path, name: str, lines: int) -> None:
    text = "".join(f"word {n} of {name}\n" for n in range(lines))
    for side in ("en", "de"):
        (folder / f"{name}.{side}").write_text(text)


def files(folder: Path, corpora: Any, **changes: Any) -> RunConfig:
    write(folder, "v", 3)
    return tiny(
        folder / "run", {"data.path": str(folder), "data.valid": ["v.en", "v.de"], "corpora": corpora, **changes}
    )


def test_pairs_that_moved_from_one_corpus_to_another_are_other_data(tmp_path: Path) -> None:
    """The same pairs in the same order, of which a resumed run would draw others more often."""
    corpora: dict[str, Any] = {"a": {"train": ["a.en", "a.de"], "weight": 3}, "b": {"train": ["b.en", "b.de"]}}
    prints = []
    for cut in (30, 20):
        folder = tmp_path / str(cut)
        folder.mkdir()
        for side in ("en", "de"):
            lines = [f"word {n}\n" for n in range(50)]
            (folder / f"a.{side}").write_text("".join(lines[:cut]))
            (folder / f"b.{side}").write_text("".join(lines[cut:]))
        prints.append(load_corpus(files(folder, corpora, **{"subwords.vocab_size": 280})).fingerprint)
    assert prints[0] != prints[1]


def test_models_are_made_anew_when_a_corpus_or_its_tag_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "a", 40)
    write(tmp_path, "b", 40)
    both: dict[str, Any] = {"a": {"train": ["a.en", "a.de"]}, "b": {"train": ["b.en", "b.de"]}}
    small = {"subwords.vocab_size": 280}
    prepare(Corpora(files(tmp_path, both, **small)))
    for change, again in (({}, "reused"), ({"weight": 2}, "reused"), ({"tag": "<bt>"}, "written")):
        capsys.readouterr()
        prepare(Corpora(files(tmp_path, {**both, "b": {**both["b"], **change}}, **small)))
        assert again in capsys.readouterr().out
    write(tmp_path, "b", 41)
    prepare(Corpora(files(tmp_path, both, **small)))
    assert "written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("corpora", "message"),
    [
        ({"a": {"train": "x"}}, r"corpora\.a\.train \(x\) does not show its format: set corpora\.a\.format"),
        ({"a": {"format": "text"}}, r"corpora\.a: data\.train takes two files"),
        ({"a": {"train": ["x", "y"]}}, r"corpora\.a: there is no file .*x"),
        ({"a": {"train": "x.tsv", "weight": 0}}, r"every weight of corpora \(a\) is 0"),
        ({"a": {"source": "fr"}}, r"corpora\.a: the built-in corpus is en and de; data\.source is fr"),
    ],
)
def test_a_mistake_in_a_corpus_names_it(corpora: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        load_corpus(files(tmp_path, corpora))


def test_a_mistake_in_the_cleaning_of_a_corpus_names_it(tmp_path: Path) -> None:
    write(tmp_path, "a", 3)
    corpora = {"a": {"train": ["a.en", "a.de"], "source": "qqq"}}
    with pytest.raises(ConfigError, match=r"^corpora\.a: cleaning\.script does not know the script of 'qqq'"):
        Corpora(files(tmp_path, corpora, **{"cleaning.script": True})).text


def test_data_train_beside_corpora_is_refused(tmp_path: Path) -> None:
    config = files(tmp_path, {"a": {"train": ["a.en", "a.de"]}})
    config = replace(config, data=replace(config.data, train=("x", "y")))
    with pytest.raises(ConfigError, match=r"data\.train \(x y\) and corpora \(a\) are both given"):
        Corpora(config).training


def test_corpora_are_yaml_on_the_command_line() -> None:
    found = load_config(None, {"corpora": "{a: {train: [x, y], weight: 2}, b: }"})
    assert found.corpora == {"a": CorpusConfig(train=("x", "y"), weight=2.0), "b": CorpusConfig()}


@pytest.mark.parametrize("symbol", ["", "two words", "\u2581x", "<s>", "<unk>", "<0x41>", "<twice>"])
def test_a_symbol_that_cannot_be_one_subword_is_refused(symbol: str) -> None:
    with pytest.raises(ConfigError, match="choose other words"):
        check_symbols(["<twice>", "<2de>", symbol])

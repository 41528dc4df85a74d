"""The data of a run: what is trained on is cut by the settings, what it is held against is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.translation.data.builtin_corpus import pairs as builtin_pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import ConfigError, DataError
from tests.recipes.tiny import tiny


def test_training_pairs_above_max_length_are_left_out_and_validation_keeps_every_pair(tmp_path: Path) -> None:
    whole = load_corpus(tiny(tmp_path / "run"))
    corpus = load_corpus(tiny(tmp_path / "run", {"training.max_length": 20}))
    sides = zip(corpus.train.sources, corpus.train.targets, strict=True)
    short = [index for index, (source, target) in enumerate(sides) if max(len(source), len(target)) <= 20]
    assert 0 < len(short) < len(corpus.train.sources)
    assert sorted(index for batch in corpus.train.epoch(0) for index in batch) == short
    assert corpus.train.dropped == len(corpus.train.sources) - len(short)
    assert whole.train.dropped == corpus.valid[0].batches.dropped == 0
    assert max(map(len, corpus.valid[0].batches.sources)) > 20
    assert len(corpus.valid[0].batches.sources) == len(corpus.valid[0].pairs) == 25


def test_a_max_length_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train pair is within training\.max_length 1"):
        load_corpus(tiny(tmp_path / "run", {"training.max_length": 1}))


@pytest.mark.parametrize("lowercase", [False, True])
def test_both_splits_are_lower_cased_or_neither(lowercase: bool, tmp_path: Path) -> None:
    corpus = load_corpus(tiny(tmp_path / "run", {"subwords.lowercase": lowercase}))
    for batches, side in ((corpus.train, corpus.source), (corpus.valid[0].batches, corpus.source)):
        texts = side.decode([list(ids) for ids in batches.sources[:50]])
        assert any(text != text.lower() for text in texts) != lowercase
    assert any(text != text.lower() for pair in corpus.valid[0].pairs for text in pair) != lowercase


def test_corpora_of_weight_0_do_not_count_as_data(tmp_path: Path) -> None:
    (tmp_path / "long").write_text(" ".join(pair.source for pair in builtin_pairs(200, 1)) + "\n")
    (tmp_path / "short").write_text("a cat\n")
    corpora = {"a": {"train": ["long", "long"]}, "s": {"train": ["short", "short"], "weight": 0}}
    changes = {"data.path": str(tmp_path), "corpora": corpora, "data.valid": ["short", "short"]}
    with pytest.raises(DataError, match=r"no train pair is within training\.max_length 30"):
        load_corpus(tiny(tmp_path / "run", {**changes, "training.max_length": 30}))


@pytest.mark.parametrize(("format", "file"), [("tsv", "a.tsv"), ("jsonl", "a.jsonl")])
def test_one_column_for_both_languages_is_refused(format: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("en\tde\na cat\teine Katze\n")
    (tmp_path / "a.jsonl").write_text('{"en": "a cat", "de": "eine Katze"}\n')
    files = {"data.path": str(tmp_path), "data.format": format, "data.train": [file], "data.valid": [file]}
    with pytest.raises(
        DataError, match=rf"data\.source and data\.target are both en, and in format {format} they name"
    ):
        load_corpus(tiny(tmp_path / "run", {**files, "data.source": "en", "data.target": "en"}))


@pytest.mark.parametrize("target", ["fr", "es"])
def test_a_target_language_that_no_tag_was_trained_for_is_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    corpora = {"c": {"train": ["a", "a"], "source": "fr", "target": "es"}}
    changes = {"data.path": str(tmp_path), "corpora": corpora, "data.valid": ["a", "a"], "data.target": target}
    config = tiny(tmp_path / "run", {**changes, "data.language_tags": True})
    if target == "es":
        Corpora(config).check()
        return
    with pytest.raises(
        ConfigError, match=r"data\.target is fr, into which translate would translate, but no corpus does: set it to es"
    ):
        Corpora(config).check()

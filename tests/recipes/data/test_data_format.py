"""The format of the data follows from what is given; what contradicts itself is refused before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.commands import main
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.settings.config import DataConfig, load_config
from tests.recipes.tiny import tiny


@pytest.mark.parametrize(
    ("files", "format"),
    [
        (["my.en", "my.de"], "text"),
        (["train.en.gz", "train.de.gz"], "text"),
        (["source.txt", "target.txt"], "text"),
        (["pairs.tsv"], "tsv"),
        (["pairs.TSV.gz"], "tsv"),
        (["folder.v2/pairs.jsonl"], "jsonl"),
        (["pairs.parquet"], "parquet"),
        ([], "builtin"),
    ],
)
def test_without_a_format_names_and_number_of_the_files_tell_it(files: list[str], format: str, tmp_path: Path) -> None:
    assert load_config(None, {"data.train": files}).data.format == format
    assert load_config(None, {"data.valid": files}).data.format == format
    (tmp_path / "run.yaml").write_text(f"data: {{train: {files}}}")
    assert load_config(tmp_path / "run.yaml").data.format == format


@pytest.mark.parametrize("format", ["text", "tsv", "jsonl", "tmx", "parquet", "hub"])
def test_a_format_that_is_given_wins(format: str) -> None:
    for files in (["one"], ["one", "two"], []):
        assert load_config(None, {"data.format": format, "data.train": files}).data.format == format


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"data.train": ["one.txt"]}, ["data.train (one.txt)", "set data.format", "tsv"]),
        ({"data.train": ["train"], "data.path": "wmt/wmt14:de-en"}, ["data.train (train)", "hub"]),
        ({"data.train": ["a", "b", "c"]}, ["data.train (a, b, c)", "set data.format"]),
        ({"data.train": ["a.tsv", "a.jsonl"]}, ["data.train (a.tsv, a.jsonl)", "set data.format"]),
        (
            {"data.train": ["a.en", "a.de"], "data.valid": "v.tsv"},
            ["data.train looks like text", "data.valid like tsv"],
        ),
        ({"data.path": "corpora"}, ["data.path is corpora", "data.train"]),
    ],
)
def test_files_that_do_not_tell_are_refused_with_the_way_out(given: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, given)
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (DataConfig(train=("a.en", "a.de")), ["data.format is builtin", "data.train is a.en a.de", "text"]),
        (DataConfig(valid=("a.tsv",)), ["data.format is builtin", "data.valid is a.tsv", "tsv"]),
        (DataConfig(test=("a.jsonl",)), ["data.format is builtin", "data.test is a.jsonl"]),
        (DataConfig(path="corpora"), ["data.format is builtin", "data.path is corpora"]),
        (DataConfig(format="text", train=("a.jsonl", "b.jsonl")), ["data.format is text", "a.jsonl", "jsonl"]),
        (DataConfig(format="tsv", train=("a.parquet",)), ["data.format is tsv", "a.parquet", "parquet"]),
        (DataConfig(format="jsonl", train=("a.tsv.gz",)), ["data.format is jsonl", "a.tsv.gz", "tsv"]),
    ],
)
def test_a_format_that_contradicts_the_files_is_refused(data: DataConfig, parts: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        load_pairs(data, "train")
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value
    assert "\n" not in str(caught.value)


def write_text(folder: Path) -> dict[str, Any]:
    lines = "".join(f"line {number} is here\n" for number in range(60))
    for name in ("a.en", "a.de", "v.en", "v.de", "t.en", "t.de"):
        (folder / name).write_text(lines)
    names = {"train": ["a.en", "a.de"], "valid": ["v.en", "v.de"], "test": ["t.en", "t.de"]}
    return {"data.path": str(folder), "subwords.vocab_size": 280} | {f"data.{key}": names[key] for key in names}


def test_two_files_without_a_format_are_what_is_trained_on(tmp_path: Path) -> None:
    given = {**write_text(tmp_path), "data.builtin_pairs": 40_000}
    config = tiny(tmp_path / "run", given)
    corpus = load_corpus(config)
    assert corpus.valid[0].pairs[0] == ("line 0 is here", "line 0 is here")
    assert len(corpus.train.sources) == 60


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize(
    ("spoil", "answer"),
    [
        (lambda path: path.unlink(), "there is no file"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"one\n"), "has 60 lines, .* has 1: "),
        (lambda path: path.write_bytes(b"caf\xe9\n"), "line 1 is not UTF-8 text"),
    ],
)
def test_held_out_files_are_looked_at_before_anything_is_trained(
    split: str, spoil: Callable[[Path], None], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_text(tmp_path)
    spoil(tmp_path / f"{split[0]}.de")
    with pytest.raises(DataError, match=answer):
        load_corpus(tiny(tmp_path / "run", given))
    assert not (tmp_path / "run").exists()
    assert "[prepare]" not in capsys.readouterr().out


def test_validation_data_is_asked_for_before_anything_is_trained_and_test_data_is_not(tmp_path: Path) -> None:
    given = write_text(tmp_path)
    load_corpus(tiny(tmp_path / "run", {key: value for key, value in given.items() if key != "data.test"}))
    without = {key: value for key, value in given.items() if key != "data.valid"}
    with pytest.raises(DataError, match=r"data\.valid takes two files"):
        load_corpus(tiny(tmp_path / "none", without))
    assert not (tmp_path / "none").exists()


def test_the_command_line_refuses_two_files_for_the_built_in_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--run", str(tmp_path / "run"), "--data.format", "builtin", "--data.train", "my.en", "my.de"]
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "data.format is builtin, the built-in corpus, but data.train is my.en my.de" in error

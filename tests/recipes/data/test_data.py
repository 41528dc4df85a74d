"""Loading sentence pairs: what is in the file comes out, line for line, and mistakes name file and setting."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from recipes.translation.data import sentence_pairs
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.settings.config import DataConfig
from recipes.translation.text.pair import Pair

Split = Literal["train", "valid", "test"]

PAIRS = [
    Pair("A dog.", "Ein Hund."),
    Pair('"Quoted", she said.', "„Zitat“, sagte sie."),
    Pair("NA", "null"),
    Pair("line\u2028separator\x85and\x0bmore\x1c", "Über\u2029Absätze"),
    Pair("  spaces  ", "Leerzeichen "),
]


def text_files(folder: Path, source: str, target: str) -> DataConfig:
    (folder / "a.en").write_bytes(source.encode())
    (folder / "a.de").write_bytes(target.encode())
    return DataConfig(format="text", path=str(folder), **dict.fromkeys(("train", "valid", "test"), ("a.en", "a.de")))


def text_of(side: int) -> str:
    return "".join(pair[side] + "\n" for pair in PAIRS)


def write_text(folder: Path) -> DataConfig:
    return text_files(folder, text_of(0), text_of(1))


def write_gzip(folder: Path) -> DataConfig:
    for name, side in (("b.en.gz", 0), ("b.de.gz", 1)):
        (folder / name).write_bytes(gzip.compress(text_of(side).encode()))
    return DataConfig(format="text", path=str(folder), train=("b.en.gz", "b.de.gz"))


def write_tsv(folder: Path) -> DataConfig:
    rows = [("id", "de", "en")] + [(f"{n}", pair.target, pair.source) for n, pair in enumerate(PAIRS)]
    (folder / "c.tsv").write_bytes("".join("\t".join(row) + "\n" for row in rows).encode())
    return DataConfig(format="tsv", path=str(folder), train=("c.tsv",))


def write_jsonl(folder: Path) -> DataConfig:
    lines = [json.dumps({"en": pair.source, "id": 3, "de": pair.target}) for pair in PAIRS]
    (folder / "d.jsonl").write_text("\n".join(lines))
    return DataConfig(format="jsonl", path=str(folder), train=("d.jsonl",))


def write_nested_jsonl(folder: Path) -> DataConfig:
    lines = [json.dumps({"translation": {"de": pair.target, "en": pair.source}}) for pair in PAIRS]
    (folder / "e.jsonl").write_text("\n".join(lines))
    return DataConfig(format="jsonl", path=str(folder), train=("e.jsonl",))


def write_parquet(folder: Path) -> DataConfig:
    table = pyarrow.table({"en": [pair.source for pair in PAIRS], "de": [pair.target for pair in PAIRS]})
    pyarrow.parquet.write_table(table, folder / "f.parquet")
    return DataConfig(format="parquet", path=str(folder), train=("f.parquet",))


def write_nested_parquet(folder: Path) -> DataConfig:
    rows = [{"de": pair.target, "en": pair.source} for pair in PAIRS]
    table = pyarrow.table({"id": list(range(len(rows))), "translation": rows})
    pyarrow.parquet.write_table(table, folder / "g.parquet", row_group_size=2)
    return DataConfig(format="parquet", path=str(folder), train=("g.parquet",))


WRITERS = [write_text, write_gzip, write_tsv, write_jsonl, write_nested_jsonl, write_parquet, write_nested_parquet]


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_gives_the_sentences_as_they_are(write: Callable[[Path], DataConfig], tmp_path: Path) -> None:
    assert load_pairs(write(tmp_path), "train") == PAIRS


def test_languages_say_which_side_is_the_source(tmp_path: Path) -> None:
    data = replace(write_jsonl(tmp_path), source="de", target="en")
    assert load_pairs(data, "train") == [Pair(target, source) for source, target in PAIRS]


def test_lower_case_is_applied_to_both_sides(tmp_path: Path) -> None:
    assert load_pairs(write_text(tmp_path), "train", lowercase=True)[0] == Pair("a dog.", "ein hund.")


def test_empty_pairs_are_dropped_from_train_only_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = text_files(tmp_path, "a\n\nb\nc\n", "x\ny\n \nz\n")
    assert load_pairs(data, "train") == [("a", "x"), ("c", "z")]
    assert "2 of 4 pairs dropped" in capsys.readouterr().err
    for split in ("valid", "test"):
        assert load_pairs(data, split) == [("a", "x"), ("", "y"), ("b", " "), ("c", "z")]


def test_a_last_line_without_line_end_counts(tmp_path: Path) -> None:
    assert len(load_pairs(text_files(tmp_path, "a\nb", "x\ny\n"), "test")) == 2


def test_files_that_are_not_aligned_are_refused_with_both_counts(tmp_path: Path) -> None:
    answer = refusal(text_files(tmp_path, "a\nb\nc\n", "x\ny\n"), "train")
    assert "a.en has 3 lines" in answer
    assert "a.de has 2" in answer


def test_nothing_is_left_in_the_cache_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "files").mkdir()
    load_pairs(write_gzip(tmp_path / "files"), "train")
    assert not (tmp_path / "cache").exists()


def test_progress_bars_are_silent_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []

    def load_dataset(*_: Any, **options: Any) -> datasets.Dataset:
        shown.append(datasets.is_progress_bar_enabled())
        return datasets.Dataset.from_dict({"en": ["a"], "de": ["b"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    datasets.enable_progress_bars()
    load_pairs(DataConfig(format="hub", path="a/b", train=("train",)), "train")
    assert shown == [False]
    assert datasets.is_progress_bar_enabled()


def refusal(data: DataConfig, split: Split = "train") -> str:
    with pytest.raises(DataError) as caught:
        load_pairs(data, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_file_is_named_with_the_setting(tmp_path: Path) -> None:
    answer = refusal(DataConfig(format="tsv", path=str(tmp_path), test=("none.tsv",)), "test")
    assert str(tmp_path / "none.tsv") in answer
    assert "data.test" in answer


def test_the_environment_is_read_in_the_path_and_a_missing_name_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    data = replace(write_text(tmp_path / "sub"), path="${CORPORA}/sub")
    monkeypatch.setenv("CORPORA", str(tmp_path))
    assert load_pairs(data, "train") == PAIRS
    monkeypatch.delenv("CORPORA")
    with pytest.raises(ConfigError, match=r"CORPORA is not set.*--data\.path"):
        load_pairs(data, "train")


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (DataConfig(format="text", train=("one.en",)), ["data.train takes two files", "got one.en"]),
        (DataConfig(format="tsv"), ["data.train takes one file", "got nothing"]),
        (DataConfig(format="hub", path="x/y"), ["data.train takes one split name"]),
        (DataConfig(format="hub", train=("train",)), ["data.path is empty"]),
        (DataConfig(source="en", target="fr"), ["built-in corpus is en and de", "data.target fr"]),
    ],
)
def test_settings_that_do_not_fit_the_format_are_named(data: DataConfig, parts: list[str]) -> None:
    answer = refusal(data)
    assert [part for part in parts if part not in answer] == [], answer


def test_a_missing_language_is_answered_with_those_there_are(tmp_path: Path) -> None:
    for write in (write_tsv, write_jsonl, write_nested_jsonl, write_parquet):
        answer = refusal(replace(write(tmp_path), target="fr"))
        assert "'fr' (data.target)" in answer
        assert "'de'" in answer


@pytest.mark.parametrize(
    ("first", "parts"),
    [
        ("A dog.\tEin Hund.", ["names neither 'en' (data.source) nor 'de' (data.target)", "'A dog.', 'Ein Hund.'"]),
        ("A dog.\tEin Hund.", ["put a line before it with en and de, separated by tabs"]),
        ("one column", ["neither 'en'", "which is 'one column'"]),
        (f"{'long ' * 50}\tx", ["(250 characters)"]),
        ("\t".join("abcdefgh"), ["'f', ... (8 in all)"]),
        ("en\tger", ["has no 'de' (data.target); its header is 'en', 'ger': set data.target to one of these"]),
        ("eng\tde", ["has no 'en' (data.source); its header is 'eng', 'de': set data.source to one of these"]),
    ],
)
def test_a_tsv_file_without_its_header_is_answered_with_its_first_line(
    first: str, parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.tsv").write_text(f"{first}\nx\ty\n")
    answer = refusal(DataConfig(format="tsv", path=str(tmp_path), train=("a.tsv",)))
    assert [part for part in [str(tmp_path / "a.tsv"), *parts] if part not in answer] == [], answer


def test_a_row_without_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("en\tde\na\tb\nc\n")
    answer = refusal(DataConfig(format="tsv", path=str(tmp_path), train=("a.tsv",)))
    assert "a.tsv:3 has 1 columns, the header 2" in answer
    (tmp_path / "a.jsonl").write_text('{"en": "a", "de": "b"}\n{"en": "a", "de": null}\n')
    data = DataConfig(format="jsonl", path=str(tmp_path), train=("a.jsonl",))
    assert "a.jsonl:2: 'de' is not text but NoneType" in refusal(data)
    (tmp_path / "a.jsonl").write_text('{"en": "a", "de": "b"}\n\n{"en": "a"}\n')
    assert "a.jsonl:3 has no 'de' (data.target); it has 'en'" in refusal(data)


def test_a_row_with_a_cell_too_many_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("en\tde\na\tb\nc\td\te\n")
    answer = refusal(DataConfig(format="tsv", path=str(tmp_path), train=("a.tsv",)))
    assert "a.tsv:3 has 3 columns, the header 2" in answer


def test_without_validation_data_it_is_said_where_to_take_it_from() -> None:
    data = DataConfig(format="text", train=("a.en", "a.de"))
    assert refusal(data, "valid").endswith(
        "got nothing; without such data, hold a few hundred pairs back from the training data"
    )
    assert refusal(replace(data, valid=("a.en",)), "valid").endswith("got a.en")
    assert refusal(data, "test").endswith(
        "got nothing; without a test set, evaluate --split valid scores the validation data"
    )


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpora").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_pairs(replace(write_text(tmp_path / "corpora"), path="~/corpora"), "train") == PAIRS
    assert load_pairs(DataConfig(format="text", train=("~/corpora/a.en", "~/corpora/a.de")), "train") == PAIRS


def test_the_environment_is_read_in_the_names_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path)
    monkeypatch.setenv("CORPORA", str(tmp_path))
    assert load_pairs(DataConfig(format="text", train=("${CORPORA}/a.en", "${CORPORA}/a.de")), "train") == PAIRS


@pytest.mark.parametrize(
    ("format", "reason"), [("tsv", " cannot be read"), ("jsonl", ":1 is not JSON"), ("parquet", " cannot be read")]
)
def test_a_damaged_file_is_named(format: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"en\tde\n\xff\xfe\t{\n\x00\n" * 3)
    answer = refusal(DataConfig(format=format, path=str(tmp_path), train=("bad",)))
    assert f"{tmp_path / 'bad'}{reason}" in answer


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    assert "a.en is empty" in refusal(text_files(tmp_path, "", ""))
    (tmp_path / "a.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "mark").write_bytes(b"\xef\xbb\xbf")
    for name in ("a.gz", "mark"):
        for format, files in (("text", (name, name)), ("tsv", (name,)), ("jsonl", (name,))):
            answer = refusal(DataConfig(format=format, path=str(tmp_path), train=files))
            assert f"{name} is empty; data.train needs sentences" in answer


def test_training_text_with_nothing_in_it_is_refused(tmp_path: Path) -> None:
    assert "no pair with text on both sides (2 pairs read)" in refusal(text_files(tmp_path, "a\n\n", "\nb\n"))


def test_the_hub_is_asked_for_name_subset_and_split_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> datasets.Dataset:
        asked.append((args, options))
        return datasets.Dataset.from_dict({"translation": [{"en": "a", "de": "b"}]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = DataConfig(format="hub", path="wmt/wmt14:de-en", train=("train",), valid=("validation",))
    assert load_pairs(data, "train") == load_pairs(replace(data, path="wmt/wmt14"), "valid") == [("a", "b")]
    assert asked == [
        (("wmt/wmt14", "de-en"), {"split": "train", "revision": None}),
        (("wmt/wmt14", None), {"split": "validation", "revision": None}),
    ]


@pytest.mark.parametrize("format", ["parquet", "hub"])
def test_a_table_is_read_in_slices_and_its_rows_are_named(
    format: Literal["parquet", "hub"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [{"translation": {"en": f"a{n}", "de": f"b{n}"}, "id": n} for n in range(7)]
    data = DataConfig(format=format, path=str(tmp_path), train=("t.parquet",))

    def written() -> DataConfig:
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **options: datasets.Dataset(table))
        return data

    monkeypatch.setattr(sentence_pairs, "SLICE", 3)
    assert load_pairs(written(), "train") == [(f"a{n}", f"b{n}") for n in range(7)]
    rows[5]["translation"] = {"en": "a5"}
    assert "row 6: 'de' is not text but NoneType" in refusal(written())
    rows[5]["translation"] = None
    assert "row 6 is a NoneType, not an object" in refusal(written())
    assert "has no 'fr' (data.target); it has 'en', 'de'" in refusal(replace(data, target="fr"))
    rows = [{"en": "a", "german": "b", "id": 3}]
    assert "has no 'de' (data.target); it has 'en', 'german', 'id'" in refusal(written())


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_revision_of_the_hub_is_asked_for_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no hub here: checked are the arguments of `datasets`, and the commit in the addresses of files."""
    asked: list[Any] = []
    files: dict[str, Any] = {}

    def load_dataset(*args: Any, **options: Any) -> datasets.Dataset:
        asked.append((args, options))
        rows = datasets.Dataset.from_dict({"en": ["a"], "de": ["b"]})
        rows.info.download_checksums = files
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = DataConfig(format="hub", path="a/b@v1.0:c", train=("train",))
    assert load_pairs(data, "train") == [("a", "b")]
    assert asked == [(("a/b", "c"), {"split": "train", "revision": "v1.0"})]
    assert "a/b@v1.0:c (split train) on the Hugging Face hub: revision v1.0" in capsys.readouterr().err
    files[f"hf://datasets/a/b@{COMMIT}/c/train.parquet"] = {}
    load_pairs(replace(data, path="a/b"), "train")
    assert f"revision {COMMIT}" in capsys.readouterr().err
    assert "without a revision after the @" in refusal(replace(data, path="a/b@:c"))


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: Any, **options: Any) -> datasets.Dataset:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    answer = refusal(DataConfig(format="hub", path="a/b", train=("train",)))
    assert "a/b (split train) on the Hugging Face hub cannot be read: no network" in answer


def test_the_built_in_corpus_serves_both_directions_and_keeps_its_splits() -> None:
    data = DataConfig(builtin_pairs=300)
    assert load_pairs(data, "train") == pairs(300, 1)
    back = load_pairs(DataConfig(source="de", target="en", builtin_pairs=300), "train")
    assert back == [Pair(target, source) for source, target in pairs(300, 1)]


@pytest.mark.parametrize(("train", "held_out"), [(1, 1), (20, 2), (255, 26), (9_990, 999), (40_000, 1_000)])
def test_the_built_in_corpus_holds_out_a_tenth_and_at_most_1000_pairs(train: int, held_out: int) -> None:
    data = DataConfig(builtin_pairs=train)
    assert len(load_pairs(data, "valid")) == len(load_pairs(data, "test")) == held_out


def test_datasets_is_imported_only_for_files() -> None:
    code = (
        "import sys; from recipes.translation.data.sentence_pairs import load_pairs;"
        "from recipes.translation.settings.config import DataConfig;"
        "load_pairs(DataConfig(builtin_pairs=5), 'train'); assert 'datasets' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.data
def test_multi30k_is_whole() -> None:
    data = DataConfig(
        format="text",
        path="${SEQPAR_DATA}/multi30k",
        train=("train.en.gz", "train.de.gz"),
        valid=("val.en.gz", "val.de.gz"),
        test=("test_2016_flickr.en.gz", "test_2016_flickr.de.gz"),
    )
    splits: list[Split] = ["train", "valid", "test"]
    loaded = {split: load_pairs(data, split) for split in splits}
    assert [len(loaded[split]) for split in splits] == [29_000, 1_014, 1_000]
    folder = os.environ["SEQPAR_DATA"] + "/multi30k"
    with gzip.open(f"{folder}/train.de.gz", "rb") as file:
        assert file.read().decode().split("\n")[:-1] == [pair.target for pair in loaded["train"]]

"""Corpora that are not what they look like: packed, marked up, quoted, or with the test set inside."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest

from recipes.translation.data.cleaning import markup_in
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.mistakes import check_meant
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.files.lines import read_lines
from recipes.translation.settings.config import DataConfig, RunConfig, named_format
from recipes.translation.settings.data import CleaningConfig
from recipes.translation.settings.paths import expand_path

LINES = ["one", "zwei", "drei ü"]
TEXT = "".join(f"{line}\n" for line in LINES).encode()


def zstd(content: bytes) -> bytes:
    return pack_by_pyarrow(content, "zstd")


def lz4(content: bytes) -> bytes:
    return pack_by_pyarrow(content, "lz4")


def pack_by_pyarrow(content: bytes, codec: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PACKED = [gzip.compress, lzma.compress, bz2.compress, zstd, lz4]


@pytest.mark.parametrize("pack", [*PACKED, bytes])
@pytest.mark.parametrize("name", ["a.en", "a.en.gz", "a.xz"])
def test_a_packed_file_is_read_whatever_its_name(pack: object, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pack(TEXT))
    assert read_lines(tmp_path / name) == LINES


@pytest.mark.parametrize("pack", PACKED)
def test_a_packed_file_that_is_cut_is_refused(pack: object, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(pack(TEXT * 999)[:-9])
    with pytest.raises(DataError, match="cannot be unpacked"):
        read_lines(tmp_path / "a")


@pytest.mark.parametrize(
    ("start", "way"),
    [(b"PK\x03\x04\x14", "unzip"), (b"7z\xbc\xaf\x27\x1c", "7z x")],
)
def test_what_cannot_be_unpacked_is_named(start: bytes, way: str, tmp_path: Path) -> None:
    (tmp_path / "a.en").write_bytes(start + bytes(40))
    with pytest.raises(DataError, match=f"unpack it first, with {way}"):
        read_lines(tmp_path / "a.en")


@pytest.mark.parametrize("pack", PACKED)
def test_packed_files_one_after_the_other_are_one_text(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(pack(b"one\ntwo") + pack(b" and more\nthree\n"))
    assert read_lines(tmp_path / "a") == ["one", "two and more", "three"]


def test_archives_are_named(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        entry = tarfile.TarInfo("a.en")
        entry.size = len(TEXT)
        archive.addfile(entry, io.BytesIO(TEXT))
    (tmp_path / "a.tgz").write_bytes(packed.getvalue())
    with pytest.raises(DataError, match="a tar archive: unpack it first, with tar -xf"):
        read_lines(tmp_path / "a.tgz")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.en", TEXT)
    with pytest.raises(DataError, match=r"is a \.zip file"):
        read_lines(tmp_path / "a.zip")


def test_the_format_is_that_of_the_name_within() -> None:
    assert [named_format(f"a.tsv{end}") for end in ("", ".gz", ".xz", ".bz2", ".zst", ".XZ")] == ["tsv"] * 6


MARKUP = {
    "it &apos;s": "&apos;", "&amp;#45; x": "&amp;#45;", "a & quot ; b": "& quot ;",
    "x &#91; y": "&#91;", "&nbsp;": "&nbsp;",
    '<SPEAKER ID="1" NAME="A B">': '<SPEAKER ID="1" NAME="A B">', "<CHAPTER ID=1>": "<CHAPTER ID=1>", "<P>": "<P>",
    "<seg id='3'>x</seg>": "<seg id='3'>", "a<br/>b": "<br/>", "<!-- x -->": "<!--",
}  # fmt: skip


@pytest.mark.parametrize("text", MARKUP)
def test_markup_is_found(text: str) -> None:
    assert markup_in(text) == MARKUP[text]


@pytest.mark.parametrize(
    "text", ["AT&T; R&D", "a < b and c > d", "x<3", "I <- you", "5 & 6;", "Q&A", "a <2de> b", "<url> x"]
)
def test_text_is_no_markup(text: str) -> None:
    assert markup_in(text, frozenset(["<url>"])) == ""


def corpus(folder: Path, name: str, pairs: list[tuple[str, str]]) -> tuple[str, str]:
    folder.mkdir(exist_ok=True)
    for side, language in enumerate(("en", "de")):
        (folder / f"{name}.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    return str(folder / f"{name}.en"), str(folder / f"{name}.de")


@pytest.mark.parametrize("rule", [False, True])
def test_pairs_with_markup_are_counted_or_removed(
    rule: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = corpus(tmp_path, "a", [("it &apos;s", "es"), ("two", "zwei"), ("three", "<P> drei")])
    found = load_pairs(DataConfig(format="text", train=names), "train", cleaning=CleaningConfig(markup=rule))
    said = capsys.readouterr().err
    assert len(found) == (1 if rule else 3)
    assert ("2 of 3 pairs dropped: markup 2" in said) == rule
    assert ("2 of 3 pairs have tags or character entities, such as &apos;" in said) != rule


@pytest.mark.parametrize(
    "first",
    ['<?xml version="1.0"?>', '<srcset setid="x">', "<tmx version='1.4'>", "<!DOCTYPE mteval>", "<refset x='y'>"],
)
def test_a_document_is_refused(first: str, tmp_path: Path) -> None:
    names = corpus(tmp_path, "a", [(first, "a"), ("b", "b")])
    with pytest.raises(DataError, match="not one sentence per line but a markup document"):
        load_pairs(DataConfig(format="text", train=names), "train")


@pytest.mark.parametrize("cell", ['"""Go"" he said."', '"She said ""no"""'])
def test_a_file_that_pandas_has_quoted_is_refused(cell: str, tmp_path: Path) -> None:
    data = DataConfig(format="tsv", train=(str(tmp_path / "a.tsv"),))
    (tmp_path / "a.tsv").write_text(f'en\tde\n"a"\t"Hallo."\n{cell}\tb\n')
    with pytest.raises(DataError, match=r"a.tsv:3 is quoted as pandas and csv do it .*to_json"):
        load_pairs(data, "train")
    (tmp_path / "a.tsv").write_text(f'en\tde\na "b\t"Hallo."\n{cell}\tb\n')
    assert load_pairs(data, "train")[1].source == cell
    (tmp_path / "a.tsv").write_text('"en"\t"de"\n"a"\t"b"\n')
    with pytest.raises(DataError, match=r"a.tsv:1 is quoted"):
        load_pairs(data, "train")


def test_as_many_names_are_asked_for_as_there_are_columns(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("Go.\tGeh.\tCC-BY\n")
    with pytest.raises(DataError, match="a name for each of its 3 columns, among them en and de"):
        load_pairs(DataConfig(format="tsv", train=(str(tmp_path / "a.tsv"),)), "train")


PAIRS = [(f"a {number}", f"b {number}") for number in range(9)]


def run(train: tuple[str, str], valid: tuple[str, str], **more: object) -> Corpora:
    return Corpora(RunConfig(data=replace(DataConfig(format="text", train=train, valid=valid), **more)))


def test_a_copy_of_the_training_data_is_refused_as_the_file_itself_is(tmp_path: Path) -> None:
    train = corpus(tmp_path, "train", PAIRS)
    other = corpus(tmp_path, "other", [*PAIRS[:-1], ("a 8", "b 9")])
    copy = tuple(shutil.copy(name, f"{name}.copy") for name in train)
    for valid, test in ((copy, ()), (corpus(tmp_path, "v", PAIRS[:2]), copy)):
        with pytest.raises(DataError, match="are the same data"):
            check_meant(run(train, valid, test=test))
    check_meant(run(train, corpus(tmp_path, "w", PAIRS[:2])))
    with pytest.raises(DataError, match="are the same data"):  # the sources alone
        check_meant(run(train, other))


def test_held_out_pairs_within_the_training_data_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    valid = corpus(
        tmp_path, "valid", [("v  1", "w 1"), ("v 2", "w 2"), ("v 2", "w 2"), ("b 3", "a 3"), ("v 4", "other")]
    )
    test = corpus(tmp_path, "test", [("t", "u")])
    train = corpus(tmp_path, "train", [*PAIRS, ("v 1", "w 1 "), ("v 2", "w 2"), ("v 4", "w 4")])
    corpora = run(train, valid, test=test, cache=str(tmp_path / "cache"))
    corpora.check()
    for _ in ("written", "reused"):
        corpora.note_held_out()
        said = capsys.readouterr().err
        assert "train: 3 of the 4 different pairs of data.valid are also in the training data" in said
        assert "data.test" not in said
        corpora = Corpora(corpora.config)
        corpora.check()


def test_paths_are_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.delenv("NOSUCH", raising=False)
    for path, expected in {
        "~/x": f"{tmp_path}/x", "~": str(tmp_path), "${SCRATCH}/y": "/scratch/y", "$SCRATCH/y": "/scratch/y",
        "a/$SCRATCH/y": "a//scratch/y", "a$SCRATCH": "a$SCRATCH", "a~": "a~", "x/~/y": "x/~/y",
        "${SCRATCH}1": "/scratch1",
    }.items():  # fmt: skip
        assert expand_path(path, "run") == expected
    for path in ("${NOSUCH}/x", "$NOSUCH/x", "~nosuchuser/x"):
        with pytest.raises(ConfigError, match="run is "):
            expand_path(path, "run")

"""Text files: only a newline ends a line, with or without a carriage return before it, and bad bytes have a place."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.commands import translation
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.errors import DataError
from recipes.translation.files.lines import each_line, lines_of, read_lines
from recipes.translation.settings.config import DataConfig

SEPARATORS = ["\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\0", "\t"]
texts = st.text(st.sampled_from(["a", " ", "ä", "漢", "\ufeff", *SEPARATORS]), max_size=6)


@given(st.lists(texts.filter(lambda text: not text.endswith("\r")), max_size=5), st.sampled_from(["\n", "\r\n"]))
def test_lines_come_back_as_they_were_written(lines: list[str], end: str) -> None:
    written = "".join(line + end for line in lines).encode()
    if written.startswith("\ufeff".encode()):
        lines[0] = lines[0][1:]
    assert lines_of(written, "it") == lines


@pytest.mark.parametrize("separator", SEPARATORS, ids=ascii)
def test_no_other_separator_ends_a_line(separator: str) -> None:
    assert lines_of(f"a{separator}b\nc".encode(), "it") == [f"a{separator}b", "c"]


def test_a_last_line_needs_no_end_and_no_text_is_no_line() -> None:
    assert lines_of(b"a\nb", "it") == lines_of(b"a\nb\n", "it") == ["a", "b"]
    assert lines_of(b"a\n\n", "it") == ["a", ""]
    assert lines_of(b"\n", "it") == [""]
    assert lines_of(b"", "it") == []
    assert lines_of("\ufeff".encode(), "it") == []


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    assert lines_of("\ufeffa\n\ufeffb".encode(), "it") == ["a", "\ufeffb"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_not_utf_8_are_answered_with_line_and_remedy(mark: bytes) -> None:
    with pytest.raises(DataError) as caught:
        lines_of(mark + b"one\ntwo\nthree caf" + b"\xe9 au lait\nfour", "x.txt")
    answer = str(caught.value)
    assert "x.txt cannot be read: line 3 is not UTF-8 text" in answer
    assert "byte 0xe9 at position 10 of the line" in answer
    assert "iconv -f latin1 -t utf-8" in answer
    assert "\n" not in answer


@pytest.mark.parametrize("name", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_recognised(name: str) -> None:
    with pytest.raises(DataError, match=r"x\.txt cannot be read: it is UTF-16.* iconv -f utf-16 -t utf-8"):
        lines_of("\ufeffabc\n".encode(name), "x.txt")


def test_compressed_files_are_unpacked_whatever_they_are_called(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"a\nb\n"))
    assert read_lines(tmp_path / "a.txt") == ["a", "b"]


@given(
    st.lists(
        st.sampled_from([b"a", b"\n", b"\r", b"\r\n", "ä\ufeff".encode(), b"\xef\xbb\xbf", b"\xff"]), max_size=9
    ).map(b"".join)
)
def test_the_lines_of_a_compressed_file_are_those_of_the_plain_one(written: bytes) -> None:
    def outcome(content: bytes) -> list[str] | str:
        try:
            return lines_of(content, "it")
        except DataError as error:
            return str(error)

    assert outcome(gzip.compress(written)) == outcome(written)


def test_a_damaged_compressed_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"a\nb\n" * 100)
    for number, damaged in enumerate((whole[:-9], whole[:12] + b"zz" + whole[14:], whole[:-5] + b"xxxxx")):
        path = tmp_path / f"{number}.gz"
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{number}\.gz cannot be unpacked: .+"):
            list(each_line(path))


LINES = [f"line {number}" for number in range(3_000)]


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress])
def test_a_damaged_stream_after_others_is_named_too(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """Python's own readers take it for the end of the file."""
    path = tmp_path / "a"
    parts = [compress("".join(f"{line}\n" for line in LINES[some]).encode()) for some in (slice(9), slice(9, None))]
    for between in (b"", bytes(8)):
        path.write_bytes(between.join([*parts, b""]))
        assert read_lines(path) == LINES
    whole = b"".join(parts)
    for damaged in (whole[:-1], parts[0] + b"x" + parts[1], whole + b"x", parts[0] + parts[1][:3]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a cannot be unpacked: .+; copy it again"):
            read_lines(path)


def test_a_file_of_pzstd_begins_with_a_frame_to_be_skipped(tmp_path: Path) -> None:
    frame = pyarrow.compress("".join(f"{line}\n" for line in LINES).encode(), codec="zstd", asbytes=True)
    (tmp_path / "a").write_bytes(b"\x50\x2a\x4d\x18\x04\0\0\0" + b"size" + frame)
    assert read_lines(tmp_path / "a") == LINES


def test_a_later_line_of_a_pipe_may_begin_as_a_packed_file_does() -> None:
    assert lines_of(b"Rar! said the lion.\nBZh\n", "it", first=2) == ["Rar! said the lion.", "BZh"]
    with pytest.raises(DataError, match=r"it is a \.rar file"):
        lines_of(b"Rar!\n", "it")


def test_one_line_in_is_one_line_out_through_file_and_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = "\ufeffone\rline\u2028here\nand\vtwo\r\n".encode()
    expected = ["one\rline\u2028here", "and\vtwo"]
    (tmp_path / "in.txt").write_bytes(written)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(written)))
    assert translation._sentences(str(tmp_path / "in.txt")) == translation._sentences(None) == expected


def test_an_empty_file_holds_no_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.txt").write_bytes(b"")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert translation._sentences(str(tmp_path / "in.txt")) == translation._sentences(None) == []


def test_a_pipe_in_another_encoding_is_refused_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("a\ncafé\n".encode("latin1"))))
    with pytest.raises(DataError, match="the standard input cannot be read: line 2 is not UTF-8 text"):
        translation._sentences(None)


def pairs_of(folder: Path, format: str, **files: bytes) -> list[tuple[str, str]]:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return list(load_pairs(DataConfig(format=format, path=str(folder), train=tuple(files)), "train"))


def test_a_file_with_carriage_returns_alone_is_not_taken_for_one_line(tmp_path: Path) -> None:
    for written in (b"a\rb", b"a\rb\r", b"\ra\r"):
        (tmp_path / "in.txt").write_bytes(written)
        with pytest.raises(DataError, match=r"in\.txt has carriage returns as line endings; convert it"):
            read_lines(tmp_path / "in.txt")
    (tmp_path / "in.txt").write_bytes(b"a\r")
    assert read_lines(tmp_path / "in.txt") == ["a\r"]


def test_a_pipe_may_be_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(b"one\ntwo\n"))))
    assert translation._sentences(None) == ["one", "two"]


@pytest.mark.parametrize(
    ("format", "content", "message"),
    [
        ("tsv", b"en\tde\ten\na\tx\tb\n", r"a has 2 columns 'en' \(data.source\); rename all but one"),
        ("jsonl", b'{"en": "a", "de": "x", "en": "b"}\n', r"a:1 is not JSON: the key 'en' occurs twice in one object"),
    ],
)
def test_a_column_or_key_that_occurs_twice_is_refused(
    format: str, content: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        pairs_of(tmp_path, format, a=content)


def test_a_lone_carriage_return_does_not_misalign_pairs(tmp_path: Path) -> None:
    found = pairs_of(tmp_path, "text", en=b"a\rb\nc\nd\n", de=b"x\ny\rz\nw\n")
    assert found == [("a\rb", "x"), ("c", "y\rz"), ("d", "w")]


def test_a_byte_order_mark_hides_neither_a_sentence_nor_a_header(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert pairs_of(tmp_path, "text", en=mark + b"a\n", de=mark + b"x\n") == [("a", "x")]
    assert pairs_of(tmp_path, "tsv", a=mark + b"en\tde\r\na\tx\r\n") == [("a", "x")]
    assert pairs_of(tmp_path, "jsonl", b=mark + b'{"en": "a", "de": "x"}\r\n') == [("a", "x")]


@pytest.mark.parametrize("format", ["text", "tsv", "jsonl"])
def test_data_in_another_encoding_is_answered_with_file_line_and_remedy(format: str, tmp_path: Path) -> None:
    bad = {"text": "a\nä\n", "tsv": "en\tde\nä\tb\n", "jsonl": '{"en":"a","de":"b"}\n{"en":"ä","de":"b"}\n'}
    files = {"x": bad[format].encode("latin1")} | ({"y": b"a\nb\n"} if format == "text" else {})
    with pytest.raises(DataError, match=r"x cannot be read: line 2 is not UTF-8 text .* iconv -f latin1 -t utf-8"):
        pairs_of(tmp_path, format, **files)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b'{"en": "c", "de": "d"', "b.jsonl:3 is not JSON: Expecting ',' delimiter"),
        (b"[1, 2]", "b.jsonl:3 is a list, not an object"),
        (b'{"en": "c\\ud800", "de": "d"}', "b.jsonl:3: 'en' is not Unicode text"),
        (b"[" * 100_000, "b.jsonl:3 is not JSON: it is nested too deeply"),
        (b'{"en": ' + b"9" * 5_000 + b"}", "b.jsonl:3 is not JSON: Exceeds the limit"),
        (b'{"en": "c"}', "b.jsonl:3 has no 'de' (data.target); it has 'en'"),
    ],
    ids=["open", "list", "surrogate", "deep", "digits", "missing"],
)
def test_a_line_that_is_no_record_is_named(line: bytes, answer: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        pairs_of(tmp_path, "jsonl", **{"b.jsonl": b'{"en": "a", "de": "b"}\n\n' + line + b"\n"})
    assert answer in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_of_dates_is_text(tmp_path: Path) -> None:
    line = b'{"en": "2020-01-01", "de": "2020-01-02"}\n'
    assert pairs_of(tmp_path, "jsonl", a=line * 2) == [("2020-01-01", "2020-01-02")] * 2

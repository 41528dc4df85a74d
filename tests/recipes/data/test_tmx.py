"""TMX files are read as they are, or answered in one line."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.data.tmx import tmx_pairs
from recipes.translation.errors import DataError
from recipes.translation.settings.config import load_config

TEXTS = st.text(st.sampled_from("ab ü你\u00a0\u3000<&>'\""), max_size=9).map(lambda text: text.strip(" "))


def written(path: Path, units: str, start: str = '<?xml version="1.0" encoding="UTF-8"?>\n') -> Path:
    body = f'{start}<tmx version="1.4"><header srclang="en"/><body>{units}</body></tmx>'
    path.write_bytes(body.encode("utf-16" if "UTF-16" in start else "utf-8"))
    return path


def variant(language: str, text: str) -> str:
    return f'<tuv xml:lang="{language}"><seg>{text}</seg></tuv>'


def unit(*variants: tuple[str, str]) -> str:
    return f"<tu>{''.join(variant(*each) for each in variants)}</tu>"


def test_names_may_be_in_a_namespace(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tmx", unit(("en", "a <ph>{}</ph>b"), ("de", "x")))
    path.write_text(path.read_text().replace("<tmx", '<tmx xmlns="http://www.lisa.org/tmx14"'))
    assert list(tmx_pairs(path, "en", "de")) == [("a b", "x")]


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5))
def test_text_comes_back_to_the_letter(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.mktemp("tmx") / "a.tmx"
    written(path, "".join(unit(("en", escape(one)), ("de", escape(other))) for one, other in pairs))
    assert list(tmx_pairs(path, "en", "de")) == pairs
    assert list(tmx_pairs(path, "de", "en")) == [(other, one) for one, other in pairs]


def test_codes_of_other_programs_are_no_text_and_marked_words_are(tmp_path: Path) -> None:
    text = 'a <bpt i="1">{\\b <sub>x</sub>}</bpt>bold<ept i="1">}</ept> <hi>word</hi>\n   c<ph/>d'
    path = written(tmp_path / "a.tmx", unit(("en", text), ("de", "b")))
    assert list(tmx_pairs(path, "en", "de")) == [("a bold word cd", "b")]


@pytest.mark.parametrize(
    ("asked", "found"),
    [("en", "British"), ("en-US", "American"), ("EN_gb", "British"), ("pt", "own"), ("zh-Hant", "long")],
)
def test_a_language_is_its_own_code_or_the_first_of_its_regions(asked: str, found: str, tmp_path: Path) -> None:
    there = [
        ("enm", "Middle English"),
        ("en-GB", "British"),
        ("en-US", "American"),
        ("pt-BR", "Brazil"),
        ("pt", "own"),
        ("zh-hant-TW", "long"),
    ]
    path = written(tmp_path / "a.tmx", unit(*there, ("de", "b")))
    assert list(tmx_pairs(path, asked, "de")) == [(found, "b")]


def test_units_without_one_of_the_languages_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    units = unit(("en", "a"), ("de", "b")) + unit(("en", "c")) + "<tu><tuv xml:lang='de'/></tu>"
    path = written(tmp_path / "a.tmx", units)
    assert list(tmx_pairs(path, "en", "de")) == [("a", "b")]
    assert "2 of 3 units are not in both languages, and left out" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"no unit in both 'en' .* and 'fr' .*; its languages are de, en: set"):
        list(tmx_pairs(path, "en", "fr"))


BOMB = "<!DOCTYPE x [" + "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10 if n else "x" * 10}">' for n in range(9)) + "]>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<tmx><body><tu>", "is not well-formed XML, as TMX must be: no element found"),
        (b"en\tde\n", "is not well-formed XML"),
        (b"", "is not well-formed XML"),
        (b"<tmx><body/></tmx>", "its languages are none"),
        (BOMB.encode() + b"<tmx><body><tu><tuv lang='en'><seg>&e8;</seg></tuv></tu></body></tmx>", "amplification"),
        (gzip.compress(b"<tmx>" * 999)[:-9], "cannot be unpacked"),
    ],
    ids=["cut", "no XML", "empty", "no unit", "bomb", "cut gzip"],
)
def test_what_is_no_tmx_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tmx"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(tmx_pairs(path, "en", "de"))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_file_is_read_by_its_name_in_utf_16_too(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = written(tmp_path / "a.tmx", unit(("en", "ä"), ("de", "ö")), '<?xml version="1.0" encoding="UTF-16"?>\n')
    packed = tmp_path / "b.tmx.gz"
    packed.write_bytes(pack(path.read_bytes()))
    config = load_config(None, {"data.train": [packed.name], "data.path": str(tmp_path)})
    assert load_pairs(config.data, "train") == [("ä", "ö")]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for units in (1_000, 20_000):
        path = written(tmp_path / "a.tmx", unit(("en", "some words"), ("de", "and others")) * units)
        tracemalloc.start()
        assert sum(1 for _ in tmx_pairs(path, "en", "de")) == units
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]

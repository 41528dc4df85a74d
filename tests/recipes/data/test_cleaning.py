"""Cleaning: each rule removes what it names and nothing else, and the counts say how much."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data.cleaning import Cleaning
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.settings.config import DataConfig
from recipes.translation.settings.data import CleaningConfig
from recipes.translation.text.pair import Pair
from recipes.translation.text.scripts import count_letters, mostly_in, scripts_of_language
from recipes.translation.text.sentencepiece_file import normalize

texts = st.text(st.sampled_from("ab \u00fc\u00c3\u00bc\ufffdдж1."), max_size=8)
pairs = st.lists(st.tuples(texts, texts).map(lambda sides: Pair(*sides)), max_size=12)
rules = st.builds(
    CleaningConfig,
    max_words=st.none() | st.integers(1, 4),
    max_characters=st.none() | st.integers(1, 8),
    max_ratio=st.none() | st.floats(1, 5),
    script=st.booleans(),
    encoding=st.booleans(),
    copies=st.booleans(),
    duplicates=st.booleans(),
)


def clean(
    pairs: Sequence[Pair], settings: CleaningConfig, source: str, target: str
) -> tuple[list[Pair], dict[str, int]]:
    """The pairs that stay, and how many each rule removed, as the reader of training data asks for them."""
    cleaning = Cleaning(settings, source, target)
    return list(cleaning.clean(pairs)), cleaning.removed


def kept(settings: CleaningConfig, *sides: tuple[str, str], languages: tuple[str, str] = ("en", "de")) -> list[Pair]:
    return clean([Pair(*pair) for pair in sides], settings, *languages)[0]


def is_empty(side: str) -> bool:
    """Whether sentencepiece makes no subword of it, by one of its rules."""
    return any(not normalize(side, name).strip("\u2581 \u3000") for name in ("nfc", "nfkc")) or not side.strip()


@given(pairs, rules)
def test_what_is_kept_and_what_is_counted_are_all_pairs_in_their_order(
    given: list[Pair], settings: CleaningConfig
) -> None:
    found, removed = clean(given, settings, "en", "ru")
    assert len(found) + sum(removed.values()) == len(given)
    rest = iter(given)
    assert all(pair in rest for pair in found)
    again, none = clean(found, settings, "en", "ru")
    assert again == found
    assert not any(none.values())


@given(pairs, st.integers(1, 4), st.integers(1, 8), st.floats(1, 5))
def test_lengths_are_counted_in_words_and_characters(
    given: list[Pair], words: int, characters: int, ratio: float
) -> None:
    expected = []
    for source, target in given:
        lengths = len(source.strip()), len(target.strip())
        if (
            not is_empty(source)
            and not is_empty(target)
            and max(len(source.split()), len(target.split())) <= words
            and max(len(source), len(target)) <= characters
            and max(lengths) <= ratio * min(lengths)
        ):
            expected.append(Pair(source, target))
    settings = CleaningConfig(max_words=words, max_characters=characters, max_ratio=ratio)
    assert clean(given, settings, "en", "ru")[0] == expected


@given(pairs)
def test_the_first_of_equal_pairs_stays(given: list[Pair]) -> None:
    full = [pair for pair in given if not any(map(is_empty, pair))]
    assert clean(given, CleaningConfig(duplicates=True), "en", "de")[0] == list(dict.fromkeys(full))


def test_pairs_that_are_divided_elsewhere_are_not_equal() -> None:
    sides = [("ab", "c"), ("a", "bc"), ("a b", "c"), ("a", "b c")]
    assert kept(CleaningConfig(duplicates=True), *sides) == sides


def test_without_rules_only_empty_sides_are_removed() -> None:
    odd = [("a", "a"), ("a", "a"), ("д" * 5_000, "a\ufffd"), ("Ã¼", "x")]
    blank = [("", "x"), ("x", " \t"), ("\u200b", "x"), ("x", "\ufeff \x7f"), ("x", "\ufffd")]
    assert kept(CleaningConfig(), *odd, *blank) == odd


def test_a_side_is_empty_if_sentencepiece_leaves_nothing_of_it() -> None:
    characters = [chr(code) for code in range(1, 0x30000) if not 0xD800 <= code < 0xE000]
    sides = [*filter(is_empty, characters), *"aä漢!\u0301\u00ad", *random.Random(0).sample(characters, 3000)]
    for side in sides:
        assert kept(CleaningConfig(), (side, "x")) == [(side, "x")] * (not is_empty(side)), hex(ord(side))


REAL = [
    "Zoë naïve café",
    "ÜBER DEN FLUSS",
    "AÇÃO, NÃO. “AMANHÃ”…",
    "SÃO",
    "»Ä«",
    "Å\u2018",
    "1 °C",
    "Привет, Ñandú",
    "šč",
    "ÂNGELO",
    "a\u2028b\x85c",
]


@pytest.mark.parametrize("text", [*REAL, "日本語", "שלום", "ñÑ", "naïve \u2013 “ok”", "x\ty"])
def test_text_as_it_should_be_is_not_taken_for_a_wrong_encoding(text: str) -> None:
    assert kept(CleaningConfig(encoding=True), (text, "x")) == [(text, "x")]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
@pytest.mark.parametrize(
    "text", ["Grüße", "café crème", "naïve", "„Zitat“", "it\u2019s", "Привет", "Žluťoučký kůň", "Ελληνικά"]
)
def test_utf_8_that_was_read_as_latin_1_is_removed(text: str, encoding: str) -> None:
    damaged = text.encode().decode(encoding, errors="replace")
    assert kept(CleaningConfig(encoding=True), (damaged, "x"), ("x", damaged), (text, "x")) == [(text, "x")]


@pytest.mark.parametrize("text", ["a\ufffdb", "a\x00b", "a\x93b\x94"])
def test_replacement_and_control_characters_are_removed(text: str) -> None:
    assert kept(CleaningConfig(encoding=True), ("x", text)) == []


def test_copies_are_removed_unless_they_have_no_letters() -> None:
    copies = [("The Guardian", "the  Guardian "), ("12.50", "12.50"), ("a", "b")]
    assert kept(CleaningConfig(copies=True), *copies) == copies[1:]


@pytest.mark.parametrize(
    ("language", "text", "right"),
    [
        ("en", "Hello", True),
        ("en", "Привет", False),
        ("ru", "Привет, John", True),
        ("ru", "Hello", False),
        ("ru", "12:30 - 14%", True),
        ("sr-Latn", "Zdravo", True),
        ("srp_Cyrl", "Zdravo", False),
        ("zh-Hant", "漢字", True),
        ("zh", "ひらがなです", False),
        ("ja", "カタカナー、漢字、ひらがな", True),
        ("ko", "안녕하세요", True),
        ("he", "שלום עולם", True),
        ("ar", "שלום", False),
        ("ar", "مرحبا", True),
        ("hi", "नमस्ते दुनिया", True),
        ("th", "สวัสดีชาวโลก", True),
        ("el", "Γειά", True),
        ("am", "ሰላም", True),
        ("en", "\uff26\uff35\uff2c\uff2c", True),
    ],
)
def test_most_letters_are_in_a_script_of_the_language(language: str, text: str, right: bool) -> None:
    scripts = scripts_of_language(language)
    assert mostly_in(text, scripts) == right
    expected = [(text, "x")] if right else []
    assert kept(CleaningConfig(script=True), (text, "x"), languages=(language, "en")) == expected


def test_signs_have_no_script() -> None:
    assert count_letters("1 .,µ€\u0301") == 0
    assert count_letters("aµb", ["Latn"]) == 2


def test_a_language_of_unknown_script_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"script of 'sr' \(data\.target\): add its ISO 15924 code, as in sr-Latn"):
        clean([], CleaningConfig(script=True), "en", "sr")


def data_of(folder: Path, source: str, target: str) -> DataConfig:
    (folder / "a.en").write_text(source)
    (folder / "a.de").write_text(target)
    names = dict.fromkeys(("train", "valid", "test"), ("a.en", "a.de"))
    return DataConfig(format="text", path=str(folder), **names)


def test_training_data_alone_is_cleaned_and_the_log_counts_every_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = data_of(tmp_path, "One two\nOne two\n\nAt home at home\nThe\n", "Eins zwei\nEins zwei\nx\ny\nTHE\n")
    settings = CleaningConfig(max_words=3, copies=True, duplicates=True)
    assert load_pairs(data, "train", True, settings) == [("one two", "eins zwei")]
    assert capsys.readouterr().err == (
        "[data] train: 4 of 5 pairs dropped: an empty side 1; more than 3 words 1; the source copied 1; duplicates 1\n"
    )
    assert len(load_pairs(data, "valid", True, settings)) == len(load_pairs(data, "test", False, settings)) == 5
    assert capsys.readouterr().err == ""


def test_the_counts_are_reported_where_a_rule_removes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_pairs(data_of(tmp_path, "One\n", "Eins\n"), "train", cleaning=CleaningConfig(encoding=True))
    assert capsys.readouterr().err == "[data] train: none of 1 pairs dropped\n"


def test_rules_that_leave_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the cleaning rules leave no pair of data\.train: 1 of 1 .*words 1"):
        load_pairs(data_of(tmp_path, "a b\n", "c\n"), "train", cleaning=CleaningConfig(max_words=1))


def test_pairs_are_cleaned_as_they_are_written_and_only_then_lower_cased(tmp_path: Path) -> None:
    """What is wrong with Ã¼ shows in the capital."""
    data = data_of(tmp_path, "One\nONE\nTwo\n", "Eins\neins\nfÃ¼nf\n")
    found = load_pairs(data, "train", True, CleaningConfig(encoding=True, duplicates=True))
    assert found == [("one", "eins")] * 2

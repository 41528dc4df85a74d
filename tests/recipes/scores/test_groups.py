"""Every sentence is in one part, and the part says which."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data.sentence_pairs import DataError
from recipes.translation.evaluate import labels_of
from recipes.translation.scores.groups import BOUNDS, parts_by_label, parts_by_length
from recipes.translation.settings.config import DataConfig

LENGTHS = st.lists(st.integers(0, 75), min_size=1, max_size=12)


@given(LENGTHS)
def test_lengths_are_words_in_tens(lengths: list[int]) -> None:
    heading, parts = parts_by_length([" ".join(["word"] * length) for length in lengths])
    assert heading == "source words"
    expected: dict[str, list[int]] = {}
    ranges = ["0-10", "11-20", "21-30", "31-40", "41-50", "51-60", "61-"]
    for low, label in zip((0, *BOUNDS), ranges, strict=True):
        high = low + 10 if label != "61-" else 1000
        rows = [row for row, length in enumerate(lengths) if low < length <= high or (length == low == 0)]
        if rows:
            expected[label] = rows
    assert parts == expected


def test_lengths_are_characters_where_no_spaces_separate_words() -> None:
    heading, parts = parts_by_length(["三 只猫在花园里玩。", "猫" * 31, "猫" * 190])
    assert heading == "source characters"
    assert parts == {"0-30": [0], "31-60": [1], "181-": [2]}


@given(st.lists(st.sampled_from(["news", "law ", "news\t", "it"]), min_size=1, max_size=8))
def test_labels_stand_in_the_order_in_which_they_occur(labels: list[str]) -> None:
    parts = parts_by_label(labels, "file", len(labels))
    assert list(parts) == list(dict.fromkeys(label.strip() for label in labels))
    for label, rows in parts.items():
        assert rows == [row for row, one in enumerate(labels) if one.strip() == label]


@pytest.mark.parametrize(
    ("labels", "line"),
    [(["a"], "file has 1 labels, and the test set 2 sentences"), (["a", " "], "file: label 2 is empty")],
)
def test_a_sentence_without_a_label_is_refused(labels: list[str], line: str) -> None:
    with pytest.raises(DataError, match=line):
        parts_by_label(labels, "file", 2)


def test_labels_come_from_a_file_or_from_a_column_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("en\tdomain\tde\nA dog.\tpets\tEin Hund.\nA law.\tlaw\tEin Gesetz.\n")
    data = DataConfig(format="tsv", path=str(tmp_path), test=("t.tsv",))
    assert labels_of("domain", data, "test") == ["pets", "law"]
    (tmp_path / "labels").write_text("x\ny\n")
    assert labels_of(str(tmp_path / "labels"), data, "test") == ["x", "y"]
    with pytest.raises(DataError, match=r"^--by topic is not length, nor a file, nor a column of the data: .*'domain'"):
        labels_of("topic", data, "test")
    with pytest.raises(DataError, match=r"^--by topic: there is no such file"):
        labels_of("topic", None, "test")

"""Every sentence is in one part, and the part says which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.errors import DataError
from recipes.translation.scores.evaluate import labels_of
from recipes.translation.scores.groups import BOUNDS, parts_by_label, parts_by_length, scores_of_sets
from recipes.translation.scores.scores import measure
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


def test_several_test_sets_have_a_line_each_and_one_for_the_mean_of_their_scores() -> None:
    references = ["the dog runs home now", "a small cat sleeps here", "the train leaves at six"]
    near = ["the dog runs home", "a small cat sleeps here", "the train leaves at seven"]
    far = ["a dog ran home now", "cat sleeps", "trains leave at six or so"]
    one, two = (measure(texts, references) for texts in (near, far))
    table = scores_of_sets({"first": one, "second": [each.subset([0, 1]) for each in two]})
    alone = [scores_of_sets({"one": one}), scores_of_sets({"two": [each.subset([0, 1]) for each in two]})]
    assert [(part.label, part.sentences) for part in table.parts] == [("first", 3), ("second", 2), ("mean", 5)]
    assert [table.parts[0], table.parts[1]] == [
        replace(found.parts[0], label=label) for label, found in zip(("first", "second"), alone, strict=True)
    ]
    expected = [sum(scores) / 2 for scores in zip(table.parts[0].scores, table.parts[1].scores, strict=True)]
    assert table.parts[2].scores == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) == len(expected)
    assert alone[0].parts[1].scores == alone[0].parts[0].scores
    assert alone[0].parts[1].intervals == alone[0].parts[0].intervals
    first, second, mean = (part.intervals for part in table.parts)
    for bounds, lower, upper in zip(mean, first, second, strict=True):
        assert min(lower.low, upper.low) <= bounds.low <= bounds.high <= max(lower.high, upper.high)
    assert str(table).splitlines()[3].split()[:2] == ["mean", "5"]

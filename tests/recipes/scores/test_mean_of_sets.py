"""The table of several test sets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipes.translation.scores.scores import measure, scores_of_sets


def test_several_test_sets_have_a_line_each_and_one_for_the_mean_of_their_scores() -> None:
    references = ["the dog runs home now", "a small cat sleeps here", "the train leaves at six"]
    near = ["the dog runs home", "a small cat sleeps here", "the train leaves at seven"]
    far = ["a dog ran home now", "cat sleeps", "trains leave at six or so"]
    one = measure(near, references)
    two = measure(far[:2], references[:2])
    table = scores_of_sets({"first": one, "second": two})
    alone = [scores_of_sets({"one": one}), scores_of_sets({"two": two})]
    assert [(row.name, row.sentences) for row in table.rows] == [("first", 3), ("second", 2), ("mean", 5)]
    assert [table.rows[0], table.rows[1]] == [
        replace(found.rows[0], name=name) for name, found in zip(("first", "second"), alone, strict=True)
    ]
    expected = [sum(scores) / 2 for scores in zip(table.rows[0].scores, table.rows[1].scores, strict=True)]
    assert table.rows[2].scores == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) == len(expected)
    assert alone[0].rows[1].scores == alone[0].rows[0].scores
    assert alone[0].rows[1].intervals == alone[0].rows[0].intervals
    first, second, mean = (row.intervals for row in table.rows)
    for bounds, lower, upper in zip(mean, first, second, strict=True):
        assert min(lower.low, upper.low) <= bounds.low <= bounds.high <= max(lower.high, upper.high)
    assert str(table).splitlines()[3].split()[:2] == ["mean", "5"]


@pytest.mark.parametrize(("sentences", "warned"), [(99, True), (100, False)])
def test_a_test_set_of_few_sentences_says_that_it_says_little(sentences: int, warned: bool) -> None:
    texts = [f"the dog runs home at {number}" for number in range(sentences)]
    table = str(scores_of_sets({"few": measure(texts, texts)}))
    assert ("a test set of fewer than 100 sentences says little" in table) == warned

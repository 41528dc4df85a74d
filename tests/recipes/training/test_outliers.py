"""Losses and gradient norms that are outliers, by the median rule computed once more with numpy."""

from __future__ import annotations

import numpy
from hypothesis import example, given
from hypothesis import strategies as st

from recipes.translation.training.outliers import Outliers

VALUES = st.floats(0.9, 1.1) | st.sampled_from([0.5, 1.0, 1.0, 2.0, 100.0])
FIRST = [(1.0, 1.0)] * 19 + [(100.0, 1.0), (1.0, 100.0)]
"""The 20th step is compared with 19, too few; the 21st is judged."""
HALVES = [(1.0, 1.0), (2.0, 1.0)] * 10 + [(9.0, 1.0)]
"""The median is 1.5 and the MAD 0.5; with the last value itself, they would be 2 and 1."""


@example(FIRST, 0)
@example(HALVES, 0)
@example(FIRST, 20)
@given(st.lists(st.tuples(VALUES, VALUES), max_size=140), st.integers(0, 140))
def test_an_outlier_is_ten_deviations_above_the_median(steps: list[tuple[float, float]], resumed: int) -> None:
    records = [{"step": step, "loss": loss, "gradient_norm": norm} for step, (loss, norm) in enumerate(steps)]
    outliers = Outliers([{"step": 1, "valid_loss": 1.0}, *records[:resumed]])
    for at, (loss, norm) in list(enumerate(steps))[resumed:]:
        outliers.judge(loss=loss, gradient_norm=norm)
        expected = []
        for column, name in enumerate(("loss", "gradient_norm")):
            before = numpy.array([step[column] for step in steps[max(0, at - 100) : at]])
            if len(before) >= 20:
                middle = numpy.median(before)
                mad = max(numpy.median(numpy.abs(before - middle)), 0.01 * middle)
                if steps[at][column] > middle + 10 * 1.4826 * mad:
                    expected.append(name)
        assert outliers.record().get("outliers", []) == expected


def test_only_the_first_of_several_in_a_row_is_said() -> None:
    outliers = Outliers([{"loss": 1.0, "gradient_norm": 2.0}] * 30)
    said = []
    for step, norm in enumerate((2.0, 50.0, 60.0, 2.0, 70.0), start=31):
        outliers.judge(loss=1.0, gradient_norm=norm)
        said += outliers.lines(step)
    assert said == [
        "[train] step     32   outlier: gradient norm 50, while the median of the previous steps is 2",
        "[train] step     35   outlier: gradient norm 70, while the median of the previous steps is 2",
    ]


def test_after_three_reports_one_line_says_where_the_rest_is() -> None:
    outliers = Outliers([{"loss": 1.0, "gradient_norm": 2.0}] * 30)
    said = []
    marked = 0
    for step in range(31, 51):
        outliers.judge(loss=1.0, gradient_norm=50.0 if step % 3 == 0 else 2.0)
        said += outliers.lines(step)
        marked += bool(outliers.record())
    assert [line.split()[2] for line in said] == ["33", "36", "39", "42"]
    assert "outlier: gradient norm 50, while the median" in said[2]
    assert said[3] == "[train] step     42   another outlier; metrics.jsonl has this and all further ones"
    assert marked == 6

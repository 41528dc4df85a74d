"""Losses and gradient norms that stand out, by the median rule computed once more with numpy."""

from __future__ import annotations

import numpy
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.training.outliers import Outliers

VALUES = st.floats(0.1, 10) | st.sampled_from([1.0, 1.0, 1.0, 100.0])


@given(st.lists(st.tuples(VALUES, VALUES), max_size=140), st.integers(0, 140))
def test_a_value_stands_out_above_the_median_by_six_deviations(steps: list[tuple[float, float]], resumed: int) -> None:
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
                if steps[at][column] > middle + 6 * 1.4826 * mad:
                    expected.append(name)
        assert outliers.record().get("stands_out", []) == expected


def test_only_the_first_of_several_in_a_row_is_said() -> None:
    outliers = Outliers([{"loss": 1.0, "gradient_norm": 2.0}] * 30)
    said = []
    for step, norm in enumerate((2.0, 50.0, 60.0, 2.0, 70.0), start=31):
        outliers.judge(loss=1.0, gradient_norm=norm)
        said += outliers.lines(step)
    assert said == [
        "[train] step     32   gradient norm 50 stands out: the median of the steps before is 2",
        "[train] step     35   gradient norm 70 stands out: the median of the steps before is 2",
    ]

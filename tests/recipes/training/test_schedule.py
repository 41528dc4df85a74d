"""The learning rate of every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.settings.config import TrainingConfig
from recipes.translation.settings.schedules import SCHEDULES, Schedule
from recipes.translation.training.optimizer import learning_rate


def settings(schedule: str, rate: float = 0.01, warmup: int = 100) -> TrainingConfig:
    return TrainingConfig(schedule=schedule, learning_rate=rate, warmup=warmup)


@given(step=st.integers(1, 100_000), warmup=st.integers(1, 10_000), width=st.sampled_from([64, 512]))
def test_noam_is_the_formula_of_the_paper(step: int, warmup: int, width: int) -> None:
    expected = 2.0 * width**-0.5 * min(step**-0.5, step * warmup**-1.5)
    assert learning_rate(settings("noam", 2.0, warmup), step, width) == pytest.approx(expected, rel=1e-12)


def test_inverse_sqrt_rises_in_a_line_to_its_peak_and_halves_at_four_times_the_warm_up() -> None:
    rates = [learning_rate(settings("inverse_sqrt"), step, 64) for step in (1, 50, 100, 400)]
    assert rates == pytest.approx([0.0001, 0.005, 0.01, 0.005])


def test_linear_rises_to_its_peak_and_falls_in_a_line_to_nothing_after_the_last_step() -> None:
    made = replace(settings("linear"), steps=299)
    rates = [learning_rate(made, step, 64) for step in (1, 50, 100, 200, 299, 300, 400)]
    assert rates == pytest.approx([0.0001, 0.005, 0.01, 0.005, 0.00005, 0.0, 0.0])


def test_cosine_rises_to_its_peak_and_falls_by_half_a_cosine_to_nothing_after_the_last_step() -> None:
    made = replace(settings("cosine"), steps=299)
    rates = [learning_rate(made, step, 64) for step in (1, 50, 100, 150, 200, 250, 300, 400)]
    quarter = 0.005 * 2**-0.5  # the cosine of an eighth of a turn
    assert rates == pytest.approx([0.0001, 0.005, 0.01, 0.005 + quarter, 0.005, 0.005 - quarter, 0.0, 0.0])
    assert 0 < learning_rate(made, 299, 64) < 1e-6, "the last step still learns"


@pytest.mark.parametrize(("name", "schedule"), SCHEDULES.items())
def test_a_schedule_says_whether_it_depends_on_the_number_of_steps(name: str, schedule: Schedule) -> None:
    once, longer = (
        [learning_rate(replace(settings(name), steps=steps), step, 64) for step in range(1, 300)]
        for steps in (300, 400)
    )
    assert (once != longer) == schedule.by_steps


def test_constant_stays_at_its_rate_after_the_warm_up() -> None:
    rates = [learning_rate(settings("constant"), step, 64) for step in (50, 100, 10_000)]
    assert rates == pytest.approx([0.005, 0.01, 0.01])


def test_plateau_stays_at_its_rate_and_is_multiplied_by_its_factor_for_each_reduction() -> None:
    made = replace(settings("plateau"), plateau_factor=0.2)
    rates = [learning_rate(made, step, 64, reductions) for step, reductions in ((50, 0), (100, 0), (900, 1), (900, 3))]
    assert rates == pytest.approx([0.005, 0.01, 0.002, 0.00008])


@pytest.mark.parametrize(("name", "schedule"), SCHEDULES.items())
def test_a_schedule_says_whether_validations_change_its_rate(name: str, schedule: Schedule) -> None:
    assert (learning_rate(settings(name), 200, 64, 2) != learning_rate(settings(name), 200, 64)) == (
        schedule.by_validations
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warm_up_the_first_step_has_the_highest_rate(schedule: str) -> None:
    rates = [learning_rate(settings(schedule, warmup=0), step, 64) for step in range(1, 20)]
    assert rates[0] == max(rates) > 0

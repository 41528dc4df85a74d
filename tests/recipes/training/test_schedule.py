"""How a run learns: the learning rate of every step, weight decay and eps, and when it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import ConfigError
from recipes.translation.report.records import read_run
from recipes.translation.settings.config import TrainingConfig, load_config
from recipes.translation.settings.schedules import SCHEDULES, Schedule
from recipes.translation.train import train
from recipes.translation.training.optimizer import learning_rate, make_optimizer, update, with_steps
from tests.recipes.saved import saved_file, steps_of
from tests.recipes.tiny import tiny, tiny_decoder_only


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


RATE = 0.01
ONE_STEP = {
    "training.steps": 1,
    "training.schedule": "constant",
    "training.warmup": 0,
    "training.learning_rate": RATE,
    "training.precision": "float64",
}


def models() -> list[nn.Module]:
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    second = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    second.load_state_dict(first.state_dict())
    return [first, second]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        update(optimizer, RATE / (step + 1))


@pytest.mark.parametrize("eps", [1e-9, 1e-3])
def test_without_weight_decay_every_step_is_adam_s_bit_for_bit(eps: float) -> None:
    ours, plain = models()
    settings = TrainingConfig(betas=(0.8, 0.9), adam_eps=eps)
    trained(ours, make_optimizer(ours, settings), 20)
    trained(plain, torch.optim.Adam(plain.parameters(), betas=(0.8, 0.9), eps=eps, fused=True), 20)
    for own, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("made", [tiny, tiny_decoder_only])
def test_a_step_takes_its_share_of_matrices_and_embeddings_and_nothing_of_norms_and_biases(
    made: type, tmp_path: Path
) -> None:
    found = {}
    for name, changes in (
        ("first", {"training.learning_rate": 0.0}),
        ("plain", {}),
        ("decayed", {"training.weight_decay": 0.5}),
    ):
        train(made(tmp_path / name, {**ONE_STEP, **changes}))
        found[name] = load_file(saved_file(tmp_path / name, "last", "model.safetensors"))
    counts = {True: 0, False: 0}
    for name, first in found["first"].items():
        counts[first.dim() > 1] += 1
        taken = found["plain"][name] - found["decayed"][name]
        expected = RATE * 0.5 * first if first.dim() > 1 else torch.zeros_like(first)
        torch.testing.assert_close(taken, expected, rtol=1e-9, atol=1e-15)
    assert min(counts.values()) > 3


def test_eps_is_added_to_the_root_of_the_second_moment(tmp_path: Path) -> None:
    """With eps far above all gradients the first step is rate * gradient / eps."""
    eps = 0.999
    for name, changes in (("first", {"training.learning_rate": 0.0}), ("run", {})):
        train(tiny(tmp_path / name, {**ONE_STEP, "training.adam_eps": eps, "training.clip": 1e-6, **changes}))
    first, after = (load_file(saved_file(tmp_path / name, "last", "model.safetensors")) for name in ("first", "run"))
    moments = load_file(saved_file(tmp_path / "run", "last", "training.safetensors"))
    for name, weight in after.items():
        gradient = moments[f"optimizer/{name}/exp_avg"] / (1 - 0.9)
        torch.testing.assert_close(first[name] - weight, RATE * gradient / eps, rtol=1e-5, atol=1e-15)


EPOCHS = {"training.steps": 0, "training.epochs": 2, "training.validate_every": 100}


def rates_of(run: Path) -> list[float]:
    return [record["learning_rate"] for record in steps_of(run)]


@pytest.mark.parametrize(
    ("given", "steps", "epochs"),
    [
        ({}, 1_000, 0),
        ({"training.epochs": 3}, 0, 3),
        ({"training.epochs": "3", "training.steps": "70"}, 70, 3),
        ({"training.epochs": 0}, 1_000, 0),
    ],
)
def test_epochs_that_are_given_alone_end_the_training_alone(given: dict[str, Any], steps: int, epochs: int) -> None:
    training = load_config(None, given).training
    assert (training.steps, training.epochs) == (steps, epochs)


def test_a_training_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^training\.steps is 0 and so is training\.epochs: set one of them"):
        load_config(None, {"training.steps": 0})


@pytest.mark.parametrize("accumulate", [1, 3])
def test_epochs_end_with_every_batch_and_a_validation(
    accumulate: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path / "run", {**EPOCHS, "training.accumulate": accumulate, "training.batch_tokens": 400})
    batches = load_corpus(config).train.count(0)
    steps = -(-2 * batches // accumulate)
    summary = train(config)
    assert (summary.state.step, summary.state.best_step) == (steps, steps)
    assert 0 <= summary.state.epoch * batches + summary.state.batch - 2 * batches < accumulate
    said = capsys.readouterr().out
    assert f"training.epochs 2 means {steps} steps\n" in said
    assert f"{steps} of {steps} steps" in str(summary)
    assert read_run(tmp_path / "run").planned_steps == steps


def test_the_earlier_end_counts_and_the_log_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(tmp_path / "run", {**EPOCHS, "training.steps": 3})
    assert train(config).state.step == 3
    assert "steps, but training.steps 3 comes first\n" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", [name for name, each in SCHEDULES.items() if each.by_steps])
def test_a_schedule_uses_the_steps_that_the_epochs_come_to(schedule: str, tmp_path: Path) -> None:
    given = {"training.schedule": schedule, "training.warmup": 1, "training.batch_tokens": 400}
    epochs = tiny(tmp_path / "epochs", {**EPOCHS, **given})
    steps = with_steps(epochs.training, load_corpus(epochs).train).steps
    train(epochs)
    train(tiny(tmp_path / "steps", {**given, "training.steps": steps, "training.validate_every": 100}))
    assert rates_of(tmp_path / "epochs") == rates_of(tmp_path / "steps")
    with pytest.raises(ConfigError, match=rf"^training\.steps was {steps} and is {steps * 3 // 2}, and training"):
        train(tiny(tmp_path / "epochs", {**EPOCHS, **given, "training.epochs": 3}))


def test_a_run_that_has_made_its_epochs_goes_on_with_more(tmp_path: Path) -> None:
    given = {**EPOCHS, "training.batch_tokens": 400}
    through = train(tiny(tmp_path / "through", given)).state
    train(tiny(tmp_path / "run", {**given, "training.epochs": 1}))
    again = train(tiny(tmp_path / "run", {**given, "training.epochs": 1})).state
    assert again.step == through.step // 2, "a finished run makes no further step"
    assert train(tiny(tmp_path / "run", given)).state.step == through.step
    weights = [saved_file(tmp_path / name, "last", "model.safetensors").read_bytes() for name in ("through", "run")]
    assert weights[0] == weights[1]
    with pytest.raises(ConfigError, match=rf"has already done {through.step} steps: set training\.steps to"):
        train(tiny(tmp_path / "run", {**given, "training.epochs": 1}))

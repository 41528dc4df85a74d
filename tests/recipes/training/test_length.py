"""Training ends after its steps or its epochs, whichever comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import ConfigError
from recipes.translation.report.records import read_run
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.settings.config import load_config
from recipes.translation.settings.schedules import SCHEDULES
from recipes.translation.train import train
from recipes.translation.training.optimizer import with_steps
from tests.recipes.saved import saved_file
from tests.recipes.tiny import tiny

EPOCHS = {"training.steps": 0, "training.epochs": 2, "training.validate_every": 100}


def rates_of(run: Path) -> list[float]:
    return [record["learning_rate"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


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
    assert f"training.epochs 2 are {steps} steps\n" in said
    assert f"{steps} of {steps} steps" in str(summary)
    assert read_run(tmp_path / "run").planned == steps


def test_the_earlier_end_counts_and_the_log_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(tmp_path / "run", {**EPOCHS, "training.steps": 3})
    assert train(config).state.step == 3
    assert "steps, but training.steps 3 ends first\n" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", [name for name, each in SCHEDULES.items() if each.by_steps])
def test_a_schedule_uses_the_steps_that_the_epochs_come_to(schedule: str, tmp_path: Path) -> None:
    given = {"training.schedule": schedule, "training.warmup": 1, "training.batch_tokens": 400}
    epochs = tiny(tmp_path / "epochs", {**EPOCHS, **given})
    steps = with_steps(epochs.training, load_corpus(epochs).train).steps
    train(epochs)
    train(tiny(tmp_path / "steps", {**given, "training.steps": steps, "training.validate_every": 100}))
    assert rates_of(tmp_path / "epochs") == rates_of(tmp_path / "steps")
    with pytest.raises(ConfigError, match=rf"^training\.steps was {steps} and is {steps * 3 // 2}, on which training"):
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
    with pytest.raises(ConfigError, match=rf"has made {through.step} steps: set training\.steps to"):
        train(tiny(tmp_path / "run", {**given, "training.epochs": 1}))

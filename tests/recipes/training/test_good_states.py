"""Only a state whose every number is finite is saved, and only a finite validation loss is the best."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipes.translation import train as training
from recipes.translation.errors import TrainingError
from recipes.translation.run_folder.checkpoint import TrainingState
from recipes.translation.train import train
from recipes.translation.training.validation import Validation
from tests.recipes.saved import saved_file
from tests.recipes.tiny import tiny


def assert_good(run: Path, step: int) -> None:
    """Every number of weights and moments in `last` is finite, and so is `best`."""
    assert json.loads(saved_file(run, "last", "training.json").read_text())["step"] == step
    files = list((run / "checkpoints").glob("*/*.safetensors"))
    assert len(files) >= 2
    for path in files:
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())


@pytest.mark.parametrize("every", [1, 5])
def test_weights_that_are_not_finite_are_never_saved(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose loss and gradient are finite, and whose update is not; with and without a validation after it."""
    run, rate = tmp_path / "run", training.learning_rate
    train(tiny(run, {"training.steps": 2, "training.validate_every": 1}))
    monkeypatch.setattr(
        training, "learning_rate", lambda settings, step, *more: math.inf if step == 3 else rate(settings, step, *more)
    )
    if every > 1:
        monkeypatch.setattr(training, "check_finite", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(TrainingError, match=r"^step 3: the weights are no longer finite: try .* the last good state$"):
        train(tiny(run, {"training.steps": 5, "training.validate_every": every}))
    assert_good(run, 2)


def test_moments_that_are_not_finite_are_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, update = tmp_path / "run", training.update
    train(tiny(run, {"training.steps": 2, "training.validate_every": 1}))

    def spoiling(optimizer: torch.optim.Optimizer, rate: float) -> None:
        update(optimizer, rate)
        next(iter(optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = math.inf

    monkeypatch.setattr(training, "update", spoiling)
    with pytest.raises(TrainingError, match=r"^step 3: the optimizer's moments are no longer finite: try "):
        train(tiny(run, {"training.steps": 3, "training.validate_every": 1}))
    assert_good(run, 2)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_validation_loss_that_is_not_finite_is_never_the_best(
    loss: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, validate = tmp_path / "run", training.validate
    monkeypatch.setattr(training, "validate", lambda *given: replace(validate(*given), values={"loss": loss}))
    with pytest.raises(TrainingError, match=rf"^step 1: the validation loss is {loss}: try "):
        train(tiny(run, {"training.steps": 2, "training.validate_every": 1}))
    assert not (run / "best").exists()
    assert not (run / "last").exists()


def test_a_state_that_was_never_finite_is_replaced_by_one_that_is() -> None:
    state = TrainingState(best_loss=float("nan"), best_step=2, stale=3)
    assert training.note_validation(state, Validation(4, {"loss": 5.0}))
    assert (state.best_loss, state.best_step, state.stale) == (5.0, 4, 0)

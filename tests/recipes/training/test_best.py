"""The best validation, by any metric of the table; of equal ones the first, and only of finite numbers."""

from __future__ import annotations

import itertools
import math
import signal
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from recipes.translation.errors import ConfigError, TrainingError
from recipes.translation.report.draw import report
from recipes.translation.report.records import read_run
from recipes.translation.run_folder.checkpoint import TrainingState, load_facts
from recipes.translation.settings.config import RunConfig
from recipes.translation.settings.metrics import METRICS, Metric
from recipes.translation.settings.schema import Schema
from recipes.translation.train import train
from recipes.translation.training import training
from recipes.translation.training.optimizer import learning_rate
from recipes.translation.training.validation import Validation, note_validation, out_of_patience, reduce_rate
from tests.recipes.saved import state_in, validations_of
from tests.recipes.tiny import tiny

NUMBERS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 30.0])


@pytest.mark.parametrize("best_by", METRICS)
@settings(max_examples=settings.default.max_examples // 5)  # of each of five
@given(st.lists(st.lists(NUMBERS, min_size=len(METRICS), max_size=len(METRICS)), min_size=1, max_size=8))
def test_the_best_is_the_first_of_the_best_ones(best_by: str, numbers: list[list[float]]) -> None:
    state = TrainingState()
    found = [Validation(step, dict(zip(METRICS, each, strict=True))) for step, each in enumerate(numbers, start=1)]
    better = [note_validation(state, each, best_by) for each in found]
    sign = -1 if METRICS[best_by].smaller_is_better else 1
    own = [sign * each.values[best_by] for each in found]
    best = own.index(max(own))
    assert state.best_step == best + 1
    assert state.best_loss == found[best]["loss"]
    assert state.stale == len(numbers) - 1 - best
    assert better == [all(value > before for before in own[:at]) for at, value in enumerate(own)]
    config = tiny(Path("run"), {"training.patience": 2}).training
    assert out_of_patience(state, config) == (len(numbers) - 1 - best >= 2)


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.integers(1, 4))
def test_a_plateau_reduces_the_rate_as_often_as_its_patience_passes_without_a_better_validation(
    losses: list[float], patience: int
) -> None:
    config = tiny(Path("run"), {"training.schedule": "plateau", "training.plateau_patience": patience}).training
    state = TrainingState()
    expected = waited = 0
    for step, loss in enumerate(losses, start=1):
        better = note_validation(state, Validation(step, {"loss": loss}))
        reduced = reduce_rate(state, config)
        waited = 0 if better else waited + 1
        if waited == patience:
            expected, waited = expected + 1, 0
            assert reduced
        assert state.reductions == expected
    constant = replace(config, schedule="constant")
    before = state.reductions
    assert not reduce_rate(state, constant)
    assert state.reductions == before


@pytest.mark.parametrize("best_by", METRICS)
def test_the_best_follows_the_number_that_is_asked_for(
    best_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other number says something else: the third validation is the best by this one, and then the fourth."""
    metric = METRICS[best_by]
    steps = itertools.count()
    validate = training.validate

    def validated(*given: Any) -> Validation:
        step = next(steps)
        largest_third, smallest_third = ((1.0, 2.0, 7.0, 6.0)[step], (9.0, 8.0, 2.0, 3.0)[step])
        own, others = largest_third, smallest_third
        if metric.smaller_is_better:
            own, others = smallest_third, largest_third
        found = validate(*given)
        values = {
            name: others if each.smaller_is_better == metric.smaller_is_better else own
            for name, each in METRICS.items()
        }
        return replace(found, values={**values, best_by: own})

    monkeypatch.setattr(training, "validate", validated)
    changes = {
        "data.builtin_pairs": 120,
        "training.validate_every": 1,
        "training.validate_bleu": 2,
        "training.keep_checkpoints": 4,
        "training.best_by": best_by,
    }
    summary = train(tiny(tmp_path / "run", changes))
    assert (summary.state.best_step, load_facts(tmp_path / "run" / "best")["step"]) == (3, 3)


@pytest.mark.parametrize("best_by", [name for name, each in METRICS.items() if each.of_translations])
def test_a_score_of_no_sentences_is_refused(best_by: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^training\.best_by is {best_by}, but training\.validate_bleu is 0: "):
        tiny(tmp_path, {"training.best_by": best_by, "training.validate_bleu": 0})


@pytest.mark.parametrize("missing", METRICS)
def test_a_record_of_a_version_without_a_metric_is_read(missing: str) -> None:
    record = Validation(3, dict.fromkeys(METRICS, 1.5)).as_dict()
    del record[f"valid_{missing}"]
    found = Validation.from_dict(record)
    assert found.values == {**dict.fromkeys(METRICS, 1.5), missing: None}
    assert str(found) == "   ".join(each.format_value(1.5) for name, each in METRICS.items() if name != missing)


WORDS = Metric(
    "wordCount",
    2,
    "Words of a translation.",
    of_translations=lambda said: sum(len(text.split()) for text in said.translations) / len(said.translations),
    unit="words",
)
CHANGES = {"training.steps": 2, "training.validate_every": 1, "training.validate_bleu": 3, "training.patience": 9}


def test_everything_that_names_a_metric_follows_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(METRICS, "words", WORDS)
    run = tmp_path / "run"
    train(tiny(run, CHANGES))
    records = validations_of(run)
    assert [set(record) for record in records] == [{"step", *(f"valid_{name}" for name in METRICS)}] * 2
    assert load_facts(run / "last") == records[-1]
    said = capsys.readouterr().out
    assert all(WORDS.format_value(record["valid_words"]) in said for record in records)
    page = report(read_run(run))
    for metric in METRICS.values():
        assert f"best {metric.heading}" in page
        assert f"<title>{metric.title}</title>" in page
        if metric.title != "Loss":  # whose chart has a caption of its own
            assert metric.caption in unescape(page)


def test_the_best_model_can_be_chosen_by_any_metric() -> None:
    assert Schema(RunConfig).settings["training.best_by"].choices == tuple(METRICS)


def assert_good(run: Path, step: int) -> None:
    """Every number of weights and moments in `last` is finite, and so is `best`."""
    assert state_in(run)["step"] == step
    files = list((run / "checkpoints").glob("*/*.safetensors"))
    assert len(files) >= 2
    for path in files:
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())


@pytest.mark.parametrize("every", [1, 5])
def test_weights_that_are_not_finite_are_never_saved(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose loss and gradient are finite, and whose update is not; with and without a validation after it."""
    run = tmp_path / "run"
    train(tiny(run, {"training.steps": 2, "training.validate_every": 1}))
    monkeypatch.setattr(
        "recipes.translation.train.learning_rate",
        lambda settings, step, *more: math.inf if step == 3 else learning_rate(settings, step, *more),
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

"""The best validation, by any metric; of equal ones the first."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.translation import train as training
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import TrainingState, load_facts
from recipes.translation.settings.metrics import METRICS
from recipes.translation.train import train
from recipes.translation.training.validation import Validation, note_validation, out_of_patience, reduce_rate
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
    assert str(found) == "   ".join(each.said(1.5) for name, each in METRICS.items() if name != missing)

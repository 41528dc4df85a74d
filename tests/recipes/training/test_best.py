"""The best validation: the lowest loss, or the highest BLEU or chrF; of equal ones the first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation import train as training
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.average import average
from recipes.translation.run_folder.checkpoint import TrainingState, load_facts
from recipes.translation.train import train
from recipes.translation.training.best import note_validation, out_of_patience
from recipes.translation.training.validation import Validation
from tests.recipes.tiny import tiny

NUMBERS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 30.0])


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8), st.sampled_from(["loss", "bleu", "chrf"])
)
def test_the_best_is_the_first_of_the_best_ones(numbers: list[tuple[float, ...]], best_by: str) -> None:
    state = TrainingState()
    better = []
    for step, (loss, bleu, chrf) in enumerate(numbers, start=1):
        better.append(note_validation(state, Validation(step, loss, 1.0, 0.0, bleu, chrf), best_by))
    own = [(-loss, bleu, chrf)[["loss", "bleu", "chrf"].index(best_by)] for loss, bleu, chrf in numbers]
    best = own.index(max(own))
    assert state.best_step == best + 1
    assert state.best_loss == numbers[best][0]
    assert state.stale == len(numbers) - 1 - best
    assert better == [all(value > before for before in own[:at]) for at, value in enumerate(own)]
    config = tiny(Path("run"), {"training.patience": 2}).training
    assert out_of_patience(state, config) == (len(numbers) - 1 - best >= 2)


@pytest.mark.parametrize(("best_by", "step", "two"), [("loss", 2, [2, 4]), ("bleu", 3, [3, 4]), ("chrf", 1, [1, 2])])
def test_best_and_the_average_of_the_best_follow_the_number_that_is_asked_for(
    best_by: str, step: int, two: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.translation.data.sentence_pairs.BUILTIN_HELD_OUT", 8)
    numbers = iter([(3.0, 1.0, 9.0), (1.0, 2.0, 8.0), (2.5, 7.0, 7.0), (2.0, 6.0, 6.0)])
    validate = training.validate

    def validated(*given: Any) -> Validation:
        loss, bleu, chrf = next(numbers)
        return replace(validate(*given), loss=loss, bleu=bleu, chrf=chrf)

    monkeypatch.setattr(training, "validate", validated)
    changes = {
        "data.builtin_pairs": 120,
        "training.validate_every": 1,
        "training.validate_bleu": 2,
        "training.keep_checkpoints": 4,
        "training.best_by": best_by,
    }
    summary = train(tiny(tmp_path / "run", changes))
    assert (summary.state.best_step, load_facts(tmp_path / "run" / "best")["step"]) == (step, step)
    assert average(tmp_path / "run", best=2).steps == two


@pytest.mark.parametrize("best_by", ["bleu", "chrf"])
def test_a_score_of_no_sentences_is_refused(best_by: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^training\.best_by is {best_by}, but training\.validate_bleu is 0: "):
        tiny(tmp_path, {"training.best_by": best_by, "training.validate_bleu": 0})


def test_a_record_of_a_version_without_chrf_is_read() -> None:
    record = Validation(3, 1.5, 2.0, 50.0, 12.0, 34.0).as_dict()
    assert str(Validation.from_dict(record)).endswith("BLEU 12.0   chrF 34.0")
    del record["valid_chrf"]
    assert str(Validation.from_dict(record)).endswith("BLEU 12.0")

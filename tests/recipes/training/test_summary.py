"""What training says at its end: how good the model is, what to do with it, or why it has learned nothing."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.translation.commands import main
from recipes.translation.commands.training import PURPOSES, next_steps
from recipes.translation.data.corpora import Corpora
from recipes.translation.run_folder.checkpoint import TrainingState, load_facts
from recipes.translation.settings.config import load_config
from recipes.translation.settings.schedules import SCHEDULES
from recipes.translation.training.progress import is_worse_than_guessing
from recipes.translation.training.summary import Summary, advice, command, is_hopeless, size_of
from recipes.translation.training.validation import Validation
from tests.recipes.tiny import options, tiny


def validation(bleu: float | None, accuracy: float) -> Validation:
    return Validation(1, {"loss": 3.0, "perplexity": 20.0, "accuracy": accuracy, "bleu": bleu, "chrf": None})


@pytest.mark.parametrize(
    ("bleu", "accuracy", "hopeless"),
    [
        (0.4, 14.0, True),
        (None, 14.0, True),
        (None, 25.0, False),
        (None, 20.0, False),
        (1.2, 14.0, False),
        (1.0, 14.0, False),
        (0.4, 49.9, True),
        (0.4, 50.0, False),
        (0.0, 97.0, False),  # translations of one word have no BLEU
    ],
)
def test_a_model_is_hopeless_by_bleu_and_accuracy_together(bleu: float | None, accuracy: float, hopeless: bool) -> None:
    assert is_hopeless(validation(bleu, accuracy)) == hopeless


def test_a_model_that_guesses_is_not_worse_than_guessing() -> None:
    found = Validation(1, {"loss": 3.0, "perplexity": 20.0, "accuracy": 5.0, "bleu": None, "chrf": None})
    assert is_worse_than_guessing(found, 19)
    assert not is_worse_than_guessing(found, 20)


def test_a_run_that_learned_nothing_shows_no_samples_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *options(run, {"training.steps": 1})]) == 0
    text = capsys.readouterr().out
    assert "->" not in text
    assert "[train] next:" not in text
    (line,) = [line for line in text.splitlines() if "hardly learned anything" in line]
    assert "at step 1 (training.warmup 2); go on with: " in line
    words = shlex.split(line.partition("go on with: ")[2])
    assert words[1:] == ["-m", "recipes.translation", "train", "--run", str(run), "--training.steps", "20"]

    assert main([*words[3:-1], "2"]) == 0  # as it says, but not for so long
    assert "resuming from step 1" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"training.steps": 1}, {"training.epochs": 1, "training.warmup": 50}])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_command_of_the_advice_goes_on(
    schedule: str, changes: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = {**changes, "training.schedule": schedule}
    given = options(run, settings)
    if "training.epochs" in settings:
        at = given.index("--training.steps")
        del given[at : at + 2]
    assert main(["train", *given]) == 0
    words = shlex.split(capsys.readouterr().out.partition("go on with: ")[2].splitlines()[0])[3:]
    made = int(load_facts(run / "last")["step"])
    words[words.index("--training.steps") + 1] = str(made + 1)  # as it says, but not for so long
    assert main(words) == 0
    assert load_facts(run / "last")["step"] == made + 1


def test_the_advice_names_steps_before_it_doubts_the_data() -> None:
    config = tiny(Path("run"), {"training.warmup": 100})
    assert "still rising" in advice(Path(config.run), config.training, TrainingState(step=100))
    assert advice(Path(config.run), config.training, TrainingState(step=300, epoch=2)).startswith(
        "training ended in epoch 3; go on with"
    )
    assert advice(Path(config.run), config.training, TrainingState(step=300, epoch=2)).endswith("--training.steps 1200")
    assert advice(Path(config.run), config.training, TrainingState(step=130, epoch=2)).endswith("--training.steps 1000")
    assert "n-th line" in advice(Path(config.run), config.training, TrainingState(step=300, epoch=5))


def test_a_summary_counts_validation_in_the_time_and_not_in_the_speed() -> None:
    state = TrainingState(step=1_030, tokens=54_321, train_seconds=100, seconds=3_725)
    line = str(Summary(Path("run"), state, 1_040, best=None, stopped_by=None, files=())).splitlines()[0]
    assert line == "[train] 1,030 of 1,040 steps in 1:02:05, 543 target tokens/s without validation"


def test_a_models_size_is_in_millions_and_that_of_its_trained_part_too() -> None:
    model: Any = torch.nn.Linear(1_000, 1_500)
    assert size_of(model) == "1.5 M parameters"
    model.weight.requires_grad_(False)
    assert size_of(model) == "1.5 M parameters (0.00 M trained)"
    model.requires_grad_(True).bias.requires_grad_(False)
    assert size_of(model) == "1.5 M parameters (1.50 M trained)"


def test_the_demo_skips_its_samples_too_and_still_names_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *options(tmp_path / "demo", {"training.steps": 1})]) == 0
    text = capsys.readouterr().out
    assert "    -> " not in text
    assert " translate --run " in text


def test_next_steps_are_commands_that_exist_on_data_that_the_run_has() -> None:
    lines = next_steps(Corpora(tiny(Path("runs/my run")))).splitlines()[1:]
    assert [shlex.split(line, comments=True)[3] for line in lines] == list(PURPOSES)
    for line in lines:
        words = shlex.split(line, comments=True)[3:]
        assert words[1:] == ["--run", "runs/my run"]
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0


def test_after_a_training_in_parts_the_next_commands_have_a_process_for_each_part() -> None:
    config = tiny(Path("run"), {"layout.shard": 2, "layout.vocab": 2})
    said = [shlex.split(line, comments=True)[3:] for line in next_steps(Corpora(config)).splitlines()[1:]]
    assert [words[0] for words in said if words[3:5] == ["--processes", "4"]] == ["translate", "evaluate"]
    assert "--processes" not in next_steps(Corpora(tiny(Path("run"), {"layout.data": 2})))


def test_without_a_test_set_evaluate_is_named_with_the_validation_data() -> None:
    config = load_config(None, {"data.train": ["a.en", "a.de"], "data.valid": ["b.en", "b.de"]})
    (line,) = (line for line in next_steps(Corpora(config)).splitlines() if " evaluate " in line)
    assert shlex.split(line, comments=True)[4:] == ["--run", "runs/demo", "--split", "valid"]
    config = replace(config, data=replace(config.data, test=("c.en", "c.de")))
    assert "--split" not in next_steps(Corpora(config))


def test_training_ends_with_the_commands_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recipes.translation.training.summary.is_hopeless", lambda best: False)
    run = tmp_path / "run"
    assert main(["train", *options(run, {"training.steps": 1})]) == 0
    text = capsys.readouterr().out
    assert text.count("->") == 3
    assert text.endswith(next_steps(Corpora(tiny(run))) + "\n")


@pytest.mark.parametrize(("smoothing", "said"), [(0.1, True), (0.0, False)])
def test_training_says_which_of_its_numbers_are_smoothed(
    smoothing: float,
    said: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = {"training.steps": 1, "training.label_smoothing": smoothing}
    assert main(["train", *options(tmp_path / "run", changes)]) == 0
    text = capsys.readouterr().out
    assert ("[train] losses are with label smoothing 0.1, perplexities without it\n" in text) == said
    assert ("smoothing" in text) == said


def test_a_command_names_a_run_that_begins_with_a_dash_as_a_folder() -> None:
    *_, option, run = shlex.split(command("translate", "--run", "-rel"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--run")
    assert Path(parser.parse_args([option, run]).run) == Path("-rel")

"""What training says: before, while and after it runs, how good the model is, and what to do with it."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.translation.commands import main
from recipes.translation.commands.serving import models_of
from recipes.translation.commands.training import PURPOSES, next_steps
from recipes.translation.data.corpora import Corpora
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import TrainingState, load_facts
from recipes.translation.settings.config import load_config
from recipes.translation.settings.schedules import SCHEDULES
from recipes.translation.train import train
from recipes.translation.training.log_file import log_to
from recipes.translation.training.progress import guessing, is_worse_than_guessing
from recipes.translation.training.summary import Summary, advice, command, divergence_advice, is_hopeless, size_of
from recipes.translation.training.validation import Validation
from tests.recipes.run_folder.made import contents
from tests.recipes.tiny import options, tiny
from tests.recipes.translating.test_one_search import parser_of


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
    assert "at step 1 (training.warmup 2); continue with: " in line
    words = shlex.split(line.partition("continue with: ")[2])
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
    words = shlex.split(capsys.readouterr().out.partition("continue with: ")[2].splitlines()[0])[3:]
    made = int(load_facts(run / "last")["step"])
    words[words.index("--training.steps") + 1] = str(made + 1)  # as it says, but not for so long
    assert main(words) == 0
    assert load_facts(run / "last")["step"] == made + 1


def test_the_advice_names_steps_before_it_doubts_the_data() -> None:
    config = tiny(Path("run"), {"training.warmup": 100})
    assert "still rising" in advice(Path(config.run), config.training, TrainingState(step=100))
    assert advice(Path(config.run), config.training, TrainingState(step=300, epoch=2)).startswith(
        "training ended in epoch 3; continue with"
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
    assert ("[train] losses include label smoothing 0.1, perplexities do not\n" in text) == said
    assert ("smoothing" in text) == said


def test_a_command_names_a_run_that_begins_with_a_dash_as_a_folder() -> None:
    *_, option, run = shlex.split(command("translate", "--run", "-rel"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--run")
    assert Path(parser.parse_args([option, run]).run) == Path("-rel")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, of which two models are kept and averaged."""
    folder = tmp_path_factory.mktemp("said") / "run"
    settings = {"training.steps": 3, "training.validate_every": 1, "training.keep_checkpoints": 2}
    train(tiny(folder, {**settings, "training.warmup": 2}))
    assert main(["average", "--run", str(folder)]) == 0
    return folder


def test_the_log_has_the_data_the_start_the_validations_and_the_end_with_the_time(run: Path) -> None:
    lines = (run / "train.log").read_text().splitlines()
    assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \[", line) for line in lines)
    text = "\n".join(lines)
    for said in (
        "[data] data.train: the built-in corpus, since no file is named, (en to de): 250 pairs",
        "[data] data.valid: the built-in corpus, since no file is named, (en to de): 25 pairs",
        "[train] starting from random weights, training.seed 1",
        "[valid] step      3",
        "[train] 3 of 3 steps in",
    ):
        assert said in text


def test_the_log_has_the_error_that_ends_a_training_and_no_line_that_was_redrawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        with log_to(tmp_path / "train.log"):
            sys.stdout.write("step 1\r\x1b[2Kstep 2\r\x1b[2K[valid] step 2\n")
            print("a warning", file=sys.stderr)
            raise ConfigError("two\nlines")

    (tmp_path / "metrics.jsonl").touch()  # or the folder would not be left behind
    with pytest.raises(ConfigError):
        fails()
    found = [line.split(" ", 2)[2] for line in (tmp_path / "train.log").read_text().splitlines()]
    assert found == ["[valid] step 2", "a warning", "error: ConfigError: two lines"]
    assert "step 1\r" in capsys.readouterr().out


def test_a_training_that_starts_from_a_model_validates_it_before_the_first_step(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(tmp_path / "tuned", {"training.steps": 1, "training.start_from": str(run / "best")}))
    told = capsys.readouterr().out
    step = load_facts(run / "best")["step"]
    assert f"[train] starting from {run / 'best'} (step {step})" in told
    assert re.search(rf"\[valid\] step +0   loss .*   {run / 'best'} \(step {step}\), before the first step", told)
    first = json.loads((tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0
    assert first["valid_perplexity"] == pytest.approx(load_facts(run / "best")["valid_perplexity"], rel=1e-5)


def test_budgets_and_warm_ups_that_cannot_be_meant_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny(tmp_path / "run", {"training.steps": 1, "training.batch_tokens": 2, "training.warmup": 5}))
    told = capsys.readouterr().out
    assert "training.batch_tokens 2 is less than the length of 250 pairs: each of them is a batch of its own" in told
    assert "training.warmup 5 is not over when training ends, at step 1" in told


def test_a_loss_above_that_of_guessing_is_no_best_so_far_and_names_the_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"training.steps": 6, "training.learning_rate": 50.0, "training.warmup": 0, "training.clip": 0}
    config = tiny(tmp_path / "run", {**settings, "training.validate_every": 3})
    summary = train(config)
    told = capsys.readouterr().out
    assert re.search(
        r"\[valid\] step +3 .*worse than guessing: with all \d+ subwords equally likely, the loss is", told
    )
    assert "best so far" not in told
    assert "training.learning_rate below 50" in summary.advice
    assert summary.advice == divergence_advice(config.training, int(re.search(r"with all (\d+)", summary.advice)[1]))  # type: ignore[index]
    assert guessing(1000) == "with all 1,000 subwords equally likely, the loss is 6.91"
    assert max(map(len, told.splitlines())) < 400


def test_the_average_is_compared_with_best_and_is_stale_after_more_training(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["average", "--run", str(run)]) == 0
    told = capsys.readouterr().out
    assert re.search(
        r"\[average\] validation: loss [\d.]+ .*; best, of step \d: loss [\d.]+ .*; it is (better|worse)", told
    )
    words = ["translate", "--run", str(run), "--checkpoint", "averaged", "one"]
    assert main(words) == 0
    assert "average again" not in capsys.readouterr().err
    assert main(["train", "--run", str(run), "--training.steps", "4"]) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert f"averages models up to step 3, but {run}" in capsys.readouterr().err
    parser, _ = parser_of("serve", monkeypatch)
    assert models_of(str(run), parser.parse_args([str(run), "--checkpoint", "averaged"]))
    assert f"averages models up to step 3, but {run}" in capsys.readouterr().err
    words = ["export", "--run", str(run), "--checkpoint", "averaged", "--to", "safetensors"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert f"averages models up to step 3, but {run}" in capsys.readouterr().err
    assert main(["average", "--run", str(tmp_path / "nosuch")]) == 2
    assert f"there is no run in {tmp_path / 'nosuch'}" in capsys.readouterr().err


def test_a_refused_resume_lists_every_setting_that_differs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    words = ["train", "--run", str(run), "--training.seed", "7", "--training.clip", "3", "--training.freeze", "encoder"]
    assert main([*words, "--model.dropout", "0.3"]) == 2
    told = capsys.readouterr().err
    assert re.match(
        rf"error: model\.dropout is 0\.3 but {run} was trained with none, training\.clip is 3\.0 but was 1\.0, "
        r"training\.freeze is encoder but was none, training\.seed is 7 but was 1: change them back",
        told,
    )
    assert {name: each for name, each in contents(run).items() if "train.log" not in name} == {
        name: each for name, each in before.items() if "train.log" not in name
    }


def test_none_may_be_typed_where_the_help_says_it(tmp_path: Path) -> None:
    typed = {
        "training.freeze": "none",
        "training.start_from": "none",
        "cleaning.max_ratio": "none",
        "data.test": ["none"],
    }
    config = tiny(tmp_path / "run", typed)
    assert (config.training.freeze, config.training.start_from, config.data.test) == ((), "", ())
    assert config.cleaning.max_ratio is None
    assert tiny(tmp_path / "run", {"model.tie": "none", "data.tokenize": "none"}).model.tie == "none"
    assert tiny(tmp_path / "run", {"data.tokenize": "none"}).data.tokenize == "none"


WRONG = {
    "no file": (["translate", "--run", "RUN", "--file", "nosuch.txt"], "nosuch.txt: No such file"),
    "no beam": (
        ["translate", "--run", "RUN", "--beam", "0", "a"],
        "--beam expects a whole number from 1 to 1,000; got '0'",
    ),
    "no run": (["translate", "--run", "nosuch", "a"], "there is no trained model in nosuch/best"),
    "no program": (
        ["evaluate", "--run", "RUN", "--metric-command", "no-such-metric"],
        "--metric-command: there is no program no-such-metric",
    ),
    "no references": (
        ["evaluate", "--hypotheses", "t.en", "--references", "nosuch.txt"],
        "nosuch.txt: No such file",
    ),
    "no beam in evaluate": (
        ["evaluate", "--run", "RUN", "--beam", "0"],
        "--beam expects a whole number from 1 to 1,000; got '0'",
    ),
    "no data": (
        ["train", "--run", "new", "--data.train", "a.en", "a.de", "--data.valid", "b.en", "b.de"],
        "no file a.en",
    ),
    "exchanged sides": (
        ["train", "--run", "new", "--data.train", "t.de", "t.en", "--data.valid", "t.en", "t.de"],
        "data.train names t.de as source",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_typed_wrong_is_found_before_torch_is_imported(name: str, run: Path, tmp_path: Path) -> None:
    for side in ("en", "de"):
        (tmp_path / f"t.{side}").write_text(f"{side}\n")
    words, message = WRONG[name]
    words = [str(run) if word == "RUN" else word for word in words]
    program = (
        "import sys\nfrom recipes.translation.commands import main\n"
        f"status = main({words!r})\nsys.exit(100 if 'torch' in sys.modules else status)"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert message in found.stderr
    assert found.returncode == 2


def test_training_without_data_says_that_it_learns_the_built_in_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--run", str(tmp_path / "run"), "--model.preset", "tiny", "--training.steps", "1"]
    words += ["--data.builtin_pairs", "40", "--subwords.vocab_size", "350", "--training.devices", "cpu"]
    assert main(words) == 0
    assert "[data] data.train: the built-in corpus, since no file is named" in capsys.readouterr().out

"""What a training says before, while and after it runs, and that its log has it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.translation.commands import main
from recipes.translation.commands.serving import models_of
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import load_facts
from recipes.translation.train import train
from recipes.translation.training.log_file import log_to
from recipes.translation.training.progress import guessing
from recipes.translation.training.summary import divergence_advice
from tests.recipes.run_folder.made import contents
from tests.recipes.tiny import tiny
from tests.recipes.translating.test_one_search import parser_of


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
    assert "training.batch_tokens 2 is below the length of 250 pairs, each of which is a batch of its own" in told
    assert "training.warmup 5 is not over when training ends, at step 1" in told


def test_a_loss_above_that_of_guessing_is_no_best_so_far_and_names_the_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"training.steps": 6, "training.learning_rate": 50.0, "training.warmup": 0, "training.clip": 0}
    config = tiny(tmp_path / "run", {**settings, "training.validate_every": 3})
    summary = train(config)
    told = capsys.readouterr().out
    assert re.search(
        r"\[valid\] step +3 .*worse than guessing: each of \d+ subwords, equally likely, has the loss", told
    )
    assert "best so far" not in told
    assert "training.learning_rate below 50" in summary.advice
    assert summary.advice == divergence_advice(config.training, int(re.search(r"each of (\d+)", summary.advice)[1]))  # type: ignore[index]
    assert guessing(1000) == "each of 1,000 subwords, equally likely, has the loss 6.91"
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
    assert "average them again" not in capsys.readouterr().err
    assert main(["train", "--run", str(run), "--training.steps", "4"]) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert f"is of models up to step 3, and {run}" in capsys.readouterr().err
    parser, _ = parser_of("serve", monkeypatch)
    assert models_of(str(run), parser.parse_args([str(run), "--checkpoint", "averaged"]))
    assert f"is of models up to step 3, and {run}" in capsys.readouterr().err
    words = ["export", "--run", str(run), "--checkpoint", "averaged", "--to", "safetensors"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert f"is of models up to step 3, and {run}" in capsys.readouterr().err
    assert main(["average", "--run", str(tmp_path / "nosuch")]) == 2
    assert f"there is no run in {tmp_path / 'nosuch'}" in capsys.readouterr().err


def test_a_refused_resume_lists_every_setting_that_differs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    words = ["train", "--run", str(run), "--training.seed", "7", "--training.clip", "3", "--training.freeze", "encoder"]
    assert main([*words, "--model.dropout", "0.3"]) == 2
    told = capsys.readouterr().err
    assert re.match(
        rf"error: model\.dropout is 0\.3 but {run} was trained with none, training\.clip is 3\.0 but was 1\.0, "
        r"training\.freeze is encoder but was none, training\.seed is 7 but was 1: keep them",
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

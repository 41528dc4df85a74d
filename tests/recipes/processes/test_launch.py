"""`--processes` starts a command in several processes, and ends as the command ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.commands import main
from recipes.translation.processes import launch
from tests.recipes.processes import started
from tests.recipes.processes.started import ended, wait_for_steps, workers_of
from tests.recipes.saved import state_in, steps_of
from tests.recipes.tiny import options

pytestmark = pytest.mark.launched

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


recipe = partial(started.recipe, environment=ENVIRONMENT)


def test_a_mistake_is_a_line_of_each_process_and_nothing_of_the_launcher(tmp_path: Path) -> None:
    status, _, errors = ended(recipe("train", f"--run={tmp_path / 'run'}", "--model.heads", "7", "--processes=2"))
    assert status == 2
    mistake = "model: d_model 128 is not divisible by heads 7: choose d_model 126, or other heads"
    # The process that sees it first may end the other one before it has printed its line
    assert {f"error: {mistake}", f"error: rank 1: {mistake}"} >= set(errors.splitlines())
    assert mistake in errors


def test_a_sentence_after_two_dashes_is_no_option() -> None:
    words = ["translate", "--run", "a", "--run=b", "--", "--run", "--run=c"]
    assert launch.unambiguous(words) == ["translate", "--folder", "a", "--folder=b", "--", "--run", "--run=c"]
    assert launch.unambiguous(["--run"]) == ["--folder"]


def test_a_step_that_takes_longer_than_half_a_minute_is_saved_after_a_signal(tmp_path: Path) -> None:
    """torch's launcher would kill the processes 30 seconds after the signal."""
    changes = {"training.devices": "auto", "training.steps": 100_000, "training.validate_every": 7}
    process = recipe("train", *options(tmp_path / "run", changes), "--processes", "2")
    wait_for_steps(tmp_path / "run", process, 10)
    workers = ranks_of(process)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(32)
    assert process.poll() is None
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    status, output, _ = ended(process)
    assert status == 128 + signal.SIGINT
    assert "2 processes (data 2), here cpu" in output
    assert output.count("stopping after this step and saving") == 1
    assert f" -m recipes.translation train --run {tmp_path / 'run'} --processes 2\n" in output
    assert state_in(tmp_path / "run")["step"] == steps_of(tmp_path / "run")[-1]["step"]


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    return [worker for rank in (0, 1) for worker in workers_of(process, rank)]


def wait_for_end(ranks: list[int]) -> None:
    """Until none of the processes runs; they are nobody's children that would wait for them."""
    deadline = time.monotonic() + 280
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("ready", [1, 2])
def test_processes_that_are_just_starting_end_with_a_launcher_that_is_killed(ready: int, tmp_path: Path) -> None:
    """They import torch and wait for the others, whose meeting point was in the launcher, for ten minutes."""
    process = recipe("train", *options(tmp_path / "run", {"training.devices": "auto"}), "--processes", "2")
    deadline = time.monotonic() + 280
    while len(ranks := ranks_of(process)) < ready:
        assert time.monotonic() < deadline
    process.kill()
    ranks = sorted({*ranks, *ranks_of(process)})
    wait_for_end(ranks)
    ended(process)
    assert not (tmp_path / "run").exists()


def test_a_launcher_that_is_killed_in_training_ends_its_processes_which_save(tmp_path: Path) -> None:
    changes = {"training.devices": "auto", "training.steps": 100_000, "training.validate_every": 7}
    process = recipe("train", *options(tmp_path / "run", changes), "--processes", "2")
    wait_for_steps(tmp_path / "run", process, 10)
    ranks = ranks_of(process)
    process.kill()
    wait_for_end(ranks)
    ended(process)
    assert state_in(tmp_path / "run")["step"] == steps_of(tmp_path / "run")[-1]["step"]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            ["--processes", "none"],
            "argument --processes: 'none' is not a whole number from 1 up: give a number, or auto",
        ),
        (["--processes", "0"], "argument --processes: '0' is not a whole number from 1 up: give a number, or auto"),
        (["--processes"], "expected one argument: give a number, or auto"),
    ],
)
def test_what_is_no_number_is_refused(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    assert answer in capsys.readouterr().err


def test_a_launched_process_launches_no_others(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "--processes", "2"]) == 2
    assert "a process that torchrun started" in capsys.readouterr().err


def test_auto_is_one_process_a_core_and_at_most_four(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 2), (3, 3), (64, 4)):
        monkeypatch.setattr(launch, "cores", lambda cores=cores: cores)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
        assert launch.automatic() == expected
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert launch.automatic() == 8

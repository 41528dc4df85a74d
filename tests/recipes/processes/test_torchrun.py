"""The recipe as a person starts it over several processes: torchrun, mp.spawn, signals, processes that die."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.commands import main
from recipes.translation.errors import CheckpointError
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.train import train
from tests.recipes.processes.layouts import EXACT, assert_same_weights
from tests.recipes.processes.started import ended, wait_for_steps, workers_of
from tests.recipes.saved import saved_file
from tests.recipes.tiny import LEARNS, options, tiny

pytestmark = pytest.mark.launched

ENDLESS = {"training.steps": 100_000, "training.validate_every": 5, "training.devices": "auto"}
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(command: str, *words: str, launcher: Sequence[str] = (), **keywords: Any) -> subprocess.Popen[str]:
    """Two processes of the recipe. torchrun would take --run for an abbreviation of one of its own options."""
    named = ["--folder" if word == "--run" else word for word in words]
    return subprocess.Popen(
        [sys.executable, *LAUNCHER, *launcher, "-m", "recipes.translation", command, *named],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=QUIET,
        **keywords,
    )


def test_training_and_evaluation_under_torchrun_are_those_of_one_process(tmp_path: Path) -> None:
    changes = {**EXACT, **LEARNS, "training.steps": 20, "decoding.beam": 2, "decoding.max_length": 5}
    status, output, errors = ended(torchrun("train", *options(tmp_path / "two", changes)))
    assert status == 0, errors
    assert output.count("[valid] step") == 1
    assert "2 processes (data 2), here cpu" in output
    assert main(["train", *options(tmp_path / "one", {**changes, "training.devices": "cpu"})]) == 0
    assert_same_weights(tmp_path / "two", tmp_path / "one", 1e-10)

    status, output, errors = ended(torchrun("evaluate", "--run", str(tmp_path / "two")))
    assert status == 0, errors
    assert output.count("BLEU, lower-cased") == 1
    assert main(["evaluate", "--run", str(tmp_path / "one")]) == 0
    found = [(tmp_path / run / "test.translations.txt").read_text() for run in ("two", "one")]
    assert found[0] == found[1]
    scores = [json.loads((tmp_path / run / "test.scores.json").read_text()) for run in ("two", "one")]
    for each in scores:
        each.pop("weights")  # which are equal up to rounding
    assert scores[0] == scores[1]
    assert scores[0]["sentences"] == 25


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_saves_the_step_at_hand(number: signal.Signals, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun("train", *options(run, {**ENDLESS, "training.validate_every": 7}), start_new_session=True)
    wait_for_steps(run, process, 10)
    if number == signal.SIGINT:  # as a terminal does it: to the launcher and to every rank
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, output, _ = ended(process)
    assert output.count("stopping after this step and saving") == 1
    (line,) = [line for line in output.splitlines() if "resume with: " in line]
    python, *words = shlex.split(line.partition("resume with: ")[2])
    assert Path.cwd() / python == Path(sys.executable)
    assert words == [*LAUNCHER, "-m", "recipes.translation", "train", "--folder", str(run)]
    steps = [record["step"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    assert json.loads(saved_file(run, "last", "training.json").read_text())["step"] == steps[-1] == len(steps)


def test_a_killed_rank_ends_the_others_with_one_line_and_loses_no_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun("train", *options(run, ENDLESS))
    wait_for_steps(run, process, 8)
    (first,) = workers_of(process, rank=0)
    with pytest.raises(CheckpointError, match=rf"^process {first} on \S+ is writing into"):
        train(tiny(run, ENDLESS))
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGKILL)
    began = time.monotonic()
    status, _, errors = ended(process)
    assert status != 0
    assert time.monotonic() - began < 40
    (line,) = [line for line in errors.splitlines() if line.startswith("error:")]
    assert line.startswith("error: rank 0 lost another one, which ended or never joined:")
    step = json.loads(saved_file(run, "last", "training.json").read_text())["step"]
    assert step % 5 == 0
    assert main(["train", *options(run, {**ENDLESS, "training.steps": step + 1, "training.devices": "[cpu]"})]) == 0


def test_a_rank_that_hangs_is_waited_for_as_long_as_the_layout_says(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun("train", *options(run, {**ENDLESS, "layout.timeout": 4}))
    wait_for_steps(run, process, 8)
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGSTOP)
    began = time.monotonic()
    while workers_of(process, rank=0) and time.monotonic() - began < 60:
        time.sleep(0.1)
    assert 3 < time.monotonic() - began < 40
    os.kill(worker, signal.SIGKILL)  # torchrun would wait half a minute for it to answer
    status, _, errors = ended(process)
    assert status != 0
    (line,) = [line for line in errors.splitlines() if line.startswith("error:")]
    assert line.startswith("error: rank 0 lost another one, which ended or never joined: ")
    assert "imed out" in line


def test_a_group_that_torchrun_starts_again_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    run, changes = tmp_path / "run", {**EXACT, "training.steps": 60, "training.validate_every": 10}
    process = torchrun("train", *options(run, changes), launcher=["--max-restarts", "1"])
    wait_for_steps(run, process, 15)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    status, output, errors = ended(process)
    assert status == 0, errors
    assert "resuming from step" in output
    assert main(["train", *options(tmp_path / "one", {**changes, "training.devices": "cpu"})]) == 0
    assert_same_weights(run, tmp_path / "one", 1e-9)  # 60 steps


def test_the_rank_that_fails_first_is_named_with_its_cause(tmp_path: Path) -> None:
    """Rank 1 has no data: as on a machine where a disk is not mounted."""
    (tmp_path / "0").mkdir()
    for split in ("train", "valid"):
        for side in ("en", "de"):
            (tmp_path / "0" / f"{split}.{side}").write_text(
                "".join(f"{split} {number} {side}\n" for number in range(60))
            )
    changes = {
        "training.devices": "auto",
        "data.format": "text",
        "data.path": f"{tmp_path}/${{RANK}}",
        "data.train": "[train.en, train.de]",
        "data.valid": "[valid.en, valid.de]",
        "subwords.vocab_size": 280,
    }
    status, _, errors = ended(torchrun("train", *options(tmp_path / "run", changes)))
    assert status != 0
    (line,) = [line for line in errors.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: rank 1: there is no file {tmp_path}/1/valid.en")


SPAWN = """
import os, sys
import torch.multiprocessing as mp
from recipes.translation.settings.config import load_config
from recipes.translation.train import train

def work(rank, world, port, words):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=port)
    settings = dict(word.lstrip("-").split("=", 1) for word in words)
    # One write: two processes that print share this pipe
    os.write(1, f"{train(load_config(None, settings)).state.step}\\n".encode())

if __name__ == "__main__":
    mp.spawn(work, (2, sys.argv[1], sys.argv[2:]), nprocs=2)
"""


def test_processes_that_mp_spawn_starts_train_together(tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (tmp_path / "spawn.py").write_text(textwrap.dedent(SPAWN))
    words = options(tmp_path / "run", {**EXACT, "training.steps": 5, "training.devices": "auto"})
    settings = [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]
    found = subprocess.run(
        [sys.executable, tmp_path / "spawn.py", str(port), *settings],
        capture_output=True,
        text=True,
        timeout=120,
        env={**QUIET, "PYTHONPATH": str(Path.cwd())},
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("[valid] step") == 1
    assert found.stdout.splitlines().count("5") == 2

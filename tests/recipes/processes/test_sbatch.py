"""A training under the batch script of `deploy/`, on stand-ins for Slurm: saved, queued again, resumed, cancelled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.translation.run_folder.step_records import read_metrics
from tests.deploy.slurm import Slurm, wait_for
from tests.recipes.processes.started import ended, wait_for_steps
from tests.recipes.saved import saved_file
from tests.recipes.tiny import options

pytestmark = pytest.mark.launched


def steps_of(run: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def test_a_job_saves_before_its_time_limit_resumes_when_queued_again_and_is_cancelled_for_good(tmp_path: Path) -> None:
    slurm, run = Slurm(tmp_path), tmp_path / "run"
    changes = {"training.steps": 100_000, "training.validate_every": 7, "training.devices": "auto"}
    words = ["--folder" if word == "--run" else word for word in options(run, changes)]
    process = slurm.submit(words)
    wait_for_steps(run, process, 10)
    slurm.near_the_time_limit()
    wait_for([tmp_path / "restarted"], process)
    saved = json.loads(saved_file(run, "last", "training.json").read_text())["step"]
    assert saved == steps_of(run)[-1]
    wait_for_steps(run, process, (run / "metrics.jsonl").read_text().count("\n") + 10)
    slurm.end("CANCELLED")
    status, output, errors = ended(process)
    assert status != 0
    assert output.count("queued again") == 1, errors
    assert output.count("2 processes (data 2), here cpu") == 2
    assert output.count("stopping after this step and saving") == 2
    assert f"resuming from step {saved}" in output
    steps = steps_of(run)
    assert steps == list(range(1, len(steps) + 1))
    assert json.loads(saved_file(run, "last", "training.json").read_text())["step"] == steps[-1]

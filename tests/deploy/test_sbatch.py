"""The batch script of `deploy/`, as Slurm runs and signals it: which jobs are queued again, with which exit status.

The launcher is a stand-in here; tests/recipes/processes/test_torchrun.py trains.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.slurm import ROOT, SCRIPT, Slurm, wait_for

LAUNCHER = """
trap 'exit 1' TERM
printf '%s\\n' "$@" > @FOLDER/words.$SLURM_NODEID
if [ -n "$SLURM_RESTART_COUNT" ]; then exit 0; fi
touch @FOLDER/started.$SLURM_NODEID
case "$*" in *--ends) exit 3 ;; *--finishes) exit 0 ;; *--last-step) trap 'exit 0' TERM ;; esac
for ((tick = 0; tick < 1000; tick++)); do sleep 0.05; done
"""
"""As torch's: it ends with an error after SIGTERM, once the ranks have saved. After it was queued again it finishes."""


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    made = Slurm(tmp_path)
    made.add("torchrun", LAUNCHER)
    return made


def outcome(process: subprocess.Popen[str]) -> tuple[int, int]:
    """The exit status, and how often the job was queued again."""
    output, errors = process.communicate(timeout=60)
    assert "stand-in: s" not in errors, errors
    return process.returncode, output.count("queued again")


def started(slurm: Slurm, *words: str) -> subprocess.Popen[str]:
    process = slurm.submit(["--config", "mine.yaml", *words])
    wait_for([slurm.folder / "started.0", slurm.folder / "started.1"], process)
    return process


def test_a_job_near_its_time_limit_is_stopped_and_queued_again(slurm: Slurm) -> None:
    process = started(slurm)
    slurm.near_the_time_limit()
    assert outcome(process) == (0, 1)


def test_a_training_whose_last_step_comes_with_the_signal_is_not_queued_again(slurm: Slurm) -> None:
    process = started(slurm, "--last-step")
    slurm.near_the_time_limit()
    assert outcome(process) == (0, 0)


def test_a_job_that_is_warned_of_its_preemption_is_queued_again(slurm: Slurm) -> None:
    """In its grace time it is still running; once it has ended by itself, Slurm would not queue it."""
    process = started(slurm)
    slurm.end("RUNNING")
    assert outcome(process) == (0, 1)


@pytest.mark.parametrize("state", ["CANCELLED", "PENDING"])
def test_a_job_that_was_cancelled_or_queued_by_slurm_is_not_queued_again(slurm: Slurm, state: str) -> None:
    process = started(slurm)
    slurm.end(state)
    assert outcome(process) == (1, 0)


@pytest.mark.parametrize(("word", "status"), [("--ends", 3), ("--finishes", 0)])
def test_a_training_that_ends_by_itself_is_not_queued_again_and_gives_the_job_its_status(
    slurm: Slurm, word: str, status: int
) -> None:
    assert outcome(slurm.submit([word])) == (status, 0)


def test_each_machine_has_one_launcher_with_the_same_words(slurm: Slurm) -> None:
    assert outcome(slurm.submit(["--config", "two words", "--finishes"], nodes=3)) == (0, 0)
    found = [(slurm.folder / f"words.{node}").read_text().splitlines() for node in range(3)]
    assert found[0] == found[1] == found[2]
    assert found[0][:4] == ["--nnodes", "3", "--nproc-per-node", "1"]
    assert found[0][-6:] == ["-m", "recipes.translation", "train", "--config", "two words", "--finishes"]


def test_the_launcher_gives_up_before_slurm_does() -> None:
    text = (ROOT / SCRIPT).read_text()
    (notice,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, flags=re.MULTILINE)
    (patience,) = re.findall(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", text, flags=re.MULTILINE)
    assert int(patience) < int(notice)
    assert "#SBATCH --requeue\n" in text


def test_slurm_reads_every_directive() -> None:
    """It stops at the first line that is neither a comment nor empty."""
    head, _, rest = (ROOT / SCRIPT).read_text().partition("\n\nexport")
    assert head.startswith("#!/bin/bash\n")
    assert all(line.startswith("#") for line in head.splitlines())
    assert "#SBATCH" not in rest


def test_bash_and_shellcheck_find_no_fault() -> None:
    subprocess.run(["bash", "-n", ROOT / SCRIPT], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", ROOT / SCRIPT], check=True)

"""The recipe over processes that torchrun, on one machine or two, Slurm or another program starts, stops and kills."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from recipes.translation.commands import main
from recipes.translation.errors import CheckpointError, OtherRankError
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.settings.config import RunConfig
from recipes.translation.train import train
from recipes.translation.training import training
from recipes.translation.training.optimizer import update
from seqpar.testing.ranks import ranks
from tests.deploy.slurm import Slurm, wait_for
from tests.recipes.processes.layouts import EXACT, assert_same_weights, records
from tests.recipes.processes.started import ended, forked, wait_for_steps, workers_of
from tests.recipes.random_translator import random_translator
from tests.recipes.saved import state_in, steps_of
from tests.recipes.tiny import OF_FILES, options, tiny, write_pairs

pytestmark = pytest.mark.launched

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


def test_training_until_an_interrupt_and_evaluation_under_torchrun_are_those_of_one_process(tmp_path: Path) -> None:
    run = tmp_path / "two"
    changes = {**EXACT, "training.steps": 100_000, "training.validate_every": 7, "training.validate_bleu": 0}
    process = torchrun("train", *options(run, changes), start_new_session=True)
    wait_for_steps(run, process, 10)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the launcher and to every rank
    _, output, errors = ended(process)
    assert output.count("stopping after this step and saving") == 1, errors
    assert "2 processes (data 2), here cpu" in output
    (line,) = [line for line in output.splitlines() if "resume with: " in line]
    python, *words = shlex.split(line.partition("resume with: ")[2])
    assert Path.cwd() / python == Path(sys.executable)
    assert words == [*LAUNCHER, "-m", "recipes.translation", "train", "--folder", str(run)]
    steps = steps_of(run)
    assert state_in(run)["step"] == steps[-1]["step"] == len(steps)
    assert output.count("[valid] step") == len(steps) // 7
    usual = {**changes, "training.devices": "cpu", "training.steps": len(steps)}
    assert main(["train", *options(tmp_path / "one", usual)]) == 0
    assert_same_weights(run, tmp_path / "one", 1e-10)

    made = tmp_path / "random"
    save_model(made / "best", random_translator(tmp_path), {"step": 1})
    status, output, errors = ended(torchrun("evaluate", "--run", str(made), "--beam", "2"))
    assert status == 0, errors
    assert output.count("BLEU, lower-cased") == 1
    results = [made / "test.translations.txt", made / "test.scores.json"]
    found = [path.read_text() for path in results]
    assert main(["evaluate", "--run", str(made), "--beam", "2"]) == 0
    assert found == [path.read_text() for path in results]
    assert json.loads(found[1])["sentences"] == 25
    assert len(set(found[0].splitlines())) > 5


def test_when_a_rank_is_killed_the_other_says_so_in_a_line_and_a_new_group_goes_on_from_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    run, changes = tmp_path / "run", {**EXACT, "training.steps": 60, "training.validate_every": 10}
    process = torchrun("train", *options(run, changes), launcher=["--max-restarts", "1"])
    wait_for_steps(run, process, 15)
    (first,), (worker,) = (workers_of(process, rank) for rank in (0, 1))
    # Or a fast machine would have trained to the end before this one asks
    for each in (first, worker):
        os.kill(each, signal.SIGSTOP)
    with pytest.raises(CheckpointError, match=rf"^process {first} on \S+ is writing to"):
        train(tiny(run, changes))
    os.kill(worker, signal.SIGKILL)
    os.kill(first, signal.SIGCONT)
    began = time.monotonic()
    while Path(f"/proc/{first}").exists():
        assert time.monotonic() - began < 40
        time.sleep(0.05)
    status, output, errors = ended(process)
    assert status == 0, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("error:")]
    assert line.startswith("error: rank 0 lost contact with another process, which ended or never joined:")
    assert "resuming from step" in output
    assert main(["train", *options(tmp_path / "one", {**changes, "training.devices": "cpu"})]) == 0
    assert_same_weights(run, tmp_path / "one", 1e-9)  # 60 steps


def left_waiting(rank: int, world: int, config: RunConfig) -> tuple[str, str, float]:
    """The error of a training whose rank 1 stops in the first step until rank 0 has given it up, and when it came."""
    numbers = [0] * world
    dist.all_gather_object(numbers, os.getpid())
    began = time.monotonic()

    def stopped(*given: Any) -> None:
        nonlocal began
        began = time.monotonic()
        if rank == 1:
            signal.raise_signal(signal.SIGSTOP)
        update(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "update", stopped)
        try:
            train(config)
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - began
        finally:
            if rank == 0:
                os.kill(numbers[1], signal.SIGCONT)
    return "", "no error", time.monotonic() - began


def test_a_rank_that_hangs_is_waited_for_as_long_as_the_layout_says(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", {"training.devices": "auto", "layout.timeout": 4})
    (kind, text, seconds), _ = ranks(2, left_waiting, config)
    assert kind == OtherRankError.__name__
    assert text.startswith("rank 0 lost contact with another process, which ended or never joined: ")
    assert "imed out" in text
    assert 3 < seconds < 40


def said(rank: int, world: int, *words: str) -> tuple[int, str]:
    """The status and the errors of a command."""
    with redirect_stderr(io.StringIO()) as errors:
        return main(words), errors.getvalue()


def test_the_rank_that_fails_first_is_named_with_its_cause(tmp_path: Path) -> None:
    """Rank 1 has no data: as on a machine where a disk is not mounted."""
    write_pairs(tmp_path / "0", {"train": (0, 60), "valid": (60, 65)})
    changes = {**OF_FILES, "training.devices": "auto", "data.path": f"{tmp_path}/${{RANK}}"}
    (status, line), (other, nothing) = ranks(2, said, "train", *options(tmp_path / "run", changes))
    assert (status, other, nothing) == (2, 2, "")
    assert line.startswith(f"error: rank 1: there is no file {tmp_path}/1/valid.en")
    assert line.count("\n") == 1


def trained(rank: int, world: int, port: int, config: RunConfig) -> None:
    """Train in one of several processes that are told no more than this."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    assert train(config).state.step == 5


def test_processes_that_another_program_starts_train_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    config = tiny(tmp_path / "run", {**EXACT, "training.steps": 5, "training.devices": "auto"})
    processes = [forked(trained, rank, 2, port, config) for rank in (0, 1)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert capfd.readouterr().out.count("[valid] step") == 1


def test_a_job_saves_before_its_time_limit_resumes_when_queued_again_and_is_cancelled_for_good(tmp_path: Path) -> None:
    slurm, run = Slurm(tmp_path), tmp_path / "run"
    changes = {"training.steps": 100_000, "training.validate_every": 7, "training.devices": "auto"}
    words = ["--folder" if word == "--run" else word for word in options(run, changes)]
    process = slurm.submit(words)
    wait_for_steps(run, process, 10)
    slurm.near_the_time_limit()
    wait_for([tmp_path / "restarted"], process)
    saved = state_in(run)["step"]
    assert saved == steps_of(run)[-1]["step"]
    wait_for_steps(run, process, (run / "metrics.jsonl").read_text().count("\n") + 10)
    slurm.end("CANCELLED")
    status, output, errors = ended(process)
    assert status != 0
    assert output.count("queued again") == 1, errors
    assert output.count("2 processes (data 2), here cpu") == 2
    assert output.count("stopping after this step and saving") == 2
    assert f"resuming from step {saved}" in output
    steps = [record["step"] for record in steps_of(run)]
    assert steps == list(range(1, state_in(run)["step"] + 1))


NAMES = (f"seqpar-a-{os.getpid()}", f"seqpar-b-{os.getpid()}")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
CHANGES = {**EXACT, "training.steps": 40, "training.validate_every": 10, "training.validate_bleu": 0}


def ip(*words: str) -> None:
    """Run iproute2; an error has what it said."""
    found = subprocess.run(["ip", *words], capture_output=True, text=True)
    if found.returncode:
        raise PermissionError(f"ip {' '.join(words)}: {found.stderr.strip()}")


@pytest.fixture
def two_machines() -> Iterator[None]:
    """The two namespaces; they see each other and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2) to make network namespaces")
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", NAMES[0], "type", "veth", "peer", "name", "cable", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield
    except PermissionError as error:
        pytest.skip(f"needs the right to make network namespaces: {error}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def on_machine(number: int, run: Path) -> subprocess.Popen[str]:
    """The command of docs/scaling.md, on one of the two; here no name resolves to the address, so it says who hosts."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    # torchrun waits for further machines this long once there are enough, where its own default is half a minute
    elastic = ["--nnodes", "1:2", "--max-restarts", "1", "--rdzv-conf"]
    elastic.append(f"is_host={number == 0},join_timeout=60,last_call_timeout=3")
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--rdzv-id", "demo"]
    here = ["--local-addr", ADDRESSES[number]]
    recipe = ["-m", "recipes.translation", "train"]
    recipe += ["--folder" if word == "--run" else word for word in options(run, CHANGES)]
    return subprocess.Popen(
        ["ip", "netns", "exec", NAMES[number], *torchrun, *elastic, *meeting, *here, *recipe],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"},
    )


@pytest.mark.usefixtures("two_machines")
def test_two_machines_train_and_when_one_goes_away_the_other_goes_on_to_the_weights_of_one_process(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "two", tmp_path / "of the other machine"
    here, other = (on_machine(number, runs[number]) for number in (0, 1))
    wait_for_steps(runs[0], here, 15)
    (rank,) = workers_of(other, rank=0)
    for process in (other.pid, rank):
        os.kill(process, signal.SIGKILL)
    with other:
        said = ended(here)[1]
    assert here.returncode == 0, said
    assert said.count("2 processes (data 2), here cpu") == 1
    assert "resuming from step" in said
    # No file system is shared, and rank 0 writes for both: the other has its own store of the text, and nothing else
    assert [path.name for path in runs[1].iterdir()] == ["data"]
    assert main(["train", *options(tmp_path / "one", {**CHANGES, "training.devices": "cpu"})]) == 0
    assert_same_weights(runs[0], tmp_path / "one", 1e-10)
    for kind in ("loss", "valid_loss"):
        assert records(runs[0], kind) == pytest.approx(records(tmp_path / "one", kind), rel=1e-10)

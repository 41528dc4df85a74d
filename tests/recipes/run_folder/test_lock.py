"""One process writes into a run's folder; a lock that a killed one left behind is no obstacle."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from recipes.translation.commands import main
from recipes.translation.errors import CheckpointError
from recipes.translation.run_folder.checkpoint import load_facts
from recipes.translation.run_folder.lock import sole_writer
from recipes.translation.train import train
from tests.recipes.processes.started import forked
from tests.recipes.tiny import options, tiny

pytestmark = pytest.mark.faults

ENDLESS = {"training.steps": 1_000_000, "training.validate_every": 5}


@pytest.fixture
def training(tmp_path: Path) -> Iterator[BaseProcess]:
    """A process that trains in `tmp_path / "run"` and has saved."""
    process = forked(train, tiny(tmp_path / "run", ENDLESS))
    deadline = time.monotonic() + 90
    while not (tmp_path / "run" / "last").exists():
        assert time.monotonic() < deadline
        assert process.is_alive()
        time.sleep(0.05)
    yield process
    process.kill()


def test_a_second_writer_is_refused_by_name_and_one_that_was_killed_is_forgotten_at_once(
    training: BaseProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match=rf"^process {training.pid} on \S+ is writing to {run}: wait until"):
        train(tiny(run, ENDLESS))
    for words in (
        ["prepare", *options(run, {**ENDLESS, "subwords.vocab_size": 300})],
        ["train", *options(run, ENDLESS), "--fresh"],
    ):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith(f"error: process {training.pid} on ")
    assert training.is_alive()  # and it goes on

    training.kill()
    training.join()
    assert (run / ".lock").exists()
    began = time.monotonic()
    saved = load_facts(run / "last")["step"]
    assert main(["train", "--run", str(run), "--training.steps", str(saved)]) == 0
    assert "resuming from step" in capsys.readouterr().out
    assert time.monotonic() - began < 30
    assert not (run / ".lock").exists()


def test_a_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nfrom pathlib import Path\nfrom recipes.translation.run_folder.lock import sole_writer\n"
        "with sole_writer(Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n        time.sleep(60)\n        os._exit(0)\n"
        "    print(child, flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "run"], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        try:
            with sole_writer(tmp_path / "run"):
                assert Path(f"/proc/{child}").exists()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_on_a_file_that_was_removed_in_between_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who had it removes the file between our opening it and our locking it; the next one opens another."""
    path, flock, locked = tmp_path / "run" / ".lock", fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not locked:
            path.unlink()
        flock(descriptor, operation)
        locked.append(descriptor)

    monkeypatch.setattr("fcntl.flock", late)
    with sole_writer(tmp_path / "run"):
        assert len(locked) == 2
        assert path.read_text().startswith(f"process {os.getpid()} on ")


def test_the_next_one_to_lock_the_folder_keeps_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens the file as soon as the lock is free: a file that is removed only then would be its own."""
    path, close, others = tmp_path / "run" / ".lock", os.close, []

    def close_and_lock(descriptor: int) -> None:
        close(descriptor)
        if not others:
            others.append(os.open(path, os.O_RDWR | os.O_CREAT))

    with sole_writer(tmp_path / "run"):
        monkeypatch.setattr(os, "close", close_and_lock)
    monkeypatch.undo()
    assert os.path.samestat(path.stat(), os.fstat(others[0]))
    os.close(others[0])


def test_a_folder_where_nothing_was_written_is_not_left_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes two files"):
        train(tiny(tmp_path / "run", {"data.format": "text"}))
    assert not (tmp_path / "run").exists()


def test_a_file_system_without_locks_is_named_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    train(tiny(tmp_path / "run", {"training.steps": 1}))
    assert (
        "cannot be locked (Function not implemented): make sure that nothing else writes to" in capsys.readouterr().err
    )

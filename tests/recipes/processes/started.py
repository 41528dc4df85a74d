"""Commands that run as processes of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from seqpar.testing.ranks import _context


def recipe(*words: str, environment: Mapping[str, str], **keywords: Any) -> subprocess.Popen[str]:
    """The recipe as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.translation", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **keywords,
    )


def forked(work: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Call a function in a process of its own, which is a test's to kill, and has torch without importing it."""
    process: BaseProcess = _context().Process(target=_with_one_thread, args=(work, *arguments), daemon=True)
    process.start()
    return process


def _with_one_thread(work: Callable[..., object], *arguments: Any) -> None:
    torch.set_num_threads(1)  # as the tests' process has: sums of two threads are rounded differently
    work(*arguments)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, output and errors; a process that hangs is killed, and its test fails."""
    with process:
        try:
            output, errors = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, output, errors


def wait_for_steps(run: Path, process: subprocess.Popen[str], steps: int) -> None:
    """Until that many steps are done and one validation is saved."""
    deadline = time.monotonic() + 300
    metrics = run / "metrics.jsonl"
    while not (run / "last").exists() or not metrics.exists() or metrics.read_text().count("\n") < steps:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def workers_of(process: subprocess.Popen[str], rank: int = 1) -> list[int]:
    """The process id of a rank; none once it has ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if int(parent) == process.pid and f"LOCAL_RANK={rank}".encode() in environment:
                found.append(int(entry.name))
    return found

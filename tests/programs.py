"""Run Python's programs in forks of a process that has imported torch, as each import takes seconds of CPU."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
KEPT: list[dict[str, Any]] = []
"""The variables of a program that has ended, until its process does."""
FORKS = get_context("forkserver")
# What takes long, and none of ours; an optimizer imports the first one
FORKS.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run", "transformers.trainer_seq2seq", "peft"]
)


def output_of(command: str) -> str:
    """Run `python` or `torchrun` with some words, and return what it prints; AssertionError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        process = FORKS.Process(target=_run, args=(command.split(), Path(folder)))
        process.start()
        process.join()
        output, errors = ((Path(folder) / name).read_text() for name in ("output", "errors"))
    assert process.exitcode == 0, f"{output[-2_000:]}\n{errors[-2_000:]}"
    return output.strip()


def _run(command: list[str], folder: Path) -> None:
    """Run a command in this process as a new one would, or in ranks that torchrun forks in place of starting them."""
    import torch
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for number, name in enumerate(("output", "errors"), start=1):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    program, *words = command
    if program == "python":
        _python(*words)
        return
    with patch.object(
        run, "elastic_launch", lambda config, entrypoint: elastic_launch(replace(config, start_method="fork"), _python)
    ):
        run.main(words)


def _python(*words: str) -> None:
    """Run what is named after `python` and its options: a file, or a module."""
    sys.argv = [words[-1]]
    if "-m" in words:
        made = runpy.run_module(words[-1], run_name="__main__", alter_sys=True)
    else:
        made = runpy.run_path(words[-1], run_name="__main__")
    # What the program has made is not freed here: a rank has hung in that, after its group was gone, in 3 of some 30
    # runs of examples/ddp.py; where torchrun itself starts it, in none of 14
    KEPT.append(made)

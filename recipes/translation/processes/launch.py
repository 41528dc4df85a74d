"""Start a command in several processes on this machine, with torch's own launcher."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from recipes.translation.processes.beginning import LAUNCHER

MOST_ON_CPU = 4
"""The most processes that `auto` starts on the CPU; the cores are divided among them."""
SECONDS_TO_STOP = 600
"""How long a step and its saving may take after Ctrl-C or SIGTERM, before torch (2.12 or newer) kills the processes."""


def automatic() -> int:
    """Return one process for each GPU or, without one, for each core, at most `MOST_ON_CPU`."""
    import torch

    return torch.cuda.device_count() or min(cores(), MOST_ON_CPU)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def launch(processes: int, argv: Sequence[str]) -> int:
    """Run `python -m recipes.translation ARGV` in `processes` processes; return the status of the first that failed.

    This is `torchrun --standalone --nproc-per-node PROCESSES -m recipes.translation ARGV`. Each process gets its share
    of the cores, unless OMP_NUM_THREADS is set, and `SECONDS_TO_STOP`, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT is set.
    All of them stop if this process is killed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    # torch's default of half a minute is too short for a long step and a large checkpoint
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_STOP))
    os.environ[LAUNCHER] = str(os.getpid())
    # A process that ends because of a user's mistake has printed one line, which the launcher's output would bury
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    launcher = ["--standalone", "--nproc-per-node", str(processes), "-m", "recipes.translation"]
    try:
        run(parse_args([*launcher, *unambiguous(argv)]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def launcher_words() -> list[str]:
    """Return the words of the command that called torchrun, or `launch`, up to the name of this recipe.

    An example is torchrun --nproc-per-node 8 -m recipes.translation. Empty if no launcher can be found.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    try:
        words = os.fsdecode(Path(f"/proc/{os.getppid()}/cmdline").read_bytes()).split("\0")
    except OSError:  # not every system has it
        return []
    if "recipes.translation" not in words:
        return []
    return words[: words.index("recipes.translation") + 1]


def unambiguous(words: Sequence[str]) -> list[str]:
    """Return the words with --folder for --run, which the launcher would take for an abbreviation of its own options.

    After -- come sentences, not options.
    """
    options = words.index("--") if "--" in words else len(words)
    is_run = [place < options and (word == "--run" or word.startswith("--run=")) for place, word in enumerate(words)]
    return [word.replace("--run", "--folder", 1) if found else word for word, found in zip(words, is_run, strict=True)]

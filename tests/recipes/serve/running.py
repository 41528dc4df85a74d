"""The real service in a process of its own, on a free port of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Running:
    """A service that runs."""

    process: subprocess.Popen[str]
    url: str


@contextmanager
def running(*words: str | Path) -> Iterator[Running]:
    """Start `serve` with these words, wait until it accepts requests, and end it with the block."""
    command = [sys.executable, "-m", "recipes.translation", "serve", *map(str, words), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        for line in process.stdout:
            if found := re.search(r"http://[^ ]+:\d+", line):
                yield Running(process, found[0])
                return
        raise AssertionError(f"the service ended with status {process.wait()}")
    finally:
        process.kill()
        process.communicate()

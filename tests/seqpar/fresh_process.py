"""Run Python in a process of its own, whose peak is measured."""

import os
import subprocess
import sys


def run_in_fresh_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python <arguments>` on one thread, to have its peak measured."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)

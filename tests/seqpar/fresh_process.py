"""Run Python in a process of its own, whose peak is measured."""

import os
import subprocess
import sys

from conformance.apart import RELEASE_FROM


def run_in_fresh_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python <arguments>` on one thread, where large freed blocks go back to the system at once."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(RELEASE_FROM), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

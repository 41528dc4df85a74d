"""Stand-ins for Slurm's commands: a job of several machines runs on this one, and can be signalled and queued again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
SCRIPT = "deploy/train.sbatch"
JOB = str(os.getpid())
State = Literal["RUNNING", "CANCELLED", "PENDING"]

COMMANDS = {
    # The variables are those of "OUTPUT ENVIRONMENT VARIABLES" in https://slurm.schedmd.com/sbatch.html
    "sbatch": """
        export SLURM_JOB_ID=@JOB SLURM_JOB_NODELIST=machines SLURM_NNODES=${1#--nodes=} SLURM_GPUS_ON_NODE=1
        shift
        for ((restart = 0; ; restart++)); do
            rm -f @FOLDER/requeued
            echo RUNNING > @FOLDER/state
            if ((restart > 0)); then export SLURM_RESTART_COUNT=$restart; touch @FOLDER/restarted; fi
            bash "$@" &
            echo $! > @FOLDER/batch
            wait $!
            status=$?
            [ -e @FOLDER/requeued ] || exit $status
            echo "stand-in: queued again"
        done
        """,
    "srun": """
        while [[ $1 == -* ]]; do shift; done
        export STEP_OF=@FOLDER
        for ((node = 0; node < SLURM_NNODES; node++)); do
            SLURM_NODEID=$node "$@" &
            tasks+=($!)
        done
        worst=0
        for task in "${tasks[@]}"; do wait "$task" || worst=$?; done
        exit $worst
        """,
    "scontrol": """
        case "$1 $2 $3" in
            "show hostnames machines") for ((node = 0; node < SLURM_NNODES; node++)); do echo localhost; done ;;
            "show job @JOB") echo "JobId=$3 JobName=seqpar"; echo "   JobState=$(cat @FOLDER/state) Reason=None" ;;
            "requeue @JOB ") touch @FOLDER/requeued ;;
            *) echo "stand-in: scontrol $*" >&2; exit 1 ;;
        esac
        """,
    # To every process of the steps, and not to the batch script: https://slurm.schedmd.com/scancel.html, --batch
    "scancel": """
        [ "$*" = "--signal=TERM @JOB" ] || { echo "stand-in: scancel $*" >&2; exit 1; }
        for process in /proc/[0-9]*; do
            if grep -qzxF STEP_OF=@FOLDER $process/environ 2> /dev/null; then kill -TERM "${process#/proc/}"; fi
        done
        true
        """,
}


class Slurm:
    """A cluster in a folder, whose commands come first on the PATH of what it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, code in COMMANDS.items():
            self.add(name, code)
        path = os.pathsep.join([str(self.bin), str(Path(sys.executable).parent), "/usr/bin", "/bin"])
        self.environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}

    def add(self, name: str, code: str) -> None:
        """Make one more command."""
        command = self.bin / name
        command.write_text(f"#!/bin/bash\n{code.replace('@JOB', JOB).replace('@FOLDER', str(self.folder))}")
        command.chmod(0o755)

    def submit(self, words: Sequence[str], nodes: int = 2) -> subprocess.Popen[str]:
        """Run the script of `deploy/`, and again whenever it queues itself again."""
        return subprocess.Popen(
            [self.bin / "sbatch", f"--nodes={nodes}", SCRIPT, *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def near_the_time_limit(self) -> None:
        """Send what `#SBATCH --signal=B:USR1@300` asks for: a signal to the batch script alone."""
        self._signal_batch("USR1")

    def end(self, state: State) -> None:
        """Send SIGTERM to every process of the job, which from now on is in this state."""
        (self.folder / "state").write_text(f"{state}\n")
        self._signal_batch("TERM")
        subprocess.run([self.bin / "scancel", "--signal=TERM", JOB], check=True)

    def _signal_batch(self, name: str) -> None:
        batch = (self.folder / "batch").read_text().strip()
        subprocess.run(["kill", f"-{name}", batch], check=True)


def wait_for(files: Sequence[Path], process: subprocess.Popen[str]) -> None:
    """Until all of them exist."""
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)

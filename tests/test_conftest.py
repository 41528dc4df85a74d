"""What the tests' own settings promise: a failing example is shown in time, and what is not installed is named."""

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from tests import conftest, emulated

ROOT = Path(__file__).parent.parent
CODE = """
import sys, time

from hypothesis import given, settings
from hypothesis import strategies as st

from tests import conftest

conftest.bound_shrinking(float(sys.argv[1]))
started = time.monotonic()


@settings(database=None)
@given(st.lists(st.integers(0, 10**9), min_size=40, max_size=60))
def fails(numbers):
    time.sleep(0.1)  # as over ranks, where a failure costs new processes
    assert len({*numbers}) < 5


try:
    fails()
finally:
    print("took", time.monotonic() - started)
"""


def test_shrinking_ends_well_before_the_timeout_of_a_test():
    import hypothesis.internal.conjecture.engine

    with (ROOT / "pyproject.toml").open("rb") as file:
        timeout = tomllib.load(file)["tool"]["pytest"]["ini_options"]["timeout"]
    assert hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS == conftest.SHRINKING_SECONDS
    assert timeout / 4 >= conftest.SHRINKING_SECONDS


def test_a_failing_example_is_shown_when_the_time_to_shrink_is_over():
    command = [sys.executable, "-c", CODE, "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "numbers=[" in done.stderr, done.stderr[-2000:]
    assert "spent more than" in done.stdout  # hypothesis says that it stopped, as after its own five minutes
    assert float(done.stdout.split()[-1]) < 20


def test_packages_that_are_not_installed_are_named_and_nothing_else_that_is_missing():
    reasons = [
        "verl: not installed",
        "nemo-rl: not installed: clone https://github.com/NVIDIA-NeMo/RL and put it on PYTHONPATH",
        "Skipped: needs spmd_types (pip install spmd_types)",
        "Skipped: needs fairseq 0.12.2, which runs on Python 3.11 as docs/from-fairseq.md says",
        "rattler_build is not here: make test-trainers unpacks it",
        "needs a CUDA device",
        "needs two GPUs",
        "chooses its devices itself",
    ]
    assert conftest.names_not_here(reasons) == ["fairseq", "nemo-rl", "rattler_build", "spmd_types", "verl"]


def test_the_lock_of_a_killed_build_of_the_emulated_accelerator_goes_and_that_of_a_running_one_stays(tmp_path):
    lock = tmp_path / "lock"
    emulated.forget_killed_build(tmp_path)  # where there is none
    lock.touch()
    emulated.forget_killed_build(tmp_path)
    assert lock.exists()
    long_ago = time.time() - emulated.COMPILED_WITHIN - 1
    os.utime(lock, (long_ago, long_ago))
    emulated.forget_killed_build(tmp_path)
    assert not lock.exists()

"""The parts, the steps of each, and how long a step may take."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

LONGEST = 540
"""Seconds that a part may take."""
PYTHON = sys.executable
PYTEST = (
    PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--continue-on-collection-errors",
    # Where it is installed, it warns beside xdist, and a warning is an error here
    "-p", "no:benchmark",
    # Other people's trainers, whose packages a machine with a GPU need not have
    "--ignore", "tests/seqpar/integrations", "--ignore", "tests/seqpar/objectives/test_against_trl.py",
)  # fmt: skip
TRAINING = ("--parts", "training", "--device", "cuda", "--orders", "similar")
RECIPE = (PYTHON, "-m", "recipes.translation")
SWITCHED = (
    "tests/seqpar/core", "tests/seqpar/engine", "tests/seqpar/linear", "tests/seqpar/multi_device",
    "tests/seqpar/objectives", "tests/seqpar/testing", "tests/seqpar/test_every_option.py",
    "--ignore", "tests/seqpar/linear/test_compile.py",
)  # fmt: skip
"""Tests whose tensors are made on the device that the switch names."""
BESIDE = ("tests/seqpar/testing", "tests/seqpar/distributed", "tests/test_ranks.py")
"""Tests of ranks, and of other people's losses, in a process that sees a GPU."""


class Step(NamedTuple):
    """A command, the seconds it may take, and the command of a dry run: small, on the CPU."""

    name: str
    seconds: int
    command: tuple[str, ...]
    dry: tuple[str, ...]
    switch: str = ""
    """The variable that says where tensors are: `cuda`, or `emulated` in a dry run."""


def out() -> Path:
    """Return the folder for logs and figures."""
    return Path(os.environ.get("OUT", "runs/gpu"))


def parts() -> dict[str, list[Step]]:
    """Return the steps of every part."""
    marked = ("-m", "gpu", "tests/seqpar")
    kernels = ("-m", "not gpu", "tests/seqpar/kernels")
    conformance = (PYTHON, "-m", "conformance")
    return {
        "tests": [
            _tests("marked gpu", 110, ("-n", "4", *marked), marked),
            _tests("kernels", 100, ("-n", "4", *kernels), ("-k", "compiles", *kernels)),
            _tests("tensors on the GPU", 150, ("-n", "8", *SWITCHED), ("tests/seqpar/core",), "SEQPAR_TEST_DEVICE"),
            _tests("beside a GPU", 180, ("-n", "8", *BESIDE), ("tests/test_ranks.py",)),
        ],
        "kernels": [
            _own("real sizes", 300, "benchmarks.gpu.kernel_errors"),
            _own("settings", 140, "benchmarks.gpu.kernel_settings"),
            _own("rows of a chunk", 60, "benchmarks.chunk_rows", "--device", "cuda"),
        ],
        "loss": [
            _own("loss", 210, "benchmarks.loss", "--out", str(out() / "loss-cuda.json")),
            _own("scores", 100, "benchmarks.scores", "--out", str(out() / "scores-cuda.json")),
            Step("conformance of losses", 120, (*conformance, "losses"), (*conformance, "losses", "torch")),
            Step("conformance of scores", 100, (*conformance, "scores"), (*conformance, "scores", "torch")),
        ],
        "recipe": [
            _demo("[cuda:0]", 100),
            _demo("[cuda:0, cuda:0]", 100),
            _own("ranks", 90, "benchmarks.gpu.ranks"),
            _own("peers", 130, "benchmarks.training", *TRAINING),
        ],
        "seeds": [_own("three seeds of Multi30k", 520, "benchmarks.gpu.seeds")],
        "trace": [_own("training steps", 120, "benchmarks.gpu.trace")],
    }


def _tests(name: str, seconds: int, given: tuple[str, ...], dry: tuple[str, ...], switch: str = "") -> Step:
    """Return the step that runs tests."""
    return Step(name, seconds, (*PYTEST, *given), (*PYTEST, *dry), switch)


def _own(name: str, seconds: int, module: str, *arguments: str) -> Step:
    """Return the step that runs a module; its dry run takes no arguments."""
    command = (PYTHON, "-m", module)
    return Step(name, seconds, (*command, *arguments), (*command, "--dry-run"))


def _demo(devices: str, seconds: int) -> Step:
    """Return the step that trains, evaluates and tries the demo's model on some devices."""
    run = str(out() / f"demo-{devices.count('cuda')}")
    command = (*RECIPE, "demo", "--run", run, "--training.devices")
    return Step(f"demo on {devices}", seconds, (*command, devices), (*command, "[cpu]", "--training.steps", "2"))

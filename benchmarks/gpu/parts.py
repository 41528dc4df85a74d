"""The parts, the steps of each, and how long a step may take: all together fit into a quarter of an hour with a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

LONGEST = 780
"""Seconds that all steps together may take."""
PYTHON = sys.executable
PYTEST = (
    PYTHON, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", "--continue-on-collection-errors",
    # Where it is installed, it warns beside xdist, and a warning is an error here
    "-p", "no:benchmark",
)  # fmt: skip
MARKED = (
    "tests/seqpar/test_gpu.py", "tests/seqpar/test_memory_plan.py", "tests/seqpar/kernels/test_score_kernel.py",
    "tests/seqpar/linear/test_linear_cross_entropy.py",
)  # fmt: skip
"""The files with tests that are marked gpu."""
RECIPE = (PYTHON, "-m", "recipes.translation")


class Step(NamedTuple):
    """A command, the seconds it may take, and what is added to it: in a dry run, and for one implementation alone."""

    name: str
    seconds: int
    command: tuple[str, ...]
    dry: tuple[str, ...] = ("--dry-run",)
    variables: tuple[tuple[str, str], ...] = ()
    takes_only: bool = False
    """Whether `--only` names the one implementation that it measures."""


def out() -> Path:
    """Return the folder for logs and figures."""
    return Path(os.environ.get("OUT", "runs/gpu"))


def parts() -> dict[str, list[Step]]:
    """Return the steps of every part, what is asked first first."""
    sanitizer = (("TORCH_CUDA_SANITIZER", "1"),)
    return {
        "products": [_own("products", 30)],
        "kernels": [_own("row_kernels", 40)],
        "steps": [_own("loss_steps", 90)._replace(takes_only=True)],
        "gaps": [_own("trace", 30)],
        "mended": [
            Step("tests marked gpu", 60, (*PYTEST, "-n", "8", "-m", "gpu", *MARKED), ("-n", "2")),
            Step("tests of the kernels", 50, (*PYTEST, "-n", "8", "tests/seqpar/kernels"), ("-n", "2")),
            Step("ordered streams", 50, (*PYTEST, "-m", "gpu", "tests/seqpar/test_gpu.py"), (), sanitizer),
            _own("ranks", 90),
        ],
        "scores": [_own("scores", 120)._replace(takes_only=True)],
        "training": [_own("training_steps", 100)._replace(takes_only=True)],
        "seeds": [_own("seeds", 120)],
    }


def _own(module: str, seconds: int) -> Step:
    """Return the step that runs a module of this folder."""
    return Step(module.replace("_", " "), seconds, (PYTHON, "-m", f"benchmarks.gpu.{module}"))

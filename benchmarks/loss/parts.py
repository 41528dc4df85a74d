"""The parts of the loss, and what can be measured in each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.loss import checks, report
from benchmarks.loss.engine import Part, Subject
from benchmarks.loss.implementations import (
    ENGINE,
    ON_A_CPU,
    ON_A_GPU,
    OURS,
    PLAIN,
    TORCH_BEST,
    Implementation,
    known,
)
from benchmarks.loss.memory import allowed_bytes
from benchmarks.loss.problems import SHAPES, Inputs, Problem
from benchmarks.loss.results import Entry, Results
from benchmarks.loss.timing import LARGE, floors, runs_in_a_row

HUGE = 3e12
"""Operations from which on only the main implementations run; from `LARGE` on, memory is measured unsmoothed only."""
MAIN = [PLAIN, TORCH_BEST, ENGINE]
NAMES = {
    "shapes": ON_A_CPU,
    "memory": ON_A_CPU,
    "gpu": ON_A_GPU,
}
"""What is measured in each part."""
VARIANTS = itertools.product(SHAPES, (torch.float32, torch.bfloat16), (0.0, 0.1))
ON_GPUS = [
    Problem(8192, 512, 32_768, bias=False),
    Problem(16_384, 1024, 37_000, bias=False),
    Problem(8192, 4096, 128_256, bias=False),
    Problem(8192, 2304, 256_000, bias=False),
    Problem(16_384, 2048, 248_320, bias=False),
    Problem(8192, 512, 32_768),
    Problem(8192, 512, 32_768, smoothing=0.1, bias=False),
    Problem(8192, 512, 32_768, smoothing=0.1),
]
"""Shapes of translation and language models."""
GPU_PROBLEMS = [problem._replace(dtype=torch.bfloat16) for problem in ON_GPUS]


class Loss(Subject):
    """The loss over a vocabulary, forward and backward."""

    name = "loss"
    peers = {  # noqa: RUF012 - never written
        "cpu": ["cut-cross-entropy"],
        "cuda": ["triton", "cut-cross-entropy", "liger-kernel", "quack-kernels"],
    }
    modules = ["benchmarks.loss.parts"]  # noqa: RUF012 - never written
    parts = {  # noqa: RUF012 - never written
        "shapes": Part([shape._replace(dtype=dtype, smoothing=eps) for shape, dtype, eps in VARIANTS]),
        "memory": Part([Problem(rows, 256, 16_000) for rows in (1024, 2048, 4096, 8192, 16_384)], times=False),
    }
    gpu_parts = {"gpu": Part(GPU_PROBLEMS)}  # noqa: RUF012 - never written
    ours = OURS

    def ways(self, part: str, problem: Problem) -> dict[str, Implementation]:
        """Return the part's implementations; of the largest problems the main ones alone can run."""
        found = {name: known()[name] for name in NAMES[part]}
        if problem.products > HUGE and part != "gpu":
            for name in found.keys() - MAIN:
                found[name] = found[name]._replace(missing=found[name].missing or "left out at this size")
        return found

    def floors(self, part: str, x: Inputs) -> dict[str, Callable[[], None]]:
        """Return the three products in chunks and, where all logits fit comfortably, all at once."""
        return floors(x)

    def check_key(self, part: str, problem: Problem) -> str:
        """Return dtype and smoothing: all parts compute the same."""
        return f"{problem.dtype_name} smoothing={problem.smoothing:g}"

    def what_is_wrong(self, part: str, name: str, way: Implementation, problem: Problem, device: str) -> list[str]:
        """Return in words what is wrong at a small problem of that dtype and smoothing."""
        return checks.what_is_wrong(way, problem, device)

    def weighs(self, problem: Problem) -> bool:
        """Return whether memory is measured; at a large size, where a process takes minutes, once for the shape."""
        return not (problem.products > LARGE and problem.smoothing)

    def about(self, problem: Problem, device: str) -> Entry:
        """Return the memory that is allowed, and runs in a row of which the last is timed."""
        return {"allowed bytes": allowed_bytes(problem, device), "steps in a row": runs_in_a_row(problem)}

    def goals(self, results: Results) -> list[str]:
        """Return goals, limits, and the worst that was measured."""
        return report.target_table(results)

    def part_table(self, results: Results, part: str) -> list[str]:
        """Return the figures of one part."""
        return report.part_table(results, part)

    def write(self, path: Path) -> None:
        """Write tables and picture next to the file of measurements."""
        report.write(path)

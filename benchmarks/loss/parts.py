"""The parts of the loss, and what can be measured in each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.loss import checks, gpu, report
from benchmarks.loss.engine import Options, Part, Run, Subject
from benchmarks.loss.implementations import (
    CHECKPOINTED,
    CUT,
    ENGINE,
    LINEAR,
    ON_A_CPU,
    OWN,
    OWN_SMALL,
    PLAIN,
    REPLICAS,
    TORCH_BEST,
    Implementation,
    known,
)
from benchmarks.loss.memory import allowed_bytes
from benchmarks.loss.peers import torch_op, torch_op_choices
from benchmarks.loss.problems import SHAPES, Inputs, Problem
from benchmarks.loss.results import Entry, Results, save
from benchmarks.loss.timing import CHUNKED, LARGE, floors, forward_and_backward, runs_in_a_row, seconds

HUGE = 3e12
"""Operations from which on only the main implementations run; from `LARGE` on, memory is measured unsmoothed only."""
MAIN = [PLAIN, TORCH_BEST, ENGINE, LINEAR]
TUNED = Problem(2048, 512, 8_000)
NAMES = {
    "shapes": ON_A_CPU,
    "small": [PLAIN, OWN, OWN_SMALL],
    "padding": [PLAIN, CHECKPOINTED, TORCH_BEST, CUT, ENGINE, OWN, LINEAR],
    "memory": ON_A_CPU,
    "linear": [ENGINE],
    "devices": list(REPLICAS),
}
"""What is measured in each part."""
VARIANTS = itertools.product(SHAPES, (torch.float32, torch.bfloat16), (0.0, 0.1))
SMOOTHED = [[SHAPES[0]._replace(smoothing=0.1)], [SHAPES[3]._replace(smoothing=0.1)]]
LINES = [
    *(Problem(rows, 256, 16_000, 0.1) for rows in (1024, 2048, 4096, 6144, 8192)),
    *(Problem(2048, width, 16_000, 0.1) for width in (128, 512, 768, 1024)),
    *(Problem(2048, 256, vocab_size, 0.1) for vocab_size in (8_000, 32_000, 48_000, 64_000)),
]
"""Each of the three sizes alone grows."""


class Loss(Subject):
    """The loss over a vocabulary, forward and backward."""

    name = "loss"
    peers = {  # noqa: RUF012 - never written
        "cpu": ["cut-cross-entropy", "torchtune", "torchao"],  # torchtune needs torchao
        "cuda": ["triton", "cut-cross-entropy", "liger-kernel", "quack-kernels"],
    }
    modules = ["benchmarks.loss.parts"]  # noqa: RUF012 - never written
    parts = {  # noqa: RUF012 - never written
        "shapes": Part([[shape._replace(dtype=dtype, smoothing=eps)] for shape, dtype, eps in VARIANTS]),
        "small": Part(SMOOTHED),
        "padding": Part([[SHAPES[1], SHAPES[1]._replace(padding=0.0)]]),
        "memory": Part([[Problem(rows, 256, 16_000)] for rows in (1024, 2048, 4096, 8192, 16_384)], times=False),
        "linear": Part([LINES], memory=False),
        "devices": Part(SMOOTHED, memory=False),
    }

    def options(self, run: Run, problem: Problem) -> Options:
        """Return the fastest options of torch's op at a problem of middle size, among the right ones if any is."""
        tuned = TUNED._replace(dtype=problem.dtype)
        stored = run.results["torch op options"]
        if tuned.dtype_name not in stored:
            tried = _try_options(tuned, run.device)
            best = min(tried, key=lambda one: (bool(one["wrong"]), one["seconds"]))
            stored[tuned.dtype_name] = {"problem": tuned.as_json(), "best": best["options"], "tried": tried}
            save(run.results, run.path)
        chosen = dict(stored[tuned.dtype_name]["best"])
        # In the file it is text: "float32", or "None" for the weight's own dtype
        chosen["acc_dtype"] = getattr(torch, chosen["acc_dtype"], None)
        return chosen

    def ways(self, part: str, problem: Problem, options: Options) -> dict[str, Implementation]:
        """Return the part's implementations; of the largest problems the main ones alone can run."""
        found = {name: known(options)[name] for name in NAMES[part]}
        if problem.products > HUGE:
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

    def weighed(self, names: Sequence[str], problem: Problem) -> list[str]:
        """Return all, and the products; at a large size, where each takes a process of minutes, once for the shape."""
        if problem.products > LARGE and problem.smoothing:
            return []
        return [*names, CHUNKED]

    def about(self, problem: Problem, device: str, ways: dict[str, Implementation]) -> Entry:
        """Return the memory that is allowed, runs in a row of which the last is timed, and the notes on each row."""
        return {
            "allowed bytes": allowed_bytes(problem, device),
            "steps in a row": runs_in_a_row(problem),
            "notes": {name: way.notes(problem) for name, way in ways.items()},
        }

    def on_a_gpu(self, run: Run) -> None:
        """Measure bfloat16 on a GPU, at the shapes of translation and language models."""
        for problem in run.todo("gpu", gpu.PROBLEMS):
            run.keep("gpu", problem, gpu.of_loss(problem, run.device, run.repeats))
            torch.cuda.empty_cache()

    def tried_on_the_cpu(self) -> list[str]:
        """Return the GPU's table of one small problem on the CPU, where what needs a GPU does not run."""
        return gpu.tried_on_the_cpu()

    def part_table(self, results: Results, part: str) -> list[str]:
        """Return the figures of one part."""
        return report.part_table(results, part)

    def write(self, path: Path) -> None:
        """Write tables and picture next to the file of measurements."""
        report.write(path)


def _try_options(problem: Problem, device: str) -> list[dict[str, Any]]:
    x = Inputs.drawn(problem, device)
    tried = []
    for options in torch_op_choices(problem.dtype):
        step = forward_and_backward(torch_op(options)(x))
        fastest = min(seconds(step, [x]) for _ in range(3))  # the first run warms up
        wrong = checks.what_is_wrong(Implementation(torch_op(options)), problem, device)
        written = {**options, "acc_dtype": str(options["acc_dtype"]).removeprefix("torch.")}
        tried.append({"options": written, "seconds": fastest, "wrong": wrong})
    return tried

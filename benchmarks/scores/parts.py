"""The scores of tokens: the cases are the parts, and every way is an implementation in each."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.loss.checks import deviating, given_inputs
from benchmarks.loss.engine import Part, Subject
from benchmarks.loss.implementations import Implementation
from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.results import Entry, Results, entries_of
from benchmarks.loss.timing import PRODUCTS, Products, sizes_of_products
from benchmarks.scores import page
from benchmarks.scores.ways import CASES, FLOAT32, INVARIANT, OURS, SCORED, WAYS, Case, Way
from conformance.adapter import Options, ScoreAdapter
from conformance.problem import Problem as KitProblem
from seqpar import TokenScores

SHAPES = [
    Problem(4096, 512, 32_000, bias=False),
    Problem(2048, 1024, 151_936, bias=False),
]
PROBLEMS = [shape._replace(dtype=dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]
ON_A_GPU = Problem(8192, 4096, 151_936, dtype=torch.bfloat16, bias=False)
BY_NAME = {str(case): case for case in CASES}


class Scores(Subject):
    """Log-probabilities and entropies of tokens, forward and backward."""

    name = "scores"
    peers = {"cpu": ["trl", "transformers"]}  # noqa: RUF012 - never written
    modules = ["benchmarks.scores.parts", "trl.trainer.utils"]  # noqa: RUF012 - never written
    parts = dict.fromkeys(BY_NAME, Part(PROBLEMS))
    gpu_parts = {str(case): Part([ON_A_GPU]) for case in CASES if case.entropy}  # noqa: RUF012 - never written
    ours = (OURS, INVARIANT, FLOAT32, SCORED)

    def ways(self, part: str, problem: Problem) -> dict[str, Implementation]:
        """Return the ways that are measured in a case of that problem."""
        case = BY_NAME[part]
        return {
            name: Implementation(lambda x, way=way: step_of(x, way, case), compiles=way.compiles)  # type: ignore[misc]
            for name, way in WAYS.items()
            if way.measured(case, problem)
        }

    def floors(self, part: str, x: Inputs) -> dict[str, Callable[[], None]]:
        """Return the bare products, each by itself, also in the dtype of a way that has its own."""
        dtypes = {way.products or x.problem.dtype for way in WAYS.values() if way.measured(BY_NAME[part], x.problem)}
        found = products(x)
        for dtype in dtypes - {x.problem.dtype}:
            found |= products(Inputs.drawn(x.problem._replace(dtype=dtype), x.device))
        return found

    def check_key(self, part: str, problem: Problem) -> str:
        """Return dtype and case."""
        return f"{problem.dtype_name}: {part}"

    def what_is_wrong(self, part: str, name: str, way: Implementation, problem: Problem, device: str) -> list[str]:
        """Return in words what is more than twice as far from float64 as plain torch in the same dtype.

        The kit asks for each token's scores, which a joined way does not return.
        """
        if WAYS[name].joined:
            return []
        return what_is_wrong(WAYS[name], BY_NAME[part], problem.dtype, device)

    def uncounted_bytes(self, part: str, problem: Problem) -> int:
        """Return the size of the gradients that a step leaves behind."""
        return gradient_bytes(problem, BY_NAME[part])

    def about(self, problem: Problem, device: str) -> Entry:
        """Return how busy the machine is before anything is timed."""
        return {"load average before": os.getloadavg()[0]}

    def part_table(self, results: Results, part: str) -> list[str]:
        """Return the figures of a case."""
        return [str(part), "", *page.case_table(results, BY_NAME[part], entries_of(results, part))]

    def write(self, path: Path) -> None:
        """Write the page next to the file of measurements."""
        page.write(path)


def step_of(x: Inputs, way: Way, case: Case) -> Callable[[], None]:
    """Return forward and backward of a way in that case; the same inputs serve all cases."""
    scores = way.prepare(x, case.entropy)
    # One number for each row: the gradient that arrives at its score
    factors_2N = torch.randn(2, x.problem.rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    upstream = {dtype: list(factors_2N.to(x.device, dtype)) for dtype in (x.problem.dtype, torch.float32)}

    def step() -> None:
        x.hidden.requires_grad_(case.gradients != "nothing")
        x.weight.requires_grad_(case.gradients == "hidden and projection")
        with torch.set_grad_enabled(case.gradients != "nothing"):
            found = [score for score in scores() if score is not None]
        if way.joined:
            found[0].backward()
        elif case.gradients != "nothing":
            torch.autograd.backward(found, upstream[found[0].dtype][: len(found)])

    return step


def what_is_wrong(way: Way, case: Case, dtype: torch.dtype, device: str) -> list[str]:
    """Return in words what is more than twice as far from float64 as plain torch in the same dtype."""

    def scores(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
        rows, width = hidden.shape
        problem = Problem(rows, width, len(weight), dtype=dtype, bias=False)
        log_prob, entropy = way.prepare(given_inputs(problem, hidden, weight, None, target), options.entropy)()
        return TokenScores(log_prob=log_prob, entropy=entropy)

    frozen = {"hidden and projection": (), "hidden": ("weight",), "nothing": ("hidden", "weight")}
    used = ("log_prob", "entropy")[: 1 + case.entropy] if case.gradients != "nothing" else ()
    adapter = ScoreAdapter("the way", scores, offers=frozenset())
    options = Options(entropy=case.entropy, dtype=dtype)
    return deviating(
        KitProblem(adapter, 256, 24, 1000, options, frozen=frozen[case.gradients], device=device, used=used)
    )


def gradient_bytes(problem: Problem, case: Case) -> int:
    """Return the size of the gradients that a step leaves behind."""
    rows = {"hidden and projection": problem.rows + problem.vocab_size, "hidden": problem.rows, "nothing": 0}
    return rows[case.gradients] * problem.width * problem.dtype.itemsize


def products(x: Inputs) -> dict[str, Callable[[], None]]:
    """Return the bare products, each by itself: all rows at once, if they fit comfortably, and in chunks."""
    sizes = sizes_of_products(x)
    # One memory for all of them: at 2,048 x 151,936 in two dtypes, memory for each would take 13 GB
    memory = Products(x, max(sizes.values(), key=lambda rows: rows or x.problem.rows))
    return {
        f"{x.problem.dtype_name}: {name}, {size}": partial(memory.run, rows, {name})
        for size, rows in sizes.items()
        for name in PRODUCTS
    }

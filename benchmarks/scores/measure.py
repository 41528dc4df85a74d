"""Check every way against float64 at a small size; then time them, interleaved with bare products, and weigh them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.loss.memory import in_fresh_process, tiny
from benchmarks.loss.parts import as_json
from benchmarks.loss.plain_ways import CHUNK_ROWS
from benchmarks.loss.problems import Inputs, Problem, fits_comfortably
from benchmarks.loss.results import Entry, Results, save
from benchmarks.loss.timing import (
    CHUNKED,
    PRODUCTS,
    WHOLE,
    Products,
    Progress,
    Runs,
    bare_products,
    interleaved,
    seconds,
)
from benchmarks.scores.ways import CASES, WAYS, Case, Way, plain
from seqpar.testing import peak_memory
from seqpar.testing.precision import DRAWS, EXACT, TWICE, error

SHAPES = [
    Problem(4096, 512, 32_000, bias=False),
    Problem(2048, 1024, 151_936, bias=False),
]
PROBLEMS = [shape._replace(dtype=dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]
CHECK = Problem(256, 24, 1000, bias=False)
ROUNDS = 3
PEAK_ROWS = 64
"""Rows of the small problem on which code is loaded before memory is measured: a whole sentence."""


class Run(NamedTuple):
    """Hold what is asked for.

    Args:
        only: a text that the problem's name must contain.
        cases: a text that the case's name must contain.
        again: whether to measure what the file already has.
    """

    results: Results
    path: Path
    device: str
    rounds: int
    only: str
    cases: str
    again: bool

    def wanted(self, problem: Problem) -> list[Case]:
        """Return the cases of a problem that are to be measured."""
        if self.only not in str(problem):
            return []
        done = self.results["parts"].get(str(problem), {}).get("cases", {})
        cases = [case for case in CASES if self.cases in str(case)]
        return [case for case in cases if self.again or str(case) not in done]


def upstream(rows: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return one number per row: the gradient that arrives at its score."""
    return torch.randn(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def step_of(x: Inputs, way: Way, case: Case) -> Callable[[], None]:
    """Return forward and backward of a way in that case; the same inputs serve all cases."""
    scores = way.prepare(x, case.entropy)
    gradients: dict[torch.dtype, list[Tensor]] = {}
    for dtype in (x.problem.dtype, torch.float32, torch.float64):
        gradients[dtype] = [upstream(x.problem.rows, dtype, seed).to(x.device) for seed in (1, 2)]

    def step() -> None:
        x.hidden.requires_grad_(case.gradients != "nothing")
        x.weight.requires_grad_(case.gradients == "hidden and projection")
        with torch.set_grad_enabled(case.gradients != "nothing"):
            found = [score for score in scores() if score is not None]
        if case.gradients != "nothing":
            torch.autograd.backward(found, gradients[found[0].dtype][: len(found)])

    return step


def answer(x: Inputs, way: Way, case: Case) -> dict[str, Tensor]:
    """Return the scores and the gradients of a way, by name."""
    x.clear()
    step_of(x, way, case)()
    with torch.no_grad():
        log_prob, entropy = way.prepare(x, case.entropy)()
    found = {"log-probability": log_prob, "entropy": entropy, "hidden gradient": x.hidden.grad}
    found["weight gradient"] = x.weight.grad
    return {name: tensor.double() for name, tensor in found.items() if tensor is not None}


def drawn(problem: Problem, device: str, seed: int = 0) -> Inputs:
    """Return the problem's inputs; another seed gives other hidden states."""
    x = Inputs.drawn(problem, device)
    if seed:
        hidden = torch.randn(x.hidden.shape, generator=torch.Generator().manual_seed(seed))
        x.hidden = hidden.to(x.hidden).requires_grad_()
    return x


def as_float64(x: Inputs) -> Inputs:
    """Return the same numbers in float64."""
    problem = x.problem._replace(dtype=torch.float64)
    generator = copy.deepcopy(x.generator).double()
    return Inputs(problem, x.hidden.detach().double().requires_grad_(), generator, x.target)


def what_is_wrong(way: Way, case: Case, dtype: torch.dtype, device: str) -> list[str]:
    """Return in words what is more than twice as far from float64 as plain torch in the same dtype."""
    problem = CHECK._replace(dtype=dtype)
    reference = Way(plain)
    plain_errors: dict[str, float] = {}
    for seed in range(DRAWS):
        x = drawn(problem, device, seed)
        exact = answer(as_float64(x), reference, case)
        for name, tensor in answer(x, reference, case).items():
            plain_errors[name] = max(plain_errors.get(name, 0.0), error(tensor, exact[name]))
    x = drawn(problem, device)
    exact = answer(as_float64(x), reference, case)
    words = []
    for name, tensor in answer(x, way, case).items():
        allowed = max(TWICE * plain_errors[name], torch.finfo(dtype).eps / 2)
        if dtype == torch.float64:
            allowed = EXACT
        found = error(tensor, exact[name])
        if not found <= allowed:
            words.append(f"{name} off by {found:.1e} ({TWICE * found / allowed:.1f} x plain's)")
    return words


def gradient_bytes(problem: Problem, case: Case) -> int:
    """Return the size of the gradients that a step leaves behind."""
    numbers = {
        "hidden and projection": (problem.rows + problem.vocab_size) * problem.width,
        "hidden": problem.rows * problem.width,
        "nothing": 0,
    }
    return numbers[case.gradients] * problem.dtype.itemsize


def peak_of(name: str, case: Case, problem: Problem, device: str) -> int:
    """Return this process's peak during one step, above the inputs and the gradients that the step leaves behind."""
    way = WAYS[name]
    x = Inputs.drawn(problem, device)
    step_of(Inputs.drawn(tiny(problem)._replace(rows=PEAK_ROWS), device), way, case)()
    step = step_of(x, way, case)
    if way.compiles:
        step()
        x.clear()
    return peak_memory.peak_bytes(step, device) - gradient_bytes(problem, case)


def floor_runs(problem: Problem, device: str) -> dict[str, Callable[[], None]]:
    """Return the bare products, each by itself: all rows at once, if they fit comfortably, and in chunks."""
    x = Inputs.drawn(problem, device)
    sizes: dict[str, int | None] = {CHUNKED: CHUNK_ROWS}
    if fits_comfortably(problem, device):
        sizes[WHOLE] = None
    kind = problem.dtype_name
    # One memory for all of them: at 2,048 x 151,936 in two dtypes, memory for each would take 13 GB
    memory = Products(x, max(sizes.values(), key=lambda rows: rows or problem.rows))
    return {
        f"{kind}: {name}, {size}": bare_products(x, rows, {name}, memory)
        for size, rows in sizes.items()
        for name in PRODUCTS
    }


def measure(run: Run, problem: Problem, cases: list[Case]) -> None:
    """Measure some cases of one problem in the same rounds, and add them to the file."""
    load = os.getloadavg()[0]
    torch.compiler.reset()  # torch stops compiling after eight variants of one function
    for case in cases:
        for name, way in WAYS.items():
            if way.measured(case, problem):
                check(run, name, case, problem.dtype)
    torch.compiler.reset()
    x = Inputs.drawn(problem, run.device)
    runs: Runs = {(problem, name): step for name, step in floor_runs(problem, run.device).items()}
    if any(way.products and way.measured(case, problem) for way in WAYS.values() for case in cases):
        wide = problem._replace(dtype=torch.float32)
        runs |= {(problem, name): step for name, step in floor_runs(wide, run.device).items()}
    floors = [name for _, name in runs]
    for case in cases:
        for name, way in WAYS.items():
            if not way.measured(case, problem):
                continue
            step = step_of(x, way, case)
            if way.compiles:
                seconds(step, [x])
            runs[problem, f"{case}: {name}"] = step
    progress = Progress(str(problem), float(run.rounds * len(runs)))
    taken = interleaved(runs, [x], run.rounds, lambda what: progress.add(1, what), in_a_row=1)
    entry = run.results["parts"].setdefault(str(problem), {"problem": as_json(problem), "cases": {}})
    for case in cases:
        names = [name for name, way in WAYS.items() if way.measured(case, problem)]
        entry["cases"][str(case)] = {
            "load average before": load,
            "floor seconds": {name: taken[problem, name] for name in floors},
            "seconds": {name: taken[problem, f"{case}: {name}"] for name in names},
            "peak bytes": {name: weighed(name, case, problem, run.device) for name in names},
        }
        save(run.results, run.path)


def weighed(name: str, case: Case, problem: Problem, device: str) -> int | str:
    """Return the peak of a way in a process of its own, or what became of the process."""
    return in_fresh_process("benchmarks.scores.preloaded", peak_of, name, case, problem, device)


def check(run: Run, name: str, case: Case, dtype: torch.dtype) -> None:
    """Check a way once for each case and dtype."""
    key = f"{str(dtype).removeprefix('torch.')}: {case}"
    found = run.results["checks"].setdefault(key, {})
    if name not in found or run.again:
        found[name] = what_is_wrong(WAYS[name], case, dtype, run.device)


def products_seconds(entry: Entry, case: Case, dtype: str) -> float:
    """Return the median time of the products of a case, in chunks or all at once, whichever is faster."""
    return min(_products(entry, case, dtype, median=True))


def fastest_products(entry: Entry, case: Case, dtype: str) -> float:
    """Return the fastest time of the same."""
    return min(_products(entry, case, dtype, median=False))


def _products(entry: Entry, case: Case, dtype: str, *, median: bool) -> list[float]:
    found = []
    for size in (CHUNKED, WHOLE):
        total = 0.0
        for name, count in case.products.items():
            times = entry["floor seconds"].get(f"{dtype}: {name}, {size}")
            if times is None:
                break
            total += count * (sorted(times)[len(times) // 2] if median else min(times))
        else:
            found.append(total)
    return found

"""The parts of a run; each fills its own section of the results, problem by problem, and leaves what is there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.loss import gpu
from benchmarks.loss.checks import what_is_wrong
from benchmarks.loss.implementations import (
    ENGINE,
    LINEAR,
    OWN,
    OWN_SMALL,
    PLAIN,
    TORCH_BEST,
    Implementation,
    implementations,
    known,
    notes,
    over_devices,
    why_not,
)
from benchmarks.loss.memory import allowance, peak_bytes
from benchmarks.loss.peers import torch_op, torch_op_choices
from benchmarks.loss.problems import SHAPES, Inputs, Problem
from benchmarks.loss.results import Results, save
from benchmarks.loss.timing import (
    CHUNKED,
    LARGE,
    WHOLE,
    Progress,
    Runs,
    floors,
    forward_and_backward,
    in_a_row,
    interleaved,
    seconds,
)

Entry = dict[str, Any]
ROUNDS = (3, 7)
"""Fewest and most."""
BUDGET = 180.0
"""Seconds that the rounds of one problem may take, if that leaves the fewest."""
HUGE = 3e12
"""Operations from which on only the main ways are run; from `LARGE` on memory is measured without smoothing alone."""
MAIN = [PLAIN, TORCH_BEST, ENGINE, LINEAR]
TUNED = Problem(2048, 512, 8_000)
PADDING = [PLAIN, "checkpointed chunks", TORCH_BEST, "cut_cross_entropy", ENGINE, OWN, LINEAR]
MEMORY_PROBLEMS = [Problem(rows, 256, 16_000) for rows in (1024, 2048, 4096, 8192, 16_384)]
LINEAR_BASE = Problem(2048, 256, 16_000, 0.1)
LINEAR_POINTS = {
    "N": ("rows", [1024, 2048, 4096, 6144, 8192]),
    "D": ("width", [128, 256, 512, 768, 1024]),
    "V": ("vocab_size", [8_000, 16_000, 32_000, 48_000, 64_000]),
}
FIXED_ROUNDS = 5
TYPICAL = 1.4
"""Time of an implementation to that of the products, for a first guess."""


class Run(NamedTuple):
    """What every part needs to know of this run."""

    results: Results
    path: Path
    device: str
    repeats: int | None
    only: str
    again: bool
    checked: set[tuple[str, str]]

    def todo(self, part: str, problems: list[Problem]) -> list[Problem]:
        """The problems that are asked for and not measured yet."""
        done = {} if self.again else self.results["parts"].get(part, {})
        return [p for p in problems if self.only in str(p) and str(p) not in done]

    def keep(self, part: str, problem: Problem, entry: Entry) -> None:
        """Into the file."""
        self.results["parts"].setdefault(part, {})[str(problem)] = {"problem": as_json(problem), **entry}
        save(self.results, self.path)


def as_json(problem: Problem) -> dict[str, Any]:
    """Its numbers by name."""
    return {**problem._asdict(), "dtype": problem.dtype_name}


def shapes(run: Run) -> None:
    """Five shapes in float32 and bfloat16, with and without label smoothing: time and peak memory of everything."""
    variants = itertools.product(SHAPES, (torch.float32, torch.bfloat16), (0.0, 0.1))
    problems = run.todo("shapes", [shape._replace(dtype=d, smoothing=s) for shape, d, s in variants])
    progress = Progress("shapes", sum(problem.products for problem in problems))
    for problem in problems:
        measure(run, "shapes", [problem], progress)


def padding(run: Run) -> None:
    """The padded shape and the same without padding, in the same rounds."""
    pair = [SHAPES[1], SHAPES[1]._replace(padding=0.0)]
    if run.todo("padding", pair):
        progress = Progress("padding", sum(problem.products for problem in pair))
        measure(run, "padding", pair, progress, PADDING)


def small(run: Run) -> None:
    """A generator of one's own with few rows at a time, where memory counts more than time."""
    for problem in run.todo("small", [SHAPES[0]._replace(smoothing=0.1), SHAPES[3]._replace(smoothing=0.1)]):
        measure(run, "small", [problem], Progress("small", problem.products), [PLAIN, OWN, OWN_SMALL])


def measure(run: Run, part: str, problems: list[Problem], progress: Progress, names: list[str] | None = None) -> None:
    """Everything about problems of one dtype and smoothing, in the same rounds; `names` of None is the usual ones."""
    first, work = problems[0], sum(problem.products for problem in problems)
    options = best_options(run, first.dtype)
    ways = {n: way for n, way in implementations(options).items() if (n != OWN_SMALL if names is None else n in names)}
    not_run = {n: why_not(n, way, first) for n, way in ways.items()}
    if first.products > HUGE:
        not_run.update({n: "left out at this size" for n, why in not_run.items() if not why and n not in MAIN})
    chosen = {n: way for n, way in ways.items() if isinstance(way, Implementation) and not not_run[n]}
    for name, way in chosen.items():
        check(run, name, way, first)
    weighed = [] if first.products > LARGE and first.smoothing else [*chosen, CHUNKED]
    times = timed(run, problems, chosen, lambda share, what: progress.add(share * work, what), len(weighed))
    share = work / times.steps
    for problem in problems:
        memory = {}
        for name in weighed:
            memory[name] = peak_bytes(name, problem, run.device, options)
            progress.add(share, f"{problem}: memory of {name}")
        mine = {name: taken for (whose, name), taken in times.seconds.items() if whose == problem}
        entry = {
            "floor seconds": {name: mine.pop(name) for name in (CHUNKED, WHOLE) if name in mine},
            "seconds": mine,
            "steps in a row": in_a_row(problem),
            "peak bytes": memory,
            "allowed bytes": allowance(problem, run.device),
            "notes": {name: notes(name, way, problem) for name, way in chosen.items()},
            "not run": {name: why for name, why in not_run.items() if why},
        }
        run.keep(part, problem, entry)


class Times(NamedTuple):
    """Seconds by problem and implementation; and how many runs there are, memory's among them."""

    seconds: dict[tuple[Problem, str], list[float]]
    steps: int


def timed(
    run: Run,
    problems: list[Problem],
    chosen: dict[str, Implementation],
    said: Callable[[float, str], None],
    more_runs: int = 0,
    fixed_rounds: int | None = None,
    with_products: bool = True,
) -> Times:
    """The products and every implementation, interleaved; `said` hears each run's share of all the runs.

    Nothing is warmed up but the products, whose time decides how many rounds there are, and what compiles.
    """
    torch.compiler.reset()
    runs: Runs = {}
    inputs, estimate = [], 0.0
    for problem in problems:
        x = Inputs(problem, run.device)
        # What has no bias is measured with the same tensors: it never looks at it
        products = floors(x) if with_products else {}
        once_each = [seconds(once, [x]) for once in (*products.values(), *products.values())]
        estimate += min(once_each, default=0.0) * in_a_row(problem) * TYPICAL * (len(chosen) + len(products))
        runs.update({(problem, name): once for name, once in products.items()})
        for name, way in chosen.items():
            runs[problem, name] = forward_and_backward(x, way.prepare(x))
            if way.compiles:
                seconds(runs[problem, name], [x])
        inputs.append(x)
    count = run.repeats or fixed_rounds or rounds(estimate)
    steps = count * len(runs) + more_runs * len(problems)
    taken = interleaved(runs, inputs, count, lambda what: said(1 / steps, what))
    return Times(taken, steps)


def rounds(round_seconds: float) -> int:
    """As many as fit into the budget, an odd number if there are more than two."""
    fitting = max(ROUNDS[0], min(ROUNDS[1], int(BUDGET / round_seconds)))
    return fitting if fitting == ROUNDS[0] else fitting - 1 + fitting % 2


def check(run: Run, name: str, way: Implementation, problem: Problem) -> None:
    """Whether it is right, once for each dtype and smoothing."""
    key = f"{problem.dtype_name} smoothing={problem.smoothing:g}"
    found = run.results["checks"].setdefault(key, {})
    if name not in found or (run.again and (key, name) not in run.checked):
        errors, wrong = what_is_wrong(way, problem, run.device)
        found[name] = {"errors": errors, "wrong": wrong}
        run.checked.add((key, name))


def best_options(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    """The fastest options of torch's op at a problem of middle size, among the right ones if any is right."""
    problem = TUNED._replace(dtype=dtype)
    stored = run.results["torch op options"]
    if problem.dtype_name not in stored:
        x, tried = Inputs(problem, run.device), []
        for options in torch_op_choices(dtype):
            once = forward_and_backward(x, torch_op(options)(x))
            took = min(seconds(once, [x]) for _ in range(3))
            wrong = what_is_wrong(Implementation(torch_op(options)), problem, run.device)[1]
            written = {k: str(v).removeprefix("torch.") if k == "acc_dtype" else v for k, v in options.items()}
            tried.append({"options": written, "seconds": took, "wrong": wrong})
        best = min(tried, key=lambda one: (bool(one["wrong"]), one["seconds"]))
        stored[problem.dtype_name] = {"problem": as_json(problem), "best": best["options"], "tried": tried}
        save(run.results, run.path)
    chosen = dict(stored[problem.dtype_name]["best"])
    chosen["acc_dtype"] = None if chosen["acc_dtype"] == "None" else getattr(torch, chosen["acc_dtype"])
    return chosen


def memory(run: Run) -> None:
    """Peak memory of everything as the rows grow 16-fold."""
    problems = run.todo("memory", MEMORY_PROBLEMS)
    progress = Progress("memory", sum(problem.products for problem in problems))
    for problem in problems:
        options = best_options(run, problem.dtype)
        ways = {n: w for n, w in implementations(options).items() if n != OWN_SMALL and not why_not(n, w, problem)}
        peaks = {}
        for name in ways:
            peaks[name] = peak_bytes(name, problem, run.device, options)
            progress.add(problem.products / len(ways), f"{problem}: {name}")
        run.keep("memory", problem, {"peak bytes": peaks, "allowed bytes": allowance(problem, run.device)})


def linear(run: Run) -> None:
    """Time of the engine as N, D and V grow, each alone."""
    points = [LINEAR_BASE._replace(**{field: n}) for field, sizes in LINEAR_POINTS.values() for n in sizes]
    problems = list(dict.fromkeys(points))
    if run.todo("linear", problems):
        of_time(run, "linear", problems, {ENGINE: known({})[ENGINE]}, with_products=False)


def devices(run: Run) -> None:
    """The engine over one device and over the same device four times."""
    for problem in run.todo("devices", [shape._replace(smoothing=0.1) for shape in (SHAPES[0], SHAPES[3])]):
        of_time(run, "devices", [problem], over_devices())


def on_gpu(run: Run) -> None:
    """bfloat16 on a GPU, at the shapes of translation and language models."""
    if run.device == "cpu":
        return
    problems = run.todo("gpu", gpu.PROBLEMS)
    progress = Progress("gpu", 2 * sum(problem.products for problem in problems))  # getting ready, then the rounds
    for problem in problems:
        torch.compiler.reset()
        run.keep("gpu", problem, gpu.measure(problem, run.device, run.repeats, progress))
        torch.cuda.empty_cache()


def of_time(
    run: Run, part: str, problems: list[Problem], chosen: dict[str, Implementation], with_products: bool = True
) -> None:
    """Times alone, of all problems in the same rounds."""
    progress = Progress(part, 1.0)
    times = timed(run, problems, chosen, progress.add, fixed_rounds=FIXED_ROUNDS, with_products=with_products).seconds
    for problem in problems:
        mine = {name: taken for (whose, name), taken in times.items() if whose == problem}
        floor = {name: mine.pop(name) for name in (CHUNKED, WHOLE) if name in mine}
        run.keep(part, problem, {"floor seconds": floor, "seconds": mine})


PARTS = {
    "shapes": shapes,
    "small": small,
    "padding": padding,
    "memory": memory,
    "linear": linear,
    "devices": devices,
    "gpu": on_gpu,
}

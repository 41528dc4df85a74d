"""Run the parts of the benchmark; each fills its own section of the results, problem by problem, and keeps the rest."""

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
from benchmarks.loss.memory import allowed_bytes, step_peak
from benchmarks.loss.peers import torch_op, torch_op_choices
from benchmarks.loss.problems import SHAPES, Inputs, Problem
from benchmarks.loss.results import Entry, Results, save
from benchmarks.loss.timing import (
    CHUNKED,
    LARGE,
    WHOLE,
    Progress,
    Runs,
    floors,
    forward_and_backward,
    interleaved,
    runs_in_a_row,
    seconds,
)

FEWEST_ROUNDS = 3
MOST_ROUNDS = 7
BUDGET = 180.0
"""Seconds that the rounds of one problem may take, as long as the fewest rounds are run."""
HUGE = 3e12
"""Operations from which on only the main implementations run; from `LARGE` on, memory is measured unsmoothed only."""
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
"""First guess of an implementation's time over that of the products."""


class Run(NamedTuple):
    """Hold what every part needs to know of this run."""

    results: Results
    path: Path
    device: str
    repeats: int | None
    only: str
    again: bool
    checked: set[tuple[str, str]]

    def todo(self, part: str, problems: list[Problem]) -> list[Problem]:
        """Return the problems that were asked for and are not measured yet."""
        done = self.results["parts"].get(part, {})
        if self.again:
            done = {}
        return [problem for problem in problems if self.only in str(problem) and str(problem) not in done]

    def keep(self, part: str, problem: Problem, entry: Entry) -> None:
        """Write an entry to the file."""
        self.results["parts"].setdefault(part, {})[str(problem)] = {"problem": as_json(problem), **entry}
        save(self.results, self.path)


def as_json(problem: Problem) -> dict[str, Any]:
    """Return the problem's numbers by name."""
    return {**problem._asdict(), "dtype": problem.dtype_name}


def shapes(run: Run) -> None:
    """Measure time and peak memory of everything at five shapes, both dtypes, with and without label smoothing."""
    variants = itertools.product(SHAPES, (torch.float32, torch.bfloat16), (0.0, 0.1))
    problems = run.todo(
        "shapes", [shape._replace(dtype=dtype, smoothing=smoothing) for shape, dtype, smoothing in variants]
    )
    progress = Progress("shapes", sum(problem.products for problem in problems))
    for problem in problems:
        measure(run, "shapes", [problem], progress)


def padding(run: Run) -> None:
    """Measure the padded shape and the same without padding, in the same rounds."""
    pair = [SHAPES[1], SHAPES[1]._replace(padding=0.0)]
    if run.todo("padding", pair):
        progress = Progress("padding", sum(problem.products for problem in pair))
        measure(run, "padding", pair, progress, PADDING)


def small(run: Run) -> None:
    """Measure a generator of one's own with few rows at a time, where memory counts more than time."""
    for problem in run.todo("small", [SHAPES[0]._replace(smoothing=0.1), SHAPES[3]._replace(smoothing=0.1)]):
        measure(run, "small", [problem], Progress("small", problem.products), [PLAIN, OWN, OWN_SMALL])


class Choice(NamedTuple):
    """Hold the implementations that run on a problem, and the reasons why others do not."""

    runs: dict[str, Implementation]
    not_run: dict[str, str]


def choose(problem: Problem, options: dict[str, Any], names: list[str] | None) -> Choice:
    """Choose among the named implementations; `names` of None is all but the one with few rows at a time."""
    runs: dict[str, Implementation] = {}
    not_run: dict[str, str] = {}
    found = implementations(options)
    wanted = names
    if wanted is None:
        wanted = [name for name in found if name != OWN_SMALL]
    for name, way in found.items():
        if name not in wanted:
            continue
        reason = why_not(name, way, problem)
        if not reason and problem.products > HUGE and name not in MAIN:
            reason = "left out at this size"
        if reason:
            not_run[name] = reason
        elif isinstance(way, Implementation):
            runs[name] = way
    return Choice(runs, not_run)


def measure(run: Run, part: str, problems: list[Problem], progress: Progress, names: list[str] | None = None) -> None:
    """Measure everything about problems of one dtype and smoothing, in the same rounds."""
    first = problems[0]
    work = sum(problem.products for problem in problems)
    options = best_options(run, first.dtype)
    chosen = choose(first, options, names)
    for name, way in chosen.runs.items():
        check(run, name, way, first)
    # At a large size a process for each implementation takes minutes, so memory is measured once for the shape
    weighed = [*chosen.runs, CHUNKED]
    if first.products > LARGE and first.smoothing:
        weighed = []
    times = timed(run, problems, chosen.runs, lambda fraction, what: progress.add(fraction * work, what), len(weighed))
    work_of_run = work / times.steps
    for problem in problems:
        memory = {}
        for name in weighed:
            memory[name] = step_peak(name, problem, run.device, options)
            progress.add(work_of_run, f"{problem}: memory of {name}")
        entry = {
            **times.of(problem),
            "steps in a row": runs_in_a_row(problem),
            "peak bytes": memory,
            "allowed bytes": allowed_bytes(problem, run.device),
            "notes": {name: notes(name, way, problem) for name, way in chosen.runs.items()},
            "not run": chosen.not_run,
        }
        run.keep(part, problem, entry)


class Times(NamedTuple):
    """Hold seconds by problem and implementation, and how many runs there are, those for memory included."""

    seconds: dict[tuple[Problem, str], list[float]]
    steps: int

    def of(self, problem: Problem) -> Entry:
        """Return one problem's seconds: those of the products apart from the implementations'."""
        mine = {name: taken for (whose, name), taken in self.seconds.items() if whose == problem}
        floor = {name: mine.pop(name) for name in (CHUNKED, WHOLE) if name in mine}
        return {"floor seconds": floor, "seconds": mine}


def timed(
    run: Run,
    problems: list[Problem],
    chosen: dict[str, Implementation],
    report: Callable[[float, str], None],
    more_runs: int = 0,
    fixed_rounds: int | None = None,
    with_products: bool = True,
) -> Times:
    """Time the products and every implementation, interleaved; `report` gets each run's fraction of all runs.

    Only the products, whose time decides how many rounds there are, and implementations that compile are warmed up.
    """
    torch.compiler.reset()  # torch stops compiling after a few shapes of one function
    runs: Runs = {}
    inputs = []
    estimate = 0.0
    for problem in problems:
        x = Inputs.drawn(problem, run.device)
        # Implementations without a bias are measured with the same tensors: they never look at it
        products: dict[str, Callable[[], None]] = {}
        if with_products:
            products = floors(x)
        product_times = [seconds(product, [x]) for product in (*products.values(), *products.values())]
        ways = len(chosen) + len(products)
        estimate += min(product_times, default=0.0) * runs_in_a_row(problem) * TYPICAL * ways
        for name, product in products.items():
            runs[problem, name] = product
        for name, way in chosen.items():
            step = forward_and_backward(x, way.prepare(x))
            if way.compiles:
                seconds(step, [x])
            runs[problem, name] = step
        inputs.append(x)
    count = run.repeats or fixed_rounds or rounds_within_budget(estimate)
    steps = count * len(runs) + more_runs * len(problems)
    taken = interleaved(runs, inputs, count, lambda what: report(1 / steps, what))
    return Times(taken, steps)


def rounds_within_budget(round_seconds: float) -> int:
    """Return how many rounds fit into the budget, as an odd number: the median is then a measured time."""
    fitting = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(BUDGET / round_seconds)))
    if fitting % 2 == 0:
        return fitting - 1
    return fitting


def check(run: Run, name: str, way: Implementation, problem: Problem) -> None:
    """Check an implementation once for each dtype and smoothing."""
    key = f"{problem.dtype_name} smoothing={problem.smoothing:g}"
    found = run.results["checks"].setdefault(key, {})
    if name not in found or (run.again and (key, name) not in run.checked):
        errors, wrong = what_is_wrong(way, problem, run.device)
        found[name] = {"errors": errors, "wrong": wrong}
        run.checked.add((key, name))


def best_options(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fastest options of torch's op at a problem of middle size, among the right ones if any is right."""
    problem = TUNED._replace(dtype=dtype)
    stored = run.results["torch op options"]
    if problem.dtype_name not in stored:
        tried = _try_options(problem, run.device)
        best = min(tried, key=lambda one: (bool(one["wrong"]), one["seconds"]))
        stored[problem.dtype_name] = {"problem": as_json(problem), "best": best["options"], "tried": tried}
        save(run.results, run.path)
    chosen = dict(stored[problem.dtype_name]["best"])
    # In the file it is text: "float32", or "None" for the weight's own dtype
    if chosen["acc_dtype"] == "None":
        chosen["acc_dtype"] = None
    else:
        chosen["acc_dtype"] = getattr(torch, chosen["acc_dtype"])
    return chosen


def _try_options(problem: Problem, device: str) -> list[Entry]:
    x = Inputs.drawn(problem, device)
    tried = []
    for options in torch_op_choices(problem.dtype):
        step = forward_and_backward(x, torch_op(options)(x))
        fastest = min(seconds(step, [x]) for _ in range(3))  # the first run warms up
        wrong = what_is_wrong(Implementation(torch_op(options)), problem, device)[1]
        written = {**options, "acc_dtype": str(options["acc_dtype"]).removeprefix("torch.")}
        tried.append({"options": written, "seconds": fastest, "wrong": wrong})
    return tried


def memory(run: Run) -> None:
    """Measure peak memory of everything as the rows grow 16-fold."""
    problems = run.todo("memory", MEMORY_PROBLEMS)
    progress = Progress("memory", sum(problem.products for problem in problems))
    for problem in problems:
        options = best_options(run, problem.dtype)
        ways = implementations(options)
        names = [name for name, way in ways.items() if name != OWN_SMALL and not why_not(name, way, problem)]
        peaks = {}
        for name in names:
            peaks[name] = step_peak(name, problem, run.device, options)
            progress.add(problem.products / len(names), f"{problem}: {name}")
        run.keep("memory", problem, {"peak bytes": peaks, "allowed bytes": allowed_bytes(problem, run.device)})


def linear(run: Run) -> None:
    """Time the engine as N, D and V grow, each alone."""
    points = [LINEAR_BASE._replace(**{field: size}) for field, sizes in LINEAR_POINTS.values() for size in sizes]
    problems = list(dict.fromkeys(points))
    if run.todo("linear", problems):
        time_only(run, "linear", problems, {ENGINE: known({})[ENGINE]}, with_products=False)


def devices(run: Run) -> None:
    """Time the engine over one device and over the same device four times."""
    for problem in run.todo("devices", [shape._replace(smoothing=0.1) for shape in (SHAPES[0], SHAPES[3])]):
        time_only(run, "devices", [problem], over_devices())


def on_gpu(run: Run) -> None:
    """Measure bfloat16 on a GPU, at the shapes of translation and language models."""
    if run.device == "cpu":
        return
    problems = run.todo("gpu", gpu.PROBLEMS)
    # Twice the work: getting ready, then the rounds
    progress = Progress("gpu", 2 * sum(problem.products for problem in problems))
    for problem in problems:
        torch.compiler.reset()
        run.keep("gpu", problem, gpu.measure(problem, run.device, run.repeats, progress))
        torch.cuda.empty_cache()


def time_only(
    run: Run, part: str, problems: list[Problem], chosen: dict[str, Implementation], with_products: bool = True
) -> None:
    """Measure times alone, of all problems in the same rounds."""
    progress = Progress(part, 1.0)
    times = timed(run, problems, chosen, progress.add, fixed_rounds=FIXED_ROUNDS, with_products=with_products)
    for problem in problems:
        run.keep(part, problem, times.of(problem))


PARTS = {
    "shapes": shapes,
    "small": small,
    "padding": padding,
    "memory": memory,
    "linear": linear,
    "devices": devices,
    "gpu": on_gpu,
}

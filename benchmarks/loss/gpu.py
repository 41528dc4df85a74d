"""Check and measure ways on a GPU in turn: of the loss, bfloat16 at the shapes of translation and language models.

A time is the median of interleaved runs, of two in a row the second, from the call to the end of the device's work.
Memory is the allocator's peak above the inputs. The products are the bare ones, all rows at once or 512 at a time,
whichever is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from benchmarks.loss.checks import what_is_wrong
from benchmarks.loss.implementations import ENGINE, LINEAR, ON_A_GPU, known
from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.results import MIB, Entry, floor_seconds, median, problem_of
from benchmarks.loss.timing import Progress, Runs, floors, forward_and_backward, interleaved, seconds
from seqpar.core.chunks import rows_per_chunk
from seqpar.core.token_loss import wide
from seqpar.testing import peak_memory
from seqpar.testing.markdown_table import markdown_table

SHAPES = [
    (8192, 512, 32_768),
    (16_384, 1024, 37_000),
    (8192, 4096, 128_256),
    (8192, 2304, 256_000),
    (16_384, 2048, 248_320),
]
PROBLEMS = [Problem(*shape, dtype=torch.bfloat16, bias=False) for shape in SHAPES]
PROBLEMS.append(Problem(*SHAPES[0], smoothing=0.1, dtype=torch.bfloat16))
ROUNDS = 11
COLUMNS = ["way", "ms", "share of the products' rate", "peak, MiB"]


class Candidate(NamedTuple):
    """A way to be measured: what makes its step, and what says in words what is wrong with it at a small problem."""

    prepare: Callable[[Inputs], Callable[[], None]]
    wrong: Callable[[], list[str]]
    may_fail: bool


def measured(
    x: Inputs, candidates: dict[str, Candidate], products: dict[str, Callable[[], None]], rounds: int
) -> Entry:
    """Return seconds and peak bytes of everything that runs, what is wrong with it, and why the others do not run."""
    entry: Entry = {"wrong": {}, "not run": {}, "peak bytes": {}}
    steps: dict[str, Callable[[], None]] = {}
    progress = Progress(str(x.problem), len(candidates) + rounds * (len(candidates) + len(products)))
    torch.compiler.reset()  # torch stops compiling after a few shapes of one function
    for name, candidate in candidates.items():
        try:
            words = candidate.wrong()
            step = candidate.prepare(x)
            seconds(step, [x])  # compiles what compiles
            x.clear()
            entry["peak bytes"][name] = peak_memory.peak_bytes(step, x.device)
            steps[name] = step
            if words:
                entry["wrong"][name] = words
        except Exception as error:  # a peer that fails here is a row of the table, with its reason
            if not candidate.may_fail:
                raise
            entry["not run"][name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
        x.clear()
        progress.add(f"{name} is ready")
    runs: Runs = {(x.problem, name): run for name, run in {**products, **steps}.items()}
    taken = interleaved(runs, [x], rounds, progress.add, in_a_row=2)
    x.clear()
    entry["floor seconds"] = {name: taken[x.problem, name] for name in products}
    entry["seconds"] = {name: taken[x.problem, name] for name in steps}
    return entry


def of_loss(problem: Problem, device: str, rounds: int | None = None) -> Entry:
    """Return the same of the loss, with the least bytes."""
    x = Inputs.drawn(problem, device)
    candidates = {}
    not_run = {}
    for name in ON_A_GPU:
        way = known({})[name]
        if reason := way.why_not(problem):
            not_run[name] = reason
            continue
        candidates[name] = Candidate(
            lambda x, way=way: forward_and_backward(way.prepare(x)),  # type: ignore[misc]
            lambda way=way: what_is_wrong(way, problem, device),  # type: ignore[misc]
            name not in (ENGINE, LINEAR),
        )
    entry = measured(x, candidates, floors(x), rounds or ROUNDS)
    entry["not run"] |= not_run
    return {**entry, "least bytes": least_bytes(problem)}


def least_bytes(problem: Problem) -> int:
    """Return the hidden gradient, the weight's sum (float32 if there are several chunks) and one chunk of logits."""
    rows = min(problem.rows, rows_per_chunk(problem.vocab_size, problem.dtype, "cuda"))
    sum_dtype = problem.dtype
    if rows < problem.rows:
        sum_dtype = wide(problem.dtype)
    weight = problem.vocab_size * problem.width * sum_dtype.itemsize
    return weight + (problem.rows * problem.width + rows * problem.vocab_size) * problem.dtype.itemsize


def tried_on_the_cpu() -> list[str]:
    """Return the table of one small problem on the CPU, where what needs a GPU does not run."""
    problem = Problem(128, 8, 50, dtype=torch.bfloat16, bias=False)
    return table([{"problem": problem.as_json(), **of_loss(problem, "cpu", 1)}])


def table(entries: list[Entry]) -> list[str]:
    """Return a table with a row for every implementation at every shape, and the remarks below it."""
    rows = []
    for entry in entries:
        problem = problem_of(entry)
        title = problem.title.removesuffix(f", {problem.dtype_name}")
        floor = floor_seconds(entry)
        rate = problem.products / floor / 1e12
        least = entry["least bytes"]
        rows.append(
            [title, f"three products, {rate:,.0f} TFLOP/s", f"{floor * 1e3:.2f}", "", f"{least / MIB:,.0f}", "1"]
        )
        for name, peak in entry["peak bytes"].items():
            rows.append([title, *figures(entry, name, floor), f"{peak / least:.2f}"])
    return [*markdown_table(["shape", *COLUMNS, "to the least"], rows).splitlines(), "", *remarks(entries), ""]


def figures(entry: Entry, name: str, floor: float) -> list[str]:
    """Return the cells of COLUMNS for one way."""
    time = median(entry, name)
    assert time is not None
    mark = " *" if name in entry["wrong"] else ""
    return [name + mark, f"{time * 1e3:.2f}", f"{floor / time:.0%}", f"{entry['peak bytes'][name] / MIB:,.0f}"]


def remarks(entries: Iterable[Entry]) -> list[str]:
    """Return what did not run, and what is wrong, each once."""
    found = set()
    for entry in entries:
        found |= {f"- {name}: {why}" for name, why in entry["not run"].items()}
        found |= {f"- * {name}: {'; '.join(words)}" for name, words in entry["wrong"].items()}
    return sorted(found)

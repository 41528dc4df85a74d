"""Measure scores with entropy on a GPU: bfloat16 at the shape of a language model, beside the other ways.

    python -m benchmarks.scores.gpu

A time is the median of interleaved runs, of two in a row the second, from the call to the end of the device's work.
Memory is the allocator's peak above the inputs and the gradients. The products are those that the case needs, all rows
at once or 512 at a time, whichever is faster.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.results import MIB, Entry
from benchmarks.loss.timing import Progress, Runs, interleaved, seconds
from benchmarks.scores.measure import floor_runs, gradient_bytes, products_seconds, step_of, what_is_wrong
from benchmarks.scores.ways import CASES, OURS, WAYS, Case
from seqpar.testing import peak_memory
from seqpar.testing.markdown_table import markdown_table

PROBLEM = Problem(8192, 4096, 151_936, dtype=torch.bfloat16, bias=False)
ROUNDS = 7
Peaks = dict[tuple[Case, str], int]
Returned = TypeVar("Returned")


def measured(problem: Problem, device: str, rounds: int) -> list[str]:
    """Return a table with a row for every way in every case with entropy, and the remarks below it."""
    remarks: set[str] = set()
    ways = checked(problem, device, remarks)
    torch.compiler.reset()  # torch stops compiling after eight variants of one function
    x = Inputs.drawn(problem, device)
    runs: Runs = {(problem, name): run for name, run in floor_runs(problem, device).items()}
    floors = [name for _, name in runs]
    peaks: Peaks = {}
    for case, name in ways:
        step = step_of(x, WAYS[name], case)
        peak = tried(name, remarks, lambda step=step: peak_of_step(x, step))
        x.clear()
        if peak is not None:
            peaks[case, name] = peak - gradient_bytes(problem, case)
            runs[problem, f"{case}: {name}"] = step
    progress = Progress(str(problem), float(rounds * len(runs)))
    taken = interleaved(runs, [x], rounds, lambda what: progress.add(1, what), in_a_row=2)
    times = {name: found for (_, name), found in taken.items()}
    floor = {"floor seconds": {name: times[name] for name in floors}}
    return [*table(problem, floor, times, peaks), "", *sorted(remarks)]


def checked(problem: Problem, device: str, remarks: set[str]) -> list[tuple[Case, str]]:
    """Return the cases with entropy, each with every way that runs in it; add what is wrong to the remarks."""
    found = []
    for case in [case for case in CASES if case.entropy]:
        for name, way in WAYS.items():
            if not way.measured(case, problem):
                continue
            words = tried(
                name,
                remarks,
                lambda way=way, case=case: what_is_wrong(way, case, problem.dtype, device),
            )
            if words is not None:
                remarks |= {f"- * {name}: {what}" for what in words}
                found.append((case, name))
    return found


def tried(name: str, remarks: set[str], action: Callable[[], Returned]) -> Returned | None:
    """Return the action's result; where a peer fails, add the reason to the remarks and return None."""
    try:
        return action()
    except Exception as error:
        if name == OURS:
            raise
        remarks.add(f"- {name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}")
        return None


def peak_of_step(x: Inputs, step: Callable[[], None]) -> int:
    """Return the peak of a step above the inputs; the first run compiles what compiles."""
    seconds(step, [x])
    x.clear()
    return peak_memory.peak_bytes(step, x.device)


def table(problem: Problem, floor: Entry, times: dict[str, list[float]], peaks: Peaks) -> list[str]:
    """Return the rows of each case: its products, then every way."""
    rows = []
    for case in dict.fromkeys(case for case, _ in peaks):
        products = products_seconds(floor, case, problem.dtype_name)
        rows.append([str(case), f"{sum(case.products.values())} products", f"{products * 1e3:.2f}", "", ""])
        for name in [name for of, name in peaks if of == case]:
            time = statistics.median(times[f"{case}: {name}"])
            figures = [f"{time * 1e3:.2f}", f"{products / time:.0%}", f"{peaks[case, name] / MIB:,.0f}"]
            rows.append([str(case), name, *figures])
    header = [f"scores, {problem.shape} {problem.dtype_name}", "way", "ms", "share of the products' rate", "peak, MiB"]
    return markdown_table(header, rows).splitlines()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of interleaved runs")
    parser.add_argument("--dry-run", action="store_true", help="one small problem on the CPU, once")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers, about what is not installed
    if options.dry_run:
        lines = measured(PROBLEM._replace(rows=64, width=8, vocab_size=50), "cpu", 1)
    else:
        lines = measured(PROBLEM, "cuda", options.rounds)
    print("\n".join(lines))


if __name__ == "__main__":
    main()

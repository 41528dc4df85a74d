"""Measure the loss on a GPU: bfloat16 at the shapes of translation and language models, beside the peers.

A time is the median of interleaved runs, of two in a row the second, from the call to the end of the device's work.
Memory is the allocator's peak above the inputs. The products are the bare three, all rows at once or 512 at a time,
whichever is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.loss import ours, peers, plain_ways
from benchmarks.loss.checks import what_is_wrong
from benchmarks.loss.implementations import (
    AUTO_CHUNKED,
    ENGINE,
    LINEAR,
    PLAIN,
    TORCH_DEFAULT,
    Implementation,
    why_no_torch_op,
)
from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.results import MIB, Entry, floor_seconds
from benchmarks.loss.targets import shape_title
from benchmarks.loss.timing import Progress, floors, forward_and_backward, interleaved, seconds
from seqpar.core.chunks import rows_per_chunk
from seqpar.core.token_loss import wide
from seqpar.testing import peak_memory
from seqpar.testing.conformance.adapter import why_missing
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
MODULES = {
    "cut_cross_entropy": "cut_cross_entropy",
    "Liger": "liger_kernel",
    "Liger, float32 sums": "liger_kernel",
    "quack": "quack.linear_cross_entropy",
}
"""What each peer's row imports."""


def ways() -> dict[str, Implementation]:
    """Return everything that can run on a GPU."""
    return {
        PLAIN: Implementation(plain_ways.plain),
        "torch.compile": Implementation(plain_ways.compiled, compiles=True),
        AUTO_CHUNKED: Implementation(plain_ways.auto_chunked, smoothing=False, compiles=True),
        TORCH_DEFAULT: Implementation(peers.torch_op({})),
        "cut_cross_entropy": Implementation(peers.cut_cross_entropy, smoothing=False, bias=False, compiles=True),
        "Liger": Implementation(peers.liger(False), compiles=True),
        "Liger, float32 sums": Implementation(peers.liger(True), compiles=True),
        "quack": Implementation(peers.quack, smoothing=False, bias=False, compiles=True),
        ENGINE: Implementation(ours.engine(), compiles=True),
        LINEAR: Implementation(ours.linear_cross_entropy, compiles=True),
    }


def why_not(name: str, way: Implementation, problem: Problem) -> str:
    """Return why it is not run on that problem; empty where it is."""
    reason = why_missing(MODULES.get(name, ""))
    if not reason and name == AUTO_CHUNKED:
        reason = plain_ways.why_no_auto_chunker()
    if not reason and name == TORCH_DEFAULT:
        reason = why_no_torch_op()
    if not reason and problem.smoothing and not way.smoothing:
        reason = "no label smoothing"
    if not reason and problem.bias and not way.bias:
        reason = "has no bias"
    return reason


def least_bytes(problem: Problem) -> int:
    """Return the hidden gradient, the weight's sum (float32 if there are several chunks) and one chunk of logits."""
    rows = min(problem.rows, rows_per_chunk(problem.vocab_size, problem.dtype, "cuda"))
    sum_dtype = problem.dtype
    if rows < problem.rows:
        sum_dtype = wide(problem.dtype)
    weight = problem.vocab_size * problem.width * sum_dtype.itemsize
    return weight + (problem.rows * problem.width + rows * problem.vocab_size) * problem.dtype.itemsize


def peak_bytes(x: Inputs, step: Callable[[], None]) -> int:
    """Return the peak of one step above the inputs."""
    x.clear()
    return peak_memory.peak_bytes(step, x.device)


def measure(problem: Problem, device: str, repeats: int | None, progress: Progress) -> Entry:
    """Return seconds and bytes of everything that runs, what is wrong with it, and why the others do not run."""
    not_run: dict[str, str] = {}
    wrong: dict[str, list[str]] = {}
    peaks: dict[str, int] = {}
    steps: dict[str, Callable[[], None]] = {}
    x = Inputs.drawn(problem, device)
    for name, way in ways().items():
        reason = why_not(name, way, problem)
        if reason:
            not_run[name] = reason
            continue
        try:
            words = what_is_wrong(way, problem, device)[1]
            if words:
                wrong[name] = words
            step = forward_and_backward(x, way.prepare(x))
            seconds(step, [x])  # compiles what compiles
            peaks[name] = peak_bytes(x, step)
            steps[name] = step
        except Exception as error:  # a peer that fails here is a row of the table, with its reason
            if name in (ENGINE, LINEAR):
                raise
            not_run[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            x.clear()
            torch.cuda.empty_cache()
        progress.add(problem.products / len(ways()), f"{problem}: {name} is ready")
    products = floors(x)
    runs = {(problem, name): run for name, run in {**products, **steps}.items()}
    rounds = repeats or ROUNDS
    work = problem.products / (rounds * len(runs))
    taken = interleaved(runs, [x], rounds, lambda what: progress.add(work, what), in_a_row=2)
    x.clear()
    return {
        "floor seconds": {name: taken[problem, name] for name in products},
        "seconds": {name: taken[problem, name] for name in steps},
        "peak bytes": peaks,
        "least bytes": least_bytes(problem),
        "wrong": wrong,
        "not run": not_run,
    }


def tried_on_the_cpu() -> list[str]:
    """Return the table of one small problem on the CPU, where what needs a GPU does not run."""
    problem = Problem(128, 8, 50, dtype=torch.bfloat16, bias=False)
    entry = measure(problem, "cpu", 1, Progress("gpu", 2 * problem.products))
    return table([{"problem": problem._asdict() | {"dtype": problem.dtype_name}, **entry}])


def table(entries: list[Entry]) -> list[str]:
    """Return a table with a row for every implementation at every shape, and the remarks below it."""
    header = ["shape", "way", "ms", "share of the products' rate", "peak, MiB", "to the least"]
    rows = [row for entry in entries for row in _rows(entry)]
    remarks = set()
    for entry in entries:
        remarks |= {f"- {name}: {why}" for name, why in entry["not run"].items()}
        remarks |= {f"- * {name}: {'; '.join(words)}" for name, words in entry["wrong"].items()}
    return [*markdown_table(header, rows).splitlines(), "", *sorted(remarks), ""]


def _rows(entry: Entry) -> list[list[str]]:
    problem = entry["problem"]
    title = shape_title(entry)
    if problem["smoothing"]:
        title += f", smoothing {problem['smoothing']:g}"
    floor = floor_seconds(entry)
    # Three products of 2 N D V operations each
    rate = 6 * problem["rows"] * problem["width"] * problem["vocab_size"] / floor / 1e12
    least = entry["least bytes"]
    rows = [[title, f"three products, {rate:,.0f} TFLOP/s", f"{floor * 1e3:.2f}", "", f"{least / MIB:,.0f}", "1"]]
    for name, times in entry["seconds"].items():
        time = statistics.median(times)
        peak = entry["peak bytes"][name]
        if name in entry["wrong"]:
            name += " *"
        figures = [f"{time * 1e3:.2f}", f"{floor / time:.0%}", f"{peak / MIB:,.0f}", f"{peak / least:.2f}"]
        rows.append([title, name, *figures])
    return rows

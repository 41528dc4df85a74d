"""The part of a run that is for a GPU: bfloat16 at the shapes of translation and language models, with the peers.

A time is the median of interleaved runs, of two in a row the second, from a call to the device's end of it. Memory is
the allocator's peak above the inputs. The products are the bare three, all rows at once or 512 at a time, whichever is
faster.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.loss import ours, peers, plain_ways
from benchmarks.loss.checks import what_is_wrong
from benchmarks.loss.implementations import ENGINE, LINEAR, PLAIN, TORCH_DEFAULT, Implementation
from benchmarks.loss.memory import device_peak
from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.results import floor_seconds
from benchmarks.loss.targets import shape_title
from benchmarks.loss.timing import Progress, floors, forward_and_backward, interleaved, seconds
from seqpar.core.chunks import rows_per_chunk
from seqpar.core.token_loss import wide

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


def ways() -> dict[str, Implementation]:
    """Everything that can run on a GPU."""
    return {
        PLAIN: Implementation(plain_ways.plain),
        "torch.compile": Implementation(plain_ways.compiled, compiles=True),
        TORCH_DEFAULT: Implementation(peers.torch_op({})),
        "cut_cross_entropy": Implementation(peers.cut_cross_entropy, smoothing=False, bias=False, compiles=True),
        "Liger": Implementation(peers.liger(False), compiles=True),
        "Liger, float32 sums": Implementation(peers.liger(True), compiles=True),
        "quack": Implementation(peers.quack, smoothing=False, bias=False, compiles=True),
        ENGINE: Implementation(ours.engine(), compiles=True),
        LINEAR: Implementation(ours.linear_cross_entropy, compiles=True),
    }


def why_not(name: str, way: Implementation, problem: Problem) -> str:
    """Why it is not run on that problem; empty where it is."""
    modules = {"cut_cross_entropy": "cut_cross_entropy", "Liger": "liger_kernel", "quack": "quack.linear_cross_entropy"}
    module = next((modules[key] for key in modules if name.startswith(key)), None)
    if module and (reason := peers.why_missing(module)):
        return reason
    if name == TORCH_DEFAULT and not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has none"
    if problem.smoothing and not way.smoothing:
        return "no label smoothing"
    return "has no bias" if problem.bias and not way.bias else ""


def least_bytes(problem: Problem) -> int:
    """The hidden gradient, the weight's sum in float32 (where there are several chunks), and one chunk of logits."""
    rows = min(problem.rows, rows_per_chunk(problem.vocab_size, problem.dtype, "cuda"))
    summed = wide(problem.dtype) if rows < problem.rows else problem.dtype
    weight = problem.vocab_size * problem.width * summed.itemsize
    return weight + (problem.rows * problem.width + rows * problem.vocab_size) * problem.dtype.itemsize


def peak_bytes(x: Inputs, step: Any) -> int:
    """Of one step, above the inputs."""
    x.clear()
    return device_peak(step)


def measure(problem: Problem, device: str, repeats: int | None, progress: Progress) -> dict[str, Any]:
    """Seconds and bytes of everything that runs, with what is wrong with it, and why the others do not run."""
    not_run, wrong, found, peaks = {}, {}, {}, {}
    x = Inputs(problem, device)
    for name, way in ways().items():
        if why := why_not(name, way, problem):
            not_run[name] = why
            continue
        try:
            if words := what_is_wrong(way, problem, device)[1]:
                wrong[name] = words
            step = forward_and_backward(x, way.prepare(x))
            seconds(step, [x])  # what compiles has compiled
            peaks[name] = peak_bytes(x, step)
            found[name] = step
        except Exception as error:  # a peer that fails here is a row of the table, with its reason
            if name in (ENGINE, LINEAR):
                raise
            not_run[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            x.clear()
            torch.cuda.empty_cache()
        progress.add(problem.products / len(ways()), f"{problem}: {name} is ready")
    runs = {(problem, name): run for name, run in {**floors(x), **found}.items()}
    rounds = repeats or ROUNDS
    share = problem.products / (rounds * len(runs))
    taken = interleaved(runs, [x], rounds, lambda what: progress.add(share, what), always=2)
    times = {name: values for (_, name), values in taken.items()}
    floor = {name: times.pop(name) for name in floors(x)}
    x.clear()
    return {
        "floor seconds": floor, "seconds": times, "peak bytes": peaks, "least bytes": least_bytes(problem),
        "wrong": wrong, "not run": not_run,
    }  # fmt: skip


def table(entries: list[dict[str, Any]]) -> list[str]:
    """A row for every way at every shape."""
    lines = [
        "| shape | way | ms | share of the products' rate | peak, MiB | to the least |",
        "|---|---|---|---|---|---|",
    ]
    for entry in entries:
        problem = entry["problem"]
        title = shape_title(entry) + (f", smoothing {problem['smoothing']:g}" if problem["smoothing"] else "")
        floor = floor_seconds(entry)
        rate = 6 * problem["rows"] * problem["width"] * problem["vocab_size"] / floor / 1e12
        least = entry["least bytes"]
        lines.append(
            f"| {title} | three products, {rate:,.0f} TFLOP/s | {floor * 1e3:.2f} | | {least / 2**20:,.0f} | 1 |"
        )
        for name, times in entry["seconds"].items():
            time, peak = statistics.median(times), entry["peak bytes"][name]
            mark = " *" if name in entry["wrong"] else ""
            cells = f"{time * 1e3:.2f} | {floor / time:.0%} | {peak / 2**20:,.0f} | {peak / least:.2f}"
            lines.append(f"| {title} | {name}{mark} | {cells} |")
    said = {f"- {name}: {why}" for entry in entries for name, why in entry["not run"].items()}
    said |= {f"- * {name}: {'; '.join(words)}" for entry in entries for name, words in entry["wrong"].items()}
    return [*lines, "", *sorted(said), ""]

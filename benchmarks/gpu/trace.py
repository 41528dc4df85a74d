"""Trace training steps of the recipe's model on a GPU, and count what makes the host or the device wait.

    python -m benchmarks.gpu.trace
    python -m benchmarks.gpu.trace --dry-run     # the smallest model on the CPU

The traced steps follow others, so that nothing is compiled in them. Busy is the time in which a kernel or a copy runs,
over the time of the steps. A wait is a call that returns only when the device has done its work; a training step needs
one for the loss and one for the norm of the gradient. The traces go to the folder OUT (runs/gpu), for chrome://tracing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.parts import out
from benchmarks.loss.results import hardware
from benchmarks.loss.timing import wall_seconds
from benchmarks.seq2seq_peers import SIZES, Ours, batches
from benchmarks.training import TOKENS, placed
from seqpar.markdown_table import markdown_table

TRACED = 5
"""Steps in a trace."""
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaFree",
    "cudaMalloc",
)
"""Calls of CUDA's runtime that wait for the device, and those of memory, which may."""
READ = "aten::_local_scalar_dense"
"""The operation that reads a number, as `float(tensor)` does."""
MOST = 12
"""Rows of the table of kernels."""


class Trace(NamedTuple):
    """What was seen in the traced steps of one model."""

    name: str
    seconds: float
    """Of one step, without the profiler."""
    busy: float
    launched: float
    """Kernels of a step."""
    copies: Counter[str]
    waits: Counter[str]
    kernels: Counter[str]
    """Seconds by kernel, in all steps."""


def traced(size: str, precision: str, device: str, folder: Path, steps: int) -> Trace:
    """Return what happens in training steps at one size."""
    config, vocab_size = SIZES[size]
    torch.manual_seed(0)
    model = Ours(config, vocab_size, precision, device)
    made = batches(vocab_size, TOKENS, "similar")
    inputs = [placed(next(made), device) for _ in range(2 * steps)]
    for batch in inputs:
        model.step(batch)

    def run() -> None:
        for batch in inputs[:steps]:
            model.step(batch)

    seconds = wall_seconds(run, device != "cpu")
    activities = [ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as record:
        under = wall_seconds(run, device != "cpu")
    name = f"{size}, {precision}"
    record.export_chrome_trace(str(folder / f"trace-{name.replace(', ', '-')}.json.gz"))
    return _summary(name, record.events(), seconds / steps, under, steps)


def _summary(name: str, events: Any, seconds: float, under: float, steps: int) -> Trace:
    """Count the events of some steps that took `under` seconds while they were traced."""
    copies: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    launched = 0
    spans = []
    for event in events:
        if event.device_type == DeviceType.CPU:
            if event.name in WAITS or event.name == READ:
                waits[event.name] += 1
            continue
        spans.append((event.time_range.start, event.time_range.end))
        if event.name.startswith(("Memcpy", "Memset")):
            copies[event.name] += 1
        else:
            launched += 1
            kernels[event.name] += event.time_range.elapsed_us() / 1e6
    return Trace(name, seconds, covered(spans) / 1e6 / under, launched / steps, copies, waits, kernels)


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def tables(found: list[Trace], steps: int) -> str:
    """Return one table of all models, and one of the kernels that take longest."""
    head = ["training step", "ms", "device busy", "kernels", "waits of the host", "copies and fills"]
    rows = []
    for trace in sorted(found, key=lambda trace: trace.busy):
        counted = [_each(trace.waits, steps), _each(trace.copies, steps)]
        rows.append([trace.name, f"{trace.seconds * 1e3:.1f}", f"{trace.busy:.0%}", f"{trace.launched:.0f}", *counted])
    longest = []
    for trace in found:
        whole = sum(trace.kernels.values())
        for kernel, seconds in trace.kernels.most_common(MOST):
            longest.append([trace.name, kernel.replace("|", "/")[:90], f"{seconds / whole:.1%}"])
    text = markdown_table(head, rows)
    if longest:
        text += "\n\n" + markdown_table(["training step", "kernel", "share of the kernels' time"], longest)
    return text


def _each(counted: Counter[str], steps: int) -> str:
    """Return how often each thing happens in a step."""
    return ", ".join(f"{number / steps:g} {name}" for name, number in counted.most_common()) or "none"


def main() -> None:
    """Print the tables, the model first whose device waits most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="the smallest model on the CPU")
    options = parser.parse_args()
    folder = out()
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda"
    cases = [("d128", "bf16"), ("d512", "bf16"), ("d512", "float32")]
    steps = TRACED
    if options.dry_run:
        device = "cpu"
        cases = [("d128", "float32")]
        steps = 1
    found = []
    for size, precision in cases:
        print(f"[trace] {size}, {precision}", file=sys.stderr)
        found.append(traced(size, precision, device, folder, steps))
    print(f"{tables(found, steps)}\n\n{hardware(device)}, torch {torch.__version__}; {TOKENS:,} target tokens a step")


if __name__ == "__main__":
    main()

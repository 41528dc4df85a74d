"""Speed and memory of the loss over a vocabulary, forward and backward, against the peers in the same run.

    python -m benchmarks.loss                   # the CPU, or the GPU where there is one
    python -m benchmarks.loss --threads 1 --repeats 9

Times are medians of interleaved runs and are shown as ratios to the floor: the three matrix products that any exact
implementation needs (logits, hidden gradient, weight gradient). Memory is each implementation's own peak above its
inputs, in a process of its own. Nothing here asserts: a figure is printed, with the machine it was taken on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import seqpar


class Problem(NamedTuple):
    """One shape to measure: rows, hidden size, vocabulary, label smoothing, dtype."""

    rows: int
    width: int
    vocab_size: int
    smoothing: float
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"N={self.rows} D={self.width} V={self.vocab_size} smoothing={self.smoothing} {kind}"


PROBLEMS = [
    Problem(4096, 128, 10_000, 0.1, torch.float32),
    Problem(2048, 512, 32_000, 0.0, torch.float32),
    Problem(4096, 512, 32_000, 0.1, torch.float32),
    Problem(2048, 512, 32_000, 0.0, torch.bfloat16),
]


class Inputs:
    """Hidden states, targets and a projection, the same for every implementation."""

    def __init__(self, problem: Problem, device: str) -> None:
        torch.manual_seed(0)
        self.problem = problem
        self.generator = nn.Linear(problem.width, problem.vocab_size).to(device, problem.dtype)
        hidden = torch.randn(problem.rows, problem.width, device=device, dtype=problem.dtype)
        self.hidden = hidden.requires_grad_()
        self.target = torch.randint(problem.vocab_size, (problem.rows,), device=device)

    def clear(self) -> None:
        """Forget gradients."""
        self.hidden.grad = None
        self.generator.zero_grad()


def floor(x: Inputs) -> None:
    """The three matrix products alone, logits kept in one buffer of a chunk."""
    weight = x.generator.weight.detach()
    for hidden in x.hidden.detach().split(512):
        logits = hidden @ weight.t()
        logits @ weight
        logits.t() @ hidden


def plain(x: Inputs) -> None:
    """The loss as it is usually written."""
    loss = F.cross_entropy(x.generator(x.hidden), x.target, label_smoothing=x.problem.smoothing, reduction="sum")
    (loss / len(x.target)).backward()


def torch_chunked(x: Inputs) -> None:
    """torch's own fused projection and loss in chunks (2.13 and later), its options as they come.

    With label smoothing it falls back to full logits (and warns).
    """
    loss = F.linear_cross_entropy(  # type: ignore[attr-defined]
        x.hidden,
        x.generator.weight,
        x.target,
        linear_bias=x.generator.bias,
        label_smoothing=x.problem.smoothing,
        reduction="sum",
        options=nn.LinearCrossEntropyOptions(),  # type: ignore[attr-defined]
    )
    (loss / len(x.target)).backward()


class OwnProjection(nn.Module):
    """A generator that the engine cannot know by formula."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., V)."""
        return self.linear(hidden)


def engine(devices: list[str] | None, known: bool = True) -> Callable[[Inputs], None]:
    """seqpar's engine, chunk chosen by itself; `known`: a generator whose gradient it has by formula."""

    def run(x: Inputs) -> None:
        criterion = seqpar.LabelSmoothing(x.problem.smoothing, "torch")
        generator = x.generator if known else OwnProjection(x.generator)
        loss = seqpar.LossCompute(generator, criterion, devices)(x.hidden, x.target)
        (loss.total / len(x.target)).backward()

    return run


def fast_path(x: Inputs) -> None:
    """seqpar's projection and loss in one, gradients by formula."""
    weight, bias, smoothing = x.generator.weight, x.generator.bias, x.problem.smoothing
    loss = seqpar.linear_cross_entropy(x.hidden, weight, x.target, bias=bias, label_smoothing=smoothing)
    (loss.total / len(x.target)).backward()


def peers(device: str) -> dict[str, Callable[[Inputs], None]]:
    """Name -> implementation."""
    found = {
        "plain": plain,
        "seqpar": engine(None),
        "seqpar, own generator": engine(None, known=False),
        "seqpar x2": engine([device] * 2),
        "seqpar linear": fast_path,
    }
    if hasattr(F, "linear_cross_entropy"):
        found["torch chunked"] = torch_chunked
    return found


def seconds(step: Callable[[Inputs], None], x: Inputs, device: str) -> float:
    """Of one step."""
    x.clear()
    if device != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    step(x)
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def peak_bytes(name: str, index: int, device: str, threads: int) -> int:
    """Peak above the inputs, in a fresh process."""
    arguments = ["--peak", name, str(index), "--device", device, "--threads", str(threads)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loss", *arguments], check=True, capture_output=True, text=True
    )
    return int(json.loads(done.stdout))


def own_peak(name: str, problem: Problem, device: str) -> int:
    """This process's peak during one step, above what the inputs take."""
    step, x = peers(device)[name], Inputs(problem, device)
    small = Inputs(Problem(8, 8, 8, problem.smoothing, problem.dtype), device)
    step(small)  # lazily loaded code is not the step's memory
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(x)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, as Linux has it
    before = resident("VmHWM")
    step(x)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of this process's memory now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(index: int, device: str, threads: int, repeats: int) -> None:
    """Prints one table."""
    problem = PROBLEMS[index]
    x, steps = Inputs(problem, device), {"three products": floor, **peers(device)}
    for step in steps.values():
        step(x)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(seconds(step, x, device))
    base = statistics.median(times["three products"])
    memory = {name: peak_bytes(name, index, device, threads) for name in peers(device)}
    print(f"\n{problem}  (three products: {base * 1e3:.1f} ms)\n")
    print("| implementation | time / three products | time / plain | peak memory, MiB | memory / plain |")
    print("|---|---|---|---|---|")
    for name in memory:
        median = statistics.median(times[name])
        row = [median / base, median / statistics.median(times["plain"])]
        share = memory[name] / memory["plain"]
        print(f"| {name} | {row[0]:.2f} | {row[1]:.2f} | {memory[name] / 2**20:.0f} | {share:.2f} |", flush=True)


def hardware(device: str) -> str:
    """What the figures were taken on."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main() -> None:
    """Measures every problem and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to measure")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each implementation, interleaved")
    parser.add_argument("--problem", type=int, default=None, help="index of one problem; default is all")
    parser.add_argument("--peak", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # torch's op warns when it falls back to full logits
    if options.peak:
        print(own_peak(options.peak[0], PROBLEMS[int(options.peak[1])], options.device))
        return
    print(f"{date.today()}, torch {torch.__version__}, {hardware(options.device)}, {options.threads} threads")
    chosen = range(len(PROBLEMS)) if options.problem is None else [options.problem]
    for index in chosen:
        measure(index, options.device, options.threads, options.repeats)


if __name__ == "__main__":
    main()

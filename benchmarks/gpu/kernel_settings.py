"""Time the Triton kernels alone against their two settings: the classes of a block, and those of a thread.

    python -m benchmarks.gpu.kernel_settings
    python -m benchmarks.gpu.kernel_settings --dry-run     # small, on the CPU, in Triton's interpreter

A time is the median of runs on products that are new each time, since the kernels overwrite them. The rate counts each
byte that has to move: the products are read once by the sums of the scores, read and written once by their gradient,
and read twice and written once by the loss, which needs a row's sums before its gradient. It is shown as a share of
the rate of a copy.

Shape suffixes: K rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.loss.results import hardware
from seqpar.kernels import row_kernel
from seqpar.kernels.row_kernel import CLASSES_A_THREAD, LARGEST_BLOCK, RowKernel, aligned
from seqpar.markdown_table import markdown_table
from seqpar.rows.scores import ClassWeights, RowFunction, RowSums, Upstream

ROWS = 2048
VOCABULARIES = (32_768, 50_257, 151_936)
BLOCKS = (1024, 2048, 4096, 8192)
THREADS = (4, 8, 16, 32)
"""Classes of a thread."""
MOST_WARPS = 32
RUNS = 20
Run = Callable[[Tensor], object]


class Kernel(NamedTuple):
    """A kernel on one problem, and how many times it moves the products."""

    name: str
    run: Run
    passes: int


def kernels(vocab_size: int, rows: int, device: str) -> list[Kernel]:
    """Return the kernels, each a function of the products (K, V)."""
    target_K = torch.randint(vocab_size, (rows,), device=device)
    picked_K1 = target_K.unsqueeze(1)
    ones_K = torch.ones(rows, device=device)
    found = []
    functions = {
        "loss": (
            RowFunction(weights=ClassWeights(None, None, float(vocab_size)), correct=True),
            Upstream(-0.9 * ones_K, weighted=-0.1 / vocab_size * ones_K),
        ),
        "scores": (RowFunction(entropy=True), Upstream(ones_K, entropy=ones_K)),
    }
    for name, (function, upstream) in functions.items():
        kernel = RowKernel(function, None, None, 1.0)
        read = partial(kernel.sums, index_KP=picked_K1, target_K=target_K, temperature_K=None)
        sums = read(products(vocab_size, rows, device))
        found.append(Kernel(f"sums of the {name}", read, 1))
        found.append(Kernel(f"gradient of the {name}", partial(_overwritten, kernel, picked_K1, sums, upstream), 2))
    return found


def _overwritten(kernel: RowKernel, picked_K1: Tensor, sums: RowSums, upstream: Upstream, product_KV: Tensor) -> None:
    """Overwrite the products by their gradient."""
    kernel.gradient_(product_KV, picked_K1, None, sums, upstream, product_KV)


def products(vocab_size: int, rows: int, device: str) -> Tensor:
    """Return products as `Projection.buffer` lays them out: every row begins at a multiple of `ALIGNED`."""
    random = torch.randn(rows, aligned(vocab_size), device=device, dtype=torch.bfloat16)
    return random[:, :vocab_size]


def median_seconds(run: Run, original: Tensor, runs: int) -> float:
    """Return the median seconds of a run, on a copy of the original each time; the first compiles."""
    rows, vocab_size = original.shape
    # Whole rows of memory, since a kernel writes up to a row's end
    memory = original.new_empty(rows, aligned(vocab_size))[:, :vocab_size]
    found = []
    for _ in range(runs + 1):
        memory.copy_(original)
        found.append(_seconds(run, memory))
    return statistics.median(found[1:])


def _seconds(run: Run, memory: Tensor) -> float:
    """Return the seconds of one run, by the device's own clock where it has one."""
    if memory.device.type == "cpu":
        start = time.perf_counter()
        run(memory)
        return time.perf_counter() - start
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    run(memory)
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended) / 1e3


def copy_rate(original: Tensor, runs: int) -> float:
    """Return the bytes a second that a copy reads and writes."""
    other = original.clone()
    seconds = median_seconds(other.copy_, original, runs)
    return 2 * original.numel() * original.element_size() / seconds


def settings() -> list[tuple[int, int]]:
    """Return the blocks and the classes of a thread that a program's warps allow."""
    return [(block, each) for block in BLOCKS for each in THREADS if 1 <= block // (32 * each) <= MOST_WARPS]


def rows_of(vocab_size: int, rows: int, device: str, runs: int, tell: Callable[[str], None]) -> list[list[str]]:
    """Return a row of the table for each kernel: the present settings beside the fastest."""
    original = products(vocab_size, rows, device)
    rate = copy_rate(original, runs)
    present = (LARGEST_BLOCK, CLASSES_A_THREAD)
    found = []
    for kernel in kernels(vocab_size, rows, device):
        times = {}
        for block, each in dict.fromkeys([present, *settings()]):
            tell(f"[settings] V={vocab_size:,}, {kernel.name}: {block} classes a block, {each} a thread")
            with patch.multiple(row_kernel, LARGEST_BLOCK=block, CLASSES_A_THREAD=each):
                times[block, each] = median_seconds(kernel.run, original, runs)
        best = min(times, key=lambda setting: times[setting])
        moved = kernel.passes * original.numel() * original.element_size()
        share = moved / times[present] / rate
        ratio = times[present] / times[best]
        figures = [f"{times[present] * 1e3:.3f}", f"{share:.0%}", f"{best[0]}, {best[1]}", f"{ratio:.2f}"]
        found.append([f"{kernel.name}, V={vocab_size:,}", *figures])
    return found


def main(dry_run: bool, tell: Callable[[str], None]) -> None:
    """Print the table, the slowest of the present settings first."""
    device = "cuda"
    rows = ROWS
    vocabularies: tuple[int, ...] = VOCABULARIES
    runs = RUNS
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        device = "cpu"
        rows = 2
        vocabularies = (5_003,)
        runs = 1
    torch.manual_seed(0)
    found = [row for vocab_size in vocabularies for row in rows_of(vocab_size, rows, device, runs, tell)]
    found.sort(key=lambda row: -float(row[-1]))
    present = f"ms at {LARGEST_BLOCK}, {CLASSES_A_THREAD}"
    header = [f"{rows:,} rows, bfloat16", present, "share of a copy's rate", "fastest", "present to fastest"]
    print(f"{markdown_table(header, found)}\n\n{hardware(device)}, torch {torch.__version__}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, in Triton's interpreter")
    options = parser.parse_args()
    main(options.dry_run, lambda line: print(line, file=sys.stderr))

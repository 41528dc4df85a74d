"""Time a step of `linear_cross_entropy` against the rows of a chunk: what `seqpar.core.chunks` chooses by.

    python -m benchmarks.chunk_rows             # the CPU
    python -m benchmarks.chunk_rows --device cuda

Times are medians of interleaved runs, as ratios to the fastest number of rows of that shape.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from datetime import date

import torch

import seqpar
from benchmarks.loss.results import hardware
from benchmarks.loss.timing import wall_seconds
from seqpar.core.chunks import rows_per_chunk
from seqpar.kernels.row_kernel import width_for_kernel
from seqpar.markdown_table import markdown_row, markdown_table

ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
SHAPES = {
    "cpu": ((4096, 128, 10_000), (4096, 512, 32_000), (4096, 128, 128_000)),
    "cuda": ((8192, 512, 32_768), (8192, 2048, 128_256)),
}
DTYPES = (torch.float32, torch.bfloat16)


def step_of(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> Callable[[int], None]:
    """Return one forward and backward at that shape, a function of the rows of a chunk."""
    rows, width, vocab_size = shape
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab_size, width, device=device) / width**0.5).to(dtype).requires_grad_()
    target = torch.randint(vocab_size, (rows,), device=device)

    def step(chunk_rows: int) -> None:
        hidden.grad = None
        weight.grad = None
        loss = seqpar.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, chunk_tokens=chunk_rows)
        (loss.total / rows).backward()

    return step


def median_seconds(shape: tuple[int, int, int], dtype: torch.dtype, device: str, repeats: int) -> dict[int, float]:
    """Return the median seconds of a step for each number of rows."""
    step = step_of(shape, dtype, device)
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for done in range(repeats + 1):
        print(f"\r{shape}: {done} of {repeats}", end="", file=sys.stderr, flush=True)
        # One run of each in turn, so that a busy moment of the machine falls on all of them
        for rows, found in times.items():
            found.append(wall_seconds(lambda rows=rows: step(rows), device != "cpu"))  # type: ignore[misc]
    return {rows: statistics.median(found[1:]) for rows, found in times.items()}  # the first run warms up


def main() -> None:
    """Print the table, row by row as it is measured, then what it was measured on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where to measure")
    parser.add_argument("--dry-run", action="store_true", help="one small shape on the CPU, once")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each number of rows, interleaved")
    options = parser.parse_args()
    device_type = torch.device(options.device).type
    shapes = SHAPES[device_type]
    if options.dry_run:
        shapes = ((256, 16, 1_000),)
        options.repeats = 1
    print(markdown_table(["N, D, V, dtype", *map(str, ROWS), "chosen", "fastest, ms"], []), flush=True)
    for shape in shapes:
        for dtype in DTYPES:
            medians = median_seconds(shape, dtype, options.device, options.repeats)
            best = min(medians.values())
            rows, width, vocab_size = shape
            title = f"{rows}, {width}, {vocab_size:,}, {str(dtype).removeprefix('torch.')}"
            ratios = [f"{seconds / best:.2f}" for seconds in medians.values()]
            chosen = rows_per_chunk(vocab_size, dtype, device_type, width_for_kernel(width, device_type))
            print("\r", end="", file=sys.stderr, flush=True)
            print(markdown_row([title, *ratios, str(chosen), f"{best * 1e3:.0f}"]), flush=True)
    machine = f"{hardware(options.device)}, {torch.get_num_threads()} threads"
    print(f"\n{date.today()}, torch {torch.__version__}, {machine} on {options.device}")


if __name__ == "__main__":
    main()

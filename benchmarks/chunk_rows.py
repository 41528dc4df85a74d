"""What `seqpar.chunks` chooses by: the time of a step of `linear_cross_entropy` against the rows of a chunk.

    python -m benchmarks.chunk_rows             # the CPU
    python -m benchmarks.chunk_rows --device cuda

Times are medians of interleaved runs, as ratios to the fastest number of rows of that shape.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from datetime import date

import torch

import seqpar
from seqpar.core.chunks import rows_per_chunk

ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
SHAPES = {
    "cpu": ((4096, 128, 10_000), (4096, 512, 32_000), (4096, 128, 128_000)),
    "cuda": ((8192, 512, 32_768), (8192, 2048, 128_256)),
}
DTYPES = (torch.float32, torch.bfloat16)


def step(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, rows: int) -> float:
    """Seconds of one forward and backward."""
    hidden.grad = weight.grad = None
    if hidden.device.type != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    loss = seqpar.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, chunk_tokens=rows)
    (loss.total / len(target)).backward()
    if hidden.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where to measure")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each number of rows, interleaved")
    options = parser.parse_args()
    print(f"{date.today()}, torch {torch.__version__}, {torch.get_num_threads()} threads on {options.device}\n")
    print(f"| N, D, V, dtype | {' | '.join(map(str, ROWS))} | chosen | fastest, ms |\n|---{'|---' * (len(ROWS) + 2)}|")
    for n, d, v in SHAPES[torch.device(options.device).type]:
        for dtype in DTYPES:
            torch.manual_seed(0)
            hidden = torch.randn(n, d, device=options.device, dtype=dtype).requires_grad_()
            weight = (torch.randn(v, d, device=options.device) / d**0.5).to(dtype).requires_grad_()
            target = torch.randint(v, (n,), device=options.device)
            times: dict[int, list[float]] = {rows: [] for rows in ROWS}
            for done in range(options.repeats + 1):  # the first one warms up
                print(f"\r{n}, {d}, {v}: {done} of {options.repeats}", end="", file=sys.stderr, flush=True)
                for rows, found in times.items():
                    found.append(step(hidden, weight, target, rows))
            medians = {rows: statistics.median(found[1:]) for rows, found in times.items()}
            best = min(medians.values())
            kind = str(dtype).removeprefix("torch.")
            cells = " | ".join(f"{t / best:.2f}" for t in medians.values())
            chosen = rows_per_chunk(v, dtype, hidden.device.type)
            print(f"\r| {n}, {d}, {v:,}, {kind} | {cells} | {chosen} | {best * 1e3:.0f} |", flush=True)


if __name__ == "__main__":
    main()

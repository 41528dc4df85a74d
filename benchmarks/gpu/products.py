"""Time the three products of a loss by the rows of a chunk: which of them loses by being cut, and where.

    python -m benchmarks.gpu.products
    python -m benchmarks.gpu.products --dry-run     # small, on the CPU

A figure is the milliseconds that all rows take, in chunks of so many. "Wide" is a product of bfloat16 with a float32
result, and "added" one that is added to a float32 sum. The bias's gradient is either a column beside the weight's or a
sum of its own, which reads the logits once more.

Shape suffixes: K rows of a chunk, D hidden, E hidden and columns of ones, V vocabulary.
"""

from __future__ import annotations

import torch

from benchmarks.gpu.figures import milliseconds, options_of, tell
from seqpar.core.stored_gradients import plus_product
from seqpar.linear.fused_loss import BESIDE

SHAPES = [(8192, 512, 32_768), (16_384, 1024, 37_000), (8192, 4096, 128_256)]
ROWS = (1024, 2048, 4096, 8192, 16_384)
MOST_LOGITS = 2**30


def tell_products(shape: tuple[int, int, int], rows: int, device: str) -> None:
    """Measure chunks of so many rows of one shape."""
    count, width, classes = shape
    hidden_KD = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    weight_VD = torch.randn(classes, width, device=device, dtype=torch.bfloat16)
    grad_KV = torch.randn(rows, classes, device=device, dtype=torch.bfloat16)
    beside_KE = torch.cat([hidden_KD, hidden_KD.new_ones(rows, BESIDE)], 1)
    sum_VD = torch.zeros(classes, width, device=device)
    ways = {
        "logits": lambda: torch.mm(hidden_KD, weight_VD.t(), out=grad_KV),
        "hidden": lambda: torch.mm(grad_KV, weight_VD),
        "hidden, wide": lambda: plus_product(None, grad_KV, weight_VD),
        "weight": lambda: torch.mm(grad_KV.t(), hidden_KD),
        "weight, wide": lambda: plus_product(None, grad_KV.t(), hidden_KD),
        "weight, added": lambda: plus_product(sum_VD, grad_KV.t(), hidden_KD),
        "weight, bias beside": lambda: torch.mm(grad_KV.t(), beside_KE),
        "bias, sum": lambda: grad_KV.sum(0, dtype=torch.float32),
    }
    figures = {name: round(milliseconds(run, device, 6) * count / rows, 3) for name, run in ways.items()}
    tell(f"products, {count:,} x {width:,} x {classes:,}", rows=rows, **figures)


def main() -> None:
    """Tell each shape and number of rows."""
    device = "cuda"
    shapes, sizes = SHAPES, ROWS
    if options_of(__doc__).dry_run:
        device = "cpu"
        shapes, sizes = [(64, 8, 100)], (16, 64)
    for shape in shapes:
        for rows in sizes:
            if rows * shape[2] <= MOST_LOGITS:
                tell_products(shape, rows, device)


if __name__ == "__main__":
    main()

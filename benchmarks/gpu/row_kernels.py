"""Time the row kernels alone: the fused one at three settings against the two, beside a copy, and their errors.

    python -m benchmarks.gpu.row_kernels
    python -m benchmarks.gpu.row_kernels --dry-run     # small, on the CPU, in Triton's interpreter

The milliseconds are those of a chunk. A copy reads and writes the products once, as a kernel must that turns them into
their gradient. An error is that of the gradient of some rows against float64, relative, by the Euclidean norm; rounding
the exact one to bfloat16 is the least.

Shape suffixes: K rows of a chunk, V vocabulary, R numbers of a row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.figures import milliseconds, options_of, tell
from seqpar.kernels import row_kernel, row_loss
from seqpar.rows.scores import ClassWeights, RowFunction, Upstream
from seqpar.rows.smoothing import SoftTarget

ROWS = 4096
VOCABULARIES = (32_768, 37_000, 128_256)
SETTINGS = ((2048, 8), (4096, 8), (8192, 8))
"""The classes of a block, and of a thread."""
CHECKED = 64
"""Rows that are held against float64."""
Run = Callable[[], object]


class Chunk:
    """Products of a chunk, which a kernel overwrites, and what its loss needs."""

    def __init__(self, rows: int, classes: int, smoothing: float, device: str) -> None:
        torch.manual_seed(0)
        drawn = torch.randn(rows, row_kernel.align(classes), device=device, dtype=torch.bfloat16)
        self.first_KV = drawn[:, :classes]
        # Whole rows of memory, since a kernel writes up to a row's end
        self.product_KV = drawn.clone()[:, :classes]
        self.target_K = torch.randint(classes, (rows,), device=device)
        self.smoothing = smoothing

    def fused(self) -> Run:
        """Return the one kernel."""
        classes = self.product_KV.size(1)
        q = SoftTarget(1 - self.smoothing, self.smoothing / classes, None, classes)
        kernel = row_loss.RowLoss(q, None, float(classes) if self.smoothing else None, None, None, None, 1.0)
        out_RK = torch.empty(3, len(self.target_K), device=self.target_K.device)
        return lambda: kernel(self.product_KV, self.target_K, None, 0, None, out_RK, 0, True)

    def two(self) -> Run:
        """Return the two kernels: sums of the scores, then their gradient."""
        classes = self.product_KV.size(1)
        ones_K = torch.ones(len(self.target_K), device=self.target_K.device)
        weights = ClassWeights(None, None, float(classes)) if self.smoothing else None
        function = RowFunction(weights=weights, correct=True)
        weighted_K = -self.smoothing / classes * ones_K if self.smoothing else None
        upstream = Upstream(-(1 - self.smoothing) * ones_K, weighted=weighted_K)
        kernel = row_kernel.RowKernel(function, None, None, 1.0)
        picked_K1 = self.target_K.unsqueeze(1)

        def run() -> None:
            sums = kernel.sums(self.product_KV, picked_K1, self.target_K, None)
            kernel.gradient_(self.product_KV, picked_K1, None, sums, upstream)

        return run

    def error(self, run: Run) -> str:
        """Return the gradient's relative error over some rows."""
        self.product_KV.copy_(self.first_KV)
        run()
        logits = self.first_KV[:CHECKED].double().requires_grad_()
        target = self.target_K[:CHECKED]
        loss = torch.nn.functional.cross_entropy(logits, target, reduction="sum", label_smoothing=self.smoothing)
        (truth,) = torch.autograd.grad(loss, logits)
        return f"{relative(self.product_KV[:CHECKED], truth):.1e}"


def relative(found: Tensor, truth: Tensor) -> float:
    """Return the relative error by the Euclidean norm."""
    return float((found.double() - truth).norm() / truth.norm())


def tell_kernels(chunk: Chunk, device: str) -> None:
    """Measure a copy, the two kernels, and the fused one at each setting."""
    rows, classes = chunk.product_KV.shape
    what = f"{rows:,} rows of {classes:,}, smoothing {chunk.smoothing:g}"
    copied = milliseconds(lambda: chunk.product_KV.copy_(chunk.first_KV), device)
    tell(what, kernel="a copy", ms=copied)
    two = chunk.two()
    tell(what, kernel="two", ms=milliseconds(two, device), error=chunk.error(two))
    for block, each in SETTINGS:
        settings = patch.multiple(row_kernel, LARGEST_BLOCK=block, CLASSES_A_THREAD=each)
        with settings, patch.object(row_loss, "BLOCKS_IN_CACHE", classes):
            fused = chunk.fused()
            ms = milliseconds(fused, device)
            tell(what, kernel=f"fused, {block} classes a block", ms=ms, error=chunk.error(fused))


def main() -> None:
    """Tell each vocabulary, with and without smoothing."""
    device = "cuda"
    rows, vocabularies = ROWS, VOCABULARIES
    if options_of(__doc__).dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        device = "cpu"
        rows, vocabularies = 4, (5_003,)
    for classes in vocabularies:
        for smoothing in (0.0, 0.1):
            tell_kernels(Chunk(rows, classes, smoothing, device), device)


if __name__ == "__main__":
    main()

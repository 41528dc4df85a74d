"""Call the Triton kernel that computes the cross-entropy of a chunk's rows with its gradient, and two smaller kernels.

Shape suffixes: N rows, K rows of one chunk, V classes, R rows of numbers about rows.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from seqpar.kernels import row_kernel
from seqpar.rows.smoothing import SoftTarget

BLOCKS_IN_CACHE = 10
"""A vocabulary of more blocks than this gets larger ones, up to four times as large: fewer rows are then in flight at
once, and the second read of each still hits the L2 cache. On an H200, 4,096 rows of 32,768 classes take
0.24 ms in blocks of 2,048 and 0.19 ms in blocks of 4,096; of 128,256 classes they take 0.86 ms in blocks of 2,048 and
0.76 ms in blocks of 8,192 (docs/results/gpu.md)."""


class RowLoss:
    """The cross-entropy of rows of products and their gradient in one launch, if all classes are on this device.

    Args:
        q: the target distribution.
        weight_V: the class weights, in the dtype of the sums; None if all are 1.
        weight_sum: W, their sum over the classes that have a share of the smoothing; None without smoothing.
        ignored: the target of rows that do not count; None if there are no such rows.
        bias_V, softcap, temperature: the projection's.
    """

    def __init__(
        self,
        q: SoftTarget,
        weight_V: Tensor | None,
        weight_sum: float | Tensor | None,
        ignored: int | None,
        bias_V: Tensor | None,
        softcap: float | None,
        temperature: float,
    ) -> None:
        self.kernel = row_kernel.compiled_kernels()._row_loss
        self.vectors = (bias_V, weight_V, weight_sum if isinstance(weight_sum, Tensor) else None)
        classes = weight_sum if isinstance(weight_sum, float) else 0.0
        # Each number as a sum of two float32 numbers, because Triton passes no float64
        self.numbers: list[float] = []
        for number in (q.gold, q.each, q.z_loss, q.kl_gold, q.kl_each, classes):
            high = ctypes.c_float(number).value
            self.numbers += (high, number - high)
        self.settings: dict[str, Any] = {
            "ignored": ignored, "softcap": softcap, "temperature": float(temperature), "excluded": q.excluded,
            "SMOOTH": q.each != 0, "Z_LOSS": q.z_loss != 0, "KL": q.kl_gold != 0,
        }  # fmt: skip

    def __call__(
        self,
        product_KV: Tensor,
        target: Tensor,
        token_weight: Tensor | None,
        first: int,
        scale: Tensor | None,
        out_RN: Tensor,
        place: int,
        gradient: bool,
    ) -> None:
        """Write each row's loss times its token weight, -log_prob, whether it is correct, and the unweighted loss.

        Args:
            product_KV: overwritten with its gradient times token weight and scale if `gradient`.
            target, token_weight: contiguous; the chunk's rows begin at `first`.
            out_RN: the results; the chunk's columns begin at `place`. Without token weights there are three rows.
        """
        bias_V, weight_V, weight_sum = self.vectors
        rows = (target, token_weight, first, bias_V, weight_V, weight_sum, scale, out_RN, out_RN.stride(0), place)
        classes = product_KV.size(1)
        block = row_kernel.LARGEST_BLOCK
        while block < 4 * row_kernel.LARGEST_BLOCK and block * BLOCKS_IN_CACHE < classes:
            block *= 2
        row_kernel.launch(self.kernel, product_KV, *rows, *self.numbers, **self.settings, GRADIENT=gradient, most=block)


def count_targets(target_N: Tensor, classes: int, ignored: int) -> Tensor:
    """Return, on the device, how many targets are not ignored; negative if one of these is not a class."""
    count = target_N.new_empty(())
    rows = target_N.size(0)
    arguments = (target_N, rows, classes, ignored, count)
    row_kernel.run_programs(row_kernel.compiled_kernels()._count_targets, 1, rows, target_N.device, *arguments)
    return count


def scale_rows(x: Tensor, factor: Tensor | None, out: Tensor, beside: Tensor | None = None) -> None:
    """Write the rows of `x` times a factor into `out`, which may be `x`, and the column after these into `beside`."""
    width = out.size(1)
    if factor is not None:
        # The factor is on the CPU if backward began there
        factor = factor.to(x.device)
    arguments = (x, x.stride(0), factor, out, out.stride(0), beside, width)
    row_kernel.run_programs(row_kernel.compiled_kernels()._scaled_rows, x.size(0), width, x.device, *arguments)

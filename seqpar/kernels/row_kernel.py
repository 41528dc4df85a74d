"""Call the Triton kernels that replace a dozen torch operations, on devices that have them.

With `TRITON_INTERPRET=1` in the environment the same kernels run on the CPU, slowly, so that they can be tested without
an accelerator.

Shape suffixes: K rows of one chunk, V classes here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from seqpar.core.token_loss import wide
from seqpar.rows.softmax_loss import RowSums, SoftTarget, included_weight

LARGEST_BLOCK = 2048
"""The most classes of a row that a program has in its registers at once; a power of 2."""
CLASSES_A_THREAD = 8
"""One load of 16 bytes in bfloat16. The compiler then uses 48 to 75 registers (sm_90, Triton 3.9), so that 24 to 40
warps fit on a multiprocessor; with 16 classes it uses 96 to 134, and kernels for unaligned rows spill."""
ALIGNED = 16
"""Rows begin at multiples of so many numbers. Otherwise rows of an odd vocabulary (50,257) would be read one number at
a time."""


def why_no_kernel(device_type: str) -> str:
    """Return why the kernels are not used on that kind of device; an empty string if they are."""
    if device_type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1" and _installed():
            return ""
        return "Triton has none for the CPU"
    if device_type not in ("cuda", "xpu"):
        return f"Triton has none for {device_type}"
    if not _installed():
        return "Triton is not installed"
    return ""


def aligned(classes: int) -> int:
    """Return the distance in memory between rows of so many classes: the next multiple of `ALIGNED`."""
    return -(-classes // ALIGNED) * ALIGNED


@functools.cache
def _installed() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


class RowKernel:
    """The kernels for one projection and target distribution.

    Args:
        q: the target distribution over this rank's classes.
        bias_V, softcap, temperature: those of the projection. The kernels add the bias, in float32, so that the sum is
            not rounded to the product's dtype.
        ignored: the target of rows that a chunk contains but that do not count; None if no chunk contains such rows.
    """

    def __init__(
        self, q: SoftTarget, bias_V: Tensor | None, softcap: float | None, temperature: float, ignored: int | None
    ) -> None:
        from seqpar.kernels import triton_rows

        self.kernels: Any = triton_rows
        self.q = q
        self.bias_V = bias_V
        self.ignored = ignored
        self.weight_sum: Tensor | None = None
        if q.weight_V is not None:
            # W = sum_k w_k without the excluded class
            self.weight_sum = included_weight(q.weight_V, q).sum().reshape(1)
        self.settings = {"each": q.each, "excluded": q.excluded, "softcap": softcap, "temperature": float(temperature)}

    def whole_(
        self, product_KV: Tensor, target_K: Tensor, factor: float | Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's loss, nll and whether it is correct (0 or 1), in float32 or wider; all classes are here.

        With `gradient`, the products are overwritten with `factor` times their gradient; `factor` is one number, or one
        for each row.
        """
        q = self.q
        out_3K = self._out(3, product_KV)
        settings = {
            "ignored": self.ignored, "gold_q": q.gold, "classes": float(q.classes), "kl_gold": q.kl_gold,
            "kl_each": q.kl_each, "z_loss": q.z_loss, "GRADIENT": gradient, **self.settings,
        }  # fmt: skip
        arguments = (self.bias_V, q.weight_V, self.weight_sum, *self._factor(factor, out_3K), out_3K, out_3K.stride(0))
        launch(self.kernels._whole_rows, product_KV, target_K.contiguous(), *arguments, **settings)
        loss_K, nll_K, correct_K = out_3K
        return loss_K, nll_K, correct_K

    def part_sums(self, product_KV: Tensor, index_K: Tensor) -> RowSums:
        """Return the row sums over this rank's classes.

        `index_K` has the targets, counted from this rank's first class; those of other ranks are outside [0, V).
        """
        out_5K = self._out(5, product_KV)
        arguments = (self.bias_V, self.q.weight_V, out_5K, out_5K.stride(0))
        launch(self.kernels._part_sums, product_KV, index_K.contiguous(), *arguments, **self.settings)
        best_K, argbest_K, lse_K, gold_K, sum_K = out_5K
        argbest_K = argbest_K.long()
        return RowSums(best_K, lse_K, gold_K, argbest_K == index_K, argbest_K, sum_K if self.q.each else None)

    def part_gradient_(
        self, product_KV: Tensor, index_K: Tensor, lse_K: Tensor, mass: float | Tensor, factor: float | Tensor
    ) -> None:
        """Overwrite this rank's products with their gradient, factor x (mass p - w q).

        p_k = exp(z_k - lse), so all that is needed from the other ranks is lse of the whole vocabulary.
        """
        mass_K, stride = self._factor(mass, lse_K)
        if mass_K is None:
            mass_K = torch.ones_like(lse_K)
            stride = 1
        arguments = (self.bias_V, self.q.weight_V, lse_K.contiguous(), mass_K, stride, *self._factor(factor, lse_K))
        settings = {"gold_q": self.q.gold, **self.settings}
        launch(self.kernels._part_gradient, product_KV, index_K.contiguous(), *arguments, **settings)

    def _out(self, columns: int, product_KV: Tensor) -> Tensor:
        """Return memory for so many results per row."""
        return product_KV.new_empty((columns, len(product_KV)), dtype=wide(product_KV.dtype))

    def _factor(self, factor: float | Tensor, like: Tensor) -> tuple[Tensor | None, int]:
        """Return the factors as a tensor, and the distance between those of two rows: 0 if there is one for all rows.

        The tensor is None if the factor is 1.
        """
        if isinstance(factor, Tensor):
            factor = factor.to(like.device, like.dtype).contiguous()
            return factor, int(factor.dim() > 0 and factor.numel() > 1)
        if factor == 1:
            return None, 0
        return torch.full((1,), factor, dtype=like.dtype, device=like.device), 0


def launch(kernel: Any, product_KV: Tensor, *arguments: object, **settings: object) -> None:
    """Run a kernel with one program per row of the products."""
    rows, classes = product_KV.shape
    block = min(LARGEST_BLOCK, 1 << max(0, classes - 1).bit_length())
    # The numbers between the last class and the next row belong to the row, so whole vectors may be read there
    width = min(product_KV.stride(0), aligned(classes))
    warps = max(1, block // (32 * CLASSES_A_THREAD))
    strided = (product_KV, product_KV.stride(0), classes, width)
    # Triton launches on the current device, which need not be the tensors'
    with _current_device(product_KV.device):
        kernel[(rows,)](*strided, *arguments, **settings, BLOCK=block, num_warps=warps)


def _current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the device is the current one; a CPU needs none."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)

"""Where Triton's kernels take the place of a dozen torch operations, and how they are called.

`TRITON_INTERPRET=1` in the environment runs the same kernels on the CPU, slowly: it is how they are tested without an
accelerator.

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
from seqpar.losses.softmax_loss import RowSums, SoftTarget

LARGEST_BLOCK = 2048
"""Classes of a row that one program has in its registers at once; a power of 2."""
CLASSES_A_THREAD = 8
"""One load of 16 bytes in bfloat16. The compiler then takes 48 to 75 registers (sm_90, Triton 3.9), so that 24 to 40
warps share a multiprocessor; with 16 classes it takes 96 to 134, and what is not aligned spills."""
ALIGNED = 16
"""Rows begin at multiples of so many numbers: without, an odd vocabulary (50,257) is read number by number."""


def why_no_kernel(device_type: str) -> str:
    """Why a device of that kind does without the kernels; empty where it has them."""
    if device_type == "cpu":
        return "" if os.environ.get("TRITON_INTERPRET") == "1" and _installed() else "Triton has none for the CPU"
    if device_type not in ("cuda", "xpu"):
        return f"Triton has none for {device_type}"
    return "" if _installed() else "Triton is not installed"


def aligned(classes: int) -> int:
    """How far rows of so many classes should begin from each other."""
    return -(-classes // ALIGNED) * ALIGNED


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


class RowKernel:
    """The kernels for one projection, and what its logits are held against.

    Args:
        q: of the classes here.
        bias_V, softcap, temperature: of the projection; a kernel adds the bias itself, before it rounds.
        ignored: the target of rows that count for nothing though they are in a chunk; None where none is.
    """

    def __init__(
        self, q: SoftTarget, bias_V: Tensor | None, softcap: float | None, temperature: float, ignored: int | None
    ) -> None:
        from seqpar.kernels import triton_rows

        self.kernels: Any = triton_rows
        self.q, self.bias_V, self.ignored = q, bias_V, ignored
        self.weight_sum: Tensor | None = None
        if q.weight_V is not None:
            shared_V = q.weight_V.clone()
            if q.excluded is not None:
                shared_V[q.excluded] = 0
            self.weight_sum = shared_V.sum().reshape(1)
        self.shared = {"each": q.each, "excluded": q.excluded, "softcap": softcap, "temperature": float(temperature)}

    def whole_(
        self, product_KV: Tensor, target_K: Tensor, factor: float | Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each row's loss, nll and whether it is correct (0 or 1), in float32 or wider; all classes are here.

        With `gradient`, that of the products takes their place, `factor` times as large: a number, or one for each row.
        """
        q, out_3K = self.q, self._out(3, product_KV)
        settings = {
            "ignored": self.ignored, "gold_q": q.gold, "classes": float(q.classes), "kl_gold": q.kl_gold,
            "kl_each": q.kl_each, "z_loss": q.z_loss, "GRADIENT": gradient, **self.shared,
        }  # fmt: skip
        given = (self.bias_V, q.weight_V, self.weight_sum, *self._factor(factor, out_3K), out_3K, out_3K.stride(0))
        self._launch(self.kernels._whole_rows, product_KV, target_K, *given, **settings)
        loss_K, nll_K, correct_K = out_3K
        return loss_K, nll_K, correct_K

    def part_sums(self, product_KV: Tensor, index_K: Tensor) -> RowSums:
        """The sums over the classes here of rows whose targets are `index_K`, below 0 or above V where elsewhere."""
        out_5K = self._out(5, product_KV)
        given = (self.bias_V, self.q.weight_V, out_5K, out_5K.stride(0))
        self._launch(self.kernels._part_sums, product_KV, index_K, *given, **self.shared)
        best_K, argbest_K, lse_K, gold_K, sum_K = out_5K
        argbest_K = argbest_K.long()
        return RowSums(best_K, lse_K, gold_K, argbest_K == index_K, argbest_K, sum_K if self.q.each else None)

    def part_gradient_(
        self, product_KV: Tensor, index_K: Tensor, lse_K: Tensor, mass: float | Tensor, factor: float | Tensor
    ) -> None:
        """The gradient of the products here takes their place: factor x (mass p - w q), p over the whole vocabulary."""
        mass_K, stride = self._factor(mass, lse_K)
        if mass_K is None:
            mass_K, stride = torch.ones_like(lse_K), 1
        given = (self.bias_V, self.q.weight_V, lse_K.contiguous(), mass_K, stride, *self._factor(factor, lse_K))
        self._launch(self.kernels._part_gradient, product_KV, index_K, *given, gold_q=self.q.gold, **self.shared)

    def _launch(self, kernel: Any, product_KV: Tensor, target_K: Tensor, *given: object, **settings: object) -> None:
        rows, classes = product_KV.shape
        block = min(LARGEST_BLOCK, 1 << max(0, classes - 1).bit_length())
        width = min(product_KV.stride(0), aligned(classes))
        on_accelerator = product_KV.device.type != "cpu"
        here = torch.accelerator.device_index(product_KV.device.index) if on_accelerator else contextlib.nullcontext()
        with here:
            warps = max(1, block // (32 * CLASSES_A_THREAD))
            strided = product_KV, product_KV.stride(0), classes, width, target_K.contiguous()
            kernel[(rows,)](*strided, *given, **settings, BLOCK=block, num_warps=warps)

    def _out(self, columns: int, product_KV: Tensor) -> Tensor:
        return product_KV.new_empty((columns, len(product_KV)), dtype=wide(product_KV.dtype))

    def _factor(self, factor: float | Tensor, like: Tensor) -> tuple[Tensor | None, int]:
        """A number for each row, and how far apart they lie; None where all are 1."""
        if not isinstance(factor, Tensor):
            return (None, 0) if factor == 1 else (torch.full((1,), factor, dtype=like.dtype, device=like.device), 0)
        factor = factor.to(like.device, like.dtype).contiguous()
        return factor, int(factor.dim() > 0 and factor.numel() > 1)

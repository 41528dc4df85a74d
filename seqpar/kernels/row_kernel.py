"""Call the Triton kernels that replace dozens of torch operations, on devices that have them.

With `TRITON_INTERPRET=1` in the environment the same kernels run on the CPU, slowly, so that they can be tested without
an accelerator.

Shape suffixes: K rows of one chunk, V classes here, P picked classes of each row (its target, then its given ones).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from seqpar.core.device_facts import FACTS, current, why_no_kernel
from seqpar.core.token_loss import wide
from seqpar.rows.scores import RowFunction, Sums, Upstream

LARGEST_BLOCK = 2048
"""The maximum number of a row's classes that a program holds in registers at once; a power of 2."""
CLASSES_A_THREAD = 8
"""One load of 16 bytes in bfloat16. The compiler then uses 32 to 64 registers (sm_90, Triton 3.7), so that 32 to 64
warps fit on a multiprocessor."""
ALIGNED = 16
"""Rows begin at multiples of this many numbers. Otherwise the rows of an odd vocabulary (50,257) would be read one
number at a time."""


def width_for_kernel(width: int, device_type: str) -> int | None:
    """Return the width of the hidden states as `rows_per_chunk` takes it: None if no kernel overwrites the logits.

    It is also None for Triton's interpreter on a CPU, whose chunks are the CPU's.
    """
    return None if FACTS[device_type].is_host or why_no_kernel(device_type) else width


def align(classes: int) -> int:
    """Return the distance in memory between rows of `classes` classes: the next multiple of `ALIGNED`."""
    return -(-classes // ALIGNED) * ALIGNED


@functools.cache
def compiled_kernels() -> Any:
    """Return the module of the kernels, importing it, and Triton with it, on first use."""
    from seqpar.kernels import triton_rows

    return triton_rows


class RowKernel:
    """The row function of `rows/scores.py` for one projection.

    Args:
        function: which scores are wanted; its class weights and excluded class are this rank's.
        bias_V, softcap, temperature: the projection's. The kernels add the bias, in float32, so that the sum is not
            rounded to the product's dtype.
    """

    def __init__(self, function: RowFunction, bias_V: Tensor | None, softcap: float | None, temperature: float) -> None:
        self.kernels = compiled_kernels()
        self.function = function
        self.bias_V = bias_V
        self.weight_V = None
        excluded = None
        if function.weights is not None:
            self.weight_V = function.weights.weight_V
            excluded = function.weights.excluded
        self.settings: dict[str, Any] = {"softcap": softcap, "temperature": float(temperature), "excluded": excluded}

    @staticmethod
    def knows(function: RowFunction) -> bool:
        """Return whether the kernels compute all that is wanted: of the top classes they find only the first."""
        return function.top_k <= 1 and not function.rest and not function.shifted

    def sums(self, product_KV: Tensor, index_KP: Tensor, target_K: Tensor, temperature_K: Tensor | None) -> Sums:
        """Return the sums of each row over this rank's classes.

        Args:
            index_KP: the picked classes, counted from this rank's first; one outside [0, V) gets a logit of nan.
            target_K: the targets, numbered within the whole vocabulary.
        """
        function = self.function
        picked_KP = index_KP.new_empty(index_KP.shape, dtype=wide(product_KV.dtype))
        out_5K = picked_KP.new_empty((5, len(product_KV)))
        flags = {
            "PICKS": index_KP.size(1), "ENTROPY": function.entropy, "ARGBEST": function.correct or function.top_k > 0,
            "WEIGHTED": function.weights is not None,
        }  # fmt: skip
        rows = (index_KP.contiguous(), self.bias_V, _adjacent(temperature_K), self.weight_V)
        launch(self.kernels._row_sums, product_KV, *rows, picked_KP, out_5K, out_5K.stride(0), **flags, **self.settings)
        best_K, log_sum_K, mean_K, argbest_K, sum_K = out_5K
        top = function.top_k > 0
        return Sums(
            best_K,
            log_sum_K,
            picked_KP,
            mean_N=mean_K if function.entropy else None,
            sum_N=None if function.weights is None else sum_K,
            correct_N=function.hit(argbest_K.long(), target_K) if function.correct else None,
            top_NT=best_K.unsqueeze(1) if top else None,
            top_ids_NT=argbest_K.long().unsqueeze(1) if top else None,
        )

    def before(self, product_KV: Tensor, target_K: Tensor, gold_K: Tensor, temperature_K: Tensor | None) -> Tensor:
        """Return how many of this rank's classes come before the target, as `RowFunction.before` does."""
        split = self.function.split
        index_K = target_K if split is None else target_K - split.start
        before_K = torch.empty_like(index_K)
        rows = (index_K.contiguous(), self.bias_V, _adjacent(temperature_K), gold_K.contiguous(), before_K)
        settings = {name: self.settings[name] for name in ("softcap", "temperature")}
        launch(self.kernels._row_before, product_KV, *rows, **settings)
        return before_K

    def gradient_(
        self,
        product_KV: Tensor,
        index_KP: Tensor,
        temperature_K: Tensor | None,
        sums: Sums,
        upstream: Upstream,
    ) -> None:
        """Overwrite the products with their gradient.

        Args:
            index_KP: the picked classes; those outside [0, V) get no gradient.
            sums: the sums over the whole vocabulary.
        """
        factor_KP = upstream.of_picked()
        if factor_KP is None:
            factor_KP = sums.best_N.new_empty((len(product_KV), 0))
        picks = factor_KP.size(1)
        every_K = upstream.of_every_logit(self.function.weights)
        arguments = (
            index_KP[:, :picks].contiguous(),
            factor_KP.contiguous(),
            self.bias_V,
            _adjacent(temperature_K),
            self.weight_V,
            sums.best_N.contiguous(),
            sums.log_sum_N.contiguous(),
            torch.zeros_like(sums.best_N) if every_K is None else every_K.contiguous(),
            _adjacent(None if upstream.entropy is None else sums.mean_N),
            _adjacent(upstream.entropy),
            _adjacent(upstream.weighted),
            product_KV,
        )
        launch(self.kernels._row_gradient, product_KV, *arguments, PICKS=picks, **self.settings)


def _adjacent(numbers_K: Tensor | None) -> Tensor | None:
    """Return the numbers contiguous in memory: autograd's may be one number expanded to all rows."""
    if numbers_K is None:
        return None
    return numbers_K.contiguous()


def launch(kernel: Any, product_KV: Tensor, *arguments: object, most: int | None = None, **settings: object) -> None:
    """Run a kernel with one program per row of the products, each of which holds at most `most` classes at once."""
    rows, classes = product_KV.shape
    # The numbers between the last class and the next row belong to this row, so whole vectors may be read there
    width = min(product_KV.stride(0), align(classes))
    strided = (product_KV, product_KV.stride(0), classes, width)
    run_programs(kernel, rows, classes, product_KV.device, *strided, *arguments, most=most, **settings)


def run_programs(
    kernel: Any,
    programs: int,
    numbers: int,
    device: torch.device,
    *arguments: object,
    most: int | None = None,
    **settings: object,
) -> None:
    """Run a kernel whose programs each read `numbers` numbers, at most `most` of them at once."""
    block = min(most or LARGEST_BLOCK, 1 << max(0, numbers - 1).bit_length())
    warps = max(1, block // (32 * CLASSES_A_THREAD))
    # Triton launches on the current device, which need not be the tensors'
    with current(device):
        kernel[(programs,)](*arguments, **settings, BLOCK=block, num_warps=warps)

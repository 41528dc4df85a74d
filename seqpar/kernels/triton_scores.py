"""Compute the scores of a chunk's tokens from its products, and their gradient, in Triton kernels.

Each row of the products has a program of its own.

The first kernel reads a row once. For each lane it keeps a running maximum m, and two sums relative to it: s of
exponentials, as in Milakov and Gimelshein 2018 ("Online normalizer calculation for softmax"), and t for the entropy.
With d = -|z - m|, one exponential per logit z serves both:

    z > m:    t <- e^d (t + d s),   s <- e^d s + 1,   m <- z
    z <= m:   t <- t + d e^d,       s <- s + e^d

    in the end   log S = log s,   mean = t / s = sum_k p_k (z_k - m)

The second kernel overwrites the product with the gradient. It needs no sum over the row again. The formulas are those
of `seqpar.rows.score_rows`, and tests compare the two.

Only `seqpar.kernels.score_kernel` imports this module, if Triton is installed.

V is the number of classes on this rank, and WIDTH how many numbers of a row's memory may be read and written, as in
`seqpar.kernels.triton_rows`. PICKS is 1 + J: a row's target and given classes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from seqpar.kernels.triton_rows import _logits


@triton.jit
def _divided_logits(
    x_ptr, bias_ptr, temperature_ptr, k, there, here, softcap: constexpr, temperature: constexpr, dtype: constexpr
):
    """Return the logits of some classes of one row, also divided by the row's temperature, and softcap's derivative."""
    z, derivative = _logits(x_ptr, bias_ptr, k, there, here, softcap, temperature, dtype)
    if temperature_ptr is not None:
        z = z / tl.load(temperature_ptr)
    return z, derivative


@triton.jit
def _finite(d):
    """Return z - m with -1e4 in place of -inf: exp of both is 0, but 0 x -inf is nan. A nan stays."""
    return tl.where(d < -1e4, -1e4, d)


# Numbers of a chunk's rows begin anywhere in those of all rows; their alignment shall make no kernel of its own
_ROWS = ["index_ptr", "factor_ptr", "temperature_ptr", "best_ptr", "log_sum_ptr", "mass_ptr", "mean_ptr", "entropy_ptr"]


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=_ROWS)
def _score_sums(
    x_ptr,
    x_stride,
    V: constexpr,
    WIDTH: constexpr,
    index_ptr,
    bias_ptr,
    temperature_ptr,
    picked_ptr,
    out_ptr,
    out_stride,
    softcap: constexpr,
    temperature: constexpr,
    PICKS: constexpr,
    ENTROPY: constexpr,
    ARGBEST: constexpr,
    BLOCK: constexpr,
):
    """Store a row's m, log S, with ENTROPY mean, with ARGBEST the lowest class that has m, and the picked logits."""
    dtype: constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    if temperature_ptr is not None:
        temperature_ptr += row
    best = tl.full([BLOCK], float("-inf"), dtype)
    total = tl.zeros([BLOCK], dtype)
    moment = tl.zeros([BLOCK], dtype)
    argbest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        k = start + tl.arange(0, BLOCK)
        here = k < V
        z, _ = _divided_logits(
            x_ptr, bias_ptr, temperature_ptr, k, k < WIDTH, here, softcap, temperature, dtype
        )  # fmt: skip
        z = tl.where(here, z, float("-inf"))
        larger = z > best
        # If both are -inf, their difference is nan; whatever the lane adds is multiplied by 0 in the end
        d = tl.where(z == best, 0.0, _finite(-tl.abs(z - best)))
        shrink = tl.exp(d)
        if ENTROPY:
            moment = tl.where(larger, shrink * (moment + d * total), moment + d * shrink)
        total = tl.where(larger, total * shrink + 1.0, total + shrink)
        if ARGBEST:
            argbest = tl.where(larger, k, argbest)
        best = tl.where(larger, z, best)
    # Each lane has a maximum and sums of its own
    row_best = tl.max(best, 0)
    d = _finite(best - row_best)
    shrink = tl.exp(d)
    row_total = tl.sum(total * shrink, 0)
    out_ptr += row
    tl.store(out_ptr, row_best)
    tl.store(out_ptr + out_stride, tl.log(row_total))
    if ENTROPY:
        tl.store(out_ptr + 2 * out_stride, tl.sum(shrink * (moment + d * total), 0) / row_total)
    if ARGBEST:
        tl.store(out_ptr + 3 * out_stride, tl.min(tl.where(best == row_best, argbest, V), 0).to(dtype))
    for j in range(0, PICKS):
        index = tl.load(index_ptr + row * PICKS + j)
        inside = (index >= 0) & (index < V)
        z, _ = _divided_logits(
            x_ptr, bias_ptr, temperature_ptr, tl.where(inside, index, 0), inside, inside, softcap, temperature, dtype
        )
        # While a CUDA graph is recorded no class can be checked; nan shows one outside the vocabulary
        tl.store(picked_ptr + row * PICKS + j, tl.where(inside, z, float("nan")))


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _score_gradient(
    x_ptr,
    x_stride,
    V: constexpr,
    WIDTH: constexpr,
    index_ptr,
    factor_ptr,
    bias_ptr,
    temperature_ptr,
    best_ptr,
    log_sum_ptr,
    mass_ptr,
    mean_ptr,
    entropy_ptr,
    grad_ptr,
    softcap: constexpr,
    temperature: constexpr,
    PICKS: constexpr,
    BLOCK: constexpr,
):
    """Store the gradient of a row's product, given m, log S and mean of the whole vocabulary.

    (sum_j g_j [k = id_j] - p_k (mass + h (z_k - m - mean))) x softcap's derivative / temperature,  mass = sum_j g_j

    g are the factors of the PICKS classes, the first of which is the target, and h is that of the entropy: without the
    pointers to mean and h there is none.
    """
    dtype: constexpr = best_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    grad_ptr += row * x_stride
    index_ptr += row * PICKS
    factor_ptr += row * PICKS
    if temperature_ptr is not None:
        temperature_ptr += row
    best = tl.load(best_ptr + row)
    mass = tl.load(mass_ptr + row)
    # p_k = exp(z_k - m) / S
    one_over_sum = tl.exp(-tl.load(log_sum_ptr + row))
    for start in range(0, V, BLOCK):
        k = start + tl.arange(0, BLOCK)
        z, derivative = _divided_logits(
            x_ptr, bias_ptr, temperature_ptr, k, k < WIDTH, k < V, softcap, temperature, dtype
        )  # fmt: skip
        d = _finite(z - best)
        slope = mass + tl.zeros([BLOCK], dtype)
        if mean_ptr is not None:
            # log p_k + H = z_k - m - mean
            slope += tl.load(entropy_ptr + row) * (d - tl.load(mean_ptr + row))
        grad = -(tl.exp(d) * one_over_sum) * slope
        for j in range(0, PICKS):
            grad += tl.where(k == tl.load(index_ptr + j), tl.load(factor_ptr + j), 0.0)
        if softcap is not None:
            grad *= derivative
        if temperature != 1.0:
            grad = grad / temperature
        if temperature_ptr is not None:
            grad = grad / tl.load(temperature_ptr)
        tl.store(grad_ptr + k, grad.to(grad_ptr.dtype.element_ty), k < WIDTH)

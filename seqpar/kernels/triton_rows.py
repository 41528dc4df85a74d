"""Compute the scores of a chunk's rows from their products, and the products' gradient, in two Triton kernels.

Each row of the products has a program of its own; a row is read twice and written once. A third kernel reads it once
more where the target's rank is wanted.

The first kernel reads a row once. For each lane it keeps a running maximum m, and two sums relative to it: s of
exponentials, as in Milakov and Gimelshein 2018 ("Online normalizer calculation for softmax"), and t for the entropy.
With d = -|z - m|, one exponential per logit z serves both:

    z > m:    t <- e^d (t + d s),   s <- e^d s + 1,   m <- z
    z <= m:   t <- t + d e^d,       s <- s + e^d

    in the end   log S = log s,   mean = t / s = sum_k p_k (z_k - m)

The second kernel overwrites the product with the gradient. It needs no sum over the row again. The formulas are those
of `seqpar.rows.scores`, and tests compare the two.

Only `seqpar.kernels.row_kernel` imports this module, if Triton is installed.

V is the number of classes on this rank. WIDTH is how many numbers of a row's memory may be read and written: V rounded
up to whole vectors, which therefore need not stop at the last class. PICKS is 1 + J: a row's target and given classes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def _tanh_of_absolute(x, dtype: constexpr):
    """Return tanh |x| and its derivative."""
    # With s = e^(-2|x|), which cannot overflow: tanh |x| = (1 - s) / (1 + s), and 1 - tanh^2 = 4 s / (1 + s)^2, which
    # keeps the digits that 1 - tanh^2 has lost where tanh is near 1
    y = tl.abs(x)
    shrunk = tl.exp(-2.0 * y)
    tanh = (1.0 - shrunk) / (1.0 + shrunk)
    derivative = 4.0 * shrunk / ((1.0 + shrunk) * (1.0 + shrunk))
    if dtype == tl.float32:
        # Near 0 that difference has lost the digits which a softcap far above the logits needs; the series
        # y - y^3/3 + 2 y^5/15 - ... has all of float32's below 1/4
        s = y * y
        series = y * (1.0 - s * (1 / 3 - s * (2 / 15 - s * (17 / 315 - s * (62 / 2835)))))
        tanh = tl.where(y < 0.25, series, tanh)
    return tanh, derivative


@triton.jit
def _logits(x_ptr, bias_ptr, k, there, here, softcap: constexpr, temperature: constexpr, dtype: constexpr):
    """Return the logits of some classes of one row, and the derivative of the softcap.

    `there` masks numbers within the row's memory, `here` those that are classes.
    """
    z = tl.load(x_ptr + k, there, other=0.0).to(dtype)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + k, here, other=0.0).to(dtype)
    derivative = z
    if softcap is not None:
        tanh, derivative = _tanh_of_absolute(z / softcap, dtype)
        z = tl.where(z < 0, -tanh, tanh) * softcap
    if temperature != 1.0:
        z = z / temperature
    return z, derivative


@triton.jit
def _class_weights(weight_ptr, k, here, excluded: constexpr, dtype: constexpr):
    """Return w of some classes; 0 for the excluded one and beyond the last class."""
    included = here
    if excluded is not None:
        included = here & (k != excluded)
    w = included.to(dtype)
    if weight_ptr is not None:
        w *= tl.load(weight_ptr + k, here, other=0.0).to(dtype)
    return w


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
_ROWS = [
    "index_ptr", "factor_ptr", "temperature_ptr", "best_ptr", "log_sum_ptr", "all_ptr", "mean_ptr", "entropy_ptr",
    "weighted_ptr", "gold_ptr", "before_ptr",
]  # fmt: skip


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=_ROWS)
def _row_sums(
    x_ptr,
    x_stride,
    V: constexpr,
    WIDTH: constexpr,
    index_ptr,
    bias_ptr,
    temperature_ptr,
    weight_ptr,
    picked_ptr,
    out_ptr,
    out_stride,
    softcap: constexpr,
    temperature: constexpr,
    PICKS: constexpr,
    ENTROPY: constexpr,
    ARGBEST: constexpr,
    WEIGHTED: constexpr,
    excluded: constexpr,
    BLOCK: constexpr,
):
    """Store a row's m, log S and the picked logits.

    With ENTROPY also mean, with ARGBEST the lowest class that has m, with WEIGHTED sum_k w_k z_k.
    """
    dtype: constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    if temperature_ptr is not None:
        temperature_ptr += row
    best = tl.full([BLOCK], float("-inf"), dtype)
    total = tl.zeros([BLOCK], dtype)
    moment = tl.zeros([BLOCK], dtype)
    argbest = tl.zeros([BLOCK], tl.int32)
    sum_ = tl.zeros([BLOCK], dtype)
    for start in range(0, V, BLOCK):
        k = start + tl.arange(0, BLOCK)
        here = k < V
        z, _ = _divided_logits(
            x_ptr, bias_ptr, temperature_ptr, k, k < WIDTH, here, softcap, temperature, dtype
        )  # fmt: skip
        if WEIGHTED:
            w = _class_weights(weight_ptr, k, here, excluded, dtype)
            # A logit may be -inf, and 0 x inf is nan
            sum_ += tl.where(w != 0, w * z, 0.0)
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
    if WEIGHTED:
        tl.store(out_ptr + 4 * out_stride, tl.sum(sum_, 0))
    for j in range(0, PICKS):
        index = tl.load(index_ptr + row * PICKS + j)
        inside = (index >= 0) & (index < V)
        z, _ = _divided_logits(
            x_ptr, bias_ptr, temperature_ptr, tl.where(inside, index, 0), inside, inside, softcap, temperature, dtype
        )
        # While a CUDA graph is captured no class can be checked; nan shows one outside the vocabulary
        tl.store(picked_ptr + row * PICKS + j, tl.where(inside, z, float("nan")))


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _row_before(
    x_ptr,
    x_stride,
    V: constexpr,
    WIDTH: constexpr,
    index_ptr,
    bias_ptr,
    temperature_ptr,
    gold_ptr,
    before_ptr,
    softcap: constexpr,
    temperature: constexpr,
    BLOCK: constexpr,
):
    """Store how many classes have a larger logit than the target's, or the same and are lower."""
    dtype: constexpr = gold_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    if temperature_ptr is not None:
        temperature_ptr += row
    gold = tl.load(gold_ptr + row)
    # Counted from this rank's first class: below 0 or beyond the last where another rank has it
    index = tl.load(index_ptr + row)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        k = start + tl.arange(0, BLOCK)
        here = k < V
        z, _ = _divided_logits(x_ptr, bias_ptr, temperature_ptr, k, k < WIDTH, here, softcap, temperature, dtype)
        before += (here & ((z > gold) | ((z == gold) & (k < index)))).to(tl.int32)
    tl.store(before_ptr + row, tl.sum(before, 0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _row_gradient(
    x_ptr,
    x_stride,
    V: constexpr,
    WIDTH: constexpr,
    index_ptr,
    factor_ptr,
    bias_ptr,
    temperature_ptr,
    weight_ptr,
    best_ptr,
    log_sum_ptr,
    all_ptr,
    mean_ptr,
    entropy_ptr,
    weighted_ptr,
    grad_ptr,
    softcap: constexpr,
    temperature: constexpr,
    PICKS: constexpr,
    excluded: constexpr,
    BLOCK: constexpr,
):
    """Store the gradient of a row's product, given m, log S and mean of the whole vocabulary.

    (sum_j g_j [k = id_j] + v w_k + p_k (a - h (z_k - m - mean))) x softcap's derivative / temperature

    g are the factors of the PICKS classes, the first of which is the target, a = r - sum_j g_j - v W that of every
    logit, h that of the entropy and v that of the weighted sum: without the pointers to mean and h, or to v, there is
    none.
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
    every = tl.load(all_ptr + row)
    # p_k = exp(z_k - m) / S
    one_over_sum = tl.exp(-tl.load(log_sum_ptr + row))
    for start in range(0, V, BLOCK):
        k = start + tl.arange(0, BLOCK)
        z, derivative = _divided_logits(
            x_ptr, bias_ptr, temperature_ptr, k, k < WIDTH, k < V, softcap, temperature, dtype
        )  # fmt: skip
        d = _finite(z - best)
        slope = every + tl.zeros([BLOCK], dtype)
        if mean_ptr is not None:
            # log p_k + H = z_k - m - mean
            slope -= tl.load(entropy_ptr + row) * (d - tl.load(mean_ptr + row))
        grad = (tl.exp(d) * one_over_sum) * slope
        if weighted_ptr is not None:
            grad += tl.load(weighted_ptr + row) * _class_weights(weight_ptr, k, k < V, excluded, dtype)
        for j in range(0, PICKS):
            grad += tl.where(k == tl.load(index_ptr + j), tl.load(factor_ptr + j), 0.0)
        if softcap is not None:
            grad *= derivative
        if temperature != 1.0:
            grad = grad / temperature
        if temperature_ptr is not None:
            grad = grad / tl.load(temperature_ptr)
        # 0 between two rows, where a product may read
        grad = tl.where(k < V, grad, 0.0)
        tl.store(grad_ptr + k, grad.to(grad_ptr.dtype.element_ty), k < WIDTH)

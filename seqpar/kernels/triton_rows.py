"""Overwrite a chunk of products with their gradient, in Triton kernels with one program per row.

Every row is read twice and written once. The first pass computes, for each lane, a running maximum m and the sum of
exponentials relative to it (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"), with one
exponential per logit z:

    s <- s exp(m - max(m, z)) + exp(z - max(m, z)),   m <- max(m, z);     in the end  lse = m + log s

The second pass overwrites the product with its gradient. The formulas are those of `seqpar.rows.softmax_loss`, and
tests compare the two.

Only `seqpar.kernels.row_kernel` imports this module, if Triton is installed.

V is the number of classes on this rank. WIDTH is how many numbers of a row's memory may be read and written: V rounded
up to whole vectors, which therefore need not stop at the last class.
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
def _row_sums(
    x_ptr,
    V: constexpr,
    WIDTH: constexpr,
    target,
    bias_ptr,
    weight_ptr,
    softcap: constexpr,
    temperature: constexpr,
    each: constexpr,
    excluded: constexpr,
    dtype: constexpr,
    BLOCK: constexpr,
):
    """Return the largest logit, its lowest class, lse, z_y, Z, and whether the target is one of this rank's classes."""
    # Loaded first: the reductions below make all warps wait for each other, and after the last one of them a warp may
    # already overwrite the target's product with its gradient
    inside = (target >= 0) & (target < V)
    gold_k = tl.where(inside, target, 0)
    gold, _derivative = _logits(x_ptr, bias_ptr, gold_k, inside, inside, softcap, temperature, dtype)
    best = tl.full([BLOCK], float("-inf"), dtype)
    total = tl.zeros([BLOCK], dtype)
    sum_ = tl.zeros([BLOCK], dtype)
    argbest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        k = start + tl.arange(0, BLOCK)
        here = k < V
        z, _ = _logits(x_ptr, bias_ptr, k, k < WIDTH, here, softcap, temperature, dtype)
        if each != 0.0:
            w = _class_weights(weight_ptr, k, here, excluded, dtype)
            # A logit may be -inf, and 0 x inf is nan
            sum_ += tl.where(w != 0, w * z, 0.0)
        z = tl.where(here, z, float("-inf"))
        larger = z > best
        # If both are -inf, their difference is nan; the 1 added instead is multiplied by exp(-inf) = 0 in the end
        shrink = tl.where(z == best, 1.0, tl.exp(-tl.abs(z - best)))
        total = tl.where(larger, total * shrink + 1.0, total + shrink)
        argbest = tl.where(larger, k, argbest)
        best = tl.where(larger, z, best)
    # Each lane has a maximum and a sum of its own; lse = m + log sum_lanes s exp(m_lane - m)
    row_best = tl.max(best, 0)
    lse = row_best + tl.log(tl.sum(total * tl.exp(best - row_best), 0))
    # Of classes that tie, the lowest counts as the prediction
    row_argbest = tl.min(tl.where(best == row_best, argbest, V), 0)
    return row_best, row_argbest, lse, gold, tl.sum(sum_, 0), inside


@triton.jit
def _gold_weight(weight_ptr, target, inside, dtype: constexpr):
    """Return w of the target; 0 if it is no class of this rank."""
    w = inside.to(dtype)
    if weight_ptr is not None:
        w *= tl.load(weight_ptr + target, inside, other=0.0).to(dtype)
    return w


@triton.jit
def _row_gradient(
    x_ptr,
    V: constexpr,
    WIDTH: constexpr,
    target,
    lse,
    mass,
    gold_share,
    factor,
    kept,
    bias_ptr,
    weight_ptr,
    softcap: constexpr,
    temperature: constexpr,
    each: constexpr,
    excluded: constexpr,
    dtype: constexpr,
    BLOCK: constexpr,
):
    """Overwrite the product with its gradient, 0 in an ignored row.

    factor x (mass p - w q) x derivative of the softcap / temperature
    """
    for start in range(0, V, BLOCK):
        k = start + tl.arange(0, BLOCK)
        here = k < V
        z, derivative = _logits(x_ptr, bias_ptr, k, k < WIDTH, here, softcap, temperature, dtype)
        # p_k = exp(z_k - lse)
        grad = tl.exp(z - lse) * mass
        if each != 0.0:
            grad -= each * _class_weights(weight_ptr, k, here, excluded, dtype)
        grad -= tl.where(k == target, gold_share, 0.0)
        if softcap is not None:
            grad *= derivative
        if temperature != 1.0:
            grad = grad / temperature
        grad = tl.where(kept, grad * factor, 0.0)
        tl.store(x_ptr + k, grad.to(x_ptr.dtype.element_ty), k < WIDTH)


@triton.jit(do_not_specialize=["out_stride", "factor_stride"])
def _whole_rows(
    x_ptr,
    x_stride,
    V: constexpr,
    WIDTH: constexpr,
    target_ptr,
    bias_ptr,
    weight_ptr,
    weight_sum_ptr,
    factor_ptr,
    factor_stride,
    out_ptr,
    out_stride,
    ignored: constexpr,
    gold_q: constexpr,
    each: constexpr,
    excluded: constexpr,
    classes: constexpr,
    kl_gold: constexpr,
    kl_each: constexpr,
    z_loss: constexpr,
    softcap: constexpr,
    temperature: constexpr,
    GRADIENT: constexpr,
    BLOCK: constexpr,
):
    """Store loss, nll and correctness of a row with all classes; with GRADIENT, overwrite its product, too."""
    dtype: constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    target = tl.load(target_ptr + row)
    _, argbest, lse, gold, sum_, inside = _row_sums(
        x_ptr, V, WIDTH, target, bias_ptr, weight_ptr, softcap, temperature, each, excluded, dtype, BLOCK
    )
    # While a CUDA graph is recorded no target can be checked; nan shows one outside the vocabulary
    gold = tl.where(inside, gold, float("nan"))
    gold_share = gold_q * _gold_weight(weight_ptr, target, inside, dtype)
    nll = lse - gold
    loss = gold_share * nll
    mass = gold_share
    if weight_ptr is None:
        # Without weights q sums to 1: gold + each x classes = 1
        mass = tl.full((), 1.0, dtype)
        if each != 0.0:
            loss += each * (classes * lse - sum_)
        loss += (kl_gold - kl_each) + kl_each * classes
    else:
        weights = tl.load(weight_sum_ptr).to(dtype)
        if each != 0.0:
            loss += each * (weights * lse - sum_)
            mass += each * weights
        # The weight of a class that no term uses may be inf, and 0 x inf is nan
        if kl_gold != 0.0:
            loss += (kl_gold - kl_each) * _gold_weight(weight_ptr, target, inside, dtype) + kl_each * weights
    if z_loss != 0.0:
        loss += z_loss * lse * lse
        mass += 2.0 * z_loss * lse
    kept = target == target
    if ignored is not None:
        kept = target != ignored
    out_ptr += row
    tl.store(out_ptr, tl.where(kept, loss, 0.0))
    tl.store(out_ptr + out_stride, tl.where(kept, nll, 0.0))
    tl.store(out_ptr + 2 * out_stride, (kept & (argbest == target)).to(dtype))
    if GRADIENT:
        factor = tl.full((), 1.0, dtype)
        if factor_ptr is not None:
            factor = tl.load(factor_ptr + row * factor_stride).to(dtype)
        _row_gradient(
            x_ptr, V, WIDTH, target, lse, mass, gold_share, factor, kept, bias_ptr, weight_ptr, softcap, temperature,
            each, excluded, dtype, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["out_stride"])
def _part_sums(
    x_ptr,
    x_stride,
    V: constexpr,
    WIDTH: constexpr,
    target_ptr,
    bias_ptr,
    weight_ptr,
    out_ptr,
    out_stride,
    each: constexpr,
    excluded: constexpr,
    softcap: constexpr,
    temperature: constexpr,
    BLOCK: constexpr,
):
    """Store a row's sums over this rank's classes: the largest logit, its class, lse, the target's logit, Z."""
    dtype: constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    best, argbest, lse, gold, sum_, _ = _row_sums(
        x_ptr + row * x_stride, V, WIDTH, tl.load(target_ptr + row), bias_ptr, weight_ptr, softcap, temperature, each,
        excluded, dtype, BLOCK,
    )  # fmt: skip
    out_ptr += row
    tl.store(out_ptr, best)
    tl.store(out_ptr + out_stride, argbest.to(dtype))
    tl.store(out_ptr + 2 * out_stride, lse)
    tl.store(out_ptr + 3 * out_stride, gold)  # 0 for a target on another rank
    tl.store(out_ptr + 4 * out_stride, sum_)


@triton.jit(do_not_specialize=["mass_stride", "factor_stride"])
def _part_gradient(
    x_ptr,
    x_stride,
    V: constexpr,
    WIDTH: constexpr,
    target_ptr,
    bias_ptr,
    weight_ptr,
    lse_ptr,
    mass_ptr,
    mass_stride,
    factor_ptr,
    factor_stride,
    gold_q: constexpr,
    each: constexpr,
    excluded: constexpr,
    softcap: constexpr,
    temperature: constexpr,
    BLOCK: constexpr,
):
    """Overwrite a row's products on this rank with their gradient, given lse of the whole vocabulary."""
    dtype: constexpr = lse_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    lse = tl.load(lse_ptr + row)
    inside = (target >= 0) & (target < V)
    factor = tl.full((), 1.0, dtype)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + row * factor_stride).to(dtype)
    _row_gradient(
        x_ptr + row * x_stride, V, WIDTH, target, lse, tl.load(mass_ptr + row * mass_stride),
        gold_q * _gold_weight(weight_ptr, target, inside, dtype), factor, inside == inside, bias_ptr, weight_ptr,
        softcap, temperature, each, excluded, dtype, BLOCK,
    )  # fmt: skip

"""Compute the scores of a chunk's rows from their products, and the products' gradient, in Triton kernels.

Each row of the products has its own program. If the loss's derivatives follow from the row alone, one kernel computes
sums, loss and gradient: a row is read from memory once and written once, because the second read hits the L2 cache.
Otherwise there are two kernels, one for the sums and one for the gradient. A further one reads a row once more if the
target's rank is wanted.

The sums are taken in one pass. Each lane (a GPU thread) keeps a running maximum m, and two sums relative to it: s of
exponentials, as in Milakov and Gimelshein 2018 ("Online normalizer calculation for softmax"), and t for the entropy.
It takes one vector of logits z at a time, so that m changes and the sums shrink once for the whole vector:

    m' = max(m, z),   d = m - m'
    t <- e^d (t + d s) + sum_z e^(z - m') (z - m')
    s <- e^d s         + sum_z e^(z - m'),          m <- m'

    in the end   log S = log s,   mean = t / s = sum_k p_k (z_k - m)

Since each logit is read from memory once, the cost is in instructions: so blocks that consist entirely of classes have
no masks, and classes are not each compared with the target for its part of the gradient.

Then the product is overwritten with the gradient, which needs no further sum over the row. The formulas are those of
`seqpar.rows.scores` and `seqpar.rows.smoothing`, and tests compare the two.

Only `seqpar.kernels.row_kernel` imports this module, if Triton is installed.

Shape suffixes: L lanes of a block, X classes of a vector.

V is the number of classes on this rank. WIDTH is how many numbers of a row's memory may be read and written: V rounded
up to whole vectors, so that vectors need not stop at the last class. PICKS is 1 + J: a row's target and given classes.
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
        # Near 0 the difference 1 - s has lost digits that a softcap far above the logits needs; below 1/4 the series
        # y - y^3/3 + 2 y^5/15 - ... has all of float32's digits
        s = y * y
        series = y * (1.0 - s * (1 / 3 - s * (2 / 15 - s * (17 / 315 - s * (62 / 2835)))))
        tanh = tl.where(y < 0.25, series, tanh)
    return tanh, derivative


@triton.jit
def _logits(x_ptr, bias_ptr, k, there, here, softcap: constexpr, temperature: constexpr, dtype: constexpr):
    """Return the logits of some classes of one row, and the derivative of the softcap.

    `there` is true for numbers within the row's memory, `here` for those that are classes.
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
        # The excluded class's own weight may be inf or nan
        w *= tl.load(weight_ptr + k, included, other=0.0).to(dtype)
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
    """Return z - m with -1e4 instead of -inf, as exp(-inf) is 0 and 0 x -inf is nan, and of nan, whose exp is nan."""
    return tl.maximum(d, -1e4)


@triton.jit
def _exp(x, dtype: constexpr):
    """Return e^x; in float32 with a single GPU instruction, whose results below 2^-126 are 0."""
    if dtype == tl.float32:
        return tl.exp2(x * 1.4426950408889634)
    return tl.exp(x)


@triton.jit
def _weighted(z, weight_ptr, k, here, excluded: constexpr, dtype: constexpr):
    """Return w_k z_k of some classes."""
    if weight_ptr is None and excluded is None:
        return tl.where(here, z, 0.0)
    w = _class_weights(weight_ptr, k, here, excluded, dtype)
    # A logit may be -inf, and 0 x inf is nan
    return tl.where(w != 0, w * z, 0.0)


@triton.jit
def _vector_step(z_LX, first, best_L, total_L, moment_L, vector_L, ENTROPY: constexpr, dtype: constexpr):
    """Return each lane's m, s, t (with ENTROPY), and the block of its first vector with m, updated by one block."""
    top_L = tl.max(z_LX, 1)
    vector_L = tl.where(top_L > best_L, first, vector_L)
    top_L = tl.maximum(top_L, best_L)
    # While all logits are -inf, their difference from m would be nan
    base_L = tl.where(top_L == float("-inf"), 0.0, top_L)
    d_L = best_L - base_L
    shrink_L = _exp(d_L, dtype)
    d_LX = z_LX - base_L[:, None]
    exponential_LX = _exp(d_LX, dtype)
    if ENTROPY:
        moment_L = shrink_L * (moment_L + _finite(d_L) * total_L) + tl.sum(exponential_LX * _finite(d_LX), 1)
    total_L = total_L * shrink_L + tl.sum(exponential_LX, 1)
    return top_L, total_L, moment_L, vector_L


@triton.jit
def _sums_of(
    x_ptr, bias_ptr, temperature_ptr, weight_ptr, V: constexpr, WIDTH: constexpr, softcap: constexpr,
    temperature: constexpr, excluded: constexpr, ENTROPY: constexpr, WEIGHTED: constexpr, BLOCK: constexpr,
    dtype: constexpr
):  # fmt: skip
    """Return a row's m, log S, mean (with ENTROPY), the lowest class that has m, and sum_k w_k z_k (with WEIGHTED)."""
    X: constexpr = min(8, BLOCK)
    L: constexpr = BLOCK // X
    within_LX = tl.arange(0, L)[:, None] * X + tl.arange(0, X)[None, :]
    best_L = tl.full([L], float("-inf"), dtype)
    total_L = tl.zeros([L], dtype)
    moment_L = tl.zeros([L], dtype)
    vector_L = tl.zeros([L], tl.int32)
    sum_L = tl.zeros([L], dtype)
    all_LX = tl.full([L, X], True, tl.int1)
    WHOLE: constexpr = V // BLOCK * BLOCK
    for start in range(0, WHOLE, BLOCK):
        k_LX = start + within_LX
        z_LX, _ = _divided_logits(
            x_ptr, bias_ptr, temperature_ptr, k_LX, all_LX, all_LX, softcap, temperature, dtype
        )  # fmt: skip
        if WEIGHTED:
            sum_L += tl.sum(_weighted(z_LX, weight_ptr, k_LX, all_LX, excluded, dtype), 1)
        best_L, total_L, moment_L, vector_L = _vector_step(
            z_LX, start, best_L, total_L, moment_L, vector_L, ENTROPY, dtype
        )  # fmt: skip
    if WHOLE < V:
        k_LX = WHOLE + within_LX
        here_LX = k_LX < V
        z_LX, _ = _divided_logits(
            x_ptr, bias_ptr, temperature_ptr, k_LX, k_LX < WIDTH, here_LX, softcap, temperature, dtype
        )  # fmt: skip
        if WEIGHTED:
            sum_L += tl.sum(_weighted(z_LX, weight_ptr, k_LX, here_LX, excluded, dtype), 1)
        z_LX = tl.where(here_LX, z_LX, float("-inf"))
        best_L, total_L, moment_L, vector_L = _vector_step(
            z_LX, WHOLE, best_L, total_L, moment_L, vector_L, ENTROPY, dtype
        )  # fmt: skip
    # Each lane has its own maximum and sums
    best = tl.max(best_L, 0)
    d_L = best_L - tl.where(best == float("-inf"), 0.0, best)
    shrink_L = _exp(d_L, dtype)
    total = tl.sum(total_L * shrink_L, 0)
    mean = total
    if ENTROPY:
        mean = tl.sum(shrink_L * (moment_L + _finite(d_L) * total_L), 0) / total
    # The lowest class with the logit m is in the lowest vector that contains m, which is read again
    vector = tl.min(tl.where(best_L == best, vector_L + tl.arange(0, L) * X, V), 0)
    k_X = vector + tl.arange(0, X)
    z_X, _ = _divided_logits(
        x_ptr, bias_ptr, temperature_ptr, k_X, k_X < V, k_X < V, softcap, temperature, dtype
    )  # fmt: skip
    first_best = tl.min(tl.where((k_X < V) & (z_X == best), k_X, V), 0)
    return best, tl.log(total), mean, first_best, tl.sum(sum_L, 0)


# A chunk's rows begin anywhere within all rows; different alignments must not compile separate kernels
_ROWS = [
    "index_ptr", "factor_ptr", "temperature_ptr", "best_ptr", "log_sum_ptr", "all_ptr", "mean_ptr", "entropy_ptr",
    "weighted_ptr", "gold_ptr", "before_ptr", "target_ptr", "token_ptr",
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

    With ENTROPY also store mean, with ARGBEST the lowest class that has m, with WEIGHTED sum_k w_k z_k.
    """
    dtype: constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    if temperature_ptr is not None:
        temperature_ptr += row
    best, log_sum, mean, first_best, sum_ = _sums_of(
        x_ptr, bias_ptr, temperature_ptr, weight_ptr, V, WIDTH, softcap, temperature, excluded, ENTROPY, WEIGHTED,
        BLOCK, dtype
    )  # fmt: skip
    out_ptr += row
    tl.store(out_ptr, best)
    tl.store(out_ptr + out_stride, log_sum)
    if ENTROPY:
        tl.store(out_ptr + 2 * out_stride, mean)
    if ARGBEST:
        tl.store(out_ptr + 3 * out_stride, first_best.to(dtype))
    if WEIGHTED:
        tl.store(out_ptr + 4 * out_stride, sum_)
    for j in range(0, PICKS):
        index = tl.load(index_ptr + row * PICKS + j)
        inside = (index >= 0) & (index < V)
        z, _ = _divided_logits(
            x_ptr, bias_ptr, temperature_ptr, tl.where(inside, index, 0), inside, inside, softcap, temperature, dtype
        )
        # While a CUDA graph is being captured, classes cannot be checked; nan marks one outside the vocabulary
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
    """Store how many classes have a larger logit than the target, or the same logit and a lower index."""
    dtype: constexpr = gold_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    if temperature_ptr is not None:
        temperature_ptr += row
    gold = tl.load(gold_ptr + row)
    # Counted from this rank's first class: negative or beyond the last if the target is on a different rank
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

    g are the factors of the PICKS classes, the first of which is the target; a = r - sum_j g_j - v W is the factor of
    every logit, h that of the entropy and v that of the weighted sum. Without the pointers to mean and h, or to v, that
    term is absent.
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
    WHOLE: constexpr = V // BLOCK * BLOCK
    all_ = tl.full([BLOCK], True, tl.int1)
    for start in range(0, WHOLE, BLOCK):
        k = start + tl.arange(0, BLOCK)
        grad = _score_gradient(
            x_ptr, bias_ptr, temperature_ptr, weight_ptr, index_ptr, factor_ptr, mean_ptr, entropy_ptr, weighted_ptr,
            row, best, every, one_over_sum, k, all_, all_, softcap, temperature, PICKS, excluded, dtype
        )  # fmt: skip
        tl.store(grad_ptr + k, grad.to(grad_ptr.dtype.element_ty))
    if WHOLE < WIDTH:
        k = WHOLE + tl.arange(0, BLOCK)
        grad = _score_gradient(
            x_ptr, bias_ptr, temperature_ptr, weight_ptr, index_ptr, factor_ptr, mean_ptr, entropy_ptr, weighted_ptr,
            row, best, every, one_over_sum, k, k < WIDTH, k < V, softcap, temperature, PICKS, excluded, dtype
        )  # fmt: skip
        # 0 between two rows, because a matrix product may read that memory
        grad = tl.where(k < V, grad, 0.0)
        tl.store(grad_ptr + k, grad.to(grad_ptr.dtype.element_ty), k < WIDTH)


@triton.jit
def _score_gradient(
    x_ptr, bias_ptr, temperature_ptr, weight_ptr, index_ptr, factor_ptr, mean_ptr, entropy_ptr, weighted_ptr, row, best,
    every, one_over_sum, k, there, here, softcap: constexpr, temperature: constexpr, PICKS: constexpr,
    excluded: constexpr, dtype: constexpr
):  # fmt: skip
    """Return the gradient of the products of some classes, by the formula of `_row_gradient`."""
    z, derivative = _divided_logits(x_ptr, bias_ptr, temperature_ptr, k, there, here, softcap, temperature, dtype)
    d = z - best
    slope = every
    if mean_ptr is not None:
        # log p_k + H = z_k - m - mean
        slope = every - tl.load(entropy_ptr + row) * (_finite(d) - tl.load(mean_ptr + row))
    grad = (_exp(d, dtype) * one_over_sum) * slope
    if weighted_ptr is not None:
        grad += tl.load(weighted_ptr + row) * _class_weights(weight_ptr, k, here, excluded, dtype)
    for j in range(0, PICKS):
        grad += tl.where(k == tl.load(index_ptr + j), tl.load(factor_ptr + j), 0.0)
    grad = _through_softcap(grad, derivative, softcap, temperature)
    if temperature_ptr is not None:
        grad = grad / tl.load(temperature_ptr)
    return grad


@triton.jit
def _number(high, low, dtype: constexpr):
    """Return a number that the host passes as two float32 numbers, because Triton takes no float64."""
    return tl.full([], 0.0, dtype) + high + low


@triton.jit
def _loss_of(
    log_prob, lse, sum_, share, W, gold, each, z_loss, kl_gold, kl_each, SMOOTH: constexpr, Z_LOSS: constexpr,
    KL: constexpr
):  # fmt: skip
    """Return a row's loss, and the factor of p_k in its gradient; `share` is w_y."""
    loss = -gold * share * log_prob
    slope = gold * share
    if SMOOTH:
        # - each sum_k w_k log p_k
        loss -= each * (sum_ - W * lse)
        slope += each * W
    if KL:
        loss += (kl_gold - kl_each) * share
        if SMOOTH:
            loss += kl_each * W
    if Z_LOSS:
        loss += z_loss * lse * lse
        slope += 2 * z_loss * lse
    return loss, slope


@triton.jit
def _product_gradient(
    z, derivative, w, best, p_factor, v, softcap: constexpr, temperature: constexpr, SMOOTH: constexpr, dtype: constexpr
):  # fmt: skip
    """Return the gradient of products other than the target's, (p_k slope - w_k each) softcap' / temperature."""
    grad = _exp(z - best, dtype) * p_factor
    if SMOOTH:
        grad -= v * w
    return _through_softcap(grad, derivative, softcap, temperature)


@triton.jit
def _through_softcap(grad, derivative, softcap: constexpr, temperature: constexpr):
    """Return the gradient of a product, given the gradient of its logit."""
    if softcap is not None:
        grad *= derivative
    if temperature != 1.0:
        grad = grad / temperature
    return grad


@triton.jit
def _overwrite(
    x_ptr, bias_ptr, weight_ptr, V: constexpr, WIDTH: constexpr, softcap: constexpr, temperature: constexpr,
    excluded: constexpr, SMOOTH: constexpr, BLOCK: constexpr, dtype: constexpr, best, p_factor, v, counted
):  # fmt: skip
    """Overwrite a row's product with its gradient, without the target's part; with 0 if the row does not count."""
    # Blocks that consist entirely of classes need no masks
    WHOLE: constexpr = V // BLOCK * BLOCK
    within = tl.arange(0, BLOCK)
    all_ = tl.full([BLOCK], True, tl.int1)
    for start in range(0, WHOLE, BLOCK):
        k = start + within
        z, derivative = _logits(x_ptr, bias_ptr, k, all_, all_, softcap, temperature, dtype)
        w = _class_weights(weight_ptr, k, all_, excluded, dtype)
        grad = _product_gradient(z, derivative, w, best, p_factor, v, softcap, temperature, SMOOTH, dtype)
        tl.store(x_ptr + k, tl.where(counted, grad, 0.0).to(x_ptr.dtype.element_ty))
    if WHOLE < WIDTH:
        k = WHOLE + within
        z, derivative = _logits(x_ptr, bias_ptr, k, k < WIDTH, k < V, softcap, temperature, dtype)
        w = _class_weights(weight_ptr, k, k < V, excluded, dtype)
        grad = _product_gradient(z, derivative, w, best, p_factor, v, softcap, temperature, SMOOTH, dtype)
        # 0 between two rows, because a matrix product may read that memory
        tl.store(x_ptr + k, tl.where(counted & (k < V), grad, 0.0).to(x_ptr.dtype.element_ty), k < WIDTH)


@triton.jit(do_not_specialize=["out_stride", "first", "place"], do_not_specialize_on_alignment=_ROWS)
def _row_loss(
    x_ptr,
    x_stride,
    V: constexpr,
    WIDTH: constexpr,
    target_ptr,
    token_ptr,
    first,
    bias_ptr,
    weight_ptr,
    total_ptr,
    scale_ptr,
    out_ptr,
    out_stride,
    place,
    gold_high,
    gold_low,
    each_high,
    each_low,
    z_loss_high,
    z_loss_low,
    kl_gold_high,
    kl_gold_low,
    kl_each_high,
    kl_each_low,
    total_high,
    total_low,
    ignored: constexpr,
    softcap: constexpr,
    temperature: constexpr,
    excluded: constexpr,
    SMOOTH: constexpr,
    Z_LOSS: constexpr,
    KL: constexpr,
    GRADIENT: constexpr,
    BLOCK: constexpr,
):
    """Store a row's loss times its token weight, -log_prob, whether it is correct, and the loss; overwrite its product.

    With GRADIENT the product becomes its own gradient times scale and token weight. A row whose target is `ignored` is
    0 everywhere, whatever its products are. The numbers are those of `SoftTarget`; W is at `total_ptr` if it is given.
    """
    dtype: constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    target = tl.load(target_ptr + first + row)
    inside = (target >= 0) & (target < V)
    # Read before the reductions, whose barriers keep other warps from overwriting it earlier. While a CUDA graph is
    # being captured, classes cannot be checked; nan marks one outside the vocabulary
    y = tl.where(inside, target, 0)
    zy, derivative = _logits(x_ptr, bias_ptr, y, inside, inside, softcap, temperature, dtype)
    zy = tl.where(inside, zy, float("nan"))
    best, log_sum, _, first_best, sum_ = _sums_of(
        x_ptr, bias_ptr, None, weight_ptr, V, WIDTH, softcap, temperature, excluded, False, SMOOTH, BLOCK, dtype
    )  # fmt: skip
    log_prob = (zy - best) - log_sum
    share = tl.full([], 1.0, dtype)
    if weight_ptr is not None:
        share = tl.load(weight_ptr + target, inside, other=0.0).to(dtype)
    W = _number(total_high, total_low, dtype)
    if total_ptr is not None:
        W = tl.load(total_ptr).to(dtype)
    gold = _number(gold_high, gold_low, dtype)
    each = _number(each_high, each_low, dtype)
    z_loss = _number(z_loss_high, z_loss_low, dtype)
    kl_gold = _number(kl_gold_high, kl_gold_low, dtype)
    kl_each = _number(kl_each_high, kl_each_low, dtype)
    loss, slope = _loss_of(
        log_prob, best + log_sum, sum_, share, W, gold, each, z_loss, kl_gold, kl_each, SMOOTH, Z_LOSS, KL
    )  # fmt: skip
    counted = target == target
    if ignored is not None:
        counted = target != ignored
    a = tl.full([], 1.0, dtype)
    out_ptr += place + row
    if token_ptr is not None:
        a = tl.load(token_ptr + first + row).to(dtype)
        # d (a loss) / d a
        tl.store(out_ptr + 3 * out_stride, tl.where(counted, loss, 0.0))
    tl.store(out_ptr, tl.where(counted, a * loss, 0.0))
    tl.store(out_ptr + out_stride, tl.where(counted, -log_prob, 0.0))
    tl.store(out_ptr + 2 * out_stride, (counted & (first_best == target)).to(dtype))
    if GRADIENT:
        if scale_ptr is not None:
            a *= tl.load(scale_ptr).to(dtype)
        p_factor = tl.exp(-log_sum) * slope * a
        v = each * a
        _overwrite(
            x_ptr, bias_ptr, weight_ptr, V, WIDTH, softcap, temperature, excluded, SMOOTH, BLOCK, dtype, best, p_factor,
            v, counted
        )  # fmt: skip
        w = _class_weights(weight_ptr, y, inside, excluded, dtype)
        grad = _product_gradient(zy, derivative, w, best, p_factor, v, softcap, temperature, SMOOTH, dtype)
        grad -= _through_softcap(gold * share * a, derivative, softcap, temperature)
        # After all warps have written the row: comparing each class with the target would double the cost
        tl.debug_barrier()
        tl.store(x_ptr + y, grad.to(x_ptr.dtype.element_ty), inside & counted)


@triton.jit(do_not_specialize=["rows", "ignore_index"], do_not_specialize_on_alignment=["target_ptr"])
def _count_targets(target_ptr, rows, classes, ignore_index, count_ptr, BLOCK: constexpr):
    """Store how many targets are not ignored; a negative number if one of these is not a class."""
    counted = tl.zeros([BLOCK], tl.int64)
    outside = tl.zeros([BLOCK], tl.int64)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        there = row < rows
        target = tl.load(target_ptr + row, there, other=0)
        counts = there & (target != ignore_index)
        counted += counts.to(tl.int64)
        outside += (counts & ((target < 0) | (target >= classes))).to(tl.int64)
    wrong = tl.sum(outside, 0)
    tl.store(count_ptr, tl.where(wrong > 0, -wrong, tl.sum(counted, 0)))


@triton.jit
def _scaled_rows(x_ptr, x_stride, factor_ptr, out_ptr, out_stride, beside_ptr, D: constexpr, BLOCK: constexpr):
    """Store D numbers of a row times a factor, and the number after them if there is a place for it."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    out_ptr += row * out_stride
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    for start in range(0, D, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + k, k < D, other=0.0)
        tl.store(out_ptr + k, (x * factor).to(out_ptr.dtype.element_ty), k < D)
    if beside_ptr is not None:
        tl.store(beside_ptr + row, (tl.load(x_ptr + D) * factor).to(beside_ptr.dtype.element_ty))

"""A chunk of products with the vocabulary becomes, in place, its own gradient: Triton kernels, one program to a row.

Every row is read twice and written once. The first reading keeps, for each lane, a running maximum and the sum of
exponentials below it (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"), so that one
exponential is taken of each logit; the second writes the gradient where the product was. `seqpar.criteria` has the
formulas; those here are the same, and tests hold the two against each other.

Only `seqpar.row_kernel` imports this module, where Triton is installed.

V is the number of classes here; WIDTH how many numbers of a row's memory may be read and written, so that steps of 16
bytes need no look at where the classes end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def _logits(x_ptr, bias_ptr, k, there, here, softcap: constexpr, temperature: constexpr, dtype: constexpr):
    """Some classes' logits of one row, and the tanh they came through; `there`: where the row's memory goes on."""
    z = tl.load(x_ptr + k, there, other=0.0).to(dtype)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + k, here, other=0.0).to(dtype)
    tanh = z
    if softcap is not None:
        shrunk = tl.exp(-2.0 * tl.abs(z) / softcap)
        tanh = (1.0 - shrunk) / (1.0 + shrunk)
        tanh = tl.where(z < 0, -tanh, tanh)
        z = tanh * softcap
    if temperature != 1.0:
        z = z / temperature
    return z, tanh


@triton.jit
def _class_weights(weight_ptr, k, here, excluded: constexpr, dtype: constexpr):
    """w of some classes; 0 for the excluded one and for what is no class here."""
    kept = here
    if excluded is not None:
        kept = here & (k != excluded)
    w = kept.to(dtype)
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
    """The largest logit, its lowest class, log-sum-exp, the target's logit, and the weighted sum of all logits."""
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
            sum_ += tl.where(w != 0, w * z, 0.0)
        z = tl.where(here, z, float("-inf"))
        larger = z > best
        # Where both are -inf their difference is nan; what is added then is multiplied by exp(-inf) in the end
        shrink = tl.where(z == best, 1.0, tl.exp(-tl.abs(z - best)))
        total = tl.where(larger, total * shrink + 1.0, total + shrink)
        argbest = tl.where(larger, k, argbest)
        best = tl.where(larger, z, best)
    row_best = tl.max(best, 0)
    lse = row_best + tl.log(tl.sum(total * tl.exp(best - row_best), 0))
    row_argbest = tl.min(tl.where(best == row_best, argbest, V), 0)
    inside = (target >= 0) & (target < V)
    gold, _ = _logits(x_ptr, bias_ptr, tl.where(inside, target, 0), inside, inside, softcap, temperature, dtype)
    return row_best, row_argbest, lse, gold, tl.sum(sum_, 0), inside


@triton.jit
def _gold_weight(weight_ptr, target, inside, dtype: constexpr):
    """w of the target; 0 where it is no class here."""
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
    """factor x (mass p - w q), carried back to the product, in its place; 0 in a row that is not kept."""
    for start in range(0, V, BLOCK):
        k = start + tl.arange(0, BLOCK)
        here = k < V
        z, tanh = _logits(x_ptr, bias_ptr, k, k < WIDTH, here, softcap, temperature, dtype)
        grad = tl.exp(z - lse) * mass
        if each != 0.0:
            grad -= each * _class_weights(weight_ptr, k, here, excluded, dtype)
        grad -= tl.where(k == target, gold_share, 0.0)
        if softcap is not None:
            grad *= 1.0 - tanh * tanh
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
    """Loss, nll and correctness of a row whose vocabulary is all here; with GRADIENT, its product's gradient, too."""
    dtype: constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    target = tl.load(target_ptr + row)
    _, argbest, lse, gold, sum_, inside = _row_sums(
        x_ptr, V, WIDTH, target, bias_ptr, weight_ptr, softcap, temperature, each, excluded, dtype, BLOCK
    )
    gold = tl.where(inside, gold, float("nan"))  # a target that nobody could check is seen in the loss
    gold_share = gold_q * _gold_weight(weight_ptr, target, inside, dtype)
    nll = lse - gold
    loss = gold_share * nll
    mass = gold_share
    if weight_ptr is None:
        mass = tl.full((), 1.0, dtype)
        if each != 0.0:
            loss += each * (classes * lse - sum_)
        loss += (kl_gold - kl_each) + kl_each * classes
    else:
        weights = tl.load(weight_sum_ptr).to(dtype)
        if each != 0.0:
            loss += each * (weights * lse - sum_)
            mass += each * weights
        if kl_gold != 0.0:  # else the weight of a class that nobody has would be multiplied by 0, and may be inf
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
    """A row's sums over the classes here: the largest logit, its class, log-sum-exp, the target's logit, the sum."""
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
    tl.store(out_ptr + 3 * out_stride, gold)  # 0 where the target is another rank's
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
    """The gradient of a row's products here, from the log-sum-exp over the whole vocabulary."""
    dtype: constexpr = lse_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    target, lse = tl.load(target_ptr + row), tl.load(lse_ptr + row)
    inside = (target >= 0) & (target < V)
    factor = tl.full((), 1.0, dtype)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + row * factor_stride).to(dtype)
    _row_gradient(
        x_ptr + row * x_stride, V, WIDTH, target, lse, tl.load(mass_ptr + row * mass_stride),
        gold_q * _gold_weight(weight_ptr, target, inside, dtype), factor, inside == inside, bias_ptr, weight_ptr,
        softcap, temperature, each, excluded, dtype, BLOCK,
    )  # fmt: skip

"""`linear_cross_entropy` as one operator that `torch.compile` puts into its graph without looking inside.

The chunk walk has loops whose number depends on the targets, so a graph could only be traced around it. The operator
returns the gradients beside the loss, and its backward multiplies them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import ByFormula, Gradients, narrowed, walk_chunks
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.linear.formula import product_dtype
from seqpar.linear.inputs import Inputs, Settings, checked, plan
from seqpar.losses.softmax_loss import Convention


def compiled_cross_entropy(inputs: Inputs, settings: Settings, loss_scale: float | Tensor) -> TokenLoss:
    """What `linear_cross_entropy` returns, while it is being traced."""
    hidden = inputs.hidden
    scale = loss_scale if isinstance(loss_scale, Tensor) else hidden.new_full((), loss_scale, dtype=torch.float64)
    leaves = (hidden, inputs.weight, inputs.bias, inputs.token_weight)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in leaves]
    autocast = torch.is_autocast_enabled(hidden.device.type)
    total, tokens, nll, correct, *_ = _operator(*inputs, scale, *settings, product_dtype(hidden), autocast, wanted)
    return TokenLoss(total, tokens, nll.detach(), correct)


@torch.library.custom_op("seqpar::linear_cross_entropy", mutates_args=())
def _operator(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    loss_scale: Tensor,
    ignore_index: int,
    label_smoothing: float,
    smoothing: str,
    z_loss: float,
    softcap: float | None,
    temperature: float,
    chunk_tokens: int | None,
    dtype: torch.dtype,
    autocast: bool,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """total, tokens, nll, correct; the gradients of hidden, weight, bias and token_weight, empty unless `wanted`."""
    convention: Convention = smoothing  # type: ignore[assignment]
    inputs = Inputs(hidden, weight, target, bias, class_weight, token_weight)
    settings = Settings(ignore_index, label_smoothing, convention, z_loss, softcap, temperature, chunk_tokens)
    cast_to = None if dtype == torch.float64 else dtype  # which autocast leaves alone, and takes no name of
    with torch.autocast(hidden.device.type, cast_to, enabled=autocast):
        shard, q = checked(inputs, settings, None, loss_scale)
        hidden_ND, chunks, formula = plan(inputs, settings, shard, q)
    per_token = [hidden_ND] if token_weight is None else [hidden_ND, token_weight.flatten()]
    params = [weight] if bias is None else [weight, bias]
    asked = [wanted[0], wanted[3]][: len(per_token)] + wanted[1:3][: len(params)]
    gradients = Gradients(per_token, params, asked, len(chunks), loss_scale) if any(wanted) else None
    empty = TokenLoss.zero(dtype, hidden.device, tells=True)
    loss = walk_chunks(ByFormula(formula), chunks, per_token, params, empty, gradients)
    found: list[Tensor | None] = [None] * 4
    if gradients is not None:
        found[0], found[1] = gradients.rows[0], gradients.params[0]
        found[2] = gradients.params[1] if bias is not None else None
        found[3] = gradients.rows[1] if token_weight is not None else None
    leaves = (hidden, weight, bias, token_weight)
    kept = (_kept(g, t, w) for g, t, w in zip(found, leaves, wanted, strict=True))
    assert loss.nll is not None
    assert loss.correct is not None
    return loss.total, loss.tokens, loss.nll, loss.correct, *kept  # type: ignore[return-value]


def _kept(grad: Tensor | None, leaf: Tensor | None, wanted: bool) -> Tensor:
    """A gradient in its leaf's shape, 0 where no chunk was there; empty where none is wanted."""
    if leaf is None or not wanted:
        return torch.empty(0)
    return torch.zeros_like(leaf) if grad is None else narrowed(grad.reshape(leaf.shape), leaf.dtype)


@_operator.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    loss_scale: Tensor,
    *settings: Any,
) -> tuple[Tensor, ...]:
    dtype, wanted = settings[-3], settings[-1]
    sum_, count = hidden.new_empty((), dtype=wide(dtype)), hidden.new_empty((), dtype=torch.int64)
    leaves = (hidden, weight, bias, token_weight)
    kept = (torch.empty(0) if t is None or not w else torch.empty_like(t) for t, w in zip(leaves, wanted, strict=True))
    return sum_, count, torch.empty_like(sum_), torch.empty_like(count), *kept


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted, ctx.arguments = inputs[-1], len(inputs)
    ctx.save_for_backward(inputs[6], *output[4:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * ctx.arguments
    if upstream is not None:
        scale, *kept = ctx.saved_tensors
        factor = upstream / scale
        for place, grad, wanted in zip((0, 1, 3, 5), kept, ctx.wanted, strict=True):
            if wanted:
                grads[place] = (grad * factor).to(grad.dtype)
    return tuple(grads)


_operator.register_autograd(_backward, setup_context=_keep)

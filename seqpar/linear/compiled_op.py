"""`linear_cross_entropy` as one operator that `torch.compile` puts into its graph without looking inside.

The number of chunks depends on the targets, so a graph could only be traced around their loop. The operator computes
loss and gradients together:

    forward:   total, tokens, nll, correct, and the gradients of loss_scale x total
    backward:  upstream factor / loss_scale x those gradients

torch asks an operator for four functions: what it computes, the shapes of what it returns, what it saves for
backward, and its backward. They stand here in that order. torch hands arguments over by position; `_Arguments` and
`_Results` give each position its name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.core.token_loss import TokenLoss, wide
from seqpar.linear.formula import LinearWanted, loss_and_gradients, product_dtype
from seqpar.linear.inputs import Inputs, Settings, checked, plan
from seqpar.losses.softmax_loss import Convention


class _Arguments(NamedTuple):
    """The operator's arguments, in its order: tensors, settings, and what autograd and autocast were at the call."""

    hidden: Any = None
    weight: Any = None
    target: Any = None
    bias: Any = None
    class_weight: Any = None
    token_weight: Any = None
    loss_scale: Any = None
    ignore_index: Any = None
    label_smoothing: Any = None
    smoothing_convention: Any = None
    z_loss: Any = None
    softcap: Any = None
    temperature: Any = None
    chunk_tokens: Any = None
    dtype: Any = None
    autocast: Any = None
    wanted: Any = None


class _Results(NamedTuple):
    """The operator's results; a gradient that is not wanted is an empty tensor, since an operator returns no None."""

    total: Tensor
    tokens: Tensor
    nll: Tensor
    correct: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor
    token_weight_grad: Tensor


def compiled_cross_entropy(inputs: Inputs, settings: Settings, loss_scale: float | Tensor) -> TokenLoss:
    """Return the loss of `linear_cross_entropy` as a call of the operator, while `torch.compile` traces."""
    hidden = inputs.hidden
    scale = loss_scale if isinstance(loss_scale, Tensor) else hidden.new_full((), loss_scale, dtype=torch.float64)
    leaves = (hidden, inputs.weight, inputs.bias, inputs.token_weight)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in leaves]
    autocast = torch.is_autocast_enabled(hidden.device.type)
    found = _Results(*_operator(*inputs, scale, *settings, product_dtype(hidden), autocast, wanted))
    return TokenLoss(found.total, found.tokens, found.nll.detach(), found.correct)


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
    smoothing_convention: str,
    z_loss: float,
    softcap: float | None,
    temperature: float,
    chunk_tokens: int | None,
    dtype: torch.dtype,
    autocast: bool,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `_Results`."""
    convention: Convention = smoothing_convention  # type: ignore[assignment]
    inputs = Inputs(hidden, weight, target, bias, class_weight, token_weight)
    settings = Settings(ignore_index, label_smoothing, convention, z_loss, softcap, temperature, chunk_tokens)
    cast_to = None if dtype == torch.float64 else dtype  # which autocast leaves alone, and takes no name of
    with torch.autocast(hidden.device.type, cast_to, enabled=autocast):
        shard, q = checked(inputs, settings, None, loss_scale)
        leaves, chunks, chunk_loss = plan(inputs, settings, shard, q)
    loss, gradients = loss_and_gradients(chunk_loss, chunks, leaves, LinearWanted(*wanted), loss_scale)
    assert loss.nll is not None
    assert loss.correct is not None
    return _Results(
        loss.total,
        loss.tokens,
        loss.nll,
        loss.correct,
        hidden_grad=_reshaped(gradients.hidden, hidden),
        weight_grad=_reshaped(gradients.weight, weight),
        bias_grad=_reshaped(gradients.bias, bias),
        token_weight_grad=_reshaped(gradients.token_weight, token_weight),
    )


def _reshaped(grad: Tensor | None, leaf: Tensor | None) -> Tensor:
    if grad is None or leaf is None:
        return torch.empty(0)
    return grad.reshape(leaf.shape)


@_operator.register_fake
def _shapes(*arguments: Any) -> tuple[Tensor, ...]:
    """Return tensors of the shapes and dtypes of `_Results`, without numbers, for tracing."""
    given = _Arguments(*arguments)
    wanted = LinearWanted(*given.wanted)
    total = given.hidden.new_empty((), dtype=wide(given.dtype))
    tokens = given.hidden.new_empty((), dtype=torch.int64)
    return _Results(
        total,
        tokens,
        nll=torch.empty_like(total),
        correct=torch.empty_like(tokens),
        hidden_grad=_like(given.hidden, wanted.hidden),
        weight_grad=_like(given.weight, wanted.weight),
        bias_grad=_like(given.bias, wanted.bias),
        token_weight_grad=_like(given.token_weight, wanted.token_weight),
    )


def _like(leaf: Tensor | None, wanted: bool) -> Tensor:
    if leaf is None or not wanted:
        return torch.empty(0)
    return torch.empty_like(leaf)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the stored gradients and their scale for backward."""
    given = _Arguments(*inputs)
    found = _Results(*output)
    ctx.wanted = LinearWanted(*given.wanted)
    ctx.save_for_backward(
        given.loss_scale, found.hidden_grad, found.weight_grad, found.bias_grad, found.token_weight_grad
    )
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument: the stored one times the upstream factor, None for all but the leaves."""
    if upstream is None:
        return _Arguments()
    loss_scale, hidden_grad, weight_grad, bias_grad, token_weight_grad = ctx.saved_tensors
    factor = upstream / loss_scale
    wanted: LinearWanted = ctx.wanted
    return _Arguments(
        hidden=_scaled(hidden_grad, factor, wanted.hidden),
        weight=_scaled(weight_grad, factor, wanted.weight),
        bias=_scaled(bias_grad, factor, wanted.bias),
        token_weight=_scaled(token_weight_grad, factor, wanted.token_weight),
    )


def _scaled(grad: Tensor, factor: Tensor, wanted: bool) -> Tensor | None:
    if not wanted:
        return None
    return (grad * factor).to(grad.dtype)


_operator.register_autograd(_backward, setup_context=_save)

"""Define `linear_cross_entropy` as one operator, which `torch.compile` does not trace into.

The number of chunks depends on the targets, so a graph cannot contain the loop over them. The operator computes loss
and gradients together:

    forward:   total, tokens, nll, correct, and the gradients of loss_scale x total
    backward:  upstream factor / loss_scale x those gradients

torch needs four functions for an operator: the computation, the shapes of its results, what to save for backward, and
the backward. They follow in this order. torch passes arguments by position; `_Arguments` and `_Results` name the
positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.core.checks import check_plain_products, refuse_second_derivative
from seqpar.core.chunked_gradient import INSTEAD, THIS
from seqpar.core.stored_gradients import in_own_precision
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.linear.inputs import Inputs, Settings, check_inputs, cross_entropy_job
from seqpar.linear.projection import ByLeaf, LinearWanted, loss_and_gradients, product_dtype
from seqpar.rows.conventions import Convention


class _Arguments(NamedTuple):
    """The operator's arguments, in order: tensors, settings, and the state of autocast and autograd at the call."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    token_weight: Tensor | None
    loss_scale: Tensor
    ignore_index: int
    label_smoothing: float
    smoothing_convention: str
    z_loss: float
    softcap: float | None
    temperature: float
    chunk_tokens: int | None
    dtype: torch.dtype
    autocast: bool
    wanted: list[bool]


class _Results(NamedTuple):
    """The operator's results; a gradient that is not wanted is an empty tensor, as an operator cannot return None."""

    total: Tensor
    tokens: Tensor
    nll: Tensor
    correct: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor
    token_weight_grad: Tensor


def compiled_cross_entropy(inputs: Inputs, settings: Settings, loss_scale: float | Tensor) -> TokenLoss:
    """Return the loss of `linear_cross_entropy` by calling the operator while `torch.compile` traces."""
    hidden = inputs.hidden
    # Checked here, because the operator only ever gets plain tensors
    check_plain_products(inputs.weight, "weight")
    check_plain_products(inputs.bias, "bias")
    scale = loss_scale
    if not isinstance(scale, Tensor):
        scale = hidden.new_full((), scale, dtype=wide(hidden.dtype))
    leaves = (hidden, inputs.weight, inputs.bias, inputs.token_weight)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in leaves]
    autocast = torch.is_autocast_enabled(hidden.device.type)
    results = _Results(*_operator(*inputs, scale, *settings, product_dtype(hidden), autocast, wanted))
    return TokenLoss(results.total, results.tokens, results.nll.detach(), results.correct)


# In the package's own namespace: a second version of it, loaded by Hugging Face's `kernels`, has a different name
@torch.library.custom_op(f"{__name__.partition('.')[0]}::linear_cross_entropy", mutates_args=())
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
    """Compute the loss and its gradients, in the order of `_Results`."""
    convention: Convention = smoothing_convention  # type: ignore[assignment]
    inputs = Inputs(hidden, weight, target, bias, class_weight, token_weight)
    settings = Settings(ignore_index, label_smoothing, convention, z_loss, softcap, temperature, chunk_tokens)
    # Autocast does not cast float64, and does not accept it as a dtype
    cast_to = None if dtype == torch.float64 else dtype
    with torch.autocast(hidden.device.type, cast_to, enabled=autocast):
        job = cross_entropy_job(inputs, settings, check_inputs(inputs, settings, None, loss_scale))
    loss, gradients = loss_and_gradients(*job, _by_leaf(wanted), loss_scale)
    assert loss.nll is not None
    assert loss.correct is not None
    return _Results(
        loss.total,
        loss.tokens,
        # The kernel's sums are rows of one tensor, and an operator's results may not share memory
        loss.nll.clone(),
        loss.correct,
        hidden_grad=_reshape(gradients.hidden, hidden),
        weight_grad=_reshape(gradients.weight, weight),
        bias_grad=_reshape(gradients.bias, bias),
        token_weight_grad=_reshape(gradients.token_weight, token_weight),
    )


def _by_leaf(wanted: list[bool]) -> LinearWanted:
    """Return which gradients are wanted, by name."""
    hidden, weight, bias, token_weight = wanted
    return ByLeaf(hidden, weight, bias, token_weight)


def _reshape(grad: Tensor | None, leaf: Tensor | None) -> Tensor:
    """Return the gradient in the shape of its tensor; an empty tensor if there is none."""
    if grad is None or leaf is None:
        return torch.empty(0, device="cpu")
    return grad.reshape(leaf.shape).contiguous()


@_operator.register_fake
def _shapes(*arguments: Any) -> tuple[Tensor, ...]:
    """Return tensors of the shapes and dtypes of `_Results`, without data, for tracing."""
    given = _Arguments(*arguments)
    wanted = _by_leaf(given.wanted)
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


def _like(leaf: Tensor | None, wanted: bool | None) -> Tensor:
    """Return an uninitialised gradient of the tensor; an empty tensor if none is wanted."""
    if leaf is None or not wanted:
        return torch.empty(0, device="cpu")
    # Adjacent in memory, whatever the strides of the tensor
    return leaf.new_empty(leaf.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the stored gradients and their scale for backward."""
    given = _Arguments(*inputs)
    results = _Results(*output)
    ctx.wanted = _by_leaf(given.wanted)
    ctx.save_for_backward(
        given.loss_scale,
        results.tokens,
        results.hidden_grad,
        results.weight_grad,
        results.bias_grad,
        results.token_weight_grad,
    )
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument, in order; None for an argument that has none."""
    refuse_second_derivative(THIS, INSTEAD)
    grads: dict[str, Tensor | None] = {}
    if upstream is not None:
        loss_scale, tokens, hidden_grad, weight_grad, bias_grad, token_weight_grad = ctx.saved_tensors
        # Not 0 x upstream: with no tokens the caller may have divided by 0
        factor = (upstream / loss_scale).where(tokens > 0, 0)
        wanted: LinearWanted = ctx.wanted
        grads = {
            "hidden": _scale(hidden_grad, factor, wanted.hidden),
            "weight": _scale(weight_grad, factor, wanted.weight),
            "bias": _scale(bias_grad, factor, wanted.bias),
            "token_weight": _scale(token_weight_grad, factor, wanted.token_weight),
        }
    return tuple(grads.get(name) for name in _Arguments._fields)


def _scale(grad: Tensor, factor: Tensor, wanted: bool | None) -> Tensor | None:
    """Return the stored gradient times the factor; None if it is not wanted."""
    if not wanted:
        return None
    return (grad * in_own_precision(factor, grad)).to(grad.dtype)


_operator.register_autograd(_backward, setup_context=_save)

"""Compare a loss's gradients with differences of its values, by `torch.autograd.gradcheck`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from seqpar.testing.evidence import Result, repeat_loss
from seqpar.testing.gradients import check_leaves, size_of, value_and_gradients

__tracebackhide__ = True  # pytest shows the call that failed, and the sentence


def assert_numerical_gradients(loss: Callable[[], Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Assert that a loss's gradients are the derivatives of its values, by `torch.autograd.gradcheck` in its fast mode.

    It finds what a comparison of two losses cannot: if both use the same operation with a wrong backward, both have the
    same wrong gradient. `assert_same_loss` is such a comparison, because its plain loss uses the generator and the
    criterion that it is given.

    For an operator made with `torch.library`, `torch.library.opcheck` checks what neither of these does: its schema,
    its shapes for `torch.compile` and the registration of its backward.

    Args:
        loss: returns the loss, a float64 scalar; called a few times for each tensor, each time with one backward, and,
            if a gradient is wrong, twice for each of that tensor's numbers.
        tensors: float64 leaves by name; those that require no gradient are left out.

    Raises:
        AssertionError: the message names the tensor and gives both numbers, along a random direction.
        ValueError: no tensors, one that is not a leaf, a loss or a tensor that is not float64, or a loss that differs
            from call to call.
        TypeError: a loss that is not a function, or does not return a tensor.

    Example:
        >>> from seqpar.testing import assert_numerical_gradients
        >>> weight = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
        >>> assert_numerical_gradients(lambda: (weight * weight).sum(), {"weight": weight})
        >>> assert_numerical_gradients(lambda: (weight.detach() * weight).sum(), {"weight": weight})
        Traceback (most recent call last):
            ...
        AssertionError: the gradient of weight ...
    """
    check_leaves(tensors)
    value, gradients = value_and_gradients(loss, tensors)
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    for name, tensor in {"the loss": value, **wanted}.items():
        if tensor.dtype != torch.float64:
            raise ValueError(
                f"{name} is {tensor.dtype}; differences of values need float64, from the inputs to the loss"
            )
    if not value.isfinite():
        raise ValueError(f"the loss is {float(value)}, of which there are no differences; give inputs of a finite loss")
    other = next((again for again in repeat_loss(loss).values if again != float(value)), None)
    if other is not None:
        raise ValueError(
            f"the loss is {float(value):.6g} in one call and {other:.6g} in another, so differences of it say "
            "nothing; call .eval() first, so that dropout draws no numbers"
        )
    sizes = {name: size_of(grad) for name, grad in gradients.items() if grad is not None}
    largest = max(sizes.values(), default=0.0)
    for name, tensor in wanted.items():
        # Scaled to a size of about 1, because gradcheck allows a difference of 1e-5 whatever the numbers are
        times = 1 / (sizes.get(name) or largest or abs(float(value)) or 1.0)

        def of_one(leaf: Tensor, name: str = name, times: float = times) -> Any:
            # gradcheck changes the leaf in place, so it need not be passed to the loss
            return _Once.apply(lambda: value_and_gradients(lambda: times * loss(), wanted), name, leaf)

        try:
            torch.autograd.gradcheck(of_one, (tensor,), fast_mode=True)
        except GradcheckError as error:
            raise AssertionError(f"the gradient of {name} is not the derivative of the loss: {_say(error)}") from None


class _Once(torch.autograd.Function):
    """A loss with its gradient computed in advance: gradcheck runs backward twice, which not every loss allows."""

    @staticmethod
    def forward(ctx: Any, computed: Callable[[], Result], name: str, leaf: Tensor) -> Tensor:
        """Return the loss."""
        with torch.enable_grad():
            value, gradients = computed()
        gradient = gradients[name]
        ctx.gradient = torch.zeros_like(leaf) if gradient is None else gradient
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None, Tensor]:
        """Return the gradient times the factor from above."""
        return None, None, upstream * ctx.gradient


def _say(error: GradcheckError) -> str:
    """Return gradcheck's message in one line, without its advice."""
    return " ".join(str(error).split("\n\n")[0].split())

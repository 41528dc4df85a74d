"""The plain, un-chunked, single-device loss, and the comparison of two losses by value and gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

ROUNDING = 1e-14
"""What float64 sums may differ by where the reference is 0 or nearly so, as a share of the largest number in play:
the loss, the largest gradient of any tensor, or 1."""


def plain_loss(generator: nn.Module, criterion: nn.Module, hidden: Tensor, target: Tensor, **per_token: Any) -> Tensor:
    """`criterion(generator(hidden), target)` on all tokens at once: what every other path must equal."""
    logits = generator(hidden, **per_token)
    total: Tensor = criterion(logits.flatten(0, -2), target.flatten())
    return total


def assert_same_gradients(
    candidate: Callable[[], Tensor],
    reference: Callable[[], Tensor],
    tensors: Mapping[str, Tensor],
    rtol: float = 1e-12,
) -> None:
    """Asserts that two scalar losses agree, and so do their gradients with respect to `tensors`.

    Plain equivalent: `torch.autograd.grad` of both, compared. The candidate's gradients are taken by
    `.backward()`, as a training loop does, from `.grad` set to None; frozen tensors must get none from either.

    Args:
        candidate: calls the loss under test, once.
        reference: calls the plain loss, once.
        tensors: leaves by name; every one that requires a gradient is compared.
        rtol: the largest difference allowed, as a share of the reference's largest entry.

    Raises:
        AssertionError: naming the tensor, the difference and the reference's size; also on nan.
    """
    value, gradients = _value_and_gradients(reference, tensors)
    got, got_gradients = _value_and_gradients(candidate, tensors)
    sizes = (g.abs().max().item() for g in (value, *gradients.values()) if g is not None and g.numel())
    floor = ROUNDING * max(1.0, *sizes)
    _assert_close("the loss", got, value, rtol, floor)
    for name, tensor in tensors.items():
        expected, found = gradients[name], got_gradients[name]
        if not tensor.requires_grad:
            assert found is None, f"{name} is frozen and got a gradient"
            continue
        zero = torch.zeros_like(tensor)
        found, expected = (zero if g is None else g for g in (found, expected))
        _assert_close(f"the gradient of {name}", found, expected, rtol, floor)


def _value_and_gradients(
    loss: Callable[[], Tensor], tensors: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    for tensor in tensors.values():
        tensor.grad = None
    value = loss()
    if value.requires_grad:
        value.backward()
    gradients = {name: tensor.grad for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    return value.detach(), gradients


def _assert_close(what: str, got: Tensor, expected: Tensor, rtol: float, floor: float) -> None:
    assert got.shape == expected.shape, f"{what} has shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    if not expected.numel():
        return
    size = expected.abs().max().item()
    apart = (got.to(expected) - expected).abs().max().item()
    assert apart <= rtol * size + floor, f"{what} is off by {apart:.3g} where the reference is {size:.3g} large"

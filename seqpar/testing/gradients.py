"""The plain, un-chunked, single-device loss, and the comparison of two losses by value and gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.testing.causes import FACTOR, Evidence, Result, gradients_by_use, likely_cause

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
    *,
    tokens: int | None = None,
) -> None:
    """Asserts that two scalar losses agree, and so do their gradients with respect to `tensors`.

    Plain equivalent: `torch.autograd.grad` of both, compared. The candidate's gradients are taken by
    `.backward()`, as a training loop does, from `.grad` set to None; frozen tensors must get none from either.
    `assert_same_loss` makes both callables of a generator and a criterion.

    Args:
        candidate: calls the loss under test; once, and if it is wrong once more, to find out why.
        reference: calls the plain loss; once, and if the candidate is wrong once more.
        tensors: leaves by name; every one that requires a gradient is compared.
        rtol: the largest difference allowed, as a share of the reference's largest entry.
        tokens: how many targets are not ignored; it only helps to name the cause.

    Raises:
        AssertionError: naming the tensor, the difference, the reference's size and the likely cause; also on nan.
    """
    expected = value_and_gradients(reference, tensors)
    got = value_and_gradients(candidate, tensors)
    for name, tensor in tensors.items():
        assert tensor.requires_grad or got[1][name] is None, f"{name} is frozen and got a gradient"
    try:
        assert_same_results(got, expected, rtol)
    except AssertionError as error:
        eighth = an_eighth(candidate, tensors)
        per_token = frozenset(name for name, t in tensors.items() if t.dim() > 1 and not isinstance(t, nn.Parameter))
        uses = gradients_by_use(reference, tensors)
        cause = likely_cause(Evidence(got, expected, eighth, uses, per_token, tokens))
        raise AssertionError(f"{error}\n{cause}") from None


def assert_same_results(got: Result, expected: Result, rtol: float = 1e-12) -> None:
    """Asserts that two losses and their gradients, taken already (on another rank, say), agree.

    Args:
        got: the loss under test, and its gradients by name.
        expected: the plain ones, under the same names. A gradient of None counts as 0.
        rtol: as `assert_same_gradients`.

    Raises:
        AssertionError: naming the tensor, the difference and the reference's size; also on nan.
    """
    (value, gradients), (plain, plain_gradients) = got, expected
    assert gradients.keys() == plain_gradients.keys(), f"{sorted(gradients)} is not {sorted(plain_gradients)}"
    sizes = (g.abs().max().item() for g in (plain, *plain_gradients.values()) if g is not None and g.numel())
    floor = ROUNDING * max(1.0, *sizes)
    _assert_close("the loss", value, plain, rtol, floor)
    for name, plain_gradient in plain_gradients.items():
        pair = gradients[name], plain_gradient
        shape = next((g for g in pair if g is not None), None)
        if shape is not None:
            found, reference = (torch.zeros_like(shape) if g is None else g for g in pair)
            _assert_close(f"the gradient of {name}", found, reference, rtol, floor)


def value_and_gradients(loss: Callable[[], Tensor], tensors: Mapping[str, Tensor]) -> Result:
    """The loss, and what one `backward()` leaves in each tensor's `.grad`, which is None before and after."""
    for tensor in tensors.values():
        tensor.grad = None
    value = loss()
    if value.requires_grad:
        value.backward()
    gradients = {name: tensor.grad for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    return value.detach(), gradients


def an_eighth(loss: Callable[[], Tensor], tensors: Mapping[str, Tensor]) -> Result | None:
    """The loss times `FACTOR` and its gradients; None where the loss cannot be called again."""
    try:
        return value_and_gradients(lambda: loss() * FACTOR, tensors)
    except Exception:  # there is a failure to report already
        return None


def _assert_close(what: str, got: Tensor, expected: Tensor, rtol: float, floor: float) -> None:
    assert got.shape == expected.shape, f"{what} has shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    if not expected.numel():
        return
    size = expected.abs().max().item()
    apart = (got.to(expected) - expected).abs().max().item()
    assert apart <= rtol * size + floor, f"{what} is off by {apart:.3g} where the reference is {size:.3g} large"

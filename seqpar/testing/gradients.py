"""Compare two losses by value and by every gradient; the plain, un-chunked, single-device loss is one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.core.checks import PROVED, check_function, check_number, check_type
from seqpar.testing.causes import likely_cause
from seqpar.testing.evidence import FACTOR, SOFTCAPS, Evidence, Result, dense, gradients_by_use, repeat_loss
from seqpar.testing.smoothing_causes import OtherSmoothing

__tracebackhide__ = True  # pytest shows the call that failed, and the sentence
RTOL = 1e-12
"""The allowed difference, relative to the largest number."""
ROUNDING = 1e-14
"""The difference between float64 sums that counts as rounding if the reference is 0 or nearly so, relative to the
largest of the loss, the gradients and 1."""


def plain_loss(generator: nn.Module, criterion: nn.Module, hidden: Tensor, target: Tensor, **per_token: Any) -> Tensor:
    """Return `criterion(generator(hidden), target)` on all tokens at once, which every other path must equal.

    Example:
        >>> from seqpar.testing import plain_loss
        >>> generator, criterion = nn.Linear(8, 50), seqpar.CrossEntropy()
        >>> hidden, target = torch.randn(2, 6, 8), torch.randint(50, (2, 6))
        >>> engine = seqpar.LossCompute(generator, criterion, chunk_tokens=4)
        >>> torch.allclose(engine(hidden, target).total, plain_loss(generator, criterion, hidden, target))
        True
    """
    logits = generator(hidden, **per_token)
    total: Tensor = criterion(logits.flatten(0, -2), target.flatten())
    return total


def assert_same_gradients(
    candidate: Callable[[], Tensor],
    reference: Callable[[], Tensor],
    tensors: Mapping[str, Tensor],
    rtol: float = RTOL,
    *,
    tokens: int | None = None,
) -> None:
    """Assert that two scalar losses are equal, and so are their gradients with respect to `tensors`.

    Plain equivalent: compare `torch.autograd.grad` of both. The gradients are computed by `.backward()`, as in a
    training loop, with `.grad` set to None before; frozen tensors must not receive a gradient from the candidate.
    `assert_same_loss` creates both functions from a generator and a criterion.

    Args:
        candidate: returns the loss under test; called once, and once more to find the cause if it is wrong.
        reference: returns the plain loss; called once, and several more times if the candidate is wrong.
        tensors: leaves by name; every one that requires a gradient is compared.
        rtol: the largest difference allowed, relative to the reference's largest entry. Differences up to 1e-14 of the
            largest number of all, or of 1, count as rounding: scale up a loss whose numbers are all smaller.
        tokens: the number of targets that are not ignored; it only helps to name the cause.

    Raises:
        AssertionError: the losses differ or are nan; the message names the tensor, the difference, the reference's size
            and the likely cause.
        ValueError: nothing to compare: no tensors, a tensor that is not a leaf, or no gradient on either side.
        TypeError: a loss that is not a function, or does not return a tensor.

    Example:
        >>> from seqpar.testing import assert_same_gradients
        >>> hidden, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (6, 50))
        >>> target = torch.randint(50, (6,))
        >>> plain = lambda: F.cross_entropy(hidden @ weight.T, target, reduction="sum")
        >>> chunked = lambda: seqpar.linear_cross_entropy(hidden, weight, target).total
        >>> assert_same_gradients(chunked, plain, {"hidden": hidden, "weight": weight})
        >>> assert_same_gradients(lambda: 2 * chunked(), plain, {"hidden": hidden, "weight": weight})
        Traceback (most recent call last):
            ...
        AssertionError: Likely cause: accumulation: all gradients are 2 times the plain ones...
    """
    check_number(rtol, "rtol", at_least=0)
    check_leaves(tensors)
    expected = value_and_gradients(reference, tensors, "reference")
    with proving():
        got = value_and_gradients(candidate, tensors, "candidate")
    refuse_no_gradients(got, expected, tensors)
    # Everything else may be right, so this is checked separately
    for name, tensor in tensors.items():
        if not tensor.requires_grad and got[1][name] is not None:
            raise AssertionError(f"{name} is frozen and got a gradient")
    off = first_difference(got, expected, rtol)
    if off and not is_shown():
        raise AssertionError(off)
    if off:
        eighth = an_eighth(candidate, tensors)
        evidence = Evidence(
            got,
            expected,
            eighth,
            an_eighth(reference, tensors),
            gradients_by_use(reference, tensors),
            frozenset(name for name, t in tensors.items() if t.dim() > 1 and not isinstance(t, nn.Parameter)),
            tokens,
            again=repeat_loss(reference),
            imagined=imagine(partial(under, reference, tensors)),
            smoothed=lambda *smoothing: under(reference, tensors, OtherSmoothing(*smoothing)),
        )
        raise AssertionError(f"{likely_cause(evidence)}\n{off}")


def hypothesis_context() -> Any:
    """Return hypothesis's own record of the test that this is called in; None outside its tests."""
    control = sys.modules.get("hypothesis.control")
    if control is None or not control.currently_in_test_context():
        return None
    return control.current_build_context()


def is_shown() -> bool:
    """Return whether a failure will be shown: of those that hypothesis tries, only the smallest is."""
    context = hypothesis_context()
    return context is None or getattr(context, "is_final", True)


@contextmanager
def proving() -> Iterator[None]:
    """Compute the loss under test in a context that refuses adapters which would leave the plain loss in place."""
    before = PROVED.set(True)
    try:
        yield
    finally:
        PROVED.reset(before)


def assert_same_results(got: Result, expected: Result, rtol: float = RTOL) -> None:
    """Assert that two losses and their gradients, computed earlier (on another rank, say), are equal.

    An infinite number equals only the same infinity in the same position; nan equals nothing.

    Args:
        got: the loss under test, and its gradients by name.
        expected: the plain ones, under the same names. A gradient of None counts as 0.
        rtol: as in `assert_same_gradients`.

    Raises:
        AssertionError: they differ or are nan; the message names the tensor, the difference and the reference's size.

    Example:
        >>> from seqpar.testing import assert_same_results, plain_value_and_gradients
        >>> hidden, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (6, 50))
        >>> target = torch.randint(50, (6,))
        >>> loss = seqpar.linear_cross_entropy(hidden, weight, target).total
        >>> loss.backward()
        >>> expected = plain_value_and_gradients(hidden, weight, target)
        >>> assert_same_results((loss, {"hidden": hidden.grad, "weight": weight.grad}), expected)
        >>> assert_same_results((loss, {"hidden": hidden.grad, "weight": None}), expected)
        Traceback (most recent call last):
            ...
        AssertionError: the gradient of weight is off by ...
    """
    check_number(rtol, "rtol", at_least=0)
    if off := first_difference(_dense(got), _dense(expected), rtol):
        raise AssertionError(off)


def first_difference(got: Result, expected: Result, rtol: float) -> str:
    """Return the first number that is too far from the expected one, in words; empty if none is."""
    value, gradients = got
    plain, plain_gradients = expected
    if gradients.keys() != plain_gradients.keys():
        return f"{sorted(gradients)} is not {sorted(plain_gradients)}"
    largest = max(size_of(t) for t in (plain, *plain_gradients.values()) if t is not None)
    # A gradient that is 0 in exact arithmetic is rounding noise in both, of about this size
    floor = ROUNDING * max(1.0, largest)
    compared = [("the loss", value, plain)]
    for name, plain_gradient in plain_gradients.items():
        gradient = gradients[name]
        # No gradient is a gradient of 0
        if gradient is None and plain_gradient is not None:
            gradient = torch.zeros_like(plain_gradient)
        if plain_gradient is None and gradient is not None:
            plain_gradient = torch.zeros_like(gradient)
        if gradient is not None and plain_gradient is not None:
            compared.append((f"the gradient of {name}", gradient, plain_gradient))
    return next(filter(None, (difference(*one, rtol, floor) for one in compared)), "")


def under(loss: Callable[[], Tensor], tensors: Mapping[str, Tensor], mode: AbstractContextManager[Any]) -> Result:
    """Return the loss and its gradients under a mode."""
    with mode:
        return value_and_gradients(loss, tensors)


def imagine(compute: Callable[[AbstractContextManager[Any]], Result]) -> list[tuple[str, Callable[[], Result]]]:
    """Return the mistakes that a mode makes in any loss, each in words and as a function; the first is no mistake."""
    return [("", lambda: compute(nullcontext())), *((said, partial(compute, mode)) for said, mode in SOFTCAPS)]


def refuse_no_gradients(got: Result, expected: Result, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if neither loss has a gradient for any tensor, so that there would be nothing to compare."""
    wanted = [name for name, tensor in tensors.items() if tensor.requires_grad]
    if wanted and all(of[1][name] is None for of in (got, expected) for name in wanted):
        raise ValueError(
            f"neither loss has a gradient with respect to any of {wanted}, so there is none to compare; call both "
            "outside torch.no_grad(), with these tensors themselves"
        )


def value_and_gradients(loss: Callable[[], Tensor], tensors: Mapping[str, Tensor], what: str = "loss") -> Result:
    """Return the loss, and each tensor's `.grad` after one `backward()`; `.grad` is None before and after."""
    # Because `backward` adds to whatever is in `.grad`
    for tensor in tensors.values():
        tensor.grad = None
    check_function(loss, what, "a function that returns the loss")
    value = check_type(loss(), what, Tensor, "one tensor (the `total` of a TokenLoss)", verb="returned")
    if value.numel() != 1:
        raise ValueError(f"{what} returned shape {tuple(value.shape)}; it must return one number, such as the sum")
    if value.requires_grad:
        value.backward()
    gradients = {name: tensor.grad for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    return _dense((value.detach(), gradients))


def an_eighth(loss: Callable[[], Tensor], tensors: Mapping[str, Tensor]) -> Result | None:
    """Return the loss times `FACTOR` and its gradients; None if the loss cannot be called again."""
    try:
        return value_and_gradients(lambda: loss() * FACTOR, tensors)
    except Exception:
        # The caller is about to report the first failure, which this one must not hide
        return None


def check_leaves(tensors: Mapping[str, Tensor]) -> None:
    """Raise TypeError or ValueError unless this is a dict of at least one named leaf."""
    check_type(tensors, "tensors", Mapping, "a dict of names and tensors")
    if not tensors:
        raise ValueError("tensors is empty; name at least one tensor whose gradient is to be compared")
    for name, tensor in tensors.items():
        check_type(tensor, f"tensors[{name!r}]", Tensor, "a tensor")
        if not tensor.is_leaf:
            raise ValueError(
                f"tensors[{name!r}] is not a leaf, and backward stores gradients only in leaves; give the parameter "
                "or the input that it was computed from"
            )


def _dense(result: Result) -> Result:
    """Return the same numbers without sparse layouts."""
    value, gradients = result
    return value, {name: g if g is None else dense(g) for name, g in gradients.items()}


def size_of(tensor: Tensor) -> float:
    """Return the largest absolute value among the finite entries; 0 if there are none."""
    finite = tensor[tensor.isfinite()]
    if not finite.numel():
        return 0.0
    return finite.abs().max().item()


def difference(what: str, got: Tensor, expected: Tensor, rtol: float, floor: float) -> str:
    """Say what is wrong unless |got - expected| <= rtol x (the largest expected number) + floor, for each number."""
    if got.shape != expected.shape:
        return f"{what} has shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    if expected.isnan().any():
        return f"{what} is off: the reference is nan there, so nothing can be compared with it"
    # In the wider dtype, so that a large float64 number does not become infinite in float32
    wider = torch.promote_types(got.dtype, expected.dtype)
    got = got.to(expected.device, wider)
    expected = expected.to(wider)
    # inf - inf is nan, so infinities are compared separately
    infinite = expected.isinf()
    if not torch.equal(got[infinite], expected[infinite]):
        return f"{what} is off where the reference is infinite"
    size = size_of(expected)
    # Relative to the largest number: small results of a sum carry the rounding of its large terms
    apart = (got - expected)[~infinite].abs()
    # Not `any(apart > ...)`, which is false for nan
    if (apart <= rtol * size + floor).all():
        return ""
    return f"{what} is off by {apart.max().item():.3g} where the reference is {size:.3g} large"

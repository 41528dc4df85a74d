"""Say which argument is at fault where a generator fails on the rows that it is given."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from seqpar.engine.pair import Project


def first_scores(
    generator: nn.Module,
    scores: Project,
    shape: tuple[int, ...],
    rows: Sequence[Tensor],
    names: Sequence[str],
    target_shape: Sequence[int],
) -> Tensor:
    """Return `scores(shape, rows)`; rephrase an error of torch's as one about an argument, where that is the cause.

    It is the cause if the generator takes zeros of another dtype or size in its place.

    Raises:
        TypeError: hidden has another dtype than all of the generator's parameters.
        ValueError: hidden has another width, or a per-token tensor has target's shape where it needs one more
            dimension.
    """

    def takes(other: Sequence[Tensor]) -> bool:
        # An index beyond the zeros, or an assertion of the generator's own, says no as well
        with contextlib.suppress(Exception):
            scores(shape, other)
            return True
        return False

    try:
        return scores(shape, rows)
    except (RuntimeError, IndexError) as error:
        cause = _hidden_at_fault(generator, takes, rows) or _column_at_fault(takes, rows, names, target_shape)
        if cause is None:
            raise
        kind, words = cause
        raise kind(f"{words} ({str(error).splitlines()[0]})") from error


Cause = tuple[type[Exception], str]
"""The error to raise, and its words."""


def _hidden_at_fault(
    generator: nn.Module, takes: Callable[[Sequence[Tensor]], bool], rows: Sequence[Tensor]
) -> Cause | None:
    """Return what is wrong with hidden: its width, its dtype, or nothing that another one would mend."""
    hidden, *extra = rows
    width = hidden.size(-1)
    parameters = [p for p in generator.parameters() if p.is_floating_point()]
    dtypes = {hidden.dtype, *(p.dtype for p in parameters)}
    sizes = sorted({size for p in parameters for size in p.shape} - {width})
    for dtype in dtypes - {hidden.dtype}:
        if takes([hidden.to(dtype), *extra]):
            return TypeError, (
                f"hidden has dtype {hidden.dtype} and the generator's parameters {dtype}; cast one, or use autocast"
            )
    for dtype, size in itertools.product(dtypes, sizes):
        if takes([hidden.new_zeros(len(hidden), size, dtype=dtype), *extra]):
            return ValueError, f"the generator does not take hidden's last size {width}; it takes {size}"
    return None


def _column_at_fault(
    takes: Callable[[Sequence[Tensor]], bool],
    rows: Sequence[Tensor],
    names: Sequence[str],
    target_shape: Sequence[int],
) -> Cause | None:
    """Return which per-token tensors are taken for one number a token and are (batch, source) instead, if any are.

    A source as long as the target is not noticed by its shape.
    """
    of_target = [i for i, t in enumerate(rows) if i and t.dim() == 1]
    for some in (*([i] for i in of_target), of_target):
        longer = [t.new_zeros(len(t), target_shape[-1]) if i in some else t for i, t in enumerate(rows)]
        if some and takes(longer):
            called = " and ".join(names[i - 1] for i in some)
            shape = tuple(target_shape)
            return ValueError, (
                f"{called} of shape {shape} has one number for each token, and the generator takes a row for each; for "
                f"a source of {shape[-1]} positions pass {names[some[0] - 1]}.unsqueeze(1).expand(-1, {shape[-1]}, -1)"
            )
    return None

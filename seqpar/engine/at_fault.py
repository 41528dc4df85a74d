"""Say which argument is at fault when a generator fails on the rows that it is given."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from seqpar.engine.trial import Trial


def first_scores(trial: Trial, copy: nn.ModuleDict) -> Tensor:
    """Return the scores of the trial's rows; if an argument causes an error of torch's, raise one about it instead.

    An argument is the cause if the generator takes zeros of a different dtype or size in its place.

    Raises:
        TypeError: hidden's dtype is not that of the generator's parameters.
        ValueError: hidden has a different width, or a per-token tensor has target's shape but needs one more dimension.
    """

    def takes(other: Sequence[Tensor]) -> bool:
        # An index out of range for the zeros, or the generator's own assertion, means no as well
        with contextlib.suppress(Exception):
            trial.scores(copy, shape, other)
            return True
        return False

    shape = trial.shape(len(trial.rows[0]))
    try:
        return trial.scores(copy, shape, trial.rows)
    except (RuntimeError, IndexError) as error:
        cause = _hidden_at_fault(copy["generator"], takes, trial.rows) or _column_at_fault(trial, takes)
        if cause is None:
            raise
        kind, words = cause
        raise kind(f"{words} ({str(error).splitlines()[0]})") from error


Cause = tuple[type[Exception], str]
"""The class of the error to raise, and its message."""
Takes = Callable[[Sequence[Tensor]], bool]
"""Whether the generator accepts such rows."""


def _hidden_at_fault(generator: nn.Module, takes: Takes, rows: Sequence[Tensor]) -> Cause | None:
    """Return what is wrong with hidden, its width or its dtype; None if a different one would not help."""
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


def _column_at_fault(trial: Trial, takes: Takes) -> Cause | None:
    """Return which per-token tensors were taken for one number per token but are (batch, source), if any are.

    Their shape does not tell if the source is as long as the target.
    """
    shape = tuple(trial.target_shape)
    of_target = [i for i, t in enumerate(trial.rows) if i and t.dim() == 1]
    for some in (*([i] for i in of_target), of_target):
        longer = [t.new_zeros(len(t), shape[-1]) if i in some else t for i, t in enumerate(trial.rows)]
        if some and takes(longer):
            names = [trial.names[i - 1] for i in some]
            return ValueError, (
                f"{' and '.join(names)} of shape {shape} has one number for each token, and the generator takes a row "
                f"for each; for a source of {shape[-1]} positions pass {names[0]}.unsqueeze(1).expand(-1, {shape[-1]}, "
                "-1)"
            )
    return None

"""Compare any implementation of the loss with the plain one, by value and by every gradient.

- `assert_same_loss`, `assert_same_gradients`: compare your generator, criterion, devices and loss with the plain
  single-device computation; a failure names the likely cause. `assert_same_loss(ranks=2)` does so over live ranks.
- `assert_same_step`: compare one step of any trainer, in each `Layout` of processes and micro-batches, with the step of
  a single process.
- `assert_numerical_gradients`: compare a loss's gradients with differences of its values (`torch.autograd.gradcheck`).
- `plain_linear_cross_entropy`, `plain_value_and_gradients`: the plain reference for `linear_cross_entropy` with every
  option, in a few lines of torch without chunks; `plain_rank`: the reference for `token_scores(..., rank=True)`.
- `seqpar.testing.strategies` (needs hypothesis) draws test cases.
- `rank_pool`, a pytest fixture (`seqpar.testing.plugin`), and `seqpar.testing.ranks`: live ranks over gloo.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqpar.testing.gradients import assert_same_gradients, assert_same_results, plain_loss
    from seqpar.testing.numerical import assert_numerical_gradients
    from seqpar.testing.plain_reference import (
        plain_linear_cross_entropy,
        plain_rank,
        plain_value_and_gradients,
    )
    from seqpar.testing.same_loss import assert_same_loss
    from seqpar.testing.same_step import assert_same_step
    from seqpar.testing.step_run import Layout

_FILES = {
    "Layout": "step_run",
    "assert_numerical_gradients": "numerical",
    "assert_same_gradients": "gradients",
    "assert_same_loss": "same_loss",
    "assert_same_results": "gradients",
    "assert_same_step": "same_step",
    "plain_linear_cross_entropy": "plain_reference",
    "plain_loss": "gradients",
    "plain_rank": "plain_reference",
    "plain_value_and_gradients": "plain_reference",
}
"""The file of each public name."""

__all__ = [
    "Layout",
    "assert_numerical_gradients",
    "assert_same_gradients",
    "assert_same_loss",
    "assert_same_results",
    "assert_same_step",
    "plain_linear_cross_entropy",
    "plain_loss",
    "plain_rank",
    "plain_value_and_gradients",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that pytest can load the plugin in this package without torch."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)

"""What proves a loss: hold any implementation against the plain one, value and every gradient.

- `assert_same_loss`, `assert_same_gradients`: your generator, criterion, devices and loss against the plain
  single-device computation; a failure names the likely cause.
- `seqpar.testing.strategies` (needs hypothesis) draws the cases.
- `rank_pool`, a pytest fixture (`seqpar.testing.plugin`), and `seqpar.testing.ranks`: live ranks over gloo.
- `python -m seqpar.testing.conformance`: any linear cross-entropy held against the same checks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqpar.testing.gradients import assert_same_gradients, assert_same_results, plain_loss
    from seqpar.testing.same_loss import assert_same_loss

__all__ = ["assert_same_gradients", "assert_same_loss", "assert_same_results", "plain_loss"]


def __getattr__(name: str) -> Any:  # so that pytest can load the plugin in here without torch
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'same_loss' if name == 'assert_same_loss' else 'gradients'}"), name)

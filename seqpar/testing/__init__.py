"""What proves a loss: hold any implementation against the plain one, value and every gradient.

`seqpar.testing.strategies` (needs hypothesis) draws the cases.
"""

from seqpar.testing.gradients import assert_same_gradients, assert_same_results, plain_loss

__all__ = ["assert_same_gradients", "assert_same_results", "plain_loss"]

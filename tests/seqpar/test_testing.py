"""The kit that proves losses fails where it should."""

import pytest
import torch
from torch import nn

from seqpar.testing import assert_same_gradients, plain_loss

WRONG = {
    "value": lambda loss: loss + 1e-9,
    "gradient": lambda loss: loss + 1e-9 * (loss - loss.detach()),
    "nan": lambda loss: loss * float("nan"),
    "no gradient": lambda loss: loss.detach(),
    "shape": lambda loss: loss.expand(1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_loss_is_caught(wrong):
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(AssertionError, match=r"the (loss|gradient of w)"):
        assert_same_gradients(lambda: WRONG[wrong](w.square().sum()), lambda: w.square().sum(), {"w": w})


def test_a_gradient_for_a_frozen_tensor_is_caught():
    frozen, w = torch.ones(2), torch.ones(2, requires_grad=True)

    def candidate():
        frozen.grad = torch.ones(2)
        return w.sum()

    with pytest.raises(AssertionError, match="frozen is frozen and got a gradient"):
        assert_same_gradients(candidate, lambda: w.sum(), {"w": w, "frozen": frozen})


def test_it_leaves_no_gradients_behind_and_accepts_the_same_loss():
    generator = nn.Linear(2, 3)
    hidden, target = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
    criterion = nn.CrossEntropyLoss(reduction="sum")
    assert_same_gradients(
        lambda: plain_loss(generator, criterion, hidden, target),
        lambda: nn.functional.cross_entropy(generator(hidden), target, reduction="sum"),
        dict(generator.named_parameters()),
    )
    assert generator.weight.grad is None

"""The criteria of `rows/criteria.py`, called by themselves: the engine gives them no row that is ignored."""

import pytest
import torch

import seqpar
from seqpar.rows.conventions import CONVENTIONS

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")

PADDING = 1


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("ignored", [torch.nan, -2.0])
def test_an_ignored_row_adds_nothing_to_the_loss_and_the_counts_even_if_it_is_no_number(convention, ignored):
    criterion = seqpar.LabelSmoothing(0.1, convention, ignore_index=PADDING)
    target = torch.tensor([0, PADDING, 3, PADDING, 2])
    kept = target != PADDING
    logits = torch.randn(5, 4, dtype=torch.float64)
    logits[~kept, 0] = ignored
    logits.requires_grad_()
    found, alone = criterion.token_loss(logits, target), criterion.token_loss(logits[kept], target[kept])
    assert [float(t) for t in found.detach()] == pytest.approx([float(t) for t in alone.detach()], rel=1e-12)
    gradient, of_kept = (torch.autograd.grad(loss.total, logits)[0][kept] for loss in (found, alone))
    torch.testing.assert_close(gradient, of_kept, rtol=1e-12, atol=0)
    if ignored == -2.0:
        (gradient,) = torch.autograd.grad(criterion(logits, target), logits)
        assert (gradient[~kept] == 0).all()

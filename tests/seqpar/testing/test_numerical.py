"""Gradients against differences of values, which see what a comparison of two losses cannot; and torch's opcheck."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import nn

import seqpar
from seqpar.linear import compiled_op
from seqpar.rows.criteria import ignored_target
from seqpar.testing import assert_numerical_gradients, assert_same_loss
from seqpar.testing.strategies import cases, criteria
from tests.backward import with_gradient


class Head(nn.Linear):
    """Half of the gradient gets through."""

    def forward(self, x):
        return super().forward(with_gradient(x, lambda upstream: upstream / 2))


def problem():
    torch.manual_seed(0)
    target = torch.tensor([[1, 2, 0], [4, 3, 1]])
    return nn.Linear(4, 5).double(), torch.randn(2, 3, 4).double().requires_grad_(), target


def test_a_wrong_backward_that_both_losses_share_is_found_by_differences_alone():
    _, hidden, target = problem()
    head, criterion = Head(4, 5).double(), seqpar.CrossEntropy()
    assert_same_loss(head, criterion, hidden, target)
    with pytest.raises(AssertionError, match=r"the gradient of hidden is not the derivative of the loss: .*analytical"):
        assert_numerical_gradients(
            lambda: criterion(head(hidden).flatten(0, 1), target.flatten()), {"hidden": hidden, "weight": head.weight}
        )


@given(case=cases(), criterion=criteria(13))
def test_seqpars_criteria_and_closed_forms_have_the_derivatives_of_their_values(case, criterion):
    generator, hidden = nn.Linear(case.width, 13).double(), case.hidden().requires_grad_()
    target = torch.randint(13, hidden.shape[:-1]).where(case.targets() != case.padding, ignored_target(criterion))
    engine = seqpar.LossCompute(generator, criterion, chunk_tokens=case.chunk_tokens, chunk_size=case.chunk_size)
    tensors = {"hidden": hidden, **dict(generator.named_parameters())}
    assert_numerical_gradients(lambda: engine(hidden, target).total, tensors)
    assert_numerical_gradients(lambda: criterion(generator(hidden).flatten(0, -2), target.flatten()), tensors)
    assert all(t.grad is None for t in tensors.values())


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1e4])
@pytest.mark.parametrize("wrong", [0.0, 0.5, 1.0])
def test_a_gradient_is_compared_whatever_its_size(size, wrong):
    head, hidden, target = problem()

    def loss():
        scores = head(hidden).flatten(0, 1)
        right = F.cross_entropy(scores, target.flatten())
        return size * (right.detach() + wrong * (right - right.detach()))

    tensors = {"hidden": hidden, "weight": head.weight}
    if wrong == 1:
        assert_numerical_gradients(loss, tensors)
        return
    with pytest.raises(AssertionError, match="the gradient of hidden is not the derivative of the loss"):
        assert_numerical_gradients(loss, tensors)


def test_what_differences_cannot_judge_is_refused_in_one_line():
    head, hidden, target = problem()
    tensors = {"hidden": hidden, "weight": head.weight}

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    first = r"\d" if hidden.device.type == "cuda" else "1"  # a GPU's dropout draws other numbers
    with pytest.raises(ValueError, match=rf"the loss is {first}.* in one call and \d.* in another, so .*; call \.eval"):
        assert_numerical_gradients(lambda: loss(F.dropout(head(hidden))), tensors)
    with pytest.raises(ValueError, match=r"the loss is torch.float32; differences of values need float64, from the in"):
        assert_numerical_gradients(lambda: loss(head(hidden).float()), tensors)
    narrow = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match=r"narrow is torch.float32; differences of values need float64"):
        assert_numerical_gradients(lambda: loss(head(hidden) * narrow), {"narrow": narrow})
    for number in ("nan", "inf"):
        with pytest.raises(ValueError, match=rf"the loss is {number}, of which there are no differences; give inputs"):
            assert_numerical_gradients(lambda number=number: loss(head(hidden)) * float(number), tensors)
    with pytest.raises(ValueError, match="tensors is empty"):
        assert_numerical_gradients(lambda: loss(head(hidden)), {})
    # What requires no gradient is left out, whatever it is
    frozen = {"scale": torch.ones(1), "classes": target}
    assert_numerical_gradients(lambda: loss(head(hidden) * frozen["scale"]), tensors | frozen)


# Of torch's own check, from torch 2.14 on
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.unswitched
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_compiled_operator_passes_torchs_own_check_of_operators(trained, dtype):
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*n, dtype=dtype, requires_grad=trained) for n in ((6, 4), (5, 4), (5,)))
    arguments = (hidden, weight, torch.tensor([1, 2, -100, 4, 3, 1]), bias, None, None)
    settings = (torch.ones((), dtype=torch.float64), -100, 0.1, "torch", 0.0, None, 1.0, 4, dtype, False)
    operator = compiled_op._operator
    checked = torch.library.opcheck(operator, (*arguments, *settings, [trained, trained, trained, False]))
    assert {*checked.values()} == {"SUCCESS"}

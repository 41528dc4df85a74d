"""Sampled softmax: its own published estimate exactly, the true loss where every class is drawn once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.testing import assert_same_gradients
from tests.seqpar.linear.linear_loss import linear_cases, plain_logits, plain_loss

LEAVES = ("hidden", "weight", "bias")


def estimate(hidden, weight, target, bias=None, *, classes, proposal, ignore_index):
    """sum over rows of log(exp z_y + sum over drawn k != y of exp z_k / (S proposal_k)) - z_y, class by class."""
    z, total = plain_logits(hidden, weight, bias), torch.zeros((), dtype=torch.float64)
    proposal = torch.ones(len(weight)).double() if proposal is None else proposal
    for row, gold in zip(z, target.flatten().tolist(), strict=True):
        if gold != ignore_index:
            # By logsumexp, which is exact where every draw is the target: the estimate is 0 then
            parts = [row[gold]]
            parts += [
                row[k] - (len(classes) * proposal[k] / proposal.sum()).log() for k in classes.tolist() if k != gold
            ]
            total = total + torch.stack(parts).logsumexp(0) - row[gold]
    return total


def small(case):
    """The tensors of a case that the estimate takes; inputs that make no exp overflow."""
    return {k: t for k, t in case.tensors().items() if k not in ("class_weight", "token_weight")}


@given(linear_cases(), st.integers(1, 20), st.booleans())
def test_value_and_gradient_are_those_of_the_estimate(case, samples, uniform):
    tensors, random = small(case), torch.Generator().manual_seed(case.seed)
    classes = torch.randint(case.vocab_size, (samples,), generator=random)
    proposal = None
    if not uniform:
        # A learned one has a gradient of its own, which the estimate does not give it
        learned = torch.rand(case.vocab_size, dtype=torch.float64, generator=random).requires_grad_()
        proposal = learned + 0.1
    options = {"classes": classes, "proposal": proposal, "ignore_index": case.padding}
    assert_same_gradients(
        lambda: (
            seqpar.sampled_cross_entropy(**tensors, **options, chunk_tokens=case.chunk_tokens).total * case.upstream
        ),
        lambda: estimate(**tensors, **options) * case.upstream,
        {name: tensors[name] for name in LEAVES if name in tensors},
    )


@given(linear_cases())
def test_with_every_class_drawn_once_it_is_the_loss_itself(case):
    tensors = small(case)
    exact = {
        "ignore_index": case.padding,
        "label_smoothing": 0.0,
        "smoothing_convention": "torch",
        "z_loss": 0.0,
        "softcap": None,
    }
    classes = torch.randperm(case.vocab_size, generator=torch.Generator().manual_seed(case.seed))
    assert_same_gradients(
        lambda: (
            seqpar.sampled_cross_entropy(
                **tensors, classes=classes, ignore_index=case.padding, chunk_tokens=case.chunk_tokens
            ).total
        ),
        lambda: plain_loss(**tensors, **exact),
        {name: tensors[name] for name in LEAVES if name in tensors},
    )


def test_it_nears_the_loss_as_more_classes_are_drawn():
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(64, 8), torch.randn(2000, 8), torch.randint(2000, (64,))
    exact = seqpar.linear_cross_entropy(hidden, weight, target).total
    apart = []
    for samples in (20, 200, 2000):
        draws = [torch.randint(2000, (samples,)) for _ in range(20)]
        losses = [seqpar.sampled_cross_entropy(hidden, weight, target, classes=c).total for c in draws]
        apart.append(float(torch.stack(losses).mean() - exact))
    assert apart[0] < apart[1] < apart[2] < 0
    assert abs(apart[2]) < 0.01 * exact


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"classes": torch.tensor([9])}, IndexError, r"classes are in \[9, 9\]; they must be in \[0, 9\)"),
        (
            {"classes": torch.tensor([0.5])},
            TypeError,
            "classes has dtype torch.float32; it must hold class indices, int64",
        ),
        ({"classes": torch.zeros(0, dtype=torch.int64)}, ValueError, r"it must be \(S,\), with one class or more"),
        ({"proposal": torch.ones(8)}, ValueError, r"proposal has shape \(8,\); it must be \(9,\)"),
        ({"proposal": torch.zeros(9)}, ValueError, "proposal is 0 for a drawn class"),
        ({"target": torch.full((6,), 9)}, IndexError, "target 9 at position"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(change, error, message):
    given = {"target": torch.zeros(6, dtype=torch.int64), "classes": torch.tensor([1, 2])}
    with pytest.raises(error, match=message):
        seqpar.sampled_cross_entropy(torch.randn(6, 3), torch.randn(9, 3), **(given | change))

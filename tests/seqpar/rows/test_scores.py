"""The scores of a row of logits and their gradient are autograd's, whatever factors arrive."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.linear.projection import Projection
from seqpar.rows.scores import FEW, RowFunction, Upstream
from seqpar.testing import assert_same_gradients, plain_linear_cross_entropy

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")


@given(st.integers(1, 5), st.integers(1, 7), st.data())
def test_beside_the_rest_of_the_classes_any_factors_give_autograds_gradient(rows, classes, data):
    """Those of a loss of log_rest alone add up to 0, which would hide a term that multiplies their sum."""
    given_classes = data.draw(st.integers(1, classes))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    logits = torch.randn(rows, classes, generator=g, dtype=torch.float64).requires_grad_()
    ids = torch.rand(rows, classes, generator=g).argsort(-1)[:, :given_classes]
    target = torch.randint(classes, (rows, 1), generator=g)
    u, r, f = torch.randn(3, rows, generator=g, dtype=torch.float64)
    u_ids = torch.randn(rows, given_classes, generator=g, dtype=torch.float64)

    log_p = logits.log_softmax(-1)
    is_given = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, value=True)
    plain = (u * log_p.gather(1, target)[:, 0]).sum() + (u_ids * log_p.gather(1, ids)).sum()
    plain = plain + (r * logits.logsumexp(-1)).sum()
    has_rest = given_classes < classes
    if has_rest:
        plain = plain + (f * log_p.masked_fill(is_given, -torch.inf).logsumexp(-1)).sum()
    (expected,) = torch.autograd.grad(plain, logits)

    function = RowFunction(rest=True, gaps=True)
    picked = torch.cat([target, ids], 1)
    made, sums = function.sums_(logits.detach().clone(), picked)
    upstream = Upstream(log_prob=u, lse=r, log_probs_at=u_ids, log_rest=f if has_rest else None)
    found = function.gradient_(made, picked, sums, upstream)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("every", [1, 3], ids=["all rows", "some rows"])
@pytest.mark.parametrize("apart", [0.0, 1e-9, -1e-9, 1e-4, 1.0])
def test_factors_of_rows_that_are_almost_1_are_not_taken_for_1(apart, every):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 4, generator=g, dtype=torch.float64).requires_grad_()
    weight = torch.randn(300, 4, generator=g, dtype=torch.float64).requires_grad_()
    target = torch.randint(300, (40,), generator=g)
    assert len(hidden) * len(weight) > FEW
    options = {"token_weight": torch.ones(40, dtype=torch.float64)}
    options["token_weight"][::every] += apart
    assert_same_gradients(
        lambda: seqpar.linear_cross_entropy(hidden, weight, target, **options).total,
        lambda: plain_linear_cross_entropy(hidden, weight, target, **options),
        {"hidden": hidden, "weight": weight},
    )


def test_a_row_function_computes_nothing_that_was_not_asked_for():
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    rows = Projection(weight, None, torch.float32, softcap=None, temperature=1.0)
    read, sums = rows.sums(rows.product(hidden), torch.tensor([[0], [1], [4]]), None, again=True)
    assert {name for name, t in sums._asdict().items() if t is not None} == {"best_N", "log_sum_N", "picked_NP"}
    assert read.softmax.shifted_NV is read.softmax.p_NV


def test_unless_a_row_function_is_told_otherwise_a_logit_may_be_minus_infinity():
    function = RowFunction(entropy=True)
    _, sums = function.sums_(torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([[0]]))
    assert float(function.scores(sums).entropy) == pytest.approx(math.log(2))

"""The equations of a row: conventions of smoothing as a table's entries, scores and criteria called by themselves."""

import itertools
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from torch import nn

import seqpar
from seqpar.linear import inputs
from seqpar.linear.projection import Projection
from seqpar.rows.conventions import CONVENTIONS, Convention, Shares, shares_of
from seqpar.rows.scores import FEW, RowFunction, Upstream
from seqpar.testing import assert_same_gradients, assert_same_loss, plain_linear_cross_entropy, plain_loss
from seqpar.testing.plain_reference import plain_smoothed_target
from seqpar.testing.strategies import criteria

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")


DOCS = Path(__file__).parents[3] / "docs"
EVERY = [Shares("", *flags) for flags in itertools.product([True, False], repeat=3)]
"""All that an entry can say."""
NEW = "a convention of this test"
EPS, PADDING = 0.3, 1


@pytest.fixture(params=EVERY, ids=lambda shares: "-".join(map(str, shares[1:])))
def new(request, monkeypatch):
    """An entry that the table gets for one test; what follows from an entry is otherwise remembered."""
    monkeypatch.setitem(CONVENTIONS, NEW, request.param)
    inputs.whole_soft_target.cache_clear()
    inputs._numbers_are_right.cache_clear()
    return request.param


def by_hand(shares, hidden, weight, target, counted):
    """The summed loss, from the sentences of `Shares`, one class at a time."""
    losses = []
    for row, y in zip((hidden @ weight.t())[counted], target[counted].tolist(), strict=True):
        kept = [k for k in range(len(row)) if (shares.target or k != y) and (shares.padding or k != PADDING)]
        q = {k: (1 - EPS) * (k == y) + EPS / len(kept) * (k in kept) for k in range(len(row))}
        loss = sum(-q[k] * torch.log_softmax(row, -1)[k] for k in q)
        if shares.kl:
            loss = loss + sum(x * torch.tensor(x, dtype=torch.float64).log() for x in q.values() if x)
        losses.append(loss)
    return torch.stack(losses).sum()


def test_an_entry_is_enough_for_losses_and_reference(new):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (6, 5))
    target = torch.tensor([0, 2, PADDING, 4, PADDING, 0])
    head = nn.Linear(3, 5, bias=False)
    head.weight = nn.Parameter(weight.detach())
    options = {"ignore_index": PADDING, "label_smoothing": EPS, "smoothing_convention": NEW}
    criterion = seqpar.LabelSmoothing(EPS, NEW, ignore_index=PADDING)
    engine = seqpar.LossCompute(head, criterion, chunk_tokens=4)
    kept = target != PADDING
    for loss, leaves in (
        (
            lambda: seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=4, **options).total,
            (hidden, weight),
        ),
        (lambda: plain_linear_cross_entropy(hidden, weight, target, **options), (hidden, weight)),
        (lambda: criterion(hidden @ weight.t(), target), (hidden, weight)),
        (lambda: engine(hidden, target).total, (hidden,)),
    ):
        plain = partial(by_hand, new, hidden, weight, target, kept)
        assert_same_gradients(loss, plain, dict(zip(("hidden", "weight"), leaves, strict=False)))
    assert str(engine.explain()).startswith("by formula")


def test_an_entry_is_enough_for_strategies_and_mistakes(new):
    once = settings(max_examples=2000, database=None)
    drawn = find(criteria(4, 0), lambda made: getattr(made, "smoothing_convention", "") == NEW, settings=once)
    assert drawn.smoothing_convention == NEW

    def otherwise_smoothed(generator, criterion, hidden, target):
        return plain_loss(generator, seqpar.LabelSmoothing(0.1, NEW, ignore_index=0), hidden, target)

    own = "fairseq" if new.target else "torch"
    # Those that have the same gradient, because they differ in a constant
    alike = [name for name, other in CONVENTIONS.items() if other[1:3] == new[1:3]]
    criterion, target = seqpar.LabelSmoothing(0.1, own, ignore_index=0), torch.arange(5)
    said = f"the smoothing convention '({'|'.join(alike)})', where the criterion has '{own}'"
    with pytest.raises(AssertionError, match=said):
        assert_same_loss(nn.Linear(3, 5), criterion, torch.randn(5, 3), target, loss=otherwise_smoothed)


def test_a_target_distribution_is_one_wherever_it_is_defined(new):
    target = torch.tensor([0, 2, 3])
    for classes in range(1, 6):
        for padding in (-100, 0, classes - 1):
            if not new.is_defined(classes, padding):
                continue
            kept = target[(target < classes) & (target != padding)]
            q = plain_smoothed_target(kept, classes, EPS, NEW, padding)
            torch.testing.assert_close(q.sum(-1), torch.ones(len(kept), dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("unknown", ["fairsec", "fairseq ", "Torch", "", None, 3, ["torch"]])
def test_an_unknown_convention_is_one_sentence_everywhere(unknown):
    hidden, weight, target = torch.randn(2, 3), torch.randn(5, 3), torch.tensor([1, 4])
    calls = (
        lambda: shares_of(unknown),
        lambda: seqpar.LabelSmoothing(0.1, unknown),
        lambda: seqpar.linear_cross_entropy(hidden, weight, target, smoothing_convention=unknown),
        lambda: plain_linear_cross_entropy(hidden, weight, target, smoothing_convention=unknown),
        lambda: plain_smoothed_target(target, 5, 0.1, unknown, -100),
    )
    for call in calls:
        with pytest.raises(ValueError, match="it must be 'torch', 'fairseq'") as raised:
            call()
        assert str(raised.value).startswith(f"smoothing_convention is {unknown!r}; ")
        assert all(repr(name) in str(raised.value) for name in CONVENTIONS)


def test_names_are_the_same_for_type_checkers_and_the_pages():
    assert [*CONVENTIONS] == [*get_args(Convention)]
    for name in CONVENTIONS:
        assert f'\n| `"{name}"` |' in (DOCS / "numerics.md").read_text()
        assert f'"{name}": eps' in seqpar.LabelSmoothing.__doc__
        assert f'"{name}"' in seqpar.linear_cross_entropy.__doc__
    (row,) = [line for line in (DOCS / "training.md").read_text().splitlines() if "`smoothing_convention`" in line]
    assert all(f"`{name}`" in row for name in CONVENTIONS)


def test_the_table_needs_no_torch():
    code = "import sys, seqpar.rows.conventions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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

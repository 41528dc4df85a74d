"""A smoothing convention is one entry of a table: losses, reference and strategies know it from there."""

import itertools
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import find, settings
from torch import nn

import seqpar
from seqpar.linear import inputs
from seqpar.rows.conventions import CONVENTIONS, Convention, Shares, shares_of
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
    inputs._soft_target.cache_clear()
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

"""Targets of several prediction heads, and one projection for all of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.objectives import head_targets

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")

IGNORE = -7


def naive(target, ids, heads):
    """Head k's target at each step, by a loop."""
    return [
        [
            target[t + k] if t + k < len(target) and ids[t] == ids[t + k] and ids[t] >= 0 else IGNORE
            for t in range(len(target))
        ]
        for k in range(heads)
    ]


@given(st.lists(st.integers(0, 4), max_size=4), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_a_head_predicts_further_on_within_its_own_sequence(lengths, heads, gaps, seed):
    ids = [s for s, length in enumerate(lengths) for s in ([-1] * gaps + [s] * length)]
    target = torch.randint(0, 9, (len(ids),), generator=torch.Generator().manual_seed(seed)).tolist()
    found = head_targets(
        torch.tensor(target, dtype=torch.int64),
        heads,
        ignore_index=IGNORE,
        segment_ids=torch.tensor(ids, dtype=torch.int64),
    )
    assert found.tolist() == naive(target, ids, heads)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_without_segments_every_row_is_one_sequence(heads):
    target = torch.tensor([[3, 1, IGNORE], [5, 2, 8]], dtype=torch.int32)
    found = head_targets(target, heads, ignore_index=IGNORE)
    assert found.dtype == torch.int64
    assert found.shape == (heads, 2, 3)
    rows = [naive(row, [0, 0, 0], heads) for row in target.tolist()]
    assert found.transpose(0, 1).tolist() == rows


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 5), st.integers(0, 2**31))
def test_one_projection_of_all_heads_is_the_sum_of_one_projection_each(heads, batch, time, seed):
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(heads, batch, time, 4, dtype=torch.float64, generator=random, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, generator=random, requires_grad=True)
    targets = head_targets(torch.randint(0, 7, (batch, time), generator=random), heads)
    loss = seqpar.linear_cross_entropy(hidden, weight, targets)
    each = [seqpar.linear_cross_entropy(h, weight, t) for h, t in zip(hidden, targets, strict=True)]
    assert loss.tokens == sum(e.tokens for e in each) == batch * sum(max(0, time - k) for k in range(heads))
    torch.testing.assert_close(loss.total, sum(e.total for e in each), rtol=1e-12, atol=1e-13)
    ours = torch.autograd.grad(loss.total, (hidden, weight))
    theirs = torch.autograd.grad(sum(e.total for e in each), (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_the_scores_of_all_heads_at_once_are_those_of_each():
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 2, 5, 4, dtype=torch.float64, generator=random)
    weight = torch.randn(7, 4, dtype=torch.float64, generator=random)
    targets = head_targets(torch.randint(0, 7, (2, 5), generator=random), 3)
    each = torch.stack([seqpar.token_scores(h, weight, t).log_prob for h, t in zip(hidden, targets, strict=True)])
    torch.testing.assert_close(seqpar.token_scores(hidden, weight, targets).log_prob, each, rtol=1e-12, atol=0)

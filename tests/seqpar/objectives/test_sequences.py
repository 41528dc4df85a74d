"""From tokens to sequences and back, padded and packed; targets of several prediction heads."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.objectives import (
    head_targets,
    padded_segments,
    sequence_lengths,
    sequence_means,
    sequence_sums,
    spread_to_tokens,
)
from tests.seqpar.objectives.batches import assert_same_losses, batches, numbers

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")


ZERO = torch.zeros((), dtype=torch.float64)


@given(batches())
def test_sums_means_and_lengths_are_those_of_a_loop_in_either_layout(batch):
    def sums():
        return [sum((batch.log_prob[p] for p in batch.tokens(s)), start=ZERO) for s in range(batch.sequences)]

    def means():
        return [total / max(1, len(batch.tokens(s))) for s, total in enumerate(sums())]

    leaves = {"log_prob": batch.log_prob}
    layout = batch.segment_ids, batch.sequences
    assert_same_losses(lambda: sequence_sums(batch.log_prob, *layout), sums, leaves)
    assert_same_losses(lambda: sequence_means(batch.log_prob, *layout), means, leaves)
    lengths = sequence_lengths(*layout)
    assert lengths.dtype == torch.int64
    assert lengths.tolist() == [len(batch.tokens(s)) for s in range(batch.sequences)]


@given(batches())
def test_a_token_gets_its_own_sequences_value_and_0_where_it_does_not_count(batch):
    values = numbers(1, batch.sequences)

    def naive():
        return [ZERO if s < 0 else values[s] for s in batch.segment_ids.flatten().tolist()]

    assert_same_losses(lambda: spread_to_tokens(values, batch.segment_ids), naive, {"values": values})


@given(batches())
def test_a_padded_batch_packed_in_any_order_has_the_same_sums(batch):
    order = torch.randperm(batch.segment_ids.numel(), generator=torch.Generator().manual_seed(3))
    shuffled = batch.log_prob.flatten()[order], batch.segment_ids.flatten()[order]
    one = sequence_sums(batch.log_prob, batch.segment_ids, batch.sequences)
    torch.testing.assert_close(sequence_sums(*shuffled, batch.sequences), one, rtol=1e-12, atol=1e-14)


def test_padded_segments_are_row_numbers_where_the_mask_is_true():
    mask = torch.tensor([[False, True, True], [False, False, False], [True, False, False]])
    assert padded_segments(mask).tolist() == [[-1, 0, 0], [-1, -1, -1], [2, -1, -1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_values_are_summed_in_float32(dtype):
    """1,024 equal terms: summed in bfloat16 they would stop growing at 256."""
    sums = sequence_sums(torch.ones(1024, dtype=dtype), torch.zeros(1024, dtype=torch.int64), 1)
    assert sums.dtype == torch.float32
    assert sums.tolist() == [1024]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_narrow_segment_ids_give_the_same_sums(dtype):
    ids = torch.tensor([0, -1, 1, 1], dtype=dtype)
    assert sequence_sums(torch.tensor([1.0, 2, 3, 4]), ids, 300)[:3].tolist() == [1, 7, 0]


@pytest.mark.unswitched  # a GPU refuses it later, and for good: no test after it could use the device
@pytest.mark.parametrize("above", [0, 1])
def test_an_id_that_is_too_large_is_an_error_where_its_value_is_not_read(above):
    """As on an accelerator, whose numbers are not read: the indexing itself refuses it."""
    values = torch.ones(3, dtype=torch.float64)
    ids = torch.tensor([0, 1, 2 + above])
    with patch("torch.compiler.is_compiling", lambda: True):
        with pytest.raises((IndexError, RuntimeError), match="index out of range"):
            sequence_sums(values, ids, 2)
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            spread_to_tokens(values[:2], ids)


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

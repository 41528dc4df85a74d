"""From tokens to sequences and back, padded and packed."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given

from seqpar.objectives import (
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

"""The window of made-up labels: what it contains, and losses of one's own that it tells from the cross-entropy."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from seqpar.integrations.transformers import apply_seqpar_loss
from seqpar.integrations.transformers_model import IGNORED
from seqpar.integrations.transformers_window import made_up_labels, window_rows
from tests.seqpar.integrations.tiny_models import batch_of, model_of


@given(st.integers(1, 5), st.integers(1, 40), st.sets(st.integers(0, 98), max_size=40), st.integers(0, 9))
def test_every_special_label_is_predicted_and_so_are_the_batchs_own_in_rows_of_two_lengths(b, t, special, seed):
    own = torch.randint(99, (b, t), generator=torch.Generator().manual_seed(seed))
    labels = made_up_labels({"labels": own}, torch.empty(99, 4), 99, special)
    predicted = labels[:, 1:][labels[:, 1:] != IGNORED]
    assert special <= set(predicted.tolist())
    assert labels.size(0) == window_rows(b) != (b if b > 1 else 0)
    assert labels.size(1) >= t
    room = len(predicted) - len(special) - 8
    assert room < b * t or set(own.flatten().tolist()) <= set(predicted.tolist())
    assert (labels[:, :2] != IGNORED).all()
    kept = (labels != IGNORED).sum(1).tolist()
    assert len(kept) == 1 or kept[0] < kept[-1]
    assert labels[0, labels.size(1) // 2] == IGNORED


def test_where_the_vocabulary_is_large_the_window_is_as_small_as_before():
    labels = made_up_labels(
        {"labels": torch.zeros(8, 4096, dtype=torch.long)}, torch.empty(128_000, 1), 128_000, {1, 2}
    )
    assert labels.numel() * 16 < 1024


def shifted(logits, labels):
    return logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()


def token_losses(logits, labels):
    flat, target = shifted(logits, labels)
    return F.cross_entropy(flat, target, reduction="none").view(labels.size(0), -1), (labels[:, 1:] != -100)


def mean_of_sequences(logits, labels):
    losses, counts = token_losses(logits, labels)
    return (losses.sum(1) / counts.sum(1)).mean()


def class_weight(logits, labels):
    flat, target = shifted(logits, labels)
    weight = torch.ones(logits.size(-1))
    weight[23] = 3.0
    return F.cross_entropy(flat, target, weight)


def halved_for_many(logits, labels):
    return F.cross_entropy(*shifted(logits, labels)) * (0.5 if labels.size(0) > 1 else 1.0)


def halved_for_one(logits, labels):
    return F.cross_entropy(*shifted(logits, labels)) * (0.5 if labels.size(0) == 1 else 1.0)


def late_positions(logits, labels):
    losses, counts = token_losses(logits, labels)
    weight = torch.where(torch.arange(losses.size(1)) < 20, 1.0, 2.0)
    return (losses * weight).sum() / counts.sum()


LOSSES = {
    mean_of_sequences: [7, 5],
    class_weight: [7, 5],
    halved_for_many: [7, 5, 2],
    halved_for_one: [7],
    late_positions: [30, 12],
}


@pytest.mark.parametrize("function", LOSSES, ids=lambda function: function.__name__)
def test_a_loss_of_ones_own_that_is_not_the_cross_entropy_is_refused(function):
    model = copy.deepcopy(model_of("llama"))
    batch = batch_of(model, LOSSES[function])
    if function is class_weight:
        batch["labels"][0, 3] = 23
    model.loss_function = lambda logits, labels, vocab_size=None, **_: function(logits, labels)
    with apply_seqpar_loss(model), pytest.raises(RuntimeError, match="own loss of a few tokens is"):
        model(**batch)


def test_a_loss_that_treats_one_sequence_in_another_way_is_noticed_when_there_is_only_one():
    model = copy.deepcopy(model_of("llama"))
    model.loss_function = lambda logits, labels, vocab_size=None, **_: halved_for_one(logits, labels)
    with apply_seqpar_loss(model):
        model(**batch_of(model, [7, 5]))
        with pytest.raises(RuntimeError, match="no longer computes logits and loss as it did"):
            model(**batch_of(model, [7]))

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
from tests.seqpar.integrations.tiny_models import VOCAB, batch_of, model_of


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
    "another number": (lambda logits, labels: logits.square().mean(), [6]),
    "a mean of sequences": (mean_of_sequences, [7, 5]),
    "a class weight": (class_weight, [7, 5]),
    "half for many": (halved_for_many, [7, 5, 2]),
    "half for one": (halved_for_one, [7]),
    "late positions": (late_positions, [30, 12]),
}
ADDED = {
    "a factor of the loss": lambda loss, logits, labels, norm: loss * (1 + norm - norm.detach()),
    "a factor of what is added": lambda loss, logits, labels, norm: loss + norm * logits.square().mean(),
    "the labels": lambda loss, logits, labels, norm: loss + norm * labels.float().mean() / 100,
    "the logits": lambda loss, logits, labels, norm: loss + 0.01 * logits.logsumexp(-1).mean(),
}
"""What a loss has besides the cross-entropy, some of it of a weight in one of the layers."""


@pytest.mark.parametrize("name", [*LOSSES, *ADDED])
def test_a_loss_of_ones_own_that_is_not_the_cross_entropy_is_refused(name):
    model = copy.deepcopy(model_of("llama"))
    own, weight = model.loss_function, model.model.layers[0].mlp.up_proj.weight

    def added(logits, labels):
        return ADDED[name](own(logits, labels, VOCAB), logits, labels, weight.square().mean())

    function, lengths = LOSSES.get(name, (added, [6]))
    batch = batch_of(model, lengths)
    if function is class_weight:
        batch["labels"][0, 3] = 23
    model.loss_function = lambda logits, labels, vocab_size=None, **_: function(logits, labels)
    said = "own loss of a few tokens is .* or adds something to the cross-entropy that depends on labels or logits"
    with apply_seqpar_loss(model), pytest.raises(RuntimeError, match=said):
        model(**batch)


def test_a_loss_that_treats_one_sequence_in_another_way_is_noticed_when_there_is_only_one():
    model = copy.deepcopy(model_of("llama"))
    model.loss_function = lambda logits, labels, vocab_size=None, **_: halved_for_one(logits, labels)
    with apply_seqpar_loss(model):
        model(**batch_of(model, [7, 5]))
        with pytest.raises(RuntimeError, match="no longer computes logits and loss as it did"):
            model(**batch_of(model, [7]))

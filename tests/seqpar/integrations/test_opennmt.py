"""OpenNMT's LossCompute against its published computation, with stand-ins for its batch and statistics."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import seqpar
from seqpar.integrations.opennmt import ChunkedLossCompute

PAD, VOCAB, WIDTH = 1, 19, 6


@dataclass
class Statistics:
    loss: float
    n_batchs: int
    n_sents: int
    n_words: int
    n_correct: int


def batch_of(seed, rows=3, time=6, dims=3):
    g = torch.Generator().manual_seed(seed)
    tgt = torch.randint(2, VOCAB, (rows, time), generator=g)
    tgt[torch.arange(time) >= torch.randint(3, time + 1, (rows, 1), generator=g)] = PAD
    return {"tgt": tgt.unsqueeze(-1) if dims == 3 else tgt, "srclen": [4] * rows}


def published(generator, batch, output, smoothing, shift, start, size):
    """Both projects' forward: the steps of the window, scores of all of them, a sum, and counts from the scores."""
    tgt = batch["tgt"].reshape(len(batch["srclen"]), -1)
    size = tgt.size(1) - start if size is None else size
    target = tgt[:, start + shift : start + size].flatten()
    scores = generator(output[:, start : start + size].flatten(0, 1))
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
    kept = target != PAD
    return criterion(scores, target), int(kept.sum()), int((scores.argmax(1) == target)[kept].sum())


@given(
    st.integers(0, 99),
    st.sampled_from([0.0, 0.1]),
    st.integers(1, 9),
    st.sampled_from([2, 3]),
    st.sampled_from([(1, 0, None), (0, 0, None), (0, 2, None), (0, 0, 3), (0, 2, 2)]),
)
def test_loss_gradient_and_statistics_are_the_published_ones(seed, smoothing, chunk_tokens, dims, window):
    shift, start, size = window
    torch.manual_seed(seed)
    generator, batch = nn.Linear(WIDTH, VOCAB).double(), batch_of(seed, dims=dims)
    output = torch.randn(3, 6 - shift, WIDTH, dtype=torch.float64, requires_grad=True)
    expected, words, correct = published(generator, batch, output, smoothing, shift, start, size)
    wanted = torch.autograd.grad(expected, [output, *generator.parameters()])
    criterion = seqpar.LabelSmoothing(smoothing, "torch", ignore_index=PAD)
    compute = ChunkedLossCompute(generator, criterion, Statistics, tgt_shift_index=shift, chunk_tokens=chunk_tokens)
    loss, statistics = compute(batch, output, {}, trunc_start=start, trunc_size=size)
    assert output.grad is None  # no hidden backward
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    got = torch.autograd.grad(loss, [output, *generator.parameters()])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    sentences = 0 if start else 3
    assert statistics == Statistics(loss.item(), int(sentences > 0), sentences, words, correct)


def test_a_criterion_that_counts_nothing_is_refused():
    with pytest.raises(TypeError, match="CrossEntropyLoss has no token_loss"):
        ChunkedLossCompute(nn.Linear(2, 3), nn.CrossEntropyLoss(reduction="sum"), Statistics)


def test_it_has_the_padding_id_that_the_trainers_normalise_by():
    criterion = seqpar.LabelSmoothing(0.1, "torch", ignore_index=PAD)
    assert ChunkedLossCompute(nn.Linear(WIDTH, VOCAB), criterion, Statistics).padding_idx == PAD

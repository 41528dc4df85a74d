"""A mean of one rank's tokens is reported and not differentiated, unless all ranks have the same tokens."""

import re

import pytest
import torch
import torch.distributed as dist

import seqpar
from seqpar import objectives as o
from seqpar.testing.ranks import ranks
from tests.seqpar.distributed.layouts import message

V, D = 6, 4
ROWS = (24, 12)
"""Tokens of the first and the second rank."""


def t(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


HIDDEN, WEIGHT = t(0, sum(ROWS), D), t(1, V, D)
TARGET = torch.arange(sum(ROWS)) % V


def loss_of(rows, weight):
    return seqpar.linear_cross_entropy(HIDDEN[rows], weight, TARGET[rows])


def whole():
    """The gradient of the mean over the tokens of both ranks."""
    weight = WEIGHT.clone().requires_grad_()
    return torch.autograd.grad(loss_of(slice(None), weight).mean, weight)[0]


def on_a_rank(rank, world):
    """What backward through the mean says, what reports do, and the gradients of the error's three ways."""
    rows = slice(0, ROWS[0]) if rank == 0 else slice(ROWS[0], None)
    weight = WEIGHT.clone().requires_grad_()
    group = dist.group.WORLD
    loss = loss_of(rows, weight)
    reported = loss.mean.item(), f"{loss.mean:.3f}", float(loss.detach().mean)
    with torch.no_grad():
        reported += (float(loss_of(rows, weight).mean),)
    twice = loss_of(rows, weight) + loss_of(rows, weight)
    refusals = [message(loss.mean.backward), message(twice.mean.backward)]
    assert weight.grad is None
    seqpar.accumulate_gradients([rows], lambda m: loss_of(m, weight), lambda m: ROWS[rank], group=group)
    accumulated = seqpar.group_sum(weight.grad, group)
    weight.grad = None
    loss = loss_of(rows, weight)
    # Neither DDP nor FSDP2 is here, so the mean of the ranks' gradients that they take is taken by hand
    (loss.total * world / seqpar.group_sum(loss.tokens, group)).backward()
    reduced = seqpar.group_sum(weight.grad, group) / world
    weight.grad = None
    loss = loss_of(slice(None), weight)
    (loss.total / loss.tokens).backward()
    return reported, refusals, [accumulated, reduced, weight.grad]


def test_backward_through_the_mean_of_one_ranks_tokens_is_refused_and_the_error_names_what_is_right():
    for rank, (reported, refusals, gradients) in enumerate(ranks(2, on_a_rank)):
        assert len({f"{float(number):.3f}" for number in reported}) == 1
        for times, refusal in enumerate(refusals, 1):
            tokens = times * ROWS[rank]
            said = f"RuntimeError: backward went through the mean over {tokens} tokens of one of 2 ranks"
            assert refusal.startswith(said)
            assert "seqpar.accumulate_gradients" in refusal
            assert "(loss.total * ranks / seqpar.group_sum(loss.tokens, group)).backward()" in refusal
            assert "(loss.total / loss.tokens).backward()" in refusal
        for gradient in gradients:
            torch.testing.assert_close(gradient, whole(), rtol=1e-12, atol=1e-14)


def split(rank, world, size, scores):
    """The hidden gradient of a mean under a vocabulary that `size` ranks split."""
    groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world, size)]
    hidden = HIDDEN.clone().requires_grad_()
    part = rank % size
    rows = WEIGHT[part * V // size : (part + 1) * V // size]
    shard = seqpar.VocabShard.of(len(rows), groups[rank // size])
    if scores:
        loss = o.per_item(-seqpar.token_scores(hidden, rows, TARGET, vocab=shard).log_prob)
    else:
        loss = seqpar.linear_cross_entropy(hidden, rows, TARGET, vocab=shard)
    return message(loss.mean.backward), hidden.grad


@pytest.mark.parametrize("scores", [False, True])
def test_ranks_that_split_the_vocabulary_have_the_same_tokens(scores):
    hidden = HIDDEN.clone().requires_grad_()
    (expected,) = torch.autograd.grad(seqpar.linear_cross_entropy(hidden, WEIGHT, TARGET).mean, hidden)
    for said, gradient in ranks(2, split, 2, scores):
        assert said == "no error"
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_two_groups_that_each_split_the_vocabulary_may_have_different_tokens():
    for refusal, _ in ranks(4, split, 2, False):
        assert re.match("RuntimeError: .* of one of 4 ranks", refusal), refusal

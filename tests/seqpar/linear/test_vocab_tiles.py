"""Backward over tiles of the vocabulary: the loss that needs the least memory, and the scores of an accelerator."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import seqpar
from seqpar.linear.projection import Projection
from seqpar.testing import assert_same_gradients
from seqpar.testing.ranks import ranks
from tests.seqpar.linear.linear_loss import linear_cases, plain_loss
from tests.seqpar.linear.score_cases import plain_scores, score_cases
from tests.seqpar.linear.test_linear_cross_entropy import LEAVES
from tests.seqpar.recording import recorded

TILES = st.sampled_from([1, 2, 5, 128])
"""Classes of a tile: one, some, all."""


@contextmanager
def tiles(classes):
    """Every tile has so many classes, whatever the budget, and scores use them on a CPU too."""
    with ExitStack() as patches:
        patches.enter_context(patch("seqpar.linear.recomputed_scores.TILE_CLASSES", classes))
        for budget in ("least_memory.CPU_BUDGET", "token_scores.ACCELERATOR_BUDGET"):
            patches.enter_context(patch(f"seqpar.linear.{budget}", 1))
        patches.enter_context(patch("seqpar.linear.token_scores.worth_tiles", lambda _: True))
        yield


def least(tensors, options, **more):
    return seqpar.linear_cross_entropy(**tensors, **options, memory="least", **more)


@given(linear_cases(), TILES)
def test_the_loss_in_the_least_memory_has_the_gradient_of_its_published_formula(case, classes):
    tensors = case.tensors()
    with tiles(classes):
        assert_same_gradients(
            lambda: least(tensors, case.options).total * case.upstream,
            lambda: plain_loss(**tensors, **case.options) * case.upstream,
            {name: tensors[name] for name in LEAVES if name in tensors},
        )


@given(linear_cases())
def test_it_has_the_sums_of_the_loss_in_three_products(case):
    tensors = case.tensors()
    found, right = least(tensors, case.options), seqpar.linear_cross_entropy(**tensors, **case.options)
    assert (found.tokens, found.correct) == (right.tokens, right.correct)
    assert [t.dtype for t in found] == [t.dtype for t in right]
    torch.testing.assert_close(found.nll, right.nll, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.total.detach(), right.total.detach(), rtol=1e-12, atol=1e-12)


@given(linear_cases(), TILES)
def test_rows_that_cannot_be_left_out_count_for_nothing(case, classes):
    tensors = case.tensors()
    with tiles(classes), recorded():
        assert_same_gradients(
            lambda: least(tensors, case.options).total,
            lambda: plain_loss(**tensors, **case.options),
            {name: tensors[name] for name in LEAVES if name in tensors},
        )


@given(score_cases(), TILES)
def test_scores_over_tiles_have_the_gradients_of_the_plain_ones(case, classes):
    tensors = case.tensors()
    wanted = {name: t for name, t in tensors.items() if t.requires_grad}
    assume(wanted)

    def total(scores):
        at = 0 if scores.log_probs_at is None else scores.log_probs_at.square().sum()
        return (scores.log_prob * 3 + scores.entropy.square()).sum() + at

    with tiles(classes):
        assert_same_gradients(
            lambda: total(seqpar.token_scores(**tensors, **case.options)),
            lambda: total(plain_scores(**tensors, **case.options)),
            wanted,
        )


def problem(dtype=torch.float64, rows=6, width=4, classes=9):
    torch.manual_seed(0)
    hidden = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = torch.randn(classes, width).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(classes, (rows,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_weights_gradient_is_added_into_the_callers_tensor_and_leaves_grad_alone(dtype):
    hidden, weight, target = problem(dtype)
    into = torch.ones(9, 4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    with tiles(2):
        loss = seqpar.linear_cross_entropy(hidden, weight, target, memory="least", weight_grad=into)
        (loss.total / 6).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    wide = weight.detach().double().requires_grad_()
    nn.functional.cross_entropy(hidden.detach().double() @ wide.t(), target).backward()
    error = float((into.double() - 1 - wide.grad).norm() / wide.grad.norm())
    # Not rounded to bfloat16 in the end; the logits' gradient is
    assert error < {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]


def test_a_gradient_may_be_taken_again_because_nothing_is_stored():
    hidden, weight, target = problem()
    loss = seqpar.linear_cross_entropy(hidden, weight, target, memory="least")
    first = torch.autograd.grad(loss.total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(2 * loss.total, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b)


def test_under_autocast_the_gradients_have_the_dtypes_of_their_tensors():
    hidden, weight, target = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16), tiles(2):
        seqpar.linear_cross_entropy(hidden, weight, target, memory="least").total.backward()
    plain = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    nn.functional.cross_entropy(plain[0] @ plain[1].t(), target, reduction="sum").backward()
    for ours, right in zip((hidden, weight), plain, strict=True):
        assert ours.grad.dtype == torch.float32
        assert float((ours.grad.double() - right.grad).norm() / right.grad.norm()) < 2**-6


def test_a_place_for_the_gradient_of_a_frozen_weight_is_refused_but_not_without_gradients():
    hidden, weight, target = problem(torch.float32)
    options = {"memory": "least", "weight_grad": torch.zeros(9, 4)}
    with torch.no_grad():
        seqpar.linear_cross_entropy(hidden, weight, target, **options)
    with pytest.raises(ValueError, match="weight requires no gradient"):
        seqpar.linear_cross_entropy(hidden, weight.detach(), target, **options)


def of_shard(rank, world):
    hidden, weight, target = problem()
    start, end = ((0, 4), (4, 9))[rank] if world > 1 else (0, 9)
    own = weight.detach()[start:end].clone().requires_grad_()
    shard = seqpar.VocabShard.of(end - start, torch.distributed.group.WORLD) if world > 1 else None
    with tiles(2):
        loss = seqpar.linear_cross_entropy(hidden, own, target, label_smoothing=0.1, memory="least", vocab=shard)
        loss.total.backward()
    return [t.detach().tolist() for t in (loss.total, hidden.grad, own.grad)]


def test_a_split_vocabulary_has_its_part_of_the_gradient():
    total, hidden, weight = map(torch.tensor, of_shard(0, 1))
    per_rank = ranks(2, of_shard)
    for found in per_rank:
        torch.testing.assert_close(torch.tensor(found[0]), total)
        torch.testing.assert_close(torch.tensor(found[1]), hidden)
    torch.testing.assert_close(torch.tensor(per_rank[0][2] + per_rank[1][2]), weight)


def test_scores_over_tiles_of_rows_that_are_all_padding_have_gradients_of_zeros():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    with patch("seqpar.linear.token_scores.worth_tiles", lambda _: True):
        seqpar.token_scores(hidden, weight, torch.full((3,), -100)).log_prob.sum().backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("in_place", [True, False], ids=["as on a CPU", "as on an accelerator"])
def test_a_block_of_the_softmax_has_one_row_where_there_are_none(in_place):
    projection = Projection(torch.randn(7, 4), None, torch.float32, None, 1.0)
    projection.in_place = in_place
    assert projection.rows_at_once(0) == 1


def test_the_weights_gradient_is_added_once_by_the_backward_that_asks_for_it():
    """A zero-bubble pipeline asks for hidden's gradient first, and for the weight's in a second backward."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), torch.randn(9, 4, dtype=torch.float64)
    weight.requires_grad_()
    target, added = torch.randint(9, (6,)), torch.zeros(9, 4, dtype=torch.float64)
    total = seqpar.linear_cross_entropy(hidden, weight, target, memory="least", weight_grad=added).total
    plain = F.cross_entropy(hidden @ weight.T, target, reduction="sum")
    right_hidden, right_weight = torch.autograd.grad(plain, [hidden, weight])
    (found,) = torch.autograd.grad(total, hidden, retain_graph=True)
    torch.testing.assert_close(found, right_hidden, rtol=1e-12, atol=1e-14)
    assert not added.any()
    total.backward(inputs=[weight])
    torch.testing.assert_close(added, right_weight, rtol=1e-12, atol=1e-14)
    assert weight.grad is None


def test_without_tokens_the_weights_own_gradient_stays_as_it_is():
    hidden, weight = torch.randn(2, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    added = torch.ones(9, 4)
    target = torch.full((2,), -100)
    seqpar.linear_cross_entropy(hidden, weight, target, memory="least", weight_grad=added).total.backward()
    assert weight.grad is None
    assert (added == 1).all()
    assert not hidden.grad.any()

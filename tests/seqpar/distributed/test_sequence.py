"""Time steps over ranks: cut, joined, shifted across the seams, and the loss of all of them on one device."""

import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

import seqpar
from seqpar.testing.ranks import ranks
from tests.seqpar.distributed.layouts import assert_answers, build, cases, gradients_of, message

ORDERS = st.sampled_from(["contiguous", "zigzag"])


def shifted(tokens: torch.Tensor, ignored: int) -> torch.Tensor:
    return torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), ignored)], 1)


@given(st.integers(0, 40), st.integers(1, 9), ORDERS)
def test_every_time_step_has_one_rank(time, world, order):
    steps = [seqpar.time_steps(time, rank, world, order) for rank in range(world)]
    assert sorted(torch.cat(steps).tolist()) == list(range(time))
    sizes = [len(s) for s in steps]
    assert max(sizes) - min(sizes) <= (1 if order == "contiguous" else 2)
    for s in steps:
        assert s.tolist() == sorted(s.tolist())


def test_the_orders_are_what_they_say():
    assert [seqpar.time_steps(7, r, 3).tolist() for r in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    zigzag = [seqpar.time_steps(9, r, 2, "zigzag").tolist() for r in range(2)]
    assert zigzag == [[0, 1, 2, 7, 8], [3, 4, 5, 6]]


@given(st.integers(1, 64), st.integers(1, 8))
def test_zigzag_balances_causal_attention(pieces_each, world):
    time = 2 * world * pieces_each
    work = [int((seqpar.time_steps(time, r, world, "zigzag") + 1).sum()) for r in range(world)]
    assert len(set(work)) == 1


@given(st.integers(0, 23), st.integers(1, 5), ORDERS, st.sampled_from([0, 1, -1]))
def test_joining_undoes_splitting(time, world, order, dim):
    shape = [2, 3, 4]
    shape[dim] = time
    whole = torch.arange(24 // 4 * 4 * time // 4 + 1000)[: shape[0] * shape[1] * shape[2]].reshape(shape)
    parts = [whole.index_select(dim, seqpar.time_steps(time, r, world, order)) for r in range(world)]
    assert torch.equal(seqpar.join_time(parts, dim, order), whole)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: seqpar.time_steps(4, 0, 1, "striped"),
            "ValueError: order is 'striped'; it must be 'contiguous' or 'zigzag'",
        ),
        (lambda: seqpar.time_steps(4, 2, 2), r"ValueError: rank is 2; it must be a whole number in \[0, 1\]"),
        (
            lambda: seqpar.join_time([torch.zeros(1, 1), torch.zeros(1, 2)]),
            r"ValueError: the ranks have \[1, 2\] time steps, 3 in all, and contiguous order gives them \[2, 1\]",
        ),
        (
            lambda: seqpar.next_token_targets(torch.zeros(2, 3), None),
            r"TypeError: tokens have shape \(2, 3\), torch.float32; they must be \(batch, time\)",
        ),
    ],
)
def test_bad_cuts_and_tokens_say_what_is_wrong(call, said):
    assert re.match(said, message(call))


def targets_across_seams(rank, world, tokens, order, ignored):
    mine = seqpar.split_time(tokens, dist.group.WORLD, order=order)
    return seqpar.next_token_targets(mine, dist.group.WORLD, order=order, ignore_index=ignored)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@settings(max_examples=settings.default.max_examples // 4)  # of each world
@given(batch=st.integers(0, 3), time=st.integers(0, 19), order=ORDERS, ignored=st.sampled_from([-100, 0]))
def test_each_ranks_last_target_is_the_next_ranks_first_token(world, batch, time, order, ignored):
    tokens = torch.randint(1, 90, (batch, time), generator=torch.Generator().manual_seed(time))
    parts = ranks(world, targets_across_seams, tokens, order, ignored)
    assert torch.equal(seqpar.join_time(parts, order=order), shifted(tokens, ignored) if time else tokens)


def uneven_targets(rank, world, tokens, cut):
    mine = tokens[:, sum(cut[:rank]) : sum(cut[: rank + 1])]
    return seqpar.next_token_targets(mine, dist.group.WORLD)


@given(st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_contiguous_pieces_may_have_any_lengths(cut):
    tokens = torch.arange(2 * sum(cut)).reshape(2, -1)
    if sum(cut):
        assert torch.equal(torch.cat(ranks(4, uneven_targets, tokens, cut), 1), shifted(tokens, -100))


def seam_errors(rank, world):
    tokens = {"contiguous": torch.zeros(2 + rank, 3).long(), "zigzag": torch.zeros(2, 2 - rank).long()}
    return [message(seqpar.next_token_targets, t, dist.group.WORLD, order=order) for order, t in tokens.items()]


def test_ranks_whose_pieces_do_not_fit_are_named_before_they_are_used():
    for batch, time in ranks(2, seam_errors):
        said = "RuntimeError: ranks disagree on the batch size: 2 on ranks [0]; 3 on ranks [1]; start all of them with"
        assert batch.startswith(said)
        said = "ValueError: the ranks have [2, 1] time steps, 3 in all, and zigzag order gives them [1, 2]"
        assert time.startswith(said)


def loss_alone_step(rank, world, case, order):
    """Hidden states whole on every rank; only the loss is split. Each rank ends with the whole gradient, unwrapped."""
    both, group = build(case), dist.group.WORLD
    ((tokens, target),) = case.micro_batches(0)
    hidden = seqpar.copy_to_group(torch.cumsum(both.model(tokens), 1), group)
    head = {n: seqpar.copy_to_group(p, group) if p.requires_grad else p for n, p in both.loss.named_parameters()}
    mine, targets = (seqpar.split_time(t, group, order=order) for t in (hidden, target))
    loss = functional_call(both.loss, head, (mine, targets))
    count = seqpar.group_sum(loss.tokens, group).clamp(min=1)
    (loss.total * case.factor / count).backward()
    return float(seqpar.sum_over_ranks(loss, group).total), gradients_of(both)


@given(cases(1, longest=11), ORDERS)
def test_a_whole_hidden_states_gradient_is_summed_over_the_sequence_ranks(case, order):
    both = build(case)
    ((tokens, target),) = case.micro_batches(0)
    loss = both.loss(torch.cumsum(both.model(tokens), 1), target)
    (loss.total * case.factor / loss.tokens.clamp(min=1)).backward()
    expected = {n: p.grad for n, p in both.named_parameters()}
    assert_answers(ranks(2, loss_alone_step, case, order), (float(loss.total.detach()), expected))

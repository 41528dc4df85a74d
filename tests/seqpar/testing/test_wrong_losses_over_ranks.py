"""Losses over live ranks: right ones pass, and what is wrong with the others is named on every rank."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import seqpar
from seqpar.testing import assert_same_loss, plain_loss
from seqpar.testing.ranks import RankError, ranks

PADDING = 0
STEP = 12
"""Tokens that are not ignored, over both ranks."""


def on_a_rank(rank, world, wrong):
    torch.manual_seed(0)
    generator, criterion = nn.Linear(4, 5).double(), nn.CrossEntropyLoss(reduction="sum")
    hidden, target = torch.randn(2, 8, 4).double()[rank], torch.randint(5, (2, 8))[rank]
    target[: 4 * rank] = -100
    own = [8, 4][rank]
    factors = {
        "right": world / STEP,
        "local": 1 / own,
        "forgot": 1 / STEP,
        "twice": world**2 / STEP,
        "not reduced": world / own,
    }

    def chosen(*given):
        if wrong == "on rank 1 alone":
            given[0].weight.register_hook(lambda grad: dist.all_reduce(grad.clone()) and None)
            # Twice the gradient of this rank's own tokens
            given = *given[:2], given[2] + rank * (given[2] - given[2].detach()), given[3]
        loss = plain_loss(*given) * factors.get(wrong, world / STEP)
        if wrong == "reduced twice" and not given[0].weight._backward_hooks:
            given[0].weight.register_hook(lambda grad: dist.all_reduce(grad := grad.clone()) or grad)
        if wrong == "silent" and rank == 1:
            return loss.detach()
        return loss

    loss = None if wrong == "engine" else chosen
    try:
        assert_same_loss(generator, criterion, hidden, target, loss=loss, tokens=STEP, group=dist.group.WORLD)
    except AssertionError as error:
        return str(error)
    return ""


def test_ranks_with_the_steps_token_count_are_accepted():
    assert ranks(2, on_a_rank, "right") == ranks(2, on_a_rank, "engine") == ["", ""]


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ("local", r"the local token count, .*: here 8 of the step's 12 tokens, .* 3/4 times .*, 12 / \(8 x 2 ranks\)"),
        ("not reduced", r"the local token count, without an all-reduce of it: here 8 .* 3/2 times .*, 12 / 8$"),
        ("reduced twice", r"a gradient is reduced twice: that of generator.weight is 2 times"),
        ("silent", r"rank 1 contributes nothing: the gradient of generator.weight is that of the other ranks alone"),
        ("forgot", r"the world size: all gradients are 1/2 times the plain ones, averaged"),
        ("twice", r"the world size: all gradients are 2 times the plain ones, multiplied"),
    ],
)
def test_a_wrong_count_over_ranks_is_named_on_every_rank(wrong, cause):
    first, second = ranks(2, on_a_rank, wrong)
    assert re.match(f"rank 0: Likely cause: {cause}", first.splitlines()[0])
    assert first == second


def test_a_rank_that_looks_for_the_cause_alone_does_not_wait_in_a_hook_for_the_others():
    first, second = ranks(2, on_a_rank, "on rank 1 alone")
    assert first.startswith("rank 1: Likely cause: none of the usual ones")
    assert "the gradient of hidden is off by" in first
    assert first == second


def of_all_ranks(number):
    number = torch.as_tensor(number)
    dist.all_reduce(number)
    return number


def right_in_ranks(generator, criterion, hidden, target):
    tokens = of_all_ranks((target != PADDING).sum())
    return plain_loss(generator, criterion, hidden, target) * dist.get_world_size() / tokens


def own_mean_in_ranks(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) / (target != PADDING).sum().clamp(min=1)


def without_the_world_size(*given):
    return right_in_ranks(*given) / dist.get_world_size()


def otherwise_smoothed_in_ranks(generator, criterion, hidden, target):
    other = seqpar.LabelSmoothing(0.1, "torch", ignore_index=PADDING)
    return right_in_ranks(generator, other, hidden, target)


def by_own_positions(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) / target.numel()


def by_all_positions(generator, criterion, hidden, target):
    scale = dist.get_world_size() / of_all_ranks(target.numel())
    return plain_loss(generator, criterion, hidden, target) * scale


def only_on(generator, criterion, hidden, target, speaking, world=3):
    own = plain_loss(generator, criterion, hidden, target) * world / 11
    return own if dist.get_rank() in speaking else own.detach()


def raises_in_rank_1(generator, criterion, hidden, target):
    if dist.get_rank() == 1:
        raise KeyError("nobody")
    return plain_loss(generator, criterion, hidden, target)


def whole_batch():
    """Five sentences of three words, of which two are padded: 11 words count."""
    torch.manual_seed(0)
    target = torch.arange(15).reshape(5, 3) % 6 + 1
    target[2:4, 1:] = PADDING
    head = nn.Linear(4, 7), seqpar.LabelSmoothing(0.1, "fairseq", ignore_index=PADDING)
    return *head, torch.randn(5, 3, 4), target


@pytest.mark.unswitched
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("loss", [None, right_in_ranks], ids=["seqpar's", "own"])
def test_one_call_proves_a_loss_over_ranks_with_unequal_tokens(world, loss):
    assert_same_loss(*whole_batch(), loss=loss, ranks=world, tokens=11)


WORLD_SIZE = "the world size: all gradients are 1/2 times the plain ones"
SMOOTHING = "the smoothing convention 'torch', where the criterion has 'fairseq'"
ALONE = "of the other ranks alone"
OVER_RANKS = [
    (2, "the local token count, .*: here 3 of the step's 11 tokens, and this rank's part of gen",
        "the local token count", own_mean_in_ranks),
    (2, WORLD_SIZE, WORLD_SIZE, without_the_world_size),
    (2, SMOOTHING, SMOOTHING, otherwise_smoothed_in_ranks),
    (2, "the local number of targets, ignored ones counted: here 3 of the step's 15 targets, and this rank's part of ",
        "the local token count", by_own_positions),
    (2, "a mean over all 15 targets, ignored padding counted: all gradients are 11/15 times the plain ones, and only 1",
        "only the value is wrong", by_all_positions),
    (3, f"ranks 1 and 2 contribute nothing: the gradient of generator.weight is that {ALONE}; the v",
        "ranks 1 and 2 contribute nothing", partial(only_on, speaking=[0])),
    (3, "ranks 0 and 2 contribute nothing: ", "ranks 0 and 2 contribute nothing", partial(only_on, speaking=[1])),
    (3, "rank 1 contributes nothing: ", "rank 1 contributes nothing", partial(only_on, speaking=[0, 2])),
    (3, "ranks 1 and 2 contribute nothing: .*; besides, all gradients are multiplied by 1/3",
        "ranks 1 and 2 contribute nothing", partial(only_on, speaking=[0], world=1)),
]  # fmt: skip
"""Ranks, cause, cause in the smallest part that fails, and loss."""


@pytest.mark.unswitched
@pytest.mark.parametrize(("world", "cause", "of_a_part", "loss"), OVER_RANKS)
def test_one_call_over_ranks_names_the_cause_and_the_smallest_part_that_fails(world, cause, of_a_part, loss):
    generator, criterion, hidden, target = whole_batch()
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(generator, criterion, hidden, target, loss=loss, ranks=world, tokens=11)
    first, *more = str(caught.value).splitlines()
    assert re.match(f"rank 0: Likely cause: {cause}", first), first
    assert "is off by" in str(caught.value)
    smallest = (3, 1, 4) if world == 2 else (4, 1, 4)
    assert more[-2].startswith(f"Smallest part of these inputs that fails: hidden {smallest}, target [["), more[-2]
    assert more[-1].endswith(f"ranks={world})")
    with pytest.raises(AssertionError, match=of_a_part):
        eval(more[-1].strip(), globals(), locals())


@pytest.mark.unswitched
@pytest.mark.usefixtures("impatient_ranks")
def test_an_error_of_a_rank_is_shown_with_its_number():
    with pytest.raises(RankError, match=r"rank 1: (.|\n)*KeyError: 'nobody'"):
        assert_same_loss(*whole_batch(), loss=raises_in_rank_1, ranks=2)


@pytest.mark.parametrize(
    ("sentences", "given", "error", "said"),
    [
        (5, {"ranks": 2, "group": object()}, ValueError, "group is for a call in every rank, and ranks for one call"),
        (5, {"ranks": 1}, ValueError, "ranks is 1; it must be a whole number of at least 2"),
        (5, {"ranks": 6}, ValueError, r"target has shape \(5, 3\) and ranks is 6; its first dimension"),
        (2, {"ranks": 2}, ValueError, "each of 2 ranks has 3 tokens that count, and with equal counts a mean of m"),
        (
            5,
            {"ranks": 2, "loss": lambda *given: plain_loss(*given)},
            TypeError,
            r"cannot be sent to the ranks \(.*<lambda>.*\); define it at the top level of",
        ),
    ],
)
def test_what_cannot_be_proved_over_ranks_is_refused_in_one_line(sentences, given, error, said):
    generator, criterion, hidden, target = whole_batch()
    with pytest.raises(error, match=said):
        assert_same_loss(generator, criterion, hidden[:sentences], target[:sentences], **given)

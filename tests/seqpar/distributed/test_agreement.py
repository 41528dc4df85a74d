"""Ranks that disagree are named, on every rank, and nobody waits for long."""

import re
import time
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import seqpar
from seqpar.distributed.collectives import (
    broadcast_object,
    gather_numbers,
    group_gather,
    group_max,
    join_from_group,
    sum_from_group,
)
from seqpar.testing.ranks import RankError, ranks
from tests.seqpar.distributed.layouts import message


def facts_of(rank, world, facts):
    return message(seqpar.check_agreement, facts[rank], dist.group.WORLD)


AGREED = {"vocabulary": 32_000, "dtype": "bfloat16", "chunks": 7, "steps": 1000, "data seed": 1}


def test_ranks_that_agree_go_on():
    assert ranks(3, facts_of, [AGREED] * 3) == ["no error"] * 3


@pytest.mark.parametrize("name", AGREED)
def test_every_rank_says_who_differs_and_in_what(name):
    facts = [AGREED, AGREED | {name: "other"}, AGREED]
    expected = (
        f"RuntimeError: ranks disagree on {name}: {AGREED[name]!r} on ranks [0, 2]; 'other' on ranks [1]; "
        "start all of them with the same settings and data"
    )
    assert ranks(3, facts_of, facts) == [expected] * 3


def test_a_fact_that_a_rank_does_not_have_is_named_too():
    said = ranks(2, facts_of, [AGREED, {k: v for k, v in AGREED.items() if k != "steps"}])
    assert said[0].startswith("RuntimeError: ranks disagree on steps: 1000 on ranks [0]; 'nothing' on ranks [1]")


@pytest.mark.parametrize(
    "value", [torch.zeros(2000), np.zeros(2000), {"inner": [torch.tensor(0.5)]}, np.bool_(True)], ids=lambda v: type(v)
)
def test_a_fact_whose_text_leaves_out_numbers_is_refused(value):
    with pytest.raises(TypeError, match=r"table has an? (Tensor|ndarray|bool_?); compare its numbers"):
        seqpar.check_agreement({"table": value}, None)


def test_a_number_of_numpy_is_a_fact():
    seqpar.check_agreement({"steps": np.int64(3), "rate": np.float32(0.1)}, None)


@dataclass
class Tokens:
    special: set


SAME = {
    "a dict in another order": ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
    "a number of numpy's": ([0.5, 3], [np.float64(0.5), np.int64(3)]),
    # Both have the same place in the table of eight, and the first that comes gets it
    "a set": ({0, 8}, {8, 0}),
    "a frozen set": (frozenset([0, 8]), frozenset([8, 0])),
    "a set inside": (({0, 8}, [{"ids": {0, 8}}]), ({8, 0}, [{"ids": {8, 0}}])),
    "a record with a set": (Tokens({0, 8}), Tokens({8, 0})),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_facts_agree_whatever_their_order_and_kind_of_number(name):
    one, other = SAME[name]
    assert one == other
    assert ranks(2, facts_of, [{"fact": one}, {"fact": other}]) == ["no error"] * 2


OTHERS = {
    "text and a number": ("1", 1),
    "a tuple and a list": ((1, 2), [1, 2]),
    "a list in another order": ([1, 2], [2, 1]),
    "another key": ({"a": 1}, {"b": 1}),
    "another entry of a set": ({"a"}, {"b"}),
    "another value in a record": (Tokens({0}), Tokens({1})),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_facts_do_not_agree(name):
    said = ranks(2, facts_of, [{"fact": fact} for fact in OTHERS[name]])
    assert all(answer.startswith("RuntimeError: ranks disagree on fact: ") for answer in said)


def different_steps(rank, world):
    """Rank 1's data ends a step early. The others' collective gives up after the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    weight = torch.ones((), requires_grad=True)
    for _ in range(2 - rank):
        seqpar.accumulate_gradients([1], lambda n: seqpar.TokenLoss(weight * n, torch.tensor(n)), int, group=group)
    time.sleep(0 if rank == 0 else 3)


def test_a_rank_that_stops_early_costs_the_others_the_timeout_they_chose():
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        ranks(2, different_steps)
    assert re.search(r"rank 0: (.|\n)*(?i:time)", str(error.value))
    assert time.monotonic() - start < 15


def everyone(rank, world):
    group = dist.group.WORLD
    return (
        [t.tolist() for t in group_gather(torch.tensor([rank, 10.0]), group)],
        gather_numbers([rank, -rank], group),
        broadcast_object({"from": rank}, 2, group),
    )


def test_gathers_and_broadcasts_are_in_rank_order():
    for gathered, numbers, value in ranks(3, everyone):
        assert gathered == [[0, 10], [1, 10], [2, 10]]
        assert numbers == [[0, 0], [1, -1], [2, -2]]
        assert value == {"from": 2}


def other_strides(rank, world):
    """Every rank has the same numbers in the same shape; rank 1 has them in another order in memory."""
    group = dist.group.WORLD
    numbers = torch.arange(6.0).view(2, 3)
    if rank == 1:
        numbers = numbers.t().contiguous().t()
    leaf = numbers.detach().requires_grad_()
    (seqpar.copy_to_group(leaf, group) * numbers).sum().backward()
    return (
        seqpar.group_sum(numbers, group),
        group_max(numbers, group),
        sum_from_group(numbers, group),
        join_from_group(numbers, [2, 2], 0, group),
        leaf.grad,
        *group_gather(numbers, group),
    )


def test_collectives_take_numbers_by_their_place_in_the_tensor():
    numbers = torch.arange(6.0).view(2, 3)
    expected = (2 * numbers, numbers, 2 * numbers, torch.cat([numbers, numbers]), 2 * numbers, numbers, numbers)
    for answers in ranks(2, other_strides):
        assert all(map(torch.equal, answers, expected))


def test_one_process_needs_no_group():
    seqpar.check_agreement(AGREED, None)
    assert gather_numbers([3, 4], None) == [[3, 4]]
    assert broadcast_object("x", 0, None) == "x"
    assert [t.item() for t in group_gather(torch.tensor(5), None)] == [5]


def second_derivatives(rank, world, name):
    group = dist.group.WORLD
    leaf = torch.ones(2, requires_grad=True)
    functions = {
        "copy_to_group": seqpar.copy_to_group,
        "join_from_group": lambda t, g: join_from_group(t, [2, 2], 0, g),
    }
    found = functions[name](leaf, group)
    return message(torch.autograd.grad, found.square().sum(), leaf, create_graph=True)


@pytest.mark.parametrize("name", ["copy_to_group", "join_from_group"])
def test_a_second_derivative_through_a_collective_is_refused(name):
    for said in ranks(2, second_derivatives, name):
        assert said.startswith(f"RuntimeError: {name} was asked for a second derivative (create_graph=True)")

"""The seconds of a collective against the published equations of a ring and of a tree, and links given in words."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.links import LINKS, Collective, Link, parse_link, seconds_of

FREE = Link.of(0, 1e30)
"""A link that takes no time."""


def seconds(kind: Collective, size: float, ranks: int, on_host: int = 8, **changed: Any) -> float:
    return seconds_of(kind, size, ranks, on_host, **({"within": FREE, "between": FREE, "start": 0.0} | changed))


@given(st.integers(2, 8), st.floats(1, 1e12))
def test_a_ring_all_reduce_moves_twice_the_bytes_of_all_ranks_but_one(ranks: int, size: float) -> None:
    moved = seconds("all_reduce", size, ranks, within=Link.of(0, 1e-9))  # one byte per second
    assert moved == pytest.approx(2 * (ranks - 1) / ranks * size, rel=1e-12)
    assert moved == pytest.approx(
        sum(seconds(x, size, ranks, within=Link.of(0, 1e-9)) for x in ("all_gather", "reduce_scatter"))
    )


def test_one_rank_has_nothing_to_communicate() -> None:
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert seconds(kind, 1e9, 1, within=LINKS["tcp100"], between=LINKS["tcp100"], start=1.0) == 0


@given(st.integers(1, 512), st.integers(1, 8))
def test_a_gather_hops_once_to_every_other_rank_and_between_every_two_hosts_once(hosts: int, here: int) -> None:
    ranks = hosts * here
    hops = seconds("all_gather", 0, ranks, here, within=Link.of(1e6, 1e30), between=Link.of(1e9, 1e30))
    assert hops == pytest.approx((ranks - hosts) + 1000 * (hosts - 1))


def test_an_all_reduce_over_many_hosts_is_a_tree_and_over_two_ranks_a_ring() -> None:
    across = Link.of(1e6, 1e30)  # a hop takes a second
    assert seconds("all_reduce", 0, 8 * 512, between=across) == pytest.approx(2 * math.log2(512))
    assert seconds("all_gather", 0, 8 * 512, between=across) == pytest.approx(511)
    assert seconds("all_reduce", 0, 2, 1, between=across) == pytest.approx(2)


def test_every_device_of_a_host_sends_through_its_own_adapter_but_no_faster_than_inside_the_host() -> None:
    slow, inside = Link.of(0, 1e-9), Link.of(0, 5e-9)
    for here, bandwidth in ((1, 1), (2, 2), (4, 4), (8, 5)):
        found = seconds("all_gather", 100, 16, here, between=slow, within=inside)
        assert found == pytest.approx(100 * 15 / 16 / bandwidth), here


def test_a_link_with_several_bandwidths_takes_that_of_the_next_power_of_two_hosts() -> None:
    by_hosts = Link.of(0, 4e-9, 2e-9, 1e-9)  # for 2, 4, and 8 and more hosts
    for hosts, bandwidth in ((2, 4), (3, 2), (4, 2), (5, 1), (8, 1), (100, 1)):
        found = seconds("reduce_scatter", 12, hosts, 1, between=by_hosts)
        assert found == pytest.approx(12 * (hosts - 1) / hosts / bandwidth), hosts


def test_the_start_is_paid_once() -> None:
    assert seconds("all_reduce", 0, 4096, start=3.0) == 3


def test_a_link_is_known_by_name_or_given_as_microseconds_and_bandwidths() -> None:
    assert parse_link("nvlink4") is LINKS["nvlink4"]
    assert parse_link("14:50") == Link.of(14, 50) == LINKS["rdma400"]
    assert parse_link("3:4,2,1") == Link.of(3, 4, 2, 1)


@pytest.mark.parametrize(
    "text", ["infiniband", "14", "14:", ":50", "14:0", "-1:50", "14:50,-2", "nan:50", "14:inf", "1:2:3"]
)
def test_a_link_that_is_neither_is_refused_in_one_line_with_what_there_is(text: str) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"neither one of nvlink4.* nor microseconds:GB/s, as in 14:50$"
    ) as raised:
        parse_link(text)
    assert "\n" not in str(raised.value)

"""Calculate the seconds of a collective from the links between devices, by latency and bandwidth (alpha and beta).

For b bytes over g ranks on h hosts, with k of the ranks on each host; an all-reduce takes twice the hops and the bytes:

    seconds   = start + hops + b (g - 1) / (g bandwidth)
    bandwidth = that within a host; over several hosts at most k times that between hosts, since each device has its own
    hops      = (g - h) hop_within + (h - 1) hop_between         in a ring (Patarasuk and Yuan 2009)
    hops     <= (k - 1) hop_within + log2(h) hop_between         in an all-reduce, which may be a tree

This is how NCCL estimates them (`ncclTopoTuneModel` in src/graph/tuning.cc). b is what every rank has at the end
(all-gather) or at the beginning (reduce-scatter); "bandwidth" is the bus bandwidth that nccl-tests report.
"""

from __future__ import annotations

import argparse
import math
from typing import Literal, NamedTuple

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]


class Link(NamedTuple):
    """A connection between devices: seconds per hop, and bytes per second and device in each collective.

    A link between hosts may have several bandwidths, for 2, 4, 8, ... hosts; the last also holds for more hosts.
    """

    hop: float
    all_reduce: tuple[float, ...]
    all_gather: tuple[float, ...]
    reduce_scatter: tuple[float, ...]

    @classmethod
    def of(cls, hop_us: float, *gigabytes: float) -> Link:
        """Return a link from microseconds and 10^9 bytes per second, the same in every collective."""
        return cls(hop_us * 1e-6, *[tuple(1e9 * each for each in gigabytes)] * 3)


LINKS = {
    # NCCL: src/graph/topo.h (SM90_NVLINK_BW x 18 links, SM80_NVLINK_BW x 12), src/graph/tuning.cc (Ring, Simple)
    "nvlink4": Link.of(3.4, 370.8),
    "nvlink3": Link.of(3.4, 240.0),
    # InfiniBand or RoCE, the line rate of one adapter per device; the hop: NCCL's tuning.cc (NET, Simple)
    "rdma400": Link.of(14.0, 50.0),
    "rdma200": Link.of(14.0, 25.0),
    # AWS p5, 8 devices a host: medians of 256 MB in the Ultra-Scale Playbook, "Communication Bandwidth by Number of
    # Nodes"; the hop: aws-ofi-nccl, src/tuner/nccl_ofi_model.cpp (20 us, and 3 with the protocol of large messages)
    "efa": Link(
        23e-6,
        tuple(1e9 / 8 * each for each in (361.7, 160.1, 99.6, 84.7, 64.9, 32.9)),
        tuple(1e9 / 8 * each for each in (184.6, 119.0, 69.0, 55.0, 28.0, 11.0)),
        tuple(1e9 / 8 * each for each in (181.6, 115.8, 68.6, 54.5, 27.9, 11.1)),
    ),
    # 100 Gb/s for 8 devices: 5 GB/s in NCCL's issue 450; the hop: issue 82 of nccl-tests
    "tcp100": Link.of(38.0, 0.625),
}
"""Known links, with the sources of their figures."""

NCCL_START = 8.4
"""Microseconds before the first hop: `baseLatencies` of the protocol for large messages (src/graph/tuning.cc)."""


def seconds_of(
    kind: Collective, size: float, ranks: int, on_host: int, within: Link, between: Link, start: float
) -> float:
    """Return the seconds of a collective of `size` bytes over `ranks` ranks, of which each host has up to `on_host`."""
    if ranks == 1:
        return 0.0
    here = min(ranks, on_host)
    hosts = math.ceil(ranks / here)
    hops = (ranks - hosts) * within.hop + (hosts - 1) * between.hop
    bandwidth: float = getattr(within, kind)[0]
    passes = 1
    if kind == "all_reduce":
        passes = 2
        hops = min(hops, (here - 1) * within.hop + math.log2(hosts) * between.hop)
    if hosts > 1:
        by_hosts = getattr(between, kind)
        across = by_hosts[min(math.ceil(math.log2(hosts)), len(by_hosts)) - 1] * here
        # If each host has only one rank, the link within hosts is not used
        bandwidth = across if here == 1 else min(bandwidth, across)
    return start + passes * (hops + size * (ranks - 1) / ranks / bandwidth)


def parse_link(text: str) -> Link:
    """Return a known link, or one given as microseconds:GB/s."""
    if text in LINKS:
        return LINKS[text]
    try:
        hop, bandwidths = text.split(":")
        found = Link.of(float(hop), *map(float, bandwidths.split(",")))
    except ValueError:
        found = Link.of(-1, 0)
    if found.hop < 0 or min(found.all_reduce) <= 0 or not math.isfinite(found.hop + sum(found.all_reduce)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither one of {', '.join(LINKS)} nor microseconds:GB/s, as in 14:50"
        )
    return found

"""Batches of scored tokens, padded and packed, and the comparison of unreduced losses with a naive loop's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from seqpar.objectives import padded_segments
from seqpar.testing import assert_same_results


class Batch(NamedTuple):
    """Scores of tokens. Where a token does not count, they are 0, -inf or nan, and must have no influence."""

    segment_ids: Tensor
    sequences: int
    log_prob: Tensor
    other: Tensor

    @property
    def mask(self) -> Tensor:
        return self.segment_ids >= 0

    def tokens(self, sequence: int) -> list[tuple[int, ...]]:
        """The positions of a sequence's tokens."""
        return [tuple(p) for p in (self.segment_ids == sequence).nonzero().tolist()]

    def counted(self) -> list[tuple[int, ...]]:
        return [tuple(p) for p in self.mask.nonzero().tolist()]


@st.composite
def batches(draw: st.DrawFn, least: int = 0, multiple: int = 1) -> Batch:
    """Batches of a few sequences, some of them empty, in either layout."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=least, max_size=4))
    lengths = lengths * multiple
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = draw(st.sampled_from([padded, packed]))(lengths, random)
    return scored(ids, len(lengths), random, draw(st.sampled_from([0.0, -torch.inf, torch.nan])))


def padded(lengths: Sequence[int], random: torch.Generator) -> Tensor:
    """Prompt and padding around the tokens that count, at random places."""
    mask = torch.zeros(len(lengths), 5, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, torch.randperm(5, generator=random)[:length]] = True
    return padded_segments(mask)


def packed(lengths: Sequence[int], random: torch.Generator) -> Tensor:
    """One after another, with tokens between them that do not count."""
    pieces = [torch.tensor([-1, *[s] * length, -3]) for s, length in enumerate(lengths)]
    return torch.cat([torch.tensor([-2]), *pieces])


def scored(ids: Tensor, sequences: int, random: torch.Generator, uncounted: float) -> Batch:
    log_prob, other = (
        -torch.rand(ids.shape, dtype=torch.float64, generator=random).mul(2).where(ids >= 0, -uncounted)
        for _ in range(2)
    )
    return Batch(ids, sequences, log_prob.requires_grad_(), other)


def numbers(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Random leaves of float64."""
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, dtype=torch.float64, generator=random) * scale).requires_grad_()


def assert_same_losses(
    ours: Callable[[], Tensor], naive: Callable[[], Sequence[Tensor]], leaves: Mapping[str, Tensor]
) -> None:
    """Assert that each loss and the gradients are equal, under a random upstream gradient for every loss."""
    losses, expected = ours().flatten(), list(naive())
    upstream = torch.randn(len(losses), dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    plain = torch.stack(expected) if expected else torch.zeros(0, dtype=torch.float64)
    assert_same_results((losses.detach(), {}), (plain.detach(), {}))
    assert_same_results(graded((losses * upstream).sum(), leaves), graded((plain * upstream).sum(), leaves))


def graded(loss: Tensor, leaves: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its gradients; 0 where there is none."""
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, retain_graph=True)
    named = zip(leaves, gradients, strict=True)
    return loss.detach(), {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in named}

"""Denominators: micro-batches and ranks together have the loss and the gradient of one batch on one device."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from seqpar.objectives import (
    clipped_surrogate,
    dpo,
    kl_estimate,
    minimum_risk,
    padded_segments,
    per_constant,
    per_item,
    per_sequence,
    per_token,
    sequence_log_ratio,
    sequence_sums,
    spread_to_tokens,
    token_log_ratio,
)
from seqpar.testing import assert_same_results
from seqpar.testing.ranks import ranks
from tests.on_device import Nowhere
from tests.seqpar.objectives.batches import batches, graded, numbers

METHODS = ("per_token", "per_sequence", "per_constant", "sequence ratios", "pairs", "groups")
V, D, LONGEST = 5, 3, 6


class Step(NamedTuple):
    """A step's responses, two of each prompt, and how they are cut: responses per micro-batch, for each rank."""

    seed: int
    lengths: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    packed: bool

    def parts(self, rank: int) -> list[tuple[int, int]]:
        """The first and last responses of a rank's micro-batches."""
        ends = [0]
        for sizes in self.cuts:
            for size in sizes:
                ends.append(ends[-1] + size)
        before = sum(len(sizes) for sizes in self.cuts[:rank])
        here = range(before, before + len(self.cuts[rank]))
        return [(ends[i], ends[i + 1]) for i in here]


class Tokens(NamedTuple):
    """A micro-batch."""

    segment_ids: Tensor
    sequences: int
    features: Tensor
    target: Tensor
    other: Tensor
    advantages: Tensor


def responses(step: Step) -> list[tuple[Tensor, ...]]:
    """Each response's features, targets, other log-probabilities and advantage."""
    random = torch.Generator().manual_seed(step.seed)
    made = []
    for n in step.lengths:
        features = torch.randn(n, D, dtype=torch.float64, generator=random)
        target = torch.randint(V, (n,), generator=random)
        other = -torch.rand(n, dtype=torch.float64, generator=random).mul(3)
        made.append((features, target, other, torch.randn((), dtype=torch.float64, generator=random)))
    return made


def micro_batch(step: Step, first: int, last: int) -> Tokens:
    """Some responses of the step, padded to their own longest, or packed."""
    features, target, other, advantages = zip(*responses(step)[first:last], strict=True)
    lengths = torch.tensor(step.lengths[first:last])
    if step.packed:
        ids = torch.arange(last - first).repeat_interleave(lengths)
        columns = [torch.cat(column) for column in (features, target, other)]
    else:
        ids = padded_segments(torch.arange(int(lengths.max()) + 1) < lengths.unsqueeze(1))
        columns = [padded(column, ids.size(1)) for column in (features, target, other)]
    return Tokens(ids, last - first, *columns, torch.stack(advantages))


def padded(column: tuple[Tensor, ...], time: int) -> Tensor:
    rows = [torch.cat([x, x.new_zeros(time - len(x), *x.shape[1:])]) for x in column]
    return torch.stack(rows)


def loss_of(method: str, weight: Tensor, m: Tokens) -> seqpar.TokenLoss:
    logits = m.features @ weight.T
    log_prob = logits.log_softmax(-1).gather(-1, m.target.unsqueeze(-1)).squeeze(-1)
    mask, layout = m.segment_ids >= 0, (m.segment_ids, m.sequences)
    ratio = token_log_ratio(log_prob, m.other, mask)
    clips = {"eps_low": 0.2, "eps_high": 0.28, "max_ratio": 5.0}
    token_losses = clipped_surrogate(ratio, spread_to_tokens(m.advantages, m.segment_ids), **clips)
    token_losses = token_losses + 0.1 * kl_estimate(ratio, "k3")
    sums = sequence_sums(ratio, *layout)
    return {
        "per_token": lambda: per_token(token_losses, mask),
        "per_sequence": lambda: per_sequence(token_losses, *layout),
        "per_constant": lambda: per_constant(token_losses, mask, LONGEST * m.sequences),
        "sequence ratios": lambda: per_item(
            clipped_surrogate(sequence_log_ratio(log_prob, m.other, *layout), m.advantages, **clips)
        ),
        "pairs": lambda: per_item(dpo(sums[::2], sums[1::2], beta=0.5)),
        "groups": lambda: per_item(minimum_risk(sums, m.advantages, 2, alpha=0.3)),
    }[method]()


def count_of(method: str, m: Tokens) -> int:
    return {
        "per_token": int((m.segment_ids >= 0).sum()),
        "per_constant": LONGEST * m.sequences,
        "pairs": m.sequences // 2,
        "groups": m.sequences // 2,
    }.get(method, m.sequences)


def the_weight() -> Tensor:
    return numbers(3, V, D)


def expected(step: Step, method: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over the whole step in one batch, divided by hand, and its gradient."""
    weight = the_weight()
    whole = micro_batch(step._replace(packed=False), 0, len(step.lengths))
    loss = loss_of(method, weight, whole)
    denominator = {
        "per_token": sum(step.lengths),
        "per_constant": LONGEST * len(step.lengths),
        "pairs": len(step.lengths) // 2,
        "groups": len(step.lengths) // 2,
    }.get(method, len(step.lengths))
    return graded(loss.total / max(1, denominator), {"weight": weight})


def on_a_rank(rank, world, step, method):
    weight = the_weight()
    group = dist.group.WORLD if world > 1 else None
    loss = seqpar.accumulate_gradients(
        [micro_batch(step, *part) for part in step.parts(rank)],
        lambda m: loss_of(method, weight, m),
        lambda m: count_of(method, m),
        group=group,
    )
    return loss.mean, {"weight": seqpar.group_sum(weight.grad, group)}


@st.composite
def steps(draw, world: int = 1) -> Step:
    """Steps of one to six pairs of responses, cut between pairs."""
    pairs = draw(st.integers(world, 6))
    lengths = draw(st.lists(st.integers(0, LONGEST), min_size=2 * pairs, max_size=2 * pairs))
    ends = sorted({0, pairs, *draw(st.lists(st.integers(0, pairs), max_size=3))})
    sizes = [2 * (b - a) for a, b in pairwise(ends)]
    where = sorted(draw(st.lists(st.integers(0, len(sizes)), min_size=world - 1, max_size=world - 1)))
    borders = [0, *where, len(sizes)]
    cuts = tuple(tuple(sizes[a:b]) for a, b in pairwise(borders))
    return Step(draw(st.integers(0, 999)), tuple(lengths), cuts, draw(st.booleans()))


@given(steps(), st.sampled_from(METHODS))
def test_micro_batches_of_unequal_sizes_are_one_batch(step, method):
    with Nowhere():
        answer = on_a_rank(0, 1, step, method)
    assert_same_results(answer, expected(step, method))


@settings(max_examples=30)
@given(steps(2), st.sampled_from(METHODS))
def test_any_split_over_two_ranks_is_one_batch(step, method):
    for answer in ranks(2, on_a_rank, step, method):
        assert_same_results(answer, expected(step, method))


UNEVEN = Step(1, (3, 0, 6, 2, 1, 1, 4, 5, 2, 6), ((4, 2), (2,), (2,)), packed=False)
STEPS = {
    "2 ranks": UNEVEN._replace(cuts=((4, 2), (4,))),
    "3 ranks, packed": UNEVEN._replace(packed=True),
    "an idle rank": UNEVEN._replace(cuts=((2, 6, 2), ())),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", STEPS)
def test_ranks_of_unequal_sizes_are_one_batch(name, method):
    step = STEPS[name]
    for answer in ranks(len(step.cuts), on_a_rank, step, method):
        assert_same_results(answer, expected(step, method))


@given(batches())
def test_the_denominators_are_those_of_a_loop(batch):
    losses = numbers(4, *batch.segment_ids.shape)
    counted = [losses[p] for p in batch.counted()]
    by_sequence = [[losses[p] for p in batch.tokens(s)] for s in range(batch.sequences)]
    means = [sum(of) / len(of) for of in by_sequence if of]
    zero = torch.zeros((), dtype=torch.float64)
    wanted = {
        "token": (per_token(losses, batch.mask), sum(counted, start=zero), len(counted)),
        "sequence": (
            per_sequence(losses, batch.segment_ids, batch.sequences),
            sum(means, start=zero),
            batch.sequences,
        ),
        "constant": (per_constant(losses, batch.mask, 17), sum(counted, start=zero), 17),
        "item": (per_item(losses.flatten()), losses.sum(), losses.numel()),
        "some items": (per_item(losses.flatten(), batch.mask.flatten()), sum(counted, start=zero), len(counted)),
    }
    for loss, total, count in wanted.values():
        assert loss.tokens.dtype == torch.int64
        assert loss.tokens == count
        assert_same_results(graded(loss.total, {"losses": losses}), graded(total, {"losses": losses}))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_batch_without_tokens_has_the_loss_0_and_the_gradient_0(value):
    log_prob = torch.full((2, 3), value, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    ids = padded_segments(mask)
    ratio = token_log_ratio(log_prob, log_prob, mask)
    for losses in (clipped_surrogate(ratio, torch.ones(2, 3), eps_low=0.2, eps_high=0.2), log_prob * 2):
        for loss in (per_token(losses, mask), per_sequence(losses, ids, 2), per_constant(losses, mask, 9)):
            (gradient,) = torch.autograd.grad(loss.total, log_prob, retain_graph=True)
            assert loss.total == 0
            assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_losses_are_summed_in_float32(dtype):
    losses, mask = torch.ones(1024, dtype=dtype), torch.ones(1024, dtype=torch.bool)
    ids = torch.zeros(1024, dtype=torch.int64)
    for loss in (per_token(losses, mask), per_item(losses), per_constant(losses, mask, 2)):
        assert loss.total.dtype == torch.float32
        assert loss.total == 1024
    assert per_sequence(losses, ids, 1).total == 1


def test_a_method_compiles_without_a_graph_break():
    weight, m = the_weight(), micro_batch(UNEVEN, 0, 4)
    compiled = torch.compile(loss_of, fullgraph=True, backend="eager")
    found, plain = (graded(f("per_sequence", weight, m).total, {"weight": weight}) for f in (compiled, loss_of))
    assert_same_results(found, plain)

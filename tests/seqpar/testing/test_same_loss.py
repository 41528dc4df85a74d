"""The kit that proves losses: right ones pass, and every usual mistake is caught and named."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import find, given, settings
from hypothesis import strategies as st
from torch import nn

import seqpar
from seqpar.rows.criteria import ignored_target
from seqpar.testing import assert_same_gradients, assert_same_loss, plain_loss
from seqpar.testing.causes import gradients_by_use
from seqpar.testing.ranks import ranks
from seqpar.testing.strategies import (
    cases,
    chunkings,
    criteria,
    device_lists,
    lengths,
    masks,
    shapes,
    targets,
    vocabulary_splits,
)

PADDING = 0


@given(st.data())
def test_any_generator_criterion_device_list_and_cut_of_the_engine_is_accepted(data):
    shape, classes = data.draw(shapes()), data.draw(st.integers(3, 13))
    padding = data.draw(st.sampled_from([-100, 0, classes - 1]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    generator = nn.Linear(4, classes).to(data.draw(st.sampled_from([torch.float64, torch.float32])))
    target, criterion = data.draw(targets(shape, classes, padding)), data.draw(criteria(classes, padding))
    layout = {"devices": data.draw(device_lists()), **data.draw(chunkings(*shape))}
    assert ignored_target(criterion) == padding
    assert_same_loss(generator, criterion, torch.randn(*shape, 4), target, **layout)
    assert all(p.grad is None for p in generator.parameters())


def found(strategy):
    return lambda wanted: find(strategy, wanted, settings=settings(max_examples=2000, database=None))


def test_the_strategies_reach_what_they_promise_and_nothing_else():
    found(vocabulary_splits(5, 3))(lambda rows: sum(rows) == 5 and 0 in rows and max(rows) > 2)
    found(vocabulary_splits(5, 3))(lambda rows: rows[0] == rows[2] == 0)
    found(device_lists())(lambda devices: devices is None)
    found(device_lists(most=3))(lambda devices: devices == ["cpu"] * 3)
    found(lengths(2, 3))(lambda length: length == [0, 3])
    found(chunkings(2, 3))(lambda cut: cut["chunk_tokens"] == 8)
    found(chunkings(2, 3))(lambda cut: cut["chunk_size"] == 5)
    found(masks((2, 3)))(lambda mask: not mask.any())
    found(targets((2, 3), 4, 0))(lambda target: target.count_nonzero() == 3)
    for kind in ("harvard", "fairseq", "torch"):
        found(criteria(4, 0))(
            lambda made, kind=kind: getattr(made, "smoothing_convention", "") == kind and made.label_smoothing > 0
        )
    found(criteria(4, 0))(lambda made: getattr(made, "weight", None) is not None)


@given(st.data(), st.integers(2, 9), st.integers(1, 4), st.sampled_from([0, 1]))
def test_every_class_is_on_one_rank(data, classes, world, least):
    split = data.draw(vocabulary_splits(classes + world, world, least))
    assert sum(split) == classes + world
    assert len(split) == world
    assert min(split) >= least


@given(cases(padding_is_a_class=True))
def test_only_masked_targets_are_the_padding(case):
    assert (replace(case, padding_share=0.0).targets() != case.padding).all()
    assert (replace(case, padding_share=1.0).targets() == case.padding).all()


class Deaf(torch.autograd.Function):
    """Gradients stored in forward, handed out whatever comes from above, to hidden alone or to both."""

    @staticmethod
    def forward(ctx, hidden, weight, target, parts):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
            loss = F.cross_entropy(F.linear(*leaves).flatten(0, -2), target.flatten(), reduction="sum")
        ctx.stored, ctx.parts = torch.autograd.grad(loss, leaves), parts
        return loss.detach()

    @staticmethod
    def backward(ctx, upstream):
        both = [g if name in ctx.parts else upstream * g for g, name in zip(ctx.stored, ("hidden", "weight"), strict=1)]
        return *both, None, None


def deaf(parts):
    return lambda generator, criterion, hidden, target: Deaf.apply(hidden, generator.weight, target, parts)


def mean(generator, criterion, hidden, target):
    return plain_loss(generator, nn.CrossEntropyLoss(ignore_index=criterion.ignore_index), hidden, target)


def mean_of_all_rows(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) / target.numel()


def dropped_rows(generator, criterion, hidden, target):
    rows = target.numel() // 4 * 4
    return criterion(generator(hidden.flatten(0, -2)[:rows]), target.flatten()[:rows])


def dropped_steps(generator, criterion, hidden, target):
    steps = target.size(1) // 2 * 2
    return plain_loss(generator, criterion, hidden[:, :steps], target[:, :steps])


def counted_padding(generator, criterion, hidden, target):
    return plain_loss(generator, nn.CrossEntropyLoss(reduction="sum"), hidden, target)


def twice(generator, criterion, hidden, target):
    loss = plain_loss(generator, criterion, hidden, target)
    loss.backward(retain_graph=True)
    return loss


def halved(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) / 2


def detached(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden.detach(), target)


def in_float32(generator, criterion, hidden, target):
    return criterion(F.linear(hidden.float(), generator.weight.float()).flatten(0, -2), target.flatten()).double()


MISTAKES = {
    "a mean instead of a sum: all gradients are 1/14 times the plain ones, and 14 targets are not ignored": mean,
    "a mean over all 15 targets, ignored padding counted: all gradients are 1/15 times": mean_of_all_rows,
    "the last chunk is dropped: hidden has no gradient in its last 3 rows": dropped_rows,
    "the last chunk is dropped: hidden has no gradient in its last 1 time steps, of 5": dropped_steps,
    "ignored padding is counted: hidden has a gradient in 1 rows whose target is ignored": counted_padding,
    "accumulation: all gradients are 2 times the plain ones": twice,
    "accumulation: all gradients are 1/2 of the plain ones": halved,
    "hidden: no gradient at all": detached,
    "float32 on the way": in_float32,
    "the upstream factor is ignored: an eighth of the loss leaves the gradient of hidden, generator.weight as": deaf(
        "hidden, weight"
    ),
    "the upstream factor is ignored: an eighth of the loss leaves the gradient of generator.weight as": deaf("weight"),
}


@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_is_caught_and_its_cause_named(cause):
    torch.manual_seed(1)
    generator = nn.Linear(4, 6, bias=False)
    target = torch.arange(1, 16).reshape(3, 5) % 5 + 1
    ignored = -100 if "upstream" in cause else PADDING
    if ignored == PADDING:
        target[1, 2] = PADDING
    criterion = nn.CrossEntropyLoss(ignore_index=ignored, reduction="sum")
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(generator, criterion, torch.randn(3, 5, 4), target, loss=MISTAKES[cause])
    said = str(caught.value)
    assert f"Likely cause: {cause}" in said
    assert said.count("\n    ") == 2, "the mistake and its remedy"
    assert "Smallest part of these inputs that fails: hidden (" in said


def test_both_numbers_and_the_smallest_failing_part_are_said():
    generator, target = nn.Linear(2, 3).double(), torch.tensor([[0, 1], [2, -100]])
    nn.init.zeros_(generator.weight)
    nn.init.zeros_(generator.bias)
    said = r"the loss is off by 2\.2 where the reference is 3\.3 large(.|\n)*: hidden \(1, 2, 2\), target \[\[0, 1\]\]"
    with pytest.raises(AssertionError, match=said):
        assert_same_loss(generator, nn.CrossEntropyLoss(reduction="sum"), torch.ones(2, 2, 2), target, loss=mean)


def test_a_division_by_no_tokens_is_named():
    generator, target = nn.Linear(2, 3), torch.full((4,), -100)
    with pytest.raises(AssertionError, match="Likely cause: a division by 0 tokens"):
        assert_same_loss(generator, nn.CrossEntropyLoss(reduction="sum"), torch.ones(4, 2), target, loss=mean)


def test_a_sum_where_the_steps_mean_is_due_is_named():
    generator, target = nn.Linear(2, 3), torch.tensor([0, 1, 2])
    criterion = nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(AssertionError, match=r"a sum instead of a mean: all gradients are 3 times .* has 3 tokens"):
        assert_same_loss(generator, criterion, torch.randn(3, 2), target, loss=plain_loss, tokens=3)
    assert_same_loss(generator, criterion, torch.randn(3, 2), target, loss=mean, tokens=3)
    assert_same_loss(generator, criterion, torch.randn(3, 2), target, tokens=3)


def test_an_unusual_mistake_is_not_given_a_cause():
    def noisy(generator, criterion, hidden, target):
        return plain_loss(generator, criterion, hidden * torch.linspace(1, 2, hidden.size(-1)), target)

    generator, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(AssertionError, match="Likely cause: none of the usual ones"):
        assert_same_loss(generator, criterion, torch.randn(6, 4), torch.tensor([0, 1, 2] * 2), loss=noisy)


@pytest.mark.parametrize("own", [None, plain_loss, halved])
def test_dropout_in_training_mode_is_named_with_its_remedy(own):
    torch.manual_seed(0)
    generator, criterion = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3)), nn.CrossEntropyLoss(reduction="sum")
    hidden, target = torch.randn(6, 4), torch.tensor([0, 1, 2] * 2)
    with pytest.raises(
        AssertionError, match="Likely cause: random numbers, such as those of dropout in train"
    ) as caught:
        assert_same_loss(generator, criterion, hidden, target, loss=own)
    assert "assert_same_loss(head.eval(), criterion, ...)" in str(caught.value)
    if own is not halved:
        assert_same_loss(generator.eval(), criterion, hidden, target, loss=own)
        return
    with pytest.raises(AssertionError, match="accumulation: all gradients are 1/2 of the plain ones"):
        assert_same_loss(generator.eval(), criterion, hidden, target, loss=own)


def test_dropout_of_two_losses_of_ones_own_is_named():
    weight, x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64)

    def loss():
        return (F.dropout(weight, 0.5) @ x).square().sum()

    with pytest.raises(
        AssertionError, match=r"Likely cause: random numbers, .* the plain loss itself is .* in another"
    ):
        assert_same_gradients(loss, loss, {"weight": weight})


@pytest.mark.parametrize("missed", ["embedding", "linear"])
def test_a_missed_tie_is_named_with_the_use_that_is_left(missed):
    torch.manual_seed(0)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    source, target = torch.tensor([1, 2, 3, 3]), torch.tensor([2, 3, 4, 0])
    copy = weight.detach().clone()

    def loss(embedded, projected):
        return F.cross_entropy(F.linear(F.embedding(source, embedded).tanh(), projected), target, reduction="sum")

    used = (copy, weight) if missed == "embedding" else (weight, copy)
    left = {"embedding": "linear", "linear": "embedding"}[missed]
    with pytest.raises(AssertionError, match=rf"a missed tie: weight is used 2 times, .* of use \d \({left}\) alone"):
        assert_same_gradients(lambda: loss(*used), lambda: loss(weight, weight), {"weight": weight})
    assert_same_gradients(lambda: loss(weight, weight), lambda: loss(weight, weight), {"weight": weight})


def test_the_gradients_through_each_use_add_up_to_the_gradient():
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, dtype=torch.float64)

    def loss():
        return (F.linear(F.linear(x, weight).tanh(), weight) * weight.sum()).sum()

    uses = gradients_by_use(loss, {"weight": weight})["weight"]
    assert [name for name, _ in uses] == ["linear", "linear", "sum"]
    torch.testing.assert_close(sum(g for _, g in uses), torch.autograd.grad(loss(), weight)[0])


def test_a_loss_of_ones_own_takes_no_layout_of_the_engine():
    with pytest.raises(ValueError, match="devices, chunk_size are for seqpar's engine"):
        assert_same_loss(
            nn.Linear(2, 3), nn.CrossEntropyLoss(), torch.ones(1, 2), torch.ones(1), loss=mean, devices=[], chunk_size=1
        )


def test_per_token_tensors_and_devices_take_part():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 5)

        def forward(self, hidden, gate):
            return self.out(hidden) * gate.unsqueeze(-1)

    gate, target = torch.rand(2, 3), torch.randint(5, (2, 3))
    criterion, hidden = seqpar.LabelSmoothing(0.1, "torch"), torch.randn(2, 3, 4)
    assert_same_loss(Gated(), criterion, hidden, target, devices=["cpu"] * 2, chunk_tokens=2, gate=gate)
    with pytest.raises(AssertionError, match="gate: no gradient at all"):
        assert_same_loss(Gated(), criterion, hidden, target, loss=forgets_the_gate, gate=gate)


def forgets_the_gate(generator, criterion, hidden, target, gate):
    return plain_loss(generator, criterion, hidden, target, gate=gate.detach())


STEP = 12
"""Tokens that are not ignored, over both ranks."""


def on_a_rank(rank, world, wrong):
    import torch.distributed as dist

    torch.manual_seed(0)
    generator, criterion = nn.Linear(4, 5).double(), nn.CrossEntropyLoss(reduction="sum")
    hidden, target = torch.randn(2, 8, 4).double()[rank], torch.randint(5, (2, 8))[rank]
    target[: 4 * rank] = -100
    own = [8, 4][rank]
    factors = {"right": world / STEP, "local": 1 / own, "forgot": 1 / STEP, "twice": world**2 / STEP}
    chosen = None if wrong == "engine" else lambda *a: plain_loss(*a) * factors[wrong]
    try:
        assert_same_loss(generator, criterion, hidden, target, loss=chosen, tokens=STEP, group=dist.group.WORLD)
    except AssertionError as error:
        return str(error)
    return ""


def test_ranks_with_the_steps_token_count_are_accepted():
    assert ranks(2, on_a_rank, "right") == ranks(2, on_a_rank, "engine") == ["", ""]


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ("local", r"rank 0: (.|\n)*the local token count: here 8 of the step's 12 tokens, .* 3/4 times the plain one"),
        ("forgot", r"rank 0: (.|\n)*the world size: all gradients are 1/2 times the plain ones, averaged"),
        ("twice", r"rank 0: (.|\n)*the world size: all gradients are 2 times the plain ones, multiplied"),
    ],
)
def test_a_wrong_count_over_ranks_is_named_on_every_rank(wrong, cause):
    import re

    first, second = ranks(2, on_a_rank, wrong)
    assert re.search(cause, first)
    assert first == second

"""The cause of a wrong loss is named by its numbers alone: each cause against each mistake that looks like it.

A row names the cause and its numbers, counted by hand; `.*` stands for words that another row has.
"""

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from seqpar.rows.criteria import LabelSmoothing
from seqpar.testing.causes import likely_cause
from seqpar.testing.evidence import Evidence, Repeated
from seqpar.testing.smoothing_causes import OtherSmoothing, other_smoothing
from tests.seqpar.testing.test_edges_of_verdicts import wide

pytestmark = pytest.mark.unswitched


VALUE = wide(math.pi)[0]


def evidence(times, off=0.0, more=(), **facts):
    """A loss and gradients, of weights and of three tokens' hidden states, that are a multiple of the plain ones."""
    plain = {"w": wide(1.0, 3.0, 2.0), "hidden": wide(1.0, 2.0, 3.0, 5.0, 7.0, 4.0).view(3, 2)}
    got = {name: g * times * (1 + off) for name, g in plain.items()} | dict(more)
    return Evidence((VALUE * times * (1 + off), got), (VALUE, plain), per_token=frozenset({"hidden"}), **facts)


def with_eighth(times):
    """A wrong loss whose gradients are so many times as large if it is multiplied by 1/8."""
    found = evidence(1.7)
    return replace(found, eighth=(found.got[0] / 8, {name: g * times for name, g in found.got[1].items()}))


def with_value(found, got, plain=math.pi, dtype=torch.float64):
    """The same gradients with other losses."""
    return replace(
        found,
        got=(torch.tensor(got, dtype=dtype), found.got[1]),
        expected=(wide(plain)[0], found.expected[1]),
    )


def alone(got, plain, **facts):
    """One gradient, of a right loss."""
    return Evidence((VALUE, {"w": got}), (VALUE, {"w": plain}), **facts)


def several(gradients):
    """Gradients of one number each, got and plain, of a right loss."""
    got, plain = ({name: None if of[k] is None else wide(of[k]) for name, of in gradients.items()} for k in (0, 1))
    return Evidence((VALUE, got), (VALUE, plain))


HALVES = {"hidden": wide(1.0, 2.0, 3.0, 5.0, 0.0, 0.0).view(3, 2)}
NONE = "none of the usual ones; "
RIGHT = "; the value is right, only the gradient is wrong"
SINGLE = torch.float32
TWO_RANKS = {"counts": [(3, 6), (3, 6)]}
BY_ITSELF = [
    (evidence(1 / 3, tokens=3, rows=6), "a mean instead of a sum: all gradients are 1/3 times the plain ones"),
    (evidence(1 / 6, tokens=3, rows=6), "a mean over all 6 targets, ignored padding counted"),
    (evidence(6 / 11, divisor=6, counts=[(3, 6), (2, 4), (1, 1)]),
        "a mean over all 11 targets, ignored padding counted"),
    (evidence(1 / 6, tokens=6, rows=6), "a mean instead of a sum: all gradients are 1/6 times the plain ones"),
    (evidence(7, divisor=7), "a sum instead of a mean: all gradients are 7 times the plain ones, and the step has"),
    (evidence(2), "accumulation: all gradients are 2 times the plain ones, as if never set to zero"),
    (evidence(1 / 2), "accumulation: all gradients are 1/2 of the plain ones"),
    (evidence(3 / 2), f"{NONE}all gradients are 3/2 times the plain ones"),
    (evidence(3, off=1.2e-6), NONE),
    (evidence(3, off=0.8e-6), "accumulation: all gradients are 3 times the plain ones"),
    (evidence(2, **TWO_RANKS), "the world size: all gradients are 2 times the plain ones, multiplied by the number of"),
    (evidence(1 / 2, **TWO_RANKS),
        "the world size: all gradients are 1/2 times the plain ones, averaged over the rank"),
    (evidence(1, off=0.9e-5), "float32 on the way: nothing is off by more than 9e-06 of its size"),
    (evidence(1, off=0.9e-5, dtype=torch.float32), NONE),
    (evidence(1, off=1.1e-5), NONE),
    (evidence(math.nan, tokens=0), "a division by 0 tokens: every target is ignored"),
    (evidence(math.nan, tokens=1), NONE),
    (evidence(1.7, again=Repeated([math.pi, 3.0, 2.0], [2.0, 2.0])),
        r"random numbers, such as those of dropout in training mode: the plain loss itself is 3\.14159 in one call and "
        "3 in"),
    (evidence(1.7, again=Repeated([math.pi, math.pi * (1 + 0.9e-6)], [2.0, 2.0])), NONE),
    (evidence(1, more={"w": wide(0.0, 0.0, 0.0)}), "w: no gradient at all, so the loss is detached from it"),
    (evidence(1, more=HALVES), "the last chunk is dropped: hidden has no gradient in its last 1 rows, of 3, and the"),
    (evidence(1.7, again=Repeated([math.pi, 3.0], [2.0, 2.1], ["n went from 1 to 2"])),
        "the generator or the criterion changes from call to call: n went from 1 to 2; the plain loss itself is"),
    (evidence(1.7, again=Repeated([math.pi, 3.0], [2.0, 2.1])),
        r"the generator or the criterion changes from call to call; the plain loss itself is 3\.14159 in one call and "
        "3 "),
    (evidence(1, more={"hidden": HALVES["hidden"].roll(-1, 0)}), NONE),
    (evidence(1, **TWO_RANKS, more={"w": wide(2.0, 6.0, 4.0)}),
        "a gradient is reduced twice: that of w is 2 times the plain one, and no other"),
    (evidence(1.7, divisor=8, **TWO_RANKS, more={"hidden": evidence(8 / 3).got[1]["hidden"]}),
        "the local token count, without an all-reduce of it: here 3 of the step's 6 tokens, and hidden's gradient is "
        "8/3 times the plain one, 8 / 3"),
    (evidence(1.7, divisor=8, **TWO_RANKS, more={"hidden": evidence(4 / 3).got[1]["hidden"]}),
        "the local token count, without an all-reduce of it: here 3 of the step's 6 tokens, and hidden's gradient is "
        "4/3 times the plain one, 8 / (3 x 2 ranks)"),
    (with_value(evidence(3), math.pi * (1 + 0.9e-12)), f"accumulation: .* as if never set to zero{RIGHT}$"),
    (with_value(evidence(3), math.pi * (1 + 1.1e-12)), "accumulation: .* as if never set to zero$"),
    (with_eighth(1), "the upstream factor is ignored: "),
    (with_eighth(1 / 64), "the upstream factor is squared: "),
    (with_eighth(1 / 8), NONE),
]  # fmt: skip
BY_THE_VALUE = [
    (with_value(evidence(1), 1.0, 0.0), f"{NONE}all gradients are right, only the value is wrong$"),
    (with_value(evidence(1, tokens=3, divisor=3), 2 * math.pi), f"{NONE}.* only the value is wrong: 2 times the plain"),
    (with_value(evidence(2, tokens=0), math.inf), "a division by 0 tokens: every target is ignored"),
    (with_value(evidence(1), 1.0005 * math.pi), f"{NONE}all gradients are right, only the value is wrong$"),
    (Evidence(evidence(1, off=0.9e-5).got, (torch.tensor(math.pi), evidence(1).got[1])),
        "the plain loss casts its logits"),
    (Evidence((torch.tensor(math.pi), evidence(1, off=0.9e-5).got[1]), (torch.tensor(math.pi), evidence(1).got[1])),
        "float32 .* the loss is float32 itself"),
    (evidence(2, tokens=0), "accumulation: all gradients are 2 times"),
    (with_value(evidence(1.7, again=Repeated([5e-7], [1.0])), 1.0, 0.0), NONE),
    (with_value(evidence(1.7, again=Repeated([1.0], [1.0])), 1.1, math.nan), NONE),
    (evidence(1.7, eighth=(wide(0.5)[0], {})),
        "the loss under test changes .*: it is 5.34071 in one and 4 in the next"),
    (evidence(1.2, eighth=(wide(1.2 * math.pi / 8)[0], {})), f"{NONE}all gradients are 6/5 times the plain ones$"),
    (with_value(evidence(1, off=0.9e-5), math.pi * 1.00002), NONE),
    (with_value(evidence(1, more={"w": wide(1.0, 3.0, 2.1)}), math.pi), f"{NONE}.*; the value is right, only the gra"),
    (with_value(evidence(1, off=0.9e-5), 0.0, 0.0), "float32 on the way: nothing is off by more than 9e-06 of its "),
    (with_value(evidence(1, off=0.9e-5), math.pi * 1.000002), "float32 .* off by more than 9e-06 .* keeps 1e-16$"),
    (with_value(evidence(1, off=0.9e-5), math.pi, dtype=SINGLE), "float32 .* keeps 1e-16; the loss is float32 itself"),
    (replace(evidence(1, off=0.9e-5), expected=(torch.tensor(math.pi), evidence(1).expected[1])),
        "the plain loss casts"),
    (replace(evidence(1.2, off=0.9e-5), expected=(torch.tensor(math.pi), evidence(1).expected[1])), NONE),
    (alone(wide(1.5, 0.25), wide(1.51, 0.2501)), "sums in bfloat16: w has no digits beyond those of bfloat16"),
    (alone(wide(1 + 2**-10, 0.25), wide(1.01, 0.2501)), "sums in float16: w has no digits beyond those of float16"),
    (alone(wide(1.0, -7.5), wide(0.0, 0.0)),
        "a gradient where the plain one is 0: that of w, which is up to 7.5; the value is right"),
    (several({"u": (0.5, None), "v": (-0.25, 0.0), "w": (2.0, 2.0)}),
        "a gradient where the plain one is 0: that of u, which is up to 0.5, that of v, which is up to 0.25;"),
    (several({"v": (2e-12, 0.0), "w": (3.0, 2.0)}), NONE),
    (alone(wide(1.5, 0.25), wide(1.51, 0.2501), dtype=torch.bfloat16), f"{NONE}the gradient of w"),
    (alone(None, None), f"{NONE}no gradient can be compared; the value is right"),
    (evidence(2 / 3), f"{NONE}all gradients are 2/3 times the plain ones$"),
    # A loss of 0 is no sum in a narrow dtype
    (with_value(alone(wide(0.1, 0.7, 1 / 3), wide(0.1, 0.7, 1 / 3)), 0.0),
        f"{NONE}all gradients are right, only the value is wrong: 0 times the plain one$"),
    (evidence(1, more={name: 0 * g for name, g in evidence(1).got[1].items()}), "w, hidden: no gradient at all"),
]  # fmt: skip


def used(*times, world=1, gradients=None, **facts):
    """A tensor of several uses, rank by rank, of which the gradient has each so many times."""
    each = gradients or [wide(1.0, 0.0, 2.0, 1.0), wide(0.0, 1.0, 1.0, 3.0), wide(2.0, 5.0, 0.0, 1.0)]
    each = [*each, wide(1.0, 1.0, 4.0, 0.0), wide(0.0, 7.0, 1.0, 1.0)][: len(times)]
    got = sum(n * g for n, g in zip(times, each, strict=True))
    uses = {"w": [*zip("abcde", each, strict=False)]}
    return alone(got, sum(each), uses=uses, counts=[(0, 0)] * world * (world > 1), **facts)


ZERO = [wide(0.0, 0.0, 0.0, 0.0), wide(0.0, 1.0, 1.0, 3.0), wide(2.0, 5.0, 0.0, 1.0)]
BY_USE = [
    (used(1, 0, 1), "a missed tie: w is used 3 times, and its gradient is that of use 1 (a), use 3 (c) alone"),
    (used(0, 5, 5),
        "a missed tie: .* is that of use 2 (b), use 3 (c) alone; besides, all gradients are multiplied by 5"),
    (used(0, 1, 0, 1, world=2),
        f"a missed tie: w is used 2 times, and its gradient is that of use 2 (b) alone{RIGHT}$"),
    (used(2, 1, 0), f"a use counted too often: of 3 uses of w, its gradient has that of use 1 (a) 2 times{RIGHT}$"),
    (used(6, 3, 9),
        ".* of 3 uses of w, its gradient has that of use 1 (a) 2 times, that of use 3 (c) 3 times; besides, all "
        "gradients are multiplied by 3"),
    (used(-1, -2), "a use .* of use 2 (b) 2 times; besides, all gradients are multiplied by -1"),
    (used(0, 0, 1, 1, 0, world=2), NONE),
    (used(1, 0, world=2, gradients=[wide(1.0, 0.0, 2.0, 1.0).view(2, 2), wide(0.0, 1.0, 1.0, 3.0).view(2, 2)],
        per_token=frozenset({"w"})), NONE),
    (used(2.5, 1), NONE),
    (used(1, 0, 1, 0, 1, world=2), NONE),
    (used(3, 3, 1.5, world=3), NONE),
    (used(1, 2, 1, gradients=ZERO),
        "a use counted too often: of 3 uses of w, its gradient has that of use 2 (b) 2 times"),
    (used(1, 0, 1, gradients=ZERO), "a missed tie: w is used 3 times, and its gradient is that of use 3 (c) alone"),
    (used(0, 1, 1, world=3), f"rank 0 contributes nothing: the gradient of w is that of the other ranks alone{RIGHT}$"),
    (used(3, 0, 0, world=3), "ranks 1 and 2 contribute nothing: .* alone; besides, all gradients are multiplied by 3"),
    (used(0, 1, 2, world=3), NONE),
    (used(0, 0, 1, 1, world=2), f"rank 0 contributes nothing: .* of w is that of the other ranks alone{RIGHT}$"),
    (used(1, 1, 0, 0, world=2), f"rank 1 contributes nothing: .* of w is that of the other ranks alone{RIGHT}$"),
    (used(2, 2, gradients=ZERO, world=2), "the world size: all gradients are 2 times"),
    (used(0, 0, 0, world=3), "w: no gradient at all"),
    (used(1, 2, divisor=6, world=2), NONE),
]  # fmt: skip


def own_counts(*times, gradients=None, **facts):
    """As `used`, with one use on each rank."""
    return replace(used(*times, world=len(times), gradients=gradients), **facts)


LOCAL = "the local token count, without an all-reduce of it: here "
COUNTS = {"counts": [(3, 4), (1, 5)], "divisor": 12}
BY_RANK = [
    (own_counts(2, 6, **COUNTS),
        LOCAL + "3 of the step's 4 tokens, and this rank's part of w's gradient is 2 times the plain one, 12 / (3 x 2 "
        "ranks)"),
    (own_counts(2, 6, rank=1, **COUNTS), LOCAL + "1 of the step's 4 .* is 6 times the plain one, 12 / (1 x 2 ranks)"),
    (own_counts(4, 12, rank=1, **COUNTS),
        LOCAL + "1 of the step's 4 tokens, .* is 12 times the plain one, 12 / 1" + RIGHT),
    (own_counts(2, 6, gradients=ZERO, **COUNTS), LOCAL + "1 of the step's 4 tokens, .* 12 / (1 x 2 ranks)"),
    (own_counts(3 / 2, 6 / 5, rank=1, **COUNTS),
        "the local number of targets, ignored ones counted: here 5 of the step's 9 targets, and this rank's part of "
        "w's gradient is 6/5 times the plain one, 12 / (5 x 2 ranks)"),
    (own_counts(2, 7, **COUNTS), NONE),
    # The second rank's 3 times is 6 / (1 x 2 ranks); the first one's share is right by chance
    (own_counts(1, 3, counts=[(3, 6), (1, 6)], divisor=6),
        LOCAL + "3 of the step's 4 tokens, .* is 1 times the plain one, 6 / (3 x 2 ranks)"),
    (evidence(1, counts=[(3, 6), (2, 4)], rank=1, divisor=8, more={"hidden": 2 * evidence(1).got[1]["hidden"]}),
        LOCAL + "2 of the step's 5 tokens, and hidden's gradient is 2 times the plain one, 8 / (2 x 2 ranks)"),
    (evidence(1, counts=[(3, 6), (3, 6)], divisor=6, more={"w": wide(2.0, 6.0, 4.0)}), "a gradient is reduced twice"),
    (evidence(1, **TWO_RANKS, more={"w": wide(0.5, 1.5, 1.0)}),
        "a gradient is divided by ranks twice: that of w is 1/2 t"),
    (evidence(1, **TWO_RANKS, more={"w": 1.0005 * wide(1.0, 3.0, 2.0)}), NONE),
    (evidence(1, **TWO_RANKS, more={"hidden": 3 * evidence(1).got[1]["hidden"]}), NONE),
    (alone(3 * wide(1.0, 3.0), wide(1.0, 3.0), **TWO_RANKS), "accumulation: all gradients are 3 times"),
    (evidence(3, counts=[(1, 1)] * 3),
        "the world size: all gradients are 3 times the plain ones, multiplied by the num"),
    (evidence(1 / 3, counts=[(2, 2)] * 3), "the world size: all gradients are 1/3 times the plain ones, averaged over"),
    (evidence(7 / 5, divisor=7, counts=[(3, 6), (2, 4)]), NONE),
    (evidence(7 / 5, divisor=7, counts=[(3, 3), (2, 2)]), NONE),
    (evidence(6 / 11, divisor=6, counts=[(3, 6), (2, 5)]),
        "a mean over all 11 targets, ignored padding counted: all gradients are 6/11 times the plain ones, and only 5 "
        "are not ignored"),
    (evidence(2 / 3, divisor=2, tokens=3, rows=6),
        "a mean instead of a sum: .* 2/3 times the plain ones, and 3 targets a"),
    (evidence(7 / 2, divisor=7, **TWO_RANKS),
        "a sum instead of a mean: all gradients are 7/2 times the plain ones, and the step has 7 tokens"),
]  # fmt: skip


def three(**changed):
    """A value and the gradients of three tensors, all 1 but for these."""
    gradients = {name: wide(1.0, 2.0) * changed.get(name, 1) for name in "abc"}
    return wide(changed.get("value", math.pi))[0], gradients


def of_three(**times):
    return Evidence(three(**times), three(), **TWO_RANKS)


BY_TENSOR = [
    (of_three(a=2, c=2), "a gradient is reduced twice: that of a, c is 2 times the plain one, and no other"),
    (of_three(a=2, c=3),
        f"{NONE}the gradient of a is 2 times the plain one; the gradient of c is 3 times .*; all others a"),
    (of_three(a=0.5, b=0.5), "a gradient is divided by ranks twice: that of a, b is 1/2 times the plain one"),
]  # fmt: skip


def supposed(got, mistaken, none=None):
    """A loss beside the plain one with a mistake; one that cannot be computed comes before it."""
    tried = [("", lambda: none or three()), ("impossible", lambda: 1 / 0), ("the mistake", lambda: mistaken)]
    return Evidence(got, three(), imagined=tried)


BY_SUPPOSING = [
    (supposed(three(a=5), three(a=5)), f"the mistake{RIGHT}$"),
    (supposed(three(a=15, b=3, c=3), three(a=5)), "the mistake; besides, all gradients are multiplied by 3"),
    (supposed(three(a=7, value=5.0), three(a=5, value=5.0)), "the mistake$"),
    (supposed(three(a=7), three(a=5)), NONE),
    (supposed(three(a=2, b=2, c=2), three(a=2, b=2, c=2)), f"the mistake{RIGHT}$"),
    (supposed(three(a=4, b=4, c=4), three(a=2, b=2, c=2)), "accumulation: all gradients are 4 times"),
    (supposed(three(a=3, b=3, c=3), three()), "accumulation: all gradients are 3 times"),
    (supposed(three(value=4.1), three()), f"{NONE}all gradients are right, only the value is wrong"),
    (supposed(three(a=5), three(a=5), none=three(b=2)), NONE),
    (supposed(three(a=5), three(a=5), none=three(a=1 + 1e-15)), "the mistake"),
    (replace(evidence(1.7), plain_eighth=(wide(1.0), evidence(1 / 8, more={"w": wide(1.0, 3.0, 2.0)}).got[1])),
        "the backward .* is not linear, .* does not have an eighth of the gradient of w$"),
    (Evidence(three(a=5, b=0), three(b=0), plain_eighth=three(a=1 / 8, b=0, c=1 / 8)), NONE),
]  # fmt: skip


def in_rows(*times, zero=(), columns=2, shape=None, last=1.0, **facts):
    """The gradient of hidden whose rows are so many times the plain ones; some plain ones are 0."""
    right = torch.arange(1.0, columns * len(times) + 1, dtype=torch.float64).view(len(times), columns).sqrt()
    right[list(zero)] = 0
    got = right * wide(*times).unsqueeze(1)
    got[:, -1] *= last
    if shape:
        right, got = right.view(*shape, columns), got.view(*shape, columns)
    facts.setdefault("per_token", frozenset({"hidden"}))
    return Evidence((VALUE, {"hidden": got}), (VALUE, {"hidden": right}), **facts)


def unlike(found, row, column=0, by=5.0):
    """The same with another number in one row."""
    found.got[1]["hidden"].flatten(0, -2)[row, column] += by
    return found


HIDDEN = f"{NONE}the gradient of hidden is "
EVENLY = f"{HIDDEN}no multiple of the plain one{RIGHT}$"
MEANS = "a mean of means: each part is divided by its own tokens, so hidden's gradient is "
BY_ROW = [
    (in_rows(1, 1, 0, 0, 0),
        "the last chunk is dropped: hidden has no gradient in its last 3 rows, of 5, and the right o"),
    (in_rows(1, 0, 0, 0, zero=[2]), "the last chunk is dropped: hidden has no gradient in its last 3 rows, of 4"),
    (in_rows(1, 0, 0, 0, zero=[3]), "the last chunk is dropped: hidden has no gradient in its last 3 rows, of 4"),
    (in_rows(0, 0, 3, 3, 3),
        "the first chunk is dropped: .* in its first 2 rows, of 5, and 3 times the plain one elsewhe"),
    (in_rows(0, 0, 0, 1, zero=[0]),
        "the first chunk is dropped: .* in its first 3 rows, of 4, and the right one elsewhe"),
    (in_rows(1, 0, 0, 1),
        "a chunk in the middle is skipped: hidden has no gradient in its rows 1 to 2, of 4, and the r"),
    (in_rows(1, 1 + 1e-8, 0, 1), "a chunk in the middle is skipped: .* rows 2 to 2, of 4, and the right one elsewhere"),
    (in_rows(0, 1, 0, 1), f"{HIDDEN}0 times the plain one in its rows 0, 2, of 4, and right elsewhere{RIGHT}$"),
    (in_rows(1, 1, 2, 2 + 1e-8),
        "a chunk is counted 2 times: the gradient of hidden is 2 times the plain one in its last 2 rows, of 4, and "
        "right elsewhere"),
    (in_rows(3, 3, 1, 1, 1),
        "a chunk is counted 3 times: .* 3 times the plain one in its first 2 rows, of 5, and right"),
    (in_rows(2, 2, 3, 3), EVENLY),
    (in_rows(2, 2, 1 / 2, 1 / 2), EVENLY),
    (in_rows(1, 1, 5 / 2, 5 / 2), f"{HIDDEN}5/2 times the plain one in its rows 2 to 3, of 4, and right elsewhere"),
    (unlike(in_rows(1, 1, 1, 0), 0),
        f"{HIDDEN}no multiple of the plain one in its row 0, 0 times the plain one in its row 3, of 4, and right "
        "elsewhere"),
    (in_rows(1, 2, 3, 1),
        f"{HIDDEN}2 times the plain one in its row 1, 3 times the plain one in its row 2, of 4, and r"),
    (in_rows(1, 2, 3, 4), EVENLY),
    (in_rows(1, 9, 9, 9, 1, 9), f"{HIDDEN}9 times the plain one in its rows 1 to 3, 5, of 6, and right elsewhere"),
    (in_rows(9, 1, 9, 1, 9, 1, 9, 9), f"{HIDDEN}9 times the plain one in its rows 0, 2, 4, 6 to 7, of 8, and right"),
    (in_rows(9, 9, 1, 9, 1, 9, 1, 9, 1, 9), f"{HIDDEN}9 times the plain one in its 6 rows, of 10, and right elsewhere"),
    (in_rows(1, 1, 1, last=0.0), EVENLY),
    (in_rows(1, 1, 0, 1, 1, 0, shape=(2, 3)),
        "the last chunk is dropped: .* no gradient in its last 1 time steps, of 3,"),
    (in_rows(1, 9, 1, 1, 1, 1, shape=(2, 3)),
        "a chunk is counted 9 times: .* in its rows 1 to 1, of 6, and right else"),
    (in_rows(1, 1, 0, 0, per_token=frozenset({"w"})), EVENLY),
    (in_rows(1, 2, 1, 1, 2, 1, tokens=6), f"{HIDDEN}2 times the plain one in its rows 1, 4, of 6, and right elsewhere"),
    (in_rows(1.5, 1.5, 3, tokens=3, divisor=3), f"{MEANS}3/2 times the plain one in 2 rows, 3 times the plain one in"),
    (in_rows(0.75, 0.75, 1.5, tokens=3), EVENLY),
    (in_rows(0.75, 0.75, 1.5, tokens=3, divisor=3),
        f"{MEANS}3/4 times the plain one in 2 rows, 3/2 times the plain one in 1 rows"),
    (in_rows(0.75, 0.75, 1.5), EVENLY),
    (in_rows(0.75, 0.75, 1.5, tokens=3, **TWO_RANKS), EVENLY),
    (in_rows(1, 2 / 3, 2 / 3, 2 / 3, tokens=4),
        f"{HIDDEN}2/3 times the plain one in its rows 1 to 3, of 4, and right els"),
    (in_rows(0, 3, 0, 3, tokens=4), EVENLY),
    (in_rows(-1, -1, -2, tokens=3, divisor=-4), EVENLY),
    (in_rows(*[4 / 3] * 16, *[2 / 3] * 34, tokens=50, divisor=44),
        f"{MEANS}4/3 times the plain one in 16 rows, 2/3 times the plain one in 34 rows"),
    (in_rows(*[2 / 3] * 17, *[1 / 3] * 36, tokens=53, divisor=70 / 3), EVENLY),
    (in_rows(1, 0.5, 0.5, 1, 0.5, 0.5, zero=[1], shape=(2, 3), tokens=5),
        f"{HIDDEN}1/2 times the plain one in its rows"),
]  # fmt: skip


def padded(ignored=None):
    found = in_rows(1, 1, 1, 1, zero=[1, 2], ignored=ignored)
    return unlike(unlike(found, 1), 2)


BY_ROW += [
    (padded(), "ignored padding is counted, it seems: hidden has a gradient in 2 rows where the plain one is 0"),
    (unlike(padded(), 0),
        f"{HIDDEN}no multiple of the plain one in its row 0, not 0, as the plain one is, in its rows 1 to 2, of 4"),
    (padded(torch.tensor([False, True, True, False])),
        "ignored padding is counted: hidden has a gradient in 2 rows whose "),
    (padded(torch.tensor([False, True, False, True])),
        f"{HIDDEN}not 0, as the plain one is, in its rows 1 to 2, of 4, an"),
]  # fmt: skip


def in_parts(*shares, weights=(), **facts):
    """The gradient of a step of three parts, which has each so many times."""
    parts = [wide(1.0, 0.0, 2.0), wide(0.0, 1.0, 1.0), wide(2.0, 5.0, 0.0)]
    got = sum(times * part for times, part in zip(shares, parts, strict=True))
    given = [{"w": part, "v": 2 * part.flip(0)} for part in parts]
    both = {"w": got, "v": 2 * got.flip(0)}, {name: sum(part[name] for part in given) for name in ("w", "v")}
    return Evidence((VALUE, both[0]), (VALUE, both[1]), parts=given, weights=weights, **facts)


UNEVEN, EVEN = [1 / 6, 1 / 3, 1 / 2], [1 / 4, 1 / 4, 1 / 2]
OWN = "each micro-batch is divided by its own tokens, not by those of the step"
BY_PART = [
    (in_parts(1, 0, 1),
        f"a part of the step contributes nothing: it has the gradient of sentences 0, 2 alone, of 3{RIGHT}$"),
    (in_parts(0, 1, 0), "a part of the step contributes nothing: it has the gradient of sentences 1 alone, of 3"),
    (in_parts(0, 3, 3),
        "only the gradient of the last micro-batch is kept: it has the gradient of sentences 1, 2 alone, of 3; "
        "besides, all gradients are multiplied by 3"),
    (in_parts(1, 1, 0, ranks_differ=True, rank=1),
        "not reduced over ranks: each rank keeps the gradient of its own tokens; in rank 1 it has the gradient of "
        "sentences 0, 1 alone, of 3"),
    (in_parts(0, 1, 2), NONE),
    (in_parts(1, 2, 3, weights=UNEVEN, micro_batches=3), NONE),
    (in_parts(2, 1, 2 / 3, weights=UNEVEN, micro_batches=3), f"mean of means: {OWN} (shares 2/3, 1, 2){RIGHT}$"),
    (in_parts(2, 1, 2 / 3, weights=UNEVEN), NONE),
    (in_parts(6, 3, 2, weights=UNEVEN, micro_batches=3),
        f"a sum of means: {OWN}, and their sum not by the 3 micro-batches (shares 2, 3, 6)"),
    (in_parts(6, 6 / 5, 6 / 5, weights=UNEVEN, micro_batches=2),
        "a sum of means: .* by the 2 micro-batches (shares 6/5, 6)"),
    (in_parts(4 / 3, 4 / 3, 2 / 3, weights=EVEN, micro_batches=3), f"mean of means: {OWN} (shares 2/3, 4/3)"),
    (in_parts(1, 1, 1 / 2, weights=EVEN, micro_batches=3), f"mean of means: {OWN} (shares 1/2, 1); besides, .* by 3/4"),
    (in_parts(1, 1 / 2, 1 / 3, weights=UNEVEN, micro_batches=3),
        "mean of means: .*; besides, .* are multiplied by 1/2"),
    (in_parts(-2, -1, -2 / 3, weights=UNEVEN, micro_batches=3), NONE),
    (in_parts(2, 1, 0, weights=UNEVEN, micro_batches=3), NONE),
]  # fmt: skip
TABLES = {
    "itself": BY_ITSELF, "value": BY_THE_VALUE, "use": BY_USE, "rank": BY_RANK, "tensor": BY_TENSOR, "row": BY_ROW,
    "part": BY_PART, "supposing": BY_SUPPOSING,
}  # fmt: skip


ROWS = [pytest.param(*row, id=f"{by}: {row[1][:60]}") for by, rows in TABLES.items() for row in rows]


@pytest.mark.parametrize(("found", "cause"), ROWS)
def test_a_cause_and_its_numbers_are_those_of_the_table(found, cause):
    said = likely_cause(found).removeprefix("Likely cause: ").splitlines()[0]
    assert re.match(re.sub(r"([()])", r"\\\1", cause), said), f"{said}\n{cause}"


TORCHS, FAIRSEQS = "in the convention 'torch'", "in the convention 'fairseq'"
TWICE_AS_MUCH = f"label smoothing of 0.2 {TORCHS}, where the criterion has 0.1 {TORCHS}"
BY_SMOOTHING = [
    (("fairseq", 0.1, 1), ("torch", 0.1, 1), True,
        "the smoothing convention 'fairseq', where the criterion has 'torch'"),
    (("fairseq", 0.2, 1), ("torch", 0.1, 1), True,
        f"label smoothing of 0.2 {FAIRSEQS}, where the criterion has 0.1 {TORCHS}"),
    (("torch", 0.1234567, 6), ("torch", 0.0, 2), False, f"label smoothing of 0.123457 {TORCHS}, where the criterion "
        "has no label smoothing; besides, all gradients are multiplied by 3"),
    (("torch", 1e-9, 1), ("harvard", 0.1, 1), True,
        "no label smoothing, where the criterion has 0.1 in the convention 'harvard'"),
    (("torch", 0.2, 1), ("torch", 0.1, 1), True, TWICE_AS_MUCH),
    (("torch", 0.2, 1 / 7), ("torch", 0.1, 1 / 7), True, TWICE_AS_MUCH),
    (("torch", 0.2, 2), ("torch", 0.1, 1), True, f"{TWICE_AS_MUCH}; besides, all gradients are multiplied by 2"),
    (("torch", 0.2, 2 / 7), ("torch", 0.1, 1 / 7), True,
        f"{TWICE_AS_MUCH}; besides, all gradients are multiplied by 2"),
    (("torch", -0.5, 1), ("torch", 0.1, 1), True, None),
    (("torch", 1.5, 1), ("torch", 0.1, 1), True, None),
    (("torch", 0.1, 3), ("torch", 0.1, 1), True, None),
    (("torch", 0.1, 3), None, True, f"the plain cross-entropy with label smoothing of 0.1 {TORCHS}, where the "
        "criterion is another one, or has class weights"),
]  # fmt: skip
"""Convention, eps and factor of the loss and of the plain one; whether the criterion states its own; what is said."""


@pytest.mark.parametrize(("theirs", "own", "known", "said"), BY_SMOOTHING)
def test_a_smoothing_is_named_by_convention_eps_and_factor(theirs, own, known, said):
    none, ends = wide(1.0, 2.0, 0.5, 0.0), wide(3.0, -1.0, 4.0, 5.0)
    starts = {
        "torch": wide(0.0, 1.0, 0.0, 2.0),
        "fairseq": wide(3.0, 0.0, 1.0, 0.0),
        "harvard": wide(0.0, 0.0, 2.0, 1.0),
    }

    def smoothed(convention, eps, times=1):
        return VALUE, {"w": times * (none + eps * (ends + starts[convention]))}

    plain = smoothed(*own) if own else (VALUE, {"w": wide(5.0, 1.0, 9.0, 2.0)})
    found = Evidence(smoothed(*theirs), plain, smoothed=smoothed, smoothing=own[:2] if own and known else None)
    assert other_smoothing(found) == said


ANOTHER = "the plain cross-entropy with label smoothing of"
ALIKE = [
    (0.125, 0.13888, None, None, f"{ANOTHER} 0.125 {TORCHS}, where"),
    (0.11111, 0.1, None, None, f"{ANOTHER} 0.1 {FAIRSEQS}, where"),
    (0.18, 0.162, None, None, f"{ANOTHER} 0.18 {TORCHS}, where"),
    (0.18, 0.162, None, ("fairseq", 0.3), f"{ANOTHER} 0.162 {FAIRSEQS}, where"),
    (0.2, 0.16667, None, ("fairseq", 0.16667), f"{ANOTHER} 0.16667 {FAIRSEQS}, where"),
    # With ten classes 0.1 over all of them is 0.09 over the others
    (0.1, 0.09, 0.09, ("torch", 0.09), "the smoothing convention 'fairseq', where the criterion has 'torch'"),
]
"""The eps of torch's convention, of fairseq's with the same gradient, plain, stated; and what is said."""


@pytest.mark.parametrize(("torchs", "fairseqs", "own", "smoothing", "named"), ALIKE)
def test_of_two_smoothings_alike_the_likelier_one_is_named(torchs, fairseqs, own, smoothing, named):
    """The criterion's own eps goes before a round one, and that before the criterion's own convention."""
    none, smooth = wide(1.0, 2.0, 0.5), wide(3.0, -1.0, 4.0)

    def smoothed(convention, eps):
        share = {"torch": 1 / torchs, "fairseq": 1 / fairseqs}[convention]
        return VALUE, {"w": none + eps * share * (smooth - none)}

    plain = smoothed("torch", own) if own else (VALUE, {"w": wide(5.0, 1.0, 9.0)})
    found = Evidence(smoothed("torch", torchs), plain, smoothed=smoothed, smoothing=smoothing)
    assert other_smoothing(found).startswith(named)


def test_every_cross_entropy_without_weights_is_smoothed_otherwise_and_nothing_else():
    logits, target = torch.randn(5, 7).double(), torch.tensor([1, 2, 0, 6, 0])
    right = LabelSmoothing(0.2, "harvard", ignore_index=0)(logits, target)
    log_p = logits.log_softmax(-1)
    with OtherSmoothing("harvard", 0.2):
        assert F.cross_entropy(logits, target, ignore_index=0, reduction="sum") == right
        assert F.cross_entropy(logits, target, None, ignore_index=0, label_smoothing=0.1) == right / 3
        assert torch.equal(F.log_softmax(logits, -1), log_p)
        for more in ({"weight": torch.ones(7).double()}, {"reduction": "none"}):
            with pytest.raises(NotImplementedError):
                F.cross_entropy(logits, target, ignore_index=0, **more)

"""The cause of a wrong loss is named by its numbers alone."""

import math
from dataclasses import replace

import pytest

from seqpar.testing.causes import likely_cause
from seqpar.testing.evidence import Evidence, Repeated
from tests.seqpar.testing.test_edges_of_verdicts import wide

pytestmark = pytest.mark.unswitched


def evidence(times, off=0.0, more=(), **facts):
    """A loss and gradients, of weights and of three tokens' hidden states, that are a multiple of the plain ones."""
    plain = {"w": wide(1.0, 3.0, 2.0), "hidden": wide(*[1.0, 2.0, 3.0, 5.0, 7.0, 4.0]).view(3, 2)}
    got = {name: g * times * (1 + off) for name, g in plain.items()} | dict(more)
    value = wide(math.pi)[0]
    return Evidence((value * times * (1 + off), got), (value, plain), per_token=frozenset({"hidden"}), **facts)


def cause_of(found):
    return likely_cause(found).removeprefix("Likely cause: ").splitlines()[0]


HALVES = {"hidden": wide(1.0, 2.0, 3.0, 5.0, 0.0, 0.0).view(3, 2)}
NONE = "none of the usual ones; "
TWO_RANKS = {"counts": [(3, 6), (3, 6)]}


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (evidence(1 / 3, tokens=3, rows=6), "a mean instead of a sum: all gradients are 1/3 times the plain ones"),
        (evidence(1 / 6, tokens=3, rows=6), "a mean over all 6 targets, ignored padding counted"),
        (
            evidence(6 / 11, divisor=6, counts=[(3, 6), (2, 4), (1, 1)]),
            "a mean over all 11 targets, ignored padding counted",
        ),
        (evidence(1 / 6, tokens=6, rows=6), "a mean instead of a sum: all gradients are 1/6 times the plain ones"),
        (
            evidence(7, divisor=7),
            "a sum instead of a mean: all gradients are 7 times the plain ones, and the step has",
        ),
        (
            evidence(7 / 2, divisor=7, **TWO_RANKS),
            "a sum instead of a mean: all gradients are 7/2 times the plain ones",
        ),
        (evidence(2), "accumulation: all gradients are 2 times the plain ones, as if never set to zero"),
        (evidence(1 / 2), "accumulation: all gradients are 1/2 of the plain ones"),
        (evidence(3 / 2), f"{NONE}all gradients are 3/2 times the plain ones"),
        (evidence(3, off=1.2e-6), NONE),
        (evidence(3, off=0.8e-6), "accumulation: all gradients are 3 times the plain ones"),
        (
            evidence(2, **TWO_RANKS),
            "the world size: all gradients are 2 times the plain ones, multiplied by the number of",
        ),
        (
            evidence(1 / 2, **TWO_RANKS),
            "the world size: all gradients are 1/2 times the plain ones, averaged over the rank",
        ),
        (evidence(1, off=0.9e-5), "float32 on the way: nothing is off by more than 9e-06 of its size"),
        (evidence(1, off=0.9e-5, is_float64=False), NONE),
        (evidence(1, off=1.1e-5), NONE),
        (evidence(math.nan, tokens=0), "a division by 0 tokens: every target is ignored"),
        (evidence(math.nan, tokens=1), NONE),
        (
            evidence(1.7, again=Repeated([math.pi, 3.0], [2.0, 2.0])),
            "random numbers, such as those of dropout in training mode: the plain lo",
        ),
        (evidence(1.7, again=Repeated([math.pi, math.pi * (1 + 0.9e-6)], [2.0, 2.0])), NONE),
        (evidence(1, more={"w": wide(0.0, 0.0, 0.0)}), "w: no gradient at all, so the loss is detached from it"),
        (
            evidence(1, more=HALVES),
            "the last chunk is dropped: hidden has no gradient in its last 1 rows, of 3, and the",
        ),
        (
            evidence(1.7, again=Repeated([math.pi, 3.0], [2.0, 2.1], ["n went from 1 to 2"])),
            "the generator or the criterion changes from call to call: n went from 1 to 2; the plain loss itself is",
        ),
        (
            evidence(1.7, again=Repeated([math.pi, 3.0], [2.0, 2.1])),
            "the generator or the criterion changes from call to call; the plain loss itself is 3.14159 in one call an",
        ),
        (evidence(1, more={"hidden": HALVES["hidden"].roll(-1, 0)}), NONE),
        (
            evidence(1, **TWO_RANKS, more={"w": wide(2.0, 6.0, 4.0)}),
            "a gradient is reduced twice: that of w is 2 times the plain one, the number of ranks",
        ),
        (
            evidence(1.7, divisor=8, **TWO_RANKS, more={"hidden": evidence(8 / 3).got[1]["hidden"]}),
            "the local token count, without an all-reduce of it: here 3 of the step's 6 tokens, and hidden's gradient "
            "is 8/3 times the plain one, 8 / 3",
        ),
        (
            evidence(1.7, divisor=8, **TWO_RANKS, more={"hidden": evidence(4 / 3).got[1]["hidden"]}),
            "the local token count, without an all-reduce of it: here 3 of the step's 6 tokens, and hidden's gradient "
            "is 4/3 times the plain one, 8 / (3 x 2 ranks)",
        ),
    ],
)
def test_a_cause_is_named_by_the_numbers_alone(found, cause):
    assert cause_of(found).startswith(cause), cause_of(found)


def test_that_only_the_gradient_is_wrong_is_said_up_to_1e_12():
    for off, said in ((0.9e-12, True), (1.1e-12, False)):
        found = evidence(3)
        found = replace(found, got=(found.expected[0] * (1 + off), found.got[1]))
        assert cause_of(found).endswith("; the value is right, only the gradient is wrong") == said


@pytest.mark.parametrize(
    ("times", "cause"),
    [(1, "the upstream factor is ignored: "), (1 / 64, "the upstream factor is squared: "), (1 / 8, NONE)],
)
def test_what_becomes_of_the_upstream_factor_is_named(times, cause):
    found = evidence(1.7)
    eighth = found.got[0] / 8, {name: g * times for name, g in found.got[1].items()}
    assert cause_of(replace(found, eighth=eighth)).startswith(cause)

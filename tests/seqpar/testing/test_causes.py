"""The cause of a wrong loss is named by its numbers alone."""

import math
from dataclasses import replace

import pytest
import torch

from seqpar.testing.causes import likely_cause
from seqpar.testing.evidence import Evidence, Repeated, shares_of
from seqpar.testing.row_causes import where_off
from seqpar.testing.share_causes import local_count, silent_ranks
from seqpar.testing.smoothing_causes import other_smoothing
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
        (evidence(1, off=0.9e-5, dtype=torch.float32), NONE),
        (evidence(1, off=1.1e-5), NONE),
        (evidence(math.nan, tokens=0), "a division by 0 tokens: every target is ignored"),
        (evidence(math.nan, tokens=1), NONE),
        (
            evidence(1.7, again=Repeated([math.pi, 3.0, 2.0], [2.0, 2.0])),
            "random numbers, such as those of dropout in training mode: the plain loss itself is 3.14159 in one call "
            "and 3 in",
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
            "the generator or the criterion changes from call to call; the plain loss itself is 3.14159 in one call "
            "and 3 ",
        ),
        (evidence(1, more={"hidden": HALVES["hidden"].roll(-1, 0)}), NONE),
        (
            evidence(1, **TWO_RANKS, more={"w": wide(2.0, 6.0, 4.0)}),
            "a gradient is reduced twice: that of w is 2 times the plain one, and no other",
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


def test_shares_are_those_of_parts_that_can_be_told_apart():
    one, other = wide(1.0, 2.0, 0.0), wide(0.0, 1.0, 3.0)
    assert shares_of(2 * one + 3 * other, [one, other]) == pytest.approx([2, 3])
    assert shares_of(3 * one, [one, 2 * one]) is None
    assert shares_of(one, [0 * one]) is None
    found = shares_of(2 * one + 3 * other, [one, 0 * one, other])
    assert math.isnan(found[1]), "of a part that is 0 nobody knows how often it was added"
    assert found[::2] == pytest.approx([2, 3])


def test_rows_are_right_elsewhere_only_where_some_are():
    found = evidence(1)
    plain = found.expected[1]["hidden"]
    for times, said in (
        ((2.0, 1.0, 1.0), "2 times the plain one in its row 0, of 3, and right elsewhere"),
        ((2, 3, 3), ""),
    ):
        hidden = plain * wide(*times).unsqueeze(1)
        assert where_off(replace(found, got=(found.got[0], {**found.got[1], "hidden": hidden})), "hidden") == said


def test_a_loss_of_0_is_no_sum_in_a_narrow_dtype():
    value, plain = wide(math.pi)[0], wide(0.1, 0.7, 1 / 3)
    assert "sums in" not in likely_cause(Evidence((0 * value, {"w": plain}), (value, {"w": plain})))


@pytest.mark.parametrize("padding", [2, 3])
def test_the_last_chunk_is_dropped_also_where_padding_is_in_it_or_at_its_end(padding):
    plain = wide(*[1.0, 2.0, 3.0, 5.0, 7.0, 4.0, 6.0, 9.0]).view(4, 2)
    plain[padding] = 0
    got = plain * wide(1.0, 0.0, 0.0, 0.0).unsqueeze(1)
    value = wide(math.pi)[0]
    found = Evidence((value, {"hidden": got}), (value, {"hidden": plain}), per_token=frozenset({"hidden"}))
    assert cause_of(found).startswith("the last chunk is dropped: hidden has no gradient in its last 3 rows, of 4")


@pytest.mark.parametrize("divisor", [1, 7])
@pytest.mark.parametrize(("times", "besides"), [(1, ""), (2, "; besides, all gradients are multiplied by 2")])
def test_another_smoothing_is_named_and_what_all_gradients_are_multiplied_by(times, besides, divisor):
    none, smooth = wide(1.0, 2.0, 0.5), wide(3.0, -1.0, 4.0)

    def result(eps, factor):
        return wide(math.pi)[0], {"w": factor * (none + eps * (smooth - none))}

    found = Evidence(
        result(0.2, times / divisor),
        result(0.1, 1 / divisor),
        smoothed=lambda convention, eps: result(eps, 1.0),
        smoothing=("torch", 0.1),
    )
    torchs = "in the convention 'torch'"
    assert other_smoothing(found) == f"label smoothing of 0.2 {torchs}, where the criterion has 0.1 {torchs}{besides}"


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_rank_is_named_where_a_tensor_has_two_uses(silent):
    """The plain loss computes one rank's tokens after the other's, so that a rank's uses are neighbours."""
    each = [wide(1.0, 0.0, 2.0, 1.0), wide(0.0, 1.0, 1.0, 3.0), wide(2.0, 5.0, 0.0, 1.0), wide(1.0, 1.0, 4.0, 0.0)]
    uses = {"w": [(name, g) for name, g in zip(("embedding", "linear") * 2, each, strict=True)]}
    heard = sum(each[2 - 2 * silent : 4 - 2 * silent])
    value = wide(math.pi)[0]
    found = Evidence((value, {"w": heard}), (value, {"w": sum(each)}), uses=uses, **TWO_RANKS)
    assert (
        silent_ranks(found) == f"rank {silent} contributes nothing: the gradient of w is that of the other ranks alone"
    )


def test_a_missed_tie_of_all_ranks_is_named_by_the_sums_over_them():
    each = [wide(1.0, 0.0, 2.0, 1.0), wide(0.0, 1.0, 1.0, 3.0), wide(2.0, 5.0, 0.0, 1.0), wide(1.0, 1.0, 4.0, 0.0)]
    uses = {"w": [(name, g) for name, g in zip(("embedding", "linear") * 2, each, strict=True)]}
    value = wide(math.pi)[0]
    found = Evidence((value, {"w": each[1] + each[3]}), (value, {"w": sum(each)}), uses=uses, **TWO_RANKS)
    named = "a missed tie: w is used 2 times, and its gradient is that of use 2 (linear) alone"
    assert named in likely_cause(found)


def test_of_two_smoothings_alike_the_one_with_the_criterions_eps_is_named():
    """With ten classes 0.1 over all of them is 0.09 over the others."""
    none, smooth = wide(1.0, 2.0, 0.5), wide(3.0, -1.0, 4.0)

    def smoothed(convention, eps):
        share = {"torch": 1.0, "fairseq": 1 / 0.9}[convention]
        return wide(math.pi)[0], {"w": none + eps * share * (smooth - none)}

    found = Evidence(smoothed("torch", 0.1), smoothed("torch", 0.09), smoothed=smoothed, smoothing=("torch", 0.09))
    assert other_smoothing(found) == "the smoothing convention 'fairseq', where the criterion has 'torch'"


def test_a_rank_whose_share_is_right_by_chance_does_not_hide_a_local_count():
    each = [wide(1.0, 0.0, 2.0), wide(0.0, 1.0, 1.0)]
    value = wide(math.pi)[0]
    uses = {"w": [("linear", g) for g in each]}
    # 6 / (3 x 2 ranks) and 6 / (1 x 2 ranks)
    got, plain = {"w": each[0] + 3 * each[1]}, {"w": sum(each)}
    found = Evidence((value, got), (value, plain), uses=uses, divisor=6, counts=[(3, 6), (1, 6)])
    assert local_count(found) is not None

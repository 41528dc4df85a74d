"""Dynamic fine-tuning and minimum risk: value and gradient of a loop over the published formula."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar.objectives import dft, minimum_risk
from tests.seqpar.objectives.batches import assert_same_losses, batches, numbers

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")

ZERO = torch.zeros((), dtype=torch.float64)


@given(batches())
def test_dft_weighs_each_token_with_its_constant_probability(batch):
    def naive():
        for p in torch.ones_like(batch.mask).nonzero().tolist():
            log_p = batch.log_prob[tuple(p)]
            yield -torch.exp(log_p).item() * log_p if batch.mask[tuple(p)] else ZERO

    assert_same_losses(lambda: dft(batch.log_prob, batch.mask), lambda: list(naive()), {"log_prob": batch.log_prob})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dft_of_an_impossible_token_is_0_and_so_is_its_gradient(dtype):
    log_prob = torch.tensor([-torch.inf, -1e30, -2.0], dtype=dtype, requires_grad=True)
    losses = dft(log_prob, torch.ones(3, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(losses.sum(), log_prob)
    assert losses[:2].tolist() == [0, 0]
    assert gradient[:2].tolist() == [0, 0]


def test_dft_of_a_masked_token_is_0_and_not_minus_0():
    losses = dft(torch.tensor([-1.0, -torch.inf]), torch.tensor([False, True]))
    assert losses.tolist() == [0, 0]
    assert not torch.signbit(losses).any()


def naive_risks(scores, costs, size, alpha, members):
    for g in range(len(scores) // size):
        candidates = [i for i in range(g * size, g * size + size) if members[i]]
        weights = {i: torch.exp(scores[i]) ** alpha for i in candidates}
        yield sum((weights[i] / sum(weights.values()) * costs[i].item() for i in candidates), start=ZERO)


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2**31), st.floats(0.005, 2), st.booleans())
def test_minimum_risk_is_the_papers_over_the_candidates_of_each_group(groups, size, seed, alpha, all_of_them):
    scores, costs = numbers(seed, groups * size), numbers(seed + 1, groups * size)
    members = numbers(seed + 2, groups * size) > (-9 if all_of_them else 0)
    assert_same_losses(
        lambda: minimum_risk(scores, costs, size, alpha=alpha, candidates=None if all_of_them else members),
        lambda: list(naive_risks(scores, costs, size, alpha, members.tolist())),
        {"scores": scores, "costs": costs},  # costs are constants
    )


def test_the_risk_of_equally_likely_candidates_is_their_mean_cost():
    costs = torch.tensor([0.5, 0.25, 1.0, 0.0])
    assert minimum_risk(torch.full((4,), -800.0), costs, 2, alpha=1.0).tolist() == [0.375, 0.5]


def test_a_sharp_distribution_has_the_cost_of_the_likeliest_candidate():
    scores = torch.tensor([-1e4, -1.0, -2e4], requires_grad=True)
    risk = minimum_risk(scores, torch.tensor([1.0, 0.25, 0.5]), 3, alpha=10.0)
    (gradient,) = torch.autograd.grad(risk.sum(), scores)
    assert risk.tolist() == [0.25]
    assert gradient.isfinite().all()


def test_what_is_no_candidate_has_no_influence_even_if_it_is_nan():
    scores = torch.tensor([-1.0, torch.nan, -2.0, -torch.inf], requires_grad=True)
    members = torch.tensor([True, False, False, False])
    risks = minimum_risk(scores, torch.tensor([0.5, torch.nan, 1.0, 1.0]), 2, alpha=1.0, candidates=members)
    (gradient,) = torch.autograd.grad(risks.sum(), scores)
    assert risks.tolist() == [0.5, 0.0]
    assert gradient.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_scores_are_widened(dtype):
    scores = torch.tensor([-1.0, -2.0], dtype=dtype)
    assert dft(scores, torch.tensor([True, False])).dtype == torch.float32
    assert minimum_risk(scores, scores, 2, alpha=1.0).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [0.005, 1.0, 4.0])
def test_the_only_candidate_has_the_whole_probability_even_if_it_was_impossible(dtype, alpha):
    scores = torch.tensor([-torch.inf, -1.0], dtype=dtype, requires_grad=True)
    risk = minimum_risk(
        scores, torch.tensor([1.0, 2.0], dtype=dtype), 2, alpha=alpha, candidates=torch.tensor([True, False])
    )
    assert risk.tolist() == [1.0]
    risk.sum().backward()
    assert scores.grad.tolist() == [0.0, 0.0]

"""PPO, GRPO, DAPO, Dr. GRPO, GSPO and their parts: value and gradient of a loop over the published formula."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.objectives import (
    clipped_surrogate,
    gamma_weights,
    group_advantages,
    kl_estimate,
    padded_segments,
    per_constant,
    per_item,
    per_sequence,
    per_token,
    sequence_log_ratio,
    soft_surrogate,
    spread_to_tokens,
    token_log_ratio,
    truncated_weights,
    weighted_policy_gradient,
)
from tests.seqpar.objectives.batches import assert_same_losses, batches, numbers

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")

ZERO = torch.zeros((), dtype=torch.float64)
seeds = st.integers(0, 2**31)
lows, highs = st.floats(0.0, 0.9), st.floats(0.0, 2.0)


def clip(r, low, high):
    return min(max(r, low), high, key=float) if isinstance(r, float) else torch.clamp(r, low, high)


def naive_surrogate(ratio, advantage, low, high):
    """min(r A, clip(r) A), where the clipped side is a constant."""
    plain, clipped = ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage
    return plain if plain <= clipped else clipped


@given(st.integers(0, 6), seeds, lows, highs)
def test_the_clipped_surrogate_is_the_papers(n, seed, low, high):
    ratio, advantages = numbers(seed, n), numbers(seed + 1, n)
    assert_same_losses(
        lambda: clipped_surrogate(ratio, advantages, eps_low=low, eps_high=high),
        lambda: [-naive_surrogate(torch.exp(r), a.item(), low, high) for r, a in zip(ratio, advantages, strict=True)],
        {"ratio": ratio, "advantages": advantages},  # advantages are constants
    )


@given(st.integers(0, 6), seeds, st.floats(0.1, 4.0), st.floats(0.1, 4.0))
def test_the_soft_surrogate_is_sapos(n, seed, positive, negative):
    ratio, advantages = numbers(seed, n), numbers(seed + 1, n)

    def naive():
        for r, a in zip(ratio, advantages.tolist(), strict=True):
            tau = positive if a > 0 else negative
            yield -4 / tau / (1 + torch.exp(-tau * (torch.exp(r) - 1))) * a

    options = {"temperature": positive, "negative_temperature": negative}
    assert_same_losses(lambda: soft_surrogate(ratio, advantages, **options), lambda: list(naive()), {"ratio": ratio})


@given(st.integers(0, 6), seeds, *[st.floats(0.1, 4.0)] * 4)
def test_the_gamma_weights_and_the_policy_gradient_with_them_are_vespos(n, seed, k, decay, low_k, low_decay):
    ratio, advantages, log_prob = (numbers(seed + i, n) for i in range(3))

    def naive():
        for r, a, p in zip(ratio.tolist(), advantages.tolist(), log_prob, strict=True):
            w, power, rate = math.exp(r), *((k, decay) if a >= 0 else (low_k, low_decay))
            yield -(w**power) * math.exp(rate * (1 - w)) * a * p

    def ours():
        phi = gamma_weights(ratio, advantages, power=k, decay=decay, negative_power=low_k, negative_decay=low_decay)
        return weighted_policy_gradient(log_prob, phi, advantages)

    assert_same_losses(ours, lambda: list(naive()), {"log_prob": log_prob})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ratios_beyond_any_number_have_finite_soft_losses_and_weights(dtype):
    log_ratio = torch.tensor([-math.inf, -500.0, 500.0, math.inf], dtype=dtype, requires_grad=True)
    for sign in (1, -1):
        advantages = sign * torch.ones(4, dtype=dtype)
        (gradient,) = torch.autograd.grad(soft_surrogate(log_ratio, advantages).sum(), log_ratio)
        assert float(gradient.abs().max()) < 1e-200
        assert gamma_weights(log_ratio, advantages).tolist() == [0.0] * 4


@given(st.integers(0, 6), seeds, lows, st.floats(0, 0.5), st.floats(1.6, 4.0))
def test_a_largest_ratio_bounds_the_loss_of_negative_advantages_alone(n, seed, low, high, largest):
    """Dual-clip PPO (Ye et al. 2020): max(min(r A, clip(r) A), c A) where A < 0."""
    ratio, advantages = numbers(seed, n, scale=2), numbers(seed + 1, n)

    def naive():
        for r, a in zip(ratio, advantages.tolist(), strict=True):
            value = naive_surrogate(torch.exp(r), a, low, high)
            yield -torch.clamp(value, min=largest * a) if a < 0 else -value

    options = {"eps_low": low, "eps_high": high, "max_ratio": largest}
    assert_same_losses(lambda: clipped_surrogate(ratio, advantages, **options), lambda: list(naive()), {"ratio": ratio})


@given(batches())
def test_at_ratio_1_the_gradient_is_the_policy_gradient(batch):
    advantages = numbers(5, *batch.segment_ids.shape).detach()
    ratio = token_log_ratio(batch.log_prob, batch.log_prob, batch.mask)
    assert (ratio == 0).all()
    loss = per_token(clipped_surrogate(ratio, advantages, eps_low=0.2, eps_high=0.2), batch.mask)
    (gradient,) = torch.autograd.grad(loss.total, batch.log_prob)
    torch.testing.assert_close(gradient, torch.where(batch.mask, -advantages, 0), rtol=1e-12, atol=0)


@given(batches(), st.sampled_from(["k1", "k3"]))
def test_log_ratios_and_divergences_are_the_papers_and_the_reference_is_constant(batch, estimator):
    other = batch.other.clone().requires_grad_()

    def naive():
        for p in torch.ones_like(batch.mask).nonzero().tolist():
            if batch.mask[tuple(p)]:
                policy, reference = torch.exp(batch.log_prob[tuple(p)]), torch.exp(other[tuple(p)].detach())
                r = reference / policy
                yield -torch.log(r) if estimator == "k1" else (r - 1) - torch.log(r)
            else:
                yield ZERO

    assert_same_losses(
        lambda: kl_estimate(token_log_ratio(batch.log_prob, other, batch.mask), estimator),
        lambda: list(naive()),
        {"log_prob": batch.log_prob, "other": other},
    )


@given(st.floats(-700, 700))
def test_k3_is_never_negative(ratio):
    found = kl_estimate(torch.tensor(ratio, dtype=torch.float64), "k3")
    assert found >= -abs(ratio) * 2**-52
    assert found.isfinite()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_both_divergences_are_unbiased(estimator):
    """The expectation over the policy's own samples, enumerated."""
    policy, reference = (numbers(s, 9).detach().log_softmax(0) for s in (1, 2))
    exact = (policy.exp() * (policy - reference)).sum()
    estimates = kl_estimate(token_log_ratio(policy, reference, torch.ones(9, dtype=torch.bool)), estimator)
    torch.testing.assert_close((policy.exp() * estimates).sum(), exact, rtol=1e-12, atol=0)


@given(batches())
def test_a_sequences_log_ratio_is_the_mean_of_its_tokens(batch):
    def naive():
        for s in range(batch.sequences):
            tokens = batch.tokens(s)
            product = torch.ones((), dtype=torch.float64)
            for p in tokens:
                product = product * torch.exp(batch.log_prob[p]) / torch.exp(batch.other[p])
            yield torch.log(product) / max(1, len(tokens))

    layout = batch.segment_ids, batch.sequences
    assert_same_losses(
        lambda: sequence_log_ratio(batch.log_prob, batch.other, *layout),
        lambda: list(naive()),
        {"log_prob": batch.log_prob},
    )


@given(st.integers(0, 6), seeds, st.floats(0.1, 4.0))
def test_truncated_weights_are_constant_ratios_up_to_the_largest(n, seed, largest):
    ratio = numbers(seed, n)
    weights = truncated_weights(ratio, max_weight=largest)
    assert not weights.requires_grad
    expected = [min(math.exp(r), largest) for r in ratio.tolist()]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@given(st.integers(0, 3), st.integers(2, 5), seeds, st.booleans())
def test_group_advantages_are_the_papers(groups, size, seed, divide):
    rewards = numbers(seed, groups * size)

    def naive():
        values = rewards.tolist()
        for i, reward in enumerate(values):
            group = values[i // size * size : i // size * size + size]
            mean = sum(group) / size
            std = math.sqrt(sum((r - mean) ** 2 for r in group) / (size - 1))
            yield (reward - mean) / (std + 1e-4) if divide else reward - mean

    found = group_advantages(rewards, size, divide_by_std=divide)
    assert not found.requires_grad
    expected = torch.tensor(list(naive()), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_equal_rewards_have_no_advantage():
    assert group_advantages(torch.full((6,), 0.25), 3).tolist() == [0.0] * 6


OPTIONS = {"eps_low": 0.2, "eps_high": 0.28}


def naive_grpo(batch, rewards, beta, method):
    """GRPO and its descendants, with groups of two, as nested sums over groups, responses and tokens."""
    total, tokens_of_all = ZERO, max(1, len(batch.counted()))
    for q in range(batch.sequences // 2):
        group = rewards[2 * q : 2 * q + 2]
        mean = sum(group) / 2
        std = math.sqrt(sum((r - mean) ** 2 for r in group))
        for i, reward in enumerate(group):
            a = reward - mean if method == "dr_grpo" else (reward - mean) / (std + 1e-4)
            response, tokens = ZERO, batch.tokens(2 * q + i)
            for p in tokens:
                policy, old = torch.exp(batch.log_prob[p]), torch.exp(batch.other[p])
                divergence = old / policy - torch.log(old / policy) - 1
                response = response + naive_surrogate(policy / old, a, 0.2, 0.28) - beta * divergence
            scale = {"grpo": max(1, len(tokens)) * batch.sequences, "dapo": tokens_of_all}
            total = total + response / scale.get(method, 5 * batch.sequences)
    return -total


@given(batches(least=1, multiple=2), seeds, st.floats(0, 1), st.sampled_from(["grpo", "dapo", "dr_grpo"]))
def test_grpo_dapo_and_dr_grpo_are_the_papers_from_the_tokens_on(batch, seed, beta, method):
    rewards = numbers(seed, batch.sequences).detach()

    def ours():
        ratio = token_log_ratio(batch.log_prob, batch.other, batch.mask)
        advantages = group_advantages(rewards, 2, divide_by_std=method != "dr_grpo")
        losses = clipped_surrogate(ratio, spread_to_tokens(advantages, batch.segment_ids), **OPTIONS)
        losses = losses + beta * kl_estimate(ratio, "k3")
        if method == "grpo":
            return per_sequence(losses, batch.segment_ids, batch.sequences).mean
        if method == "dapo":
            return per_token(losses, batch.mask).mean
        return per_constant(losses, batch.mask, 5 * batch.sequences).mean

    assert_same_losses(
        ours,
        lambda: [naive_grpo(batch, rewards.tolist(), beta, method)],
        {"log_prob": batch.log_prob},
    )


@given(batches(least=1), seeds)
def test_gspo_is_the_papers_from_the_tokens_on(batch, seed):
    advantages = numbers(seed, batch.sequences).detach()

    def naive():
        total = ZERO
        for s, a in enumerate(advantages.tolist()):
            tokens, logs = batch.tokens(s), ZERO
            for p in tokens:
                logs = logs + batch.log_prob[p] - batch.other[p]
            total = total - naive_surrogate(torch.exp(logs / max(1, len(tokens))), a, 0.2, 0.28)
        return total / batch.sequences

    def ours():
        ratio = sequence_log_ratio(batch.log_prob, batch.other, batch.segment_ids, batch.sequences)
        return per_item(clipped_surrogate(ratio, advantages, **OPTIONS)).mean

    assert_same_losses(ours, lambda: [naive()], {"log_prob": batch.log_prob})


def test_with_token_scores_and_an_entropy_bonus_the_gradient_is_that_of_the_plain_logits():
    hidden, weight = numbers(1, 4, 5, 3), numbers(2, 7, 3)
    mask = torch.arange(5) < torch.tensor([5, 0, 2, 3]).unsqueeze(1)
    target = torch.arange(20).view(4, 5).remainder(7).masked_fill(~mask, -100)
    ids, advantages = padded_segments(mask), group_advantages(numbers(3, 4), 2)
    old = -numbers(4, 4, 5).detach().abs()

    def loss(log_prob, entropy):
        ratio = token_log_ratio(log_prob, old, mask)
        losses = clipped_surrogate(ratio, spread_to_tokens(advantages, ids), **OPTIONS)
        return per_sequence(losses - 0.01 * entropy, ids, 4).mean

    def ours():
        scores = seqpar.token_scores(hidden, weight, target, entropy=True, chunk_tokens=3)
        return loss(scores.log_prob, scores.entropy)

    def plain():
        log_p = (hidden @ weight.T).log_softmax(-1)
        log_prob = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return [loss(log_prob, -(log_p.exp() * log_p).sum(-1))]

    assert_same_losses(ours, plain, {"hidden": hidden, "weight": weight})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [-torch.inf, -1e4, 1e4, torch.inf])
def test_a_very_large_log_ratio_is_clipped_without_overflow(dtype, ratio):
    log_ratio = torch.tensor([ratio, ratio], dtype=dtype, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0], dtype=dtype)
    loss = clipped_surrogate(log_ratio, advantages, eps_low=0.2, eps_high=0.25, max_ratio=10.0)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    assert loss.tolist() == pytest.approx([-1.25, 10.0] if ratio > 0 else [0.0, 0.8])
    assert gradient.tolist() == [0, 0]
    assert truncated_weights(log_ratio, max_weight=2.0).tolist() == pytest.approx([2.0 * (ratio > 0)] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [-1e4, 0.0, 88.0, 90.0, 710.0, 1e4])
def test_an_advantage_of_0_has_the_loss_0_whatever_the_ratio(dtype, ratio):
    log_ratio = torch.full((3,), ratio, dtype=dtype, requires_grad=True)
    losses = clipped_surrogate(log_ratio, torch.zeros(3, dtype=dtype), eps_low=0.2, eps_high=0.2)
    assert not losses.any()
    (gradient,) = torch.autograd.grad(losses.sum(), log_ratio)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_positive_advantage_needs_no_largest_ratio():
    log_ratio = torch.tensor([1e4], requires_grad=True)
    loss = clipped_surrogate(log_ratio, torch.ones(1), eps_low=0.2, eps_high=0.25)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    assert loss.item() == pytest.approx(-1.25)
    assert gradient.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_of_very_unlike_policies_is_finite_where_the_number_exists(dtype):
    log_ratio = torch.tensor([-80.0, -1e-6, 0.0, 1e-6, 80.0, 1e30], dtype=dtype, requires_grad=True)
    found = kl_estimate(log_ratio, "k3")
    (gradient,) = torch.autograd.grad(found.sum(), log_ratio)
    assert found.isfinite().all()
    assert gradient.isfinite().all()
    assert found[-1] == log_ratio[-1]


def test_k3_of_nearly_equal_policies_does_not_cancel_in_float32():
    """It is about half the square of the log-ratio, which 1 would swallow."""
    found = kl_estimate(torch.tensor(1e-3), "k3").item()
    assert found == pytest.approx(kl_estimate(torch.tensor(1e-3, dtype=torch.float64), "k3").item(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_scores_are_widened(dtype):
    log_prob, mask = torch.tensor([-1.0], dtype=dtype), torch.tensor([True])
    ratio = token_log_ratio(log_prob, log_prob.float() - 1e-3, mask)
    assert ratio.item() == pytest.approx(1e-3, rel=1e-3)
    for made in (
        kl_estimate(log_prob, "k3"),
        truncated_weights(log_prob, max_weight=2.0),
        clipped_surrogate(log_prob, log_prob, eps_low=0.2, eps_high=0.2),
        group_advantages(torch.zeros(2, dtype=dtype), 2),
    ):
        assert made.dtype == torch.float32


@given(st.floats(-1e4, 1e4, width=32), st.integers(2, 16), st.sampled_from([1e-8, 1e-4]))
def test_equal_rewards_have_no_advantage_whatever_they_are(reward, size, eps):
    assert not group_advantages(torch.full((2 * size,), reward), size, eps=eps).any()

"""DPO and its variants, KTO, ORPO, SimPO, CPO: value and gradient of a loop over the published formula."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar.objectives import cpo, dpo, kto, orpo, padded_segments, per_item, sequence_means, sequence_sums, simpo
from tests.seqpar.objectives.batches import assert_same_losses, batches, numbers

betas = st.floats(0.05, 2.0)
smoothings = st.floats(0.0, 0.45)
seeds = st.integers(0, 2**31)
pairs = st.integers(0, 4)


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def naive_dpo(chosen, rejected, beta, variant, epsilon):
    """One pair, from the ratios of probabilities as the papers write them."""
    difference = chosen - rejected
    right = torch.log(sigmoid(beta * difference))
    wrong = torch.log(sigmoid(-beta * difference))
    if variant == "sigmoid":
        return -(1 - epsilon) * right - epsilon * wrong
    if variant == "robust":
        return (-(1 - epsilon) * right + epsilon * wrong) / (1 - 2 * epsilon)
    if variant == "hinge":
        return 1 - beta * difference if beta * difference < 1 else 0 * difference
    return (difference - 1 / beta / 2) ** 2


@given(pairs, seeds, betas, st.sampled_from(["sigmoid", "robust", "hinge", "ipo"]), smoothings)
def test_dpo_and_its_variants_are_the_papers(n, seed, beta, variant, epsilon):
    if variant in ("hinge", "ipo"):
        epsilon = 0.0
    chosen, rejected = numbers(seed, n), numbers(seed + 1, n)
    assert_same_losses(
        lambda: dpo(chosen, rejected, beta=beta, variant=variant, label_smoothing=epsilon),
        lambda: [naive_dpo(c, r, beta, variant, epsilon) for c, r in zip(chosen, rejected, strict=True)],
        {"chosen": chosen, "rejected": rejected},
    )


@given(pairs, seeds, betas, st.floats(-1, 2), st.floats(0, 2), st.floats(0, 2))
def test_kto_is_the_papers_with_the_reference_point_clamped_and_constant(n, seed, beta, point, good, bad):
    ratio, point = numbers(seed, n), torch.tensor(point, dtype=torch.float64, requires_grad=True)
    desirable = numbers(seed + 1, n) > 0
    z0 = max(0.0, point.item())

    def naive():
        for r, wanted in zip(ratio, desirable.tolist(), strict=True):
            if wanted:
                yield good - good * sigmoid(beta * (r - z0))
            else:
                yield bad - bad * sigmoid(beta * (z0 - r))

    assert_same_losses(
        lambda: kto(ratio, desirable, beta=beta, reference_point=point, desirable_weight=good, undesirable_weight=bad),
        lambda: list(naive()),
        {"ratio": ratio, "point": point},  # the gradient of the point is 0: it is a constant
    )


def test_a_reference_point_that_is_a_number_has_the_digits_of_the_log_ratios():
    ratio, desirable = torch.zeros(2, dtype=torch.float64), torch.tensor([True, False])
    losses = kto(ratio, desirable, beta=1.0, reference_point=0.3)
    assert losses.tolist() == pytest.approx([1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(0.3))], rel=1e-15)


def means(batch):
    """Each response's mean log-probability, by a loop."""
    for s in range(batch.sequences):
        tokens = batch.tokens(s)
        yield sum((batch.log_prob[p] for p in tokens), start=torch.zeros((), dtype=torch.float64)) / max(1, len(tokens))


def halves(of, batch):
    """The chosen and the rejected responses of a batch that has one after the other."""
    return of(batch.log_prob, batch.segment_ids, batch.sequences).chunk(2)


def naive_pairs(batch):
    values = list(means(batch))
    return zip(values[: len(values) // 2], values[len(values) // 2 :], strict=True)


def test_kto_compiles_with_a_reference_point_that_is_a_tensor():
    log_ratio, desirable = torch.tensor([0.3, -0.7, 1.1]).double(), torch.tensor([True, False, True])
    compiled = torch.compile(
        lambda r, point: kto(r, desirable, beta=0.2, reference_point=point), fullgraph=True, backend="eager"
    )
    for point in (torch.tensor(0.4), torch.tensor(-1.0)):
        torch.testing.assert_close(
            compiled(log_ratio, point), kto(log_ratio, desirable, beta=0.2, reference_point=point)
        )


@given(batches(least=1, multiple=2), betas, st.floats(0, 2))
def test_simpo_is_the_papers_from_the_tokens_on(batch, beta, gamma):
    assert_same_losses(
        lambda: simpo(*halves(sequence_means, batch), beta=beta, gamma=gamma),
        lambda: [-torch.log(sigmoid(beta * w - beta * r - gamma)) for w, r in naive_pairs(batch)],
        {"log_prob": batch.log_prob},
    )


@given(batches(least=1, multiple=2), st.floats(0.05, 2))
def test_orpo_is_the_papers_from_the_tokens_on(batch, weight):
    def log_odds(mean):
        p = torch.exp(mean.double())
        if p == 1:  # an empty response
            p = 1 - torch.tensor(2.0**-52, dtype=torch.float64)
        return torch.log(p / (1 - p))

    assert_same_losses(
        lambda: orpo(*halves(sequence_means, batch), weight=weight),
        lambda: [-w - weight * torch.log(sigmoid(log_odds(w) - log_odds(r))) for w, r in naive_pairs(batch)],
        {"log_prob": batch.log_prob},
    )


@given(batches(least=1, multiple=2), st.floats(0.05, 2), st.floats(0, 2))
def test_orpo_may_take_the_likelihood_over_all_chosen_tokens_of_a_step_in_any_micro_batches(batch, weight, nll_weight):
    """-(nll_weight / tokens) sum of all chosen log p, and the odds' mean over the pairs."""
    half = batch.sequences // 2
    chosen_tokens = [p for s in range(half) for p in batch.tokens(s)]

    def loss(pairs=slice(None)):
        means = [m[pairs] for m in halves(sequence_means, batch)]
        nll = -halves(sequence_sums, batch)[0][pairs] * half / max(1, len(chosen_tokens))
        return per_item(orpo(*means, weight=weight, nll_weight=nll_weight, chosen_nll=nll))

    def plain():
        odds = orpo(*halves(sequence_means, batch), weight=weight, nll_weight=0.0).sum() / half
        nll = sum((-batch.log_prob[p] for p in chosen_tokens), start=torch.zeros((), dtype=torch.float64))
        return [odds + nll_weight * nll / max(1, len(chosen_tokens))]

    leaves = {"log_prob": batch.log_prob}
    assert_same_losses(lambda: loss().mean.reshape(1), plain, leaves)
    assert_same_losses(lambda: (loss(slice(0, 1)) + loss(slice(1, None))).mean.reshape(1), plain, leaves)


@given(batches(least=1, multiple=2), betas, st.floats(0, 2))
def test_cpo_is_the_papers_from_the_tokens_on(batch, beta, nll_weight):
    def naive():
        half = batch.sequences // 2
        sums = [m * max(1, len(batch.tokens(s))) for s, m in enumerate(means(batch))]
        for w, r in zip(sums[:half], sums[half:], strict=True):
            yield -torch.log(sigmoid(beta * w - beta * r)) - nll_weight * w

    assert_same_losses(
        lambda: cpo(*halves(sequence_sums, batch), beta=beta, nll_weight=nll_weight),
        lambda: list(naive()),
        {"log_prob": batch.log_prob},
    )


@given(st.floats(-50, 50), betas, st.sampled_from(["sigmoid", "robust"]), smoothings)
def test_at_equal_log_ratios_dpo_is_log_2(ratio, beta, variant, epsilon):
    both = torch.tensor([ratio], dtype=torch.float64)
    loss = dpo(both, both, beta=beta, variant=variant, label_smoothing=epsilon).item()
    assert loss == pytest.approx(math.log(2), rel=1e-12)


@given(betas, st.floats(0.01, 0.45))
def test_conservative_dpo_is_least_where_the_model_is_as_sure_as_the_labels(beta, epsilon):
    """sigmoid(beta m) = 1 - e (Mitchell 2023)."""
    margin = torch.tensor([math.log((1 - epsilon) / epsilon) / beta], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros_like(margin)
    loss = dpo(margin, zero, beta=beta, label_smoothing=epsilon)
    (slope,) = torch.autograd.grad(loss.sum(), margin)
    assert abs(slope.item()) < 1e-14
    for shift in (-0.1, 0.1):
        assert dpo(margin + shift, zero, beta=beta, label_smoothing=epsilon) > loss


@given(st.floats(-4, 4), betas, st.floats(0.01, 0.4))
def test_robust_dpo_over_flipped_labels_is_dpo_over_the_true_ones(margin, beta, epsilon):
    """Its expectation under labels that are wrong with probability e (Chowdhury et al. 2024)."""
    m, zero = torch.tensor([margin], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    options = {"beta": beta, "variant": "robust", "label_smoothing": epsilon}
    noisy = (1 - epsilon) * dpo(m, zero, **options) + epsilon * dpo(zero, m, **options)
    torch.testing.assert_close(noisy, dpo(m, zero, beta=beta), rtol=1e-12, atol=1e-12)


LARGE = 1e4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [-1, 1])
def test_very_large_log_ratios_give_the_limit_and_finite_gradients(dtype, sign):
    chosen = torch.full((1,), sign * LARGE, dtype=dtype, requires_grad=True)
    rejected = torch.full((1,), -sign * LARGE, dtype=dtype, requires_grad=True)
    wanted = torch.tensor([True])
    limits = {
        "sigmoid": (dpo(chosen, rejected, beta=1.0), max(0.0, -2 * sign * LARGE)),
        "smoothed": (
            dpo(chosen, rejected, beta=1.0, label_smoothing=0.25),
            LARGE * (0.5 if sign > 0 else 1.5),
        ),
        "simpo": (simpo(chosen, rejected, beta=1.0, gamma=0.0), max(0.0, -2 * sign * LARGE)),
        "kto": (kto(chosen, wanted, beta=1.0, reference_point=0.0), float(sign < 0)),
    }
    for name, (loss, limit) in limits.items():
        gradients = torch.autograd.grad(loss.sum(), (chosen, rejected), allow_unused=True)
        assert loss.item() == pytest.approx(limit, rel=1e-6), name
        assert all(g is None or g.isfinite().all() for g in gradients), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orpo_is_finite_where_a_probability_is_1_or_nearly_0(dtype):
    for chosen, rejected in [(0.0, -1.0), (-1.0, 0.0), (0.0, 0.0), (-1e4, -1.0), (-1.0, -1e4), (-1e-30, -1e-30)]:
        tensors = [torch.tensor([x], dtype=dtype, requires_grad=True) for x in (chosen, rejected)]
        loss = orpo(*tensors, weight=0.5)
        assert loss.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss.sum(), tensors))


def test_nothing_cancels_in_float32():
    """Losses far below 1, and odds of probabilities close to 1, keep the digits of float32."""
    far, near, other, wanted = (torch.tensor([x]) for x in (20.0, -1e-6, -0.01, True))
    pairs = [
        (dpo(far, -far, beta=0.5), dpo(far.double(), -far.double(), beta=0.5)),
        (kto(far, wanted, beta=1.0, reference_point=0.0), torch.sigmoid(-far.double())),
        (orpo(near, other, weight=1.0), orpo(near.double(), other.double(), weight=1.0)),
    ]
    for found, exact in pairs:
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


def test_a_pair_of_empty_responses_has_a_finite_loss_and_no_gradient():
    log_prob = torch.full((2, 3), -torch.inf, requires_grad=True)
    ids = padded_segments(torch.zeros(2, 3, dtype=torch.bool))
    w, r = sequence_means(log_prob, ids, 2).chunk(2)
    losses = [
        dpo(w, r, beta=0.1),
        simpo(w, r, beta=2.0, gamma=1.0),
        orpo(w, r, weight=0.1),
        cpo(w, r, beta=0.1),
        kto(w, torch.tensor([True]), beta=0.1, reference_point=0.0),
    ]
    for loss in losses:
        assert loss.isfinite().all()
        (gradient,) = torch.autograd.grad(loss.sum(), log_prob, retain_graph=True)
        assert (gradient == 0).all()


def test_a_response_of_probability_0_has_the_gradient_of_the_limit():
    chosen = torch.zeros(1, requires_grad=True)
    rejected = torch.full((1,), -torch.inf, requires_grad=True)
    for a, b, slope in ((chosen, rejected, 0.0), (rejected, chosen, -0.5)):
        loss = dpo(a, b, beta=0.5)
        gradients = torch.autograd.grad(loss.sum(), (a, b))
        assert [g.item() for g in gradients] == [slope, -slope]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_scores_are_widened(dtype):
    a, b = torch.tensor([-1.0], dtype=dtype), torch.tensor([-2.0], dtype=dtype)
    for loss in (
        dpo(a, b, beta=0.1),
        orpo(a, b, weight=0.1),
        simpo(a, b, beta=1.0, gamma=0.5),
        cpo(a, b, beta=0.1),
        kto(a, torch.tensor([True]), beta=0.1, reference_point=a),
    ):
        assert loss.dtype == torch.float32


@pytest.mark.unswitched
@pytest.mark.parametrize("point", [math.nan, torch.tensor(math.nan), torch.tensor([math.inf])])
def test_a_reference_point_that_is_no_number_is_refused(point):
    with pytest.raises(ValueError, match="reference_point is"):
        kto(torch.zeros(3), torch.tensor([True, False, True]), beta=0.1, reference_point=point)

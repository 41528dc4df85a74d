"""Per-token log-probabilities: value and gradient of the plain log-softmax, under any factor for each token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.testing import assert_same_gradients
from tests.seqpar.linear.linear_loss import linear_cases, plain_logits


def arguments(case):
    """The tensors and keywords of a case that `token_scores` takes."""
    tensors = {k: t for k, t in case.tensors().items() if k not in ("class_weight", "token_weight")}
    names = ("ignore_index", "softcap", "temperature", "chunk_tokens")
    return tensors, {name: case.options[name] for name in names}


def plain_scores(hidden, weight, target, bias=None, *, ignore_index, softcap, temperature, **_):
    log_p = plain_logits(hidden, weight, bias, softcap, temperature).log_softmax(-1)
    kept = target.flatten() != ignore_index
    rows = log_p.gather(1, target.flatten().where(kept, 0).unsqueeze(1)).squeeze(1)
    return rows.where(kept, 0.0).reshape(target.shape)


@given(linear_cases(), st.sampled_from(["factors", "ratio", "one token"]))
def test_any_loss_of_the_scores_has_the_plain_gradient(case, how):
    tensors, options = arguments(case)
    factors = torch.randn(case.lead, dtype=torch.float64, generator=torch.Generator().manual_seed(case.seed))

    def loss(scores):
        if how == "factors":
            return (scores * factors).sum()
        if how == "ratio":  # of a policy to an older one, clipped
            ratio = (scores - factors.abs()).exp()
            return torch.minimum(ratio * factors, ratio.clamp(0.8, 1.2) * factors).sum()
        return scores.flatten()[-1]

    assert_same_gradients(
        lambda: loss(seqpar.token_scores(**tensors, **options)),
        lambda: loss(plain_scores(**tensors, **options)),
        {name: tensors[name] for name in ("hidden", "weight", "bias") if name in tensors},
    )


@given(linear_cases())
def test_each_score_is_the_plain_one_and_0_where_ignored(case):
    tensors, options = arguments(case)
    scores, plain = seqpar.token_scores(**tensors, **options), plain_scores(**tensors, **options)
    assert scores.shape == tensors["target"].shape
    torch.testing.assert_close(scores, plain, rtol=1e-12, atol=1e-13)
    assert (scores[tensors["target"] == case.padding] == 0).all()


def small():
    torch.manual_seed(0)
    return torch.randn(5, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True), torch.randint(7, (5,))


def test_backward_may_be_called_again_and_a_second_derivative_is_refused():
    hidden, weight, target = small()
    scores = seqpar.token_scores(hidden, weight, target, chunk_tokens=2)
    first, again = (torch.autograd.grad(scores.sum(), weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(scores.sum(), weight, create_graph=True)


def test_a_weight_changed_between_forward_and_backward_is_noticed():
    hidden, weight, target = small()
    scores = seqpar.token_scores(hidden, weight, target)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


def test_between_forward_and_backward_no_logits_are_kept():
    hidden, weight, target = small()
    scores = seqpar.token_scores(hidden, weight, target)
    node = scores.grad_fn
    formula = node.formula if hasattr(node, "formula") else node.next_functions[0][0].formula
    assert formula.projection.buffers == {}


def test_inputs_are_checked_as_those_of_the_loss():
    hidden, weight, target = small()
    with pytest.raises(IndexError, match=r"target 7 at position \(1,\)"):
        seqpar.token_scores(hidden, weight, target.index_fill(0, torch.tensor([1]), 7))
    with pytest.raises(ValueError, match=r"temperature is 0\.0; it must be a finite number above 0"):
        seqpar.token_scores(hidden, weight, target, temperature=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_a_low_precision_model_are_not_rounded_to_its_dtype(dtype):
    hidden, weight, target = (t.detach() for t in small())
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    scores = seqpar.token_scores(hidden, weight, target)
    assert scores.dtype == torch.float32
    logits = (hidden @ weight.t()).double()
    exact = logits.log_softmax(-1).gather(1, target.unsqueeze(1)).squeeze(1)
    assert (scores - exact).abs().max() <= 1e-6
    assert (exact - exact.to(dtype)).abs().max() > 1e-5  # which the dtype's own rounding would not keep

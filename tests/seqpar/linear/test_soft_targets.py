"""A soft target of a few classes has the loss of torch's cross-entropy with the same probabilities written out."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.testing import assert_same_gradients
from tests.seqpar.linear.linear_loss import linear_cases, plain_logits

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")

OPTIONS = ("ignore_index", "z_loss", "softcap", "temperature", "loss_scale", "chunk_tokens")


def soft_target(case, k, filled):
    """The sparse target of a case, and the same probabilities over all classes (N, V)."""
    random = torch.Generator().manual_seed(case.seed + 2)
    rows = len(torch.zeros(case.lead).flatten())
    ids = torch.rand(rows, case.vocab_size, generator=random).argsort(-1)[:, :k]
    probs = torch.rand(rows, k, dtype=torch.float64, generator=random).square()
    if filled:
        left_out = torch.rand(rows, k, generator=random) < 0.4
        left_out[:, 0] = False
        probs = probs.masked_fill(left_out, 0)
    probs = probs / probs.sum(-1, keepdim=True)
    dense = torch.zeros(rows, case.vocab_size, dtype=torch.float64).scatter(1, ids, probs)
    if filled:  # the probability of a row's filling is not read
        ids, probs = ids.masked_fill(left_out, -1), probs.masked_fill(left_out, 9.0)
    shape = (*case.lead, k)
    return seqpar.SparseTarget(ids.reshape(shape), probs.reshape(shape)), dense


def plain(tensors, dense, case):
    """The loss by torch, of the rows that count."""
    names = ("hidden", "weight")
    logits = plain_logits(*(tensors[n] for n in names), tensors.get("bias"), case.softcap, case.temperature)
    rows = F.cross_entropy(logits, dense, reduction="none") + case.z_loss * logits.logsumexp(-1).square()
    if "token_weight" in tensors:
        rows = rows * tensors["token_weight"].flatten()
    return (rows * (tensors["target"].flatten() != case.padding)).sum()


@given(linear_cases(), st.integers(1, 13), st.booleans())
def test_any_soft_target_has_the_value_and_gradient_of_the_dense_one(case, k, filled):
    sparse, dense = soft_target(case, min(k, case.vocab_size), filled)
    tensors = {name: t for name, t in case.tensors().items() if name != "class_weight"}
    options = {name: case.options[name] for name in OPTIONS}
    assert_same_gradients(
        lambda: seqpar.linear_cross_entropy(**tensors, **options, soft_target=sparse).total * case.upstream,
        lambda: plain(tensors, dense, case) * case.upstream,
        {name: t for name, t in tensors.items() if name != "target"},
    )
    soft = seqpar.linear_cross_entropy(**tensors, **options, soft_target=sparse)
    hard = seqpar.linear_cross_entropy(**tensors, **options)
    torch.testing.assert_close(soft.nll, hard.nll, rtol=1e-12, atol=1e-13)
    assert (soft.tokens, soft.correct) == (hard.tokens, hard.correct)


def good(ids, probs, **change):
    torch.manual_seed(0)
    given = {"hidden": torch.randn(6, 3), "weight": torch.randn(9, 3), "target": torch.tensor([0, 1, 2, 3, 4, -100])}
    soft = seqpar.SparseTarget(torch.tensor(ids).expand(6, -1), torch.tensor(probs).expand(6, -1))
    return given | {"soft_target": soft} | change


def test_a_soft_target_of_one_class_is_the_hard_one():
    given = good([0], [1.0])
    ids = given["target"].clamp(min=0).unsqueeze(1)
    given["soft_target"] = seqpar.SparseTarget(ids, torch.ones(6, 1))
    soft = seqpar.linear_cross_entropy(**given)
    given.pop("soft_target")
    torch.testing.assert_close(soft, seqpar.linear_cross_entropy(**given), rtol=1e-6, atol=0)


def test_probabilities_that_sum_to_1_only_after_rounding_are_taken():
    probs = torch.rand(4).bfloat16()
    probs = probs / probs.sum()
    seqpar.linear_cross_entropy(
        **good([0, 1, 2, 3], probs.tolist())
        | {"soft_target": seqpar.SparseTarget(torch.arange(4).expand(6, 4), probs.expand(6, 4))}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_may_be_off_by_the_rounding_of_float32_and_no_more(dtype):
    """The square root of its epsilon, 3.5e-4, in float64 too, where they may have been computed in float32."""
    hidden, weight, target = torch.randn(1, 3, dtype=dtype), torch.randn(5, 3, dtype=dtype), torch.tensor([1])
    ids = torch.tensor([[1, 4]])
    for total in (1.0003, 0.9997):
        probs = torch.tensor([[0.5, total - 0.5]], dtype=dtype)
        seqpar.linear_cross_entropy(hidden, weight, target, soft_target=seqpar.SparseTarget(ids, probs))
    for total in (1.0005, 0.9995):
        probs = torch.tensor([[0.5, total - 0.5]], dtype=dtype)
        with pytest.raises(ValueError, match=rf"soft_target.probs sum to {total} at position \(0,\)"):
            seqpar.linear_cross_entropy(hidden, weight, target, soft_target=seqpar.SparseTarget(ids, probs))

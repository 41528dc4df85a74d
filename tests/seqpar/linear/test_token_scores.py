"""Per-token scores: values and gradients of the plain log-softmax, under any factor for each token and each score."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.testing import assert_same_gradients
from tests.seqpar.linear.score_cases import assert_scores, plain_scores, score_cases, weighted

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")

USED = st.sampled_from(["all", "all", "log_prob", "entropy", "log_probs_at"])
CHUNKS = st.sampled_from([None, 1, 2, 3, 7, 100])


@given(score_cases(), USED, CHUNKS)
def test_any_loss_of_the_scores_has_the_plain_gradient(case, used, chunk_tokens):
    tensors = case.tensors()
    seed = case.linear.seed
    assert_same_gradients(
        lambda: weighted(seqpar.token_scores(**tensors, **case.options, chunk_tokens=chunk_tokens), seed, used),
        lambda: weighted(plain_scores(**tensors, **case.options), seed, used),
        {name: tensors[name] for name in ("hidden", "weight", "bias") if name in tensors},
    )


@given(score_cases(), USED, CHUNKS)
def test_a_frozen_projection_gives_hidden_the_plain_gradient(case, used, chunk_tokens):
    tensors = {name: t.detach() for name, t in case.tensors().items()}
    tensors["hidden"].requires_grad_()
    seed = case.linear.seed
    assert_same_gradients(
        lambda: weighted(seqpar.token_scores(**tensors, **case.options, chunk_tokens=chunk_tokens), seed, used),
        lambda: weighted(plain_scores(**tensors, **case.options), seed, used),
        {"hidden": tensors["hidden"]},
    )


@given(score_cases(), USED, st.sampled_from([1, 2, 3]), st.booleans())
def test_blocks_of_a_chunk_do_not_change_the_gradient(case, used, rows_at_once, frozen):
    tensors = case.tensors()
    if frozen:
        tensors = {name: t.detach() for name, t in tensors.items()}
        tensors["hidden"].requires_grad_()
    cache = rows_at_once * case.linear.vocab_size * 8 // torch.get_num_threads()
    with patch("seqpar.linear.projection.CACHE", cache):
        assert_same_gradients(
            lambda: weighted(seqpar.token_scores(**tensors, **case.options), case.linear.seed, used),
            lambda: weighted(plain_scores(**tensors, **case.options), case.linear.seed, used),
            {name: tensors[name] for name in ("hidden", "weight", "bias") if name in tensors},
        )


@given(score_cases(), st.booleans())
def test_each_score_is_the_plain_one_and_0_where_ignored(case, invariant):
    tensors = case.tensors()
    options = case.options
    found = seqpar.token_scores(**tensors, **options, batch_invariant=invariant)
    plain = plain_scores(**tensors, **options)
    assert_scores(found, plain, tensors["target"] == case.linear.padding)


def test_equal_log_probabilities_go_to_the_lower_class():
    hidden = torch.ones(3, 1)
    weight = torch.tensor([[1.0], [2.0], [2.0], [0.0], [2.0]])
    for top_k, expected in ((1, [1]), (2, [1, 2]), (4, [1, 2, 4, 0]), (5, [1, 2, 4, 0, 3])):
        found = seqpar.token_scores(hidden, weight, torch.zeros(3, dtype=torch.long), top_k=top_k)
        assert found.top_ids.tolist() == [expected] * 3


def small():
    torch.manual_seed(0)
    return torch.randn(5, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True), torch.randint(7, (5,))


@pytest.mark.parametrize("frozen", [False, True])
def test_backward_may_be_called_again_and_a_second_derivative_is_refused(frozen):
    hidden, weight, target = small()
    weight.requires_grad_(not frozen)
    scores = seqpar.token_scores(hidden, weight, target, entropy=True, chunk_tokens=2)
    total = scores.log_prob.sum() + scores.entropy.square().sum()
    first, again = (torch.autograd.grad(total, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(total, hidden, create_graph=True)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_an_ignored_token_receives_does_not_matter(frozen):
    hidden, weight, target = small()
    weight.requires_grad_(not frozen)
    target[1] = -100
    scores = seqpar.token_scores(hidden, weight, target, entropy=True)
    factor = torch.tensor([1.0, torch.nan, 2.0, 3.0, 4.0])
    grad = torch.autograd.grad((scores.log_prob * factor + scores.entropy * factor).sum(), hidden)[0]
    assert grad.isfinite().all()
    assert (grad[1] == 0).all()


def test_a_weight_changed_between_forward_and_backward_is_noticed():
    hidden, weight, target = small()
    scores = seqpar.token_scores(hidden, weight, target).log_prob
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


def test_between_forward_and_backward_no_logits_are_kept():
    hidden, weight, target = small()
    scores = seqpar.token_scores(hidden, weight, target, entropy=True).log_prob
    node = scores.grad_fn
    tokens = node.tokens if hasattr(node, "tokens") else node.next_functions[0][0].tokens
    assert tokens.projection.buffers == {}


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Count the matrix products of rows x D x V."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen", "entropy", "products"),
    [
        ((), False, 4),
        ((), True, 4),
        (("hidden",), True, 3),
        (("weight",), False, 2),
        (("weight",), True, 3),
        (("hidden", "weight"), True, 1),
    ],
)
def test_no_more_products_than_the_documented_ones(frozen, entropy, products):
    hidden, weight, target = small()
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        tensor.requires_grad_(name not in frozen)
    with Products() as counted:
        scores = seqpar.token_scores(hidden, weight, target, entropy=entropy)
        if scores.log_prob.requires_grad:
            (scores.log_prob.sum() + (scores.entropy.sum() if entropy else 0)).backward()
    assert counted.count == products


def test_ids_and_temperature_of_ignored_tokens_may_be_anything():
    hidden, weight, target = small()
    target[2] = -100
    ids = torch.zeros(5, 2, dtype=torch.long)
    ids[2] = 99
    temperature = torch.ones(5)
    temperature[2] = torch.nan
    found = seqpar.token_scores(hidden, weight, target, ids=ids, temperature=temperature)
    assert (found.log_probs_at[2] == 0).all()
    assert found.log_prob.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_a_low_precision_model_are_not_rounded_to_its_dtype(dtype):
    hidden, weight, target = (t.detach() for t in small())
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    scores = seqpar.token_scores(hidden, weight, target).log_prob
    assert scores.dtype == torch.float32
    logits = (hidden @ weight.t()).double()
    exact = logits.log_softmax(-1).gather(1, target.unsqueeze(1)).squeeze(1)
    assert (scores - exact).abs().max() <= 1e-6
    assert (exact - exact.to(dtype)).abs().max() > 1e-5  # which the dtype's own rounding would not keep


def bits(scores):
    """Every score of each token, bit by bit."""
    columns = [scores.log_prob, scores.entropy, *scores.top_log_probs.unbind(-1), *scores.log_probs_at.unbind(-1)]
    return torch.stack(columns, -1)


@given(
    st.integers(1, 150),
    st.integers(1, 40),
    st.integers(2, 300),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 2**16),
)
def test_a_batch_invariant_score_has_the_same_bits_in_any_batch(tokens, width, vocab_size, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=random).to(dtype)
    weight = (3 * torch.randn(vocab_size, width, generator=random)).to(dtype)
    target = torch.randint(vocab_size, (tokens,), generator=random)
    bias = torch.randn(vocab_size, generator=random).to(dtype)

    def of(rows, chunk_tokens):
        given = {"bias": bias, "ids": target[rows].unsqueeze(1), "chunk_tokens": chunk_tokens}
        return bits(
            seqpar.token_scores(
                hidden[rows], weight, target[rows], entropy=True, top_k=1, batch_invariant=True, **given
            )
        )

    expected = of(torch.arange(tokens), None)
    for chunk_tokens in (1, 7, None):
        rows = torch.randperm(tokens, generator=random)[: int(torch.randint(1, tokens + 1, (1,), generator=random))]
        assert torch.equal(of(rows, chunk_tokens), expected[rows])


@given(score_cases(), CHUNKS)
def test_batch_invariant_scores_have_the_plain_gradient(case, chunk_tokens):
    """Forward's and backward's products round differently: of a certain token the gradient is up to 1e-13, not 0."""
    tensors = case.tensors()
    seed = case.linear.seed
    options = {**case.options, "chunk_tokens": chunk_tokens, "batch_invariant": True}
    assert_same_gradients(
        lambda: weighted(seqpar.token_scores(**tensors, **options), seed) / 16,
        lambda: weighted(plain_scores(**tensors, **case.options), seed) / 16,
        {name: tensors[name] for name in ("hidden", "weight", "bias") if name in tensors},
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_a_float32_head_over_bfloat16_hidden_states_has_the_gradient_of_the_cast_ones(frozen):
    torch.manual_seed(0)
    hidden = torch.randn(40, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(30, 8, dtype=torch.bfloat16, requires_grad=not frozen)
    bias = torch.randn(30, requires_grad=not frozen)
    target = torch.randint(30, (40,))
    found = seqpar.token_scores(
        hidden, weight, target, bias=bias, entropy=True, product_dtype=torch.float32, chunk_tokens=7
    )
    log_p = torch.nn.functional.linear(hidden.float(), weight.float(), bias).log_softmax(-1)
    plain = log_p.gather(1, target.unsqueeze(1)).squeeze(1)
    plain_entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(found.log_prob, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropy, plain_entropy, rtol=1e-6, atol=1e-6)
    narrow = seqpar.token_scores(hidden, weight, target, bias=bias.bfloat16()).log_prob
    assert (narrow - plain).abs().max() > 1e-3
    leaves = [hidden] if frozen else [hidden, weight, bias]
    ours = torch.autograd.grad((found.log_prob * found.entropy).sum(), leaves)
    theirs = torch.autograd.grad((plain * plain_entropy).sum(), leaves)
    for got, expected in zip(ours, theirs, strict=True):
        assert got.dtype == expected.dtype
        # Both round the same float32 gradient to the leaf's dtype
        torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(got.dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_in_low_precision_the_error_is_at_most_twice_that_of_plain_torch(dtype, frozen, scale):
    torch.manual_seed(0)
    exact = {
        "hidden": scale * torch.randn(64, 32).to(dtype).double(),
        "weight": torch.randn(200, 32).to(dtype).double(),
    }
    target = torch.randint(200, (64,))
    factors = torch.randn(2, 64, dtype=torch.float64)

    def results(tensors, scores):
        leaves = {name: t.clone().requires_grad_(name == "hidden" or not frozen) for name, t in tensors.items()}
        log_prob, entropy = scores(**leaves)
        total = (log_prob.double() * factors[0]).sum() + (entropy.double() * factors[1]).sum()
        grads = torch.autograd.grad(total, [t for t in leaves.values() if t.requires_grad])
        return [log_prob.detach().double(), entropy.detach().double(), *(g.double() for g in grads)]

    def plain(hidden, weight):
        log_p = (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32)).log_softmax(-1)
        return log_p.gather(1, target.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)

    def ours(hidden, weight):
        return seqpar.token_scores(hidden, weight, target, entropy=True, chunk_tokens=13)[:2]

    truth = results(exact, plain)
    narrow = {name: t.to(dtype) for name, t in exact.items()}
    for mine, theirs, true in zip(results(narrow, ours), results(narrow, plain), truth, strict=True):
        floor = torch.finfo(torch.float32).eps * true.norm()
        assert (mine - true).norm() <= 2 * (theirs - true).norm() + floor


def test_the_entropy_over_a_large_vocabulary_is_as_precise_as_plain_pytorchs():
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(64, 16), torch.randn(32_000, 16) / 4, torch.zeros(64, dtype=torch.int64)

    def plain(hidden, weight):
        log_p = (hidden @ weight.t()).log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1).double()

    right = plain(hidden.double(), weight.double())
    found = seqpar.token_scores(hidden, weight, target, entropy=True).entropy
    assert (found - right).norm() <= 2 * (plain(hidden, weight) - right).norm()


@given(score_cases(), st.booleans())
def test_the_target_is_the_top_class_of_its_rank_also_where_it_is_masked(case, invariant):
    tensors = {name: t.detach() for name, t in case.tensors().items()}
    options = case.options | {"top_k": case.linear.vocab_size, "ids": None}
    if case.masked and "bias" in tensors:
        tensors["target"] = tensors["target"].where(tensors["target"] == case.linear.padding, case.masked_class())
    found = seqpar.token_scores(**tensors, **options, batch_invariant=invariant)
    counted = tensors["target"] != case.linear.padding
    place = found.rank.clamp(min=0).unsqueeze(-1)
    assert torch.equal(found.top_ids.gather(-1, place).squeeze(-1)[counted], tensors["target"][counted])
    assert (found.rank[~counted] == -1).all()


@pytest.mark.parametrize("rows", [slice(None), [3]])
def test_equally_likely_classes_rank_as_in_the_order_of_top_ids(rows):
    weight = torch.tensor([[1.0], [2.0], [2.0], [0.0], [2.0]])
    target = torch.tensor([0, 1, 2, 3, 4])[rows]
    found = seqpar.token_scores(torch.ones(len(target), 1), weight, target, rank=True)
    assert found.rank.tolist() == torch.tensor([3, 0, 1, 4, 2])[rows].tolist()
    loss = seqpar.linear_cross_entropy(torch.ones(len(target), 1), weight, target)
    assert loss.correct == (found.rank == 0).sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_most_probable_classes_and_the_rank_are_constants(frozen):
    hidden, weight = torch.randn(5, 4).requires_grad_(), torch.randn(7, 4).requires_grad_(not frozen)
    found = seqpar.token_scores(
        hidden, weight, torch.arange(5), entropy=True, ids=torch.arange(10).view(5, 2) % 7, top_k=2, rank=True
    )
    assert [t.requires_grad for t in (found.log_prob, found.entropy, found.log_probs_at)] == [True] * 3
    assert [t.requires_grad for t in (found.top_log_probs, found.top_ids, found.rank)] == [False] * 3


def test_what_is_not_asked_for_is_not_computed():
    hidden, weight, target = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, 2])
    scores = seqpar.token_scores(hidden, weight, target)
    assert [name for name, score in scores._asdict().items() if score is not None] == ["log_prob"]
    given = []
    seqpar.scored_loss(hidden, weight, target, lambda scores: given.append(scores) or -scores.log_prob)
    assert [name for name, score in given[0]._asdict().items() if score is not None] == ["log_prob", "lse"]

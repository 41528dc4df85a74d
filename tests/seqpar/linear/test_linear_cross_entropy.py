"""The fast path: value and every gradient by formula equal the plain un-chunked loss, in float64 within 1e-12."""

import contextlib
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import seqpar
from seqpar.rows.conventions import CONVENTIONS
from seqpar.testing import assert_same_gradients
from tests.seqpar.linear.linear_loss import errors, linear_cases, plain_logits, plain_loss, small

LEAVES = ("hidden", "weight", "bias", "token_weight")


PATHS = {
    "seqpar.linear.projection.CACHE": (2**23, 200),
    "seqpar.linear.fused_loss.COUNTED": (2**24, 0),
    "seqpar.rows.scores.FEW": (2**13, 0),
}
"""Sizes from which on another path is taken: as they are, larger than all cases here; and smaller than all."""


@given(linear_cases(), st.fixed_dictionaries({name: st.sampled_from(sizes) for name, sizes in PATHS.items()}))
def test_every_option_has_the_gradient_of_its_published_formula_on_either_path(case, sizes):
    """With a cache of 200 bytes, a few rows at a time go through the softmax."""
    tensors = case.tensors()
    with contextlib.ExitStack() as stack:
        for name, size in sizes.items():
            stack.enter_context(patch(name, size))
        assert_same_gradients(
            lambda: seqpar.linear_cross_entropy(**tensors, **case.options).total * case.upstream,
            lambda: plain_loss(**tensors, **case.options) * case.upstream,
            {name: tensors[name] for name in LEAVES if name in tensors},
        )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_each_convention_with_and_without_class_weights(convention, weighted):
    torch.manual_seed(0)
    tensors = {name: torch.randn(7, 3, dtype=torch.float64, requires_grad=True) for name in ("hidden", "weight")}
    tensors["class_weight"] = torch.rand(7, dtype=torch.float64) + 0.1 if weighted else None
    options = {"ignore_index": 2, "label_smoothing": 0.1, "smoothing_convention": convention, "z_loss": 0.5}
    target = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    assert_same_gradients(
        lambda: seqpar.linear_cross_entropy(**tensors, target=target, **options).total,
        lambda: plain_loss(**tensors, target=target, softcap=None, **options),
        {name: tensors[name] for name in ("hidden", "weight")},
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padding", [0, 3, 6])
@pytest.mark.parametrize("masked", [-1e9, torch.finfo(torch.float64).min, -torch.inf])
def test_a_masked_padding_class_takes_no_digits_from_the_harvard_loss(masked, padding, weighted):
    """Its target is 0, so that no term has its logit, however small or -inf that is."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(7, 3, dtype=torch.float64, requires_grad=True) for name in ("hidden", "weight")}
    bias = torch.randn(7, dtype=torch.float64).index_fill(0, torch.tensor(padding), masked)
    class_weight = torch.rand(7, dtype=torch.float64) + 0.1 if weighted else None
    target = torch.arange(7)
    counted = target != padding
    criterion = seqpar.LabelSmoothing(0.1, "harvard", ignore_index=padding)

    def plain():
        log_p = F.linear(*tensors.values(), bias)[counted].log_softmax(-1)
        q = torch.full_like(log_p, 0.1 / 5).scatter(1, target[counted, None], 0.9)
        terms = q * (q.log() - log_p)
        if weighted:
            terms = terms * class_weight
        return terms[:, counted].sum()

    def ours():
        options = {"ignore_index": padding, "label_smoothing": 0.1, "smoothing_convention": "harvard"}
        loss = seqpar.linear_cross_entropy(**tensors, target=target, bias=bias, class_weight=class_weight, **options)
        return loss.total

    assert_same_gradients(ours, plain, tensors)
    if not weighted:
        assert_same_gradients(lambda: criterion(F.linear(*tensors.values(), bias), target), plain, tensors)


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 5])
def test_the_bias_has_its_gradient_from_every_block_of_a_chunk(rows_at_once):
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    bias, target = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.randint(7, (5,))
    with patch("seqpar.linear.projection.CACHE", rows_at_once * 7 * 8):
        loss = seqpar.linear_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=5).total
    plain = F.cross_entropy(F.linear(hidden, weight, bias), target, reduction="sum")
    found, expected = (torch.autograd.grad(each, bias)[0] for each in (loss, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@given(linear_cases())
def test_torchs_convention_is_torchs_own_loss_weights_included(case):
    tensors = case.tensors()

    def torchs():
        logits = F.linear(tensors["hidden"], tensors["weight"], tensors.get("bias")).flatten(0, -2)
        return F.cross_entropy(
            logits,
            tensors["target"].flatten(),
            tensors.get("class_weight"),
            ignore_index=case.padding,
            label_smoothing=case.eps,
            reduction="sum",
        )

    options = case.options | {"smoothing_convention": "torch", "z_loss": 0.0, "softcap": None, "temperature": 1.0}
    tensors.pop("token_weight", None)
    leaves = {name: tensors[name] for name in LEAVES if name in tensors}
    assert_same_gradients(lambda: seqpar.linear_cross_entropy(**tensors, **options).total, torchs, leaves)


@given(linear_cases(), st.booleans(), st.sampled_from([2**23, 200]))
def test_counts_are_those_of_the_plain_predictions(case, grad, cache):
    tensors = case.tensors()
    with torch.set_grad_enabled(grad), patch("seqpar.linear.projection.CACHE", cache):
        loss = seqpar.linear_cross_entropy(**tensors, **case.options)
    logits = plain_logits(tensors["hidden"], tensors["weight"], tensors.get("bias"), case.softcap, case.temperature)
    target = tensors["target"].flatten()
    kept = target != case.padding
    nll = F.cross_entropy(logits, target, ignore_index=case.padding, reduction="sum").detach()
    trained = any(tensors[name].requires_grad for name in LEAVES if name in tensors)
    assert loss.total.requires_grad == (grad and trained)
    assert loss.tokens == kept.sum()
    assert loss.correct == ((logits.argmax(-1) == target) & kept).sum()
    torch.testing.assert_close(loss.nll, nll, rtol=1e-12, atol=1e-13)


@given(linear_cases())
def test_a_tied_embedding_gets_both_its_gradients(case):
    tensors = case.tensors()
    weight, target = tensors["weight"], tensors["target"]
    tokens = torch.randint(case.vocab_size, case.lead, generator=torch.Generator().manual_seed(case.seed))
    assert_same_gradients(
        lambda: seqpar.linear_cross_entropy(F.embedding(tokens, weight).tanh(), weight, target, **case.options).total,
        lambda: plain_loss(F.embedding(tokens, weight).tanh(), weight, target, **case.options),
        {"weight": weight},
    )


@pytest.mark.parametrize("vocab_size", [15, 16, 1023, 1025, 4099])
def test_a_softmax_in_its_own_place_is_right_at_any_row_length(vocab_size):
    """Vector lengths and their remainders: torch promises nothing of an `out` that is its input."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, vocab_size))
    target = torch.randint(vocab_size, (5,))
    options = {
        "ignore_index": -100,
        "label_smoothing": 0.1,
        "smoothing_convention": "fairseq",
        "z_loss": 1e-3,
        "softcap": None,
    }
    assert_same_gradients(
        lambda: seqpar.linear_cross_entropy(hidden, weight, target, **options, chunk_tokens=2).total,
        lambda: plain_loss(hidden, weight, target, **options),
        {"hidden": hidden, "weight": weight},
    )


def test_one_class_alone_costs_nothing():
    hidden, weight = torch.randn(4, 2, requires_grad=True), torch.randn(1, 2, requires_grad=True)
    loss = seqpar.linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64), label_smoothing=0.1)
    loss.total.backward()
    assert (loss.total, loss.correct) == (0, 4)
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_the_first_of_classes_that_tie_is_the_prediction():
    hidden, weight, _ = small()
    # Eighths, whose products are exact: some CPUs round a logit by its place in the vocabulary
    hidden, weight = ((t.detach() * 8).round() / 8 for t in (hidden, weight[:1].expand(9, 4)))
    for gold, correct in ((0, 12), (1, 0), (8, 0)):
        assert seqpar.linear_cross_entropy(hidden, weight, torch.full((12,), gold)).correct == correct


def test_all_padding_gives_zero_and_never_nan_even_divided_by_no_tokens():
    hidden, weight, target = small()
    bias = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    loss = seqpar.linear_cross_entropy(hidden, weight, torch.full_like(target, -100), bias=bias, z_loss=0.1)
    assert tuple(loss) == (0, 0, 0, 0)
    (loss.total / loss.tokens).backward()
    for leaf in (hidden, weight, bias):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_an_empty_batch_is_a_loss_of_no_tokens(shape):
    hidden = torch.zeros(*shape, 4, requires_grad=True)
    loss = seqpar.linear_cross_entropy(hidden, torch.zeros(9, 4), torch.zeros(shape, dtype=torch.int64))
    loss.total.backward()
    assert loss.tokens == 0
    assert hidden.grad.shape == hidden.shape


def test_padding_rows_are_never_projected():
    hidden, weight, target = small()
    target[::3] = -100
    with torch.no_grad():
        hidden[::3] = float("nan")  # projecting one of these rows would show
    loss = seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=5)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert torch.isfinite(weight.grad).all()
    assert torch.equal(hidden.grad[::3], torch.zeros_like(hidden.grad[::3]))


def test_padding_as_nan_hides_nothing_that_a_class_masked_out_needs():
    """A bias of -inf takes classes out of the vocabulary, as padding it to a round size does."""
    hidden, weight, target = small()
    bias = torch.zeros(9, dtype=torch.float64)
    bias[5:] = -torch.inf
    loss = seqpar.linear_cross_entropy(hidden, weight, target % 5, bias=bias, chunk_tokens=5)
    plain = F.cross_entropy(F.linear(hidden, weight[:5]), target % 5, reduction="sum")
    got = torch.autograd.grad(loss.total, (hidden, weight))
    expected = torch.autograd.grad(plain, (hidden, weight))
    for a, b in zip((loss.total, *got), (plain, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_second_backward_and_a_second_derivative_are_clear_errors():
    hidden, weight, target = small()
    loss = seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=5).total
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True, retain_graph=True)
    loss.backward(retain_graph=True)
    first = weight.grad.clone()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert torch.equal(weight.grad, first)


def test_forward_makes_no_graph_writes_no_gradient_and_backward_fires_each_hook_once():
    hidden, weight, target = small()
    fired = []
    weight.register_hook(lambda _: fired.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    loss = seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=2).total
    assert not fired
    assert weight.grad is None
    parents = [parent for parent, _ in loss.grad_fn.next_functions if parent is not None]
    assert {type(p).__name__ for p in parents} == {"AccumulateGrad"}  # one node, straight to the leaves
    loss.backward()
    assert sorted(fired) == ["accumulated", "tensor"]


@pytest.mark.parametrize("chunk_tokens", [3, 12])
def test_the_inputs_are_left_as_they_were(chunk_tokens):
    hidden, weight, target = small()
    before = [t.detach().clone() for t in (hidden, weight, target)]
    class_weight = torch.ones(9, dtype=torch.float64)
    loss = seqpar.linear_cross_entropy(
        hidden, weight, target, class_weight=class_weight, softcap=2.0, chunk_tokens=chunk_tokens
    )
    loss.total.backward()
    for a, b in zip((hidden, weight, target), before, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(class_weight, torch.ones_like(class_weight))


def test_no_gradients_means_no_graph_and_the_same_numbers():
    hidden, weight, target = small()
    with torch.no_grad():
        evaluated = seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=5)
    with torch.inference_mode():
        inferred = seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=5)
    trained = seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=5)
    assert evaluated.total.grad_fn is None
    assert evaluated.total == inferred.total == trained.total.detach()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gpu_has_the_plain_gradient(dtype):
    hidden, weight, target = (
        t.detach().cuda() for t in small(rows=300, width=16, vocab_size=1000, dtype=torch.float64)
    )
    truth_inputs = [t.to(dtype).double().requires_grad_() for t in (hidden, weight)]
    inputs = [t.detach().to(dtype).requires_grad_() for t in truth_inputs]
    options = {
        "ignore_index": -100,
        "label_smoothing": 0.1,
        "smoothing_convention": "torch",
        "z_loss": 1e-4,
        "softcap": 20.0,
    }
    truth = (
        F.cross_entropy(plain_logits(*truth_inputs, softcap=20.0), target, label_smoothing=0.1, reduction="sum")
        + 1e-4 * torch.logsumexp(plain_logits(*truth_inputs, softcap=20.0), -1).square().sum()
    )
    loss = seqpar.linear_cross_entropy(*inputs, target, **options, chunk_tokens=64).total
    mine = errors(loss, inputs, [truth.detach(), *torch.autograd.grad(truth, truth_inputs)])
    assert max(mine) <= {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_narrow_integer_targets_work(dtype):
    hidden, weight, target = small()
    loss = seqpar.linear_cross_entropy(hidden, weight, target.to(dtype), chunk_tokens=5)
    assert loss.total == seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=5).total


def test_it_is_the_engines_loss_with_a_linear_generator():
    """One formula for both: the criterion under the engine, and the fast path."""
    hidden, weight, target = small()
    head = nn.Linear(4, 9, bias=False).double()
    head.weight = nn.Parameter(weight.detach().clone())
    engine = seqpar.LossCompute(head, seqpar.LabelSmoothing(0.1, "fairseq"), chunk_tokens=5)(hidden, target)
    ours = seqpar.linear_cross_entropy(
        hidden, head.weight, target, label_smoothing=0.1, smoothing_convention="fairseq", chunk_tokens=5
    )
    for a, b in zip(ours, engine, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=0)

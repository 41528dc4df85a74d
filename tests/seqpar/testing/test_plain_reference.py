"""The plain reference equals the published equations and torch's own loss, by value and by every gradient."""

import ast
import inspect

import torch
import torch.nn.functional as F
from hypothesis import given

import seqpar.testing
from seqpar.testing import assert_same_results, plain_linear_cross_entropy, plain_rank, plain_value_and_gradients
from seqpar.testing import plain_reference as reference
from tests.seqpar.linear.linear_loss import linear_cases
from tests.seqpar.published import smoothed_targets

LEAVES = ("hidden", "weight", "bias", "token_weight")


def unfrozen(case):
    """The tensors of a case, all of whose leaves need a gradient, and the options that change the loss."""
    tensors = case.tensors()
    for name in LEAVES:
        if name in tensors:
            tensors[name].requires_grad_()
    options = {name: value for name, value in case.options.items() if name not in ("loss_scale", "chunk_tokens")}
    return tensors, options


def by_autograd(loss, tensors):
    leaves = {name: tensors[name] for name in LEAVES if name in tensors}
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), dict(zip(leaves, gradients, strict=True))


def published_loss(case, hidden, weight, target, bias=None, class_weight=None, token_weight=None):
    """The equations of the conventions over every row, with a factor of 0 for ignored ones; exp and log by hand."""
    z = hidden.flatten(0, -2) @ weight.t()
    if bias is not None:
        z = z + bias
    if case.softcap is not None:
        z = case.softcap * torch.tanh(z / case.softcap)
    z = z / case.temperature
    best = z.detach().amax(-1, keepdim=True)
    lse = (z - best).exp().sum(-1, keepdim=True).log() + best
    target = target.flatten()
    q = smoothed_targets(target, len(weight), case.eps, case.convention, case.padding)
    terms = q * (lse - z)
    if case.convention == "harvard":
        terms = terms + torch.special.xlogy(q, q)
    if class_weight is not None:
        terms = terms * class_weight
    rows = terms.sum(-1) + case.z_loss * lse.squeeze(1).square()
    if token_weight is not None:
        rows = rows * token_weight.flatten()
    return (rows * (target != case.padding)).sum()


@given(linear_cases())
def test_the_reference_is_the_published_equations(case):
    tensors, options = unfrozen(case)
    expected = by_autograd(published_loss(case, **tensors), tensors)
    assert_same_results(plain_value_and_gradients(**tensors, **options), expected)
    assert_same_results(by_autograd(plain_linear_cross_entropy(**tensors, **options), tensors), expected)


@given(linear_cases())
def test_the_reference_is_torchs_cross_entropy(case):
    tensors, options = unfrozen(case)
    tensors.pop("token_weight", None)
    options |= {"smoothing_convention": "torch", "z_loss": 0.0, "softcap": None, "temperature": 1.0}
    loss = F.cross_entropy(
        F.linear(tensors["hidden"], tensors["weight"], tensors.get("bias")).flatten(0, -2),
        tensors["target"].flatten(),
        tensors.get("class_weight"),
        ignore_index=case.padding,
        label_smoothing=case.eps,
        reduction="sum",
    )
    assert_same_results(plain_value_and_gradients(**tensors, **options), by_autograd(loss, tensors))


def test_the_reference_keeps_the_dtype_and_leaves_the_tensors_alone():
    hidden, weight = torch.randn(4, 2), torch.nn.Parameter(torch.randn(5, 2))
    weight.grad = torch.ones_like(weight)
    with torch.no_grad():
        loss, gradients = plain_value_and_gradients(hidden, weight, torch.tensor([0, 1, -100, 4]), label_smoothing=0.1)
    assert {loss.dtype, *(g.dtype for g in gradients.values())} == {torch.float32}
    assert gradients.keys() == {"hidden", "weight"}
    assert not hidden.requires_grad
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_the_reference_is_plain():
    """Only torch and the conventions are imported, no chunks made, and no function has more than 40 lines of code."""
    tree = ast.parse(inspect.getsource(reference))
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "typing", "torch", "torch.nn.functional", "seqpar.rows.conventions"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert functions
    for function in functions:
        first = function.body[1]  # the statement after the docstring
        assert function.end_lineno - first.lineno < 40
    for name in ("plain_linear_cross_entropy", "plain_value_and_gradients"):
        assert getattr(seqpar.testing, name) is getattr(reference, name)


def test_a_nan_in_an_ignored_row_does_not_matter():
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    target = torch.tensor([1, -100, 2, 3])
    expected, gradients = plain_value_and_gradients(hidden, weight, target)
    hidden[1] = float("nan")
    assert_same_results(plain_value_and_gradients(hidden, weight, target), (expected, gradients))


def test_where_no_class_gets_a_share_the_reference_without_smoothing_is_torchs_cross_entropy():
    hidden, weight = torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    target = torch.tensor([1, 0, 1, 1])
    # Of two classes one is the target and the other the padding
    found = plain_linear_cross_entropy(hidden, weight, target, ignore_index=0, smoothing_convention="harvard")
    wanted = F.cross_entropy(hidden @ weight.T, target, ignore_index=0, reduction="sum")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_of_many_equal_logits_the_lower_class_comes_first():
    logits = torch.zeros(3, 500)
    logits[0, 450] = logits[1, 399] = 1
    logits[2, 3] = -1
    assert plain_rank(logits, torch.tensor([400, 400, 400])).tolist() == [401, 400, 399]

"""Distillation in chunks: the plain divergence of two log-softmaxes and its gradient, without either's whole logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.testing import assert_same_gradients
from tests.seqpar.linear.linear_loss import linear_cases, plain_logits


def teachers(case, width, bias, dtype=torch.float64):
    random = torch.Generator().manual_seed(case.seed + 1)
    shapes = {"teacher_hidden": (*case.lead, width), "teacher_weight": (case.vocab_size, width)}
    shapes |= {"teacher_bias": (case.vocab_size,)} if bias else {}
    return {name: torch.randn(shape, dtype=dtype, generator=random) for name, shape in shapes.items()}


def divergence(
    hidden, weight, teacher_hidden, teacher_weight, target, bias=None, teacher_bias=None, *, direction, temperature,
    ignore_index, **_,
):  # fmt: skip
    """sum over kept rows of sum_k p_k (log p_k - log q_k), p the teacher's or, in reverse, the student's."""
    student = plain_logits(hidden, weight, bias, None, temperature).log_softmax(-1)
    teacher = plain_logits(teacher_hidden, teacher_weight, teacher_bias, None, temperature).log_softmax(-1)
    p, q = (teacher, student) if direction == "forward" else (student, teacher)
    rows = (p.exp() * (p - q)).sum(-1)
    return (rows * (target.flatten() != ignore_index)).sum()


@given(linear_cases(), st.sampled_from(["forward", "reverse"]), st.integers(1, 5), st.booleans())
def test_both_directions_have_the_plain_value_and_gradient(case, direction, width, bias):
    tensors = {k: t for k, t in case.tensors().items() if k not in ("class_weight", "token_weight")}
    tensors |= teachers(case, width, bias)
    names = ("ignore_index", "temperature", "chunk_tokens")
    options = {"direction": direction} | {name: case.options[name] for name in names}
    assert_same_gradients(
        lambda: seqpar.linear_distillation(**tensors, **options).total * case.upstream,
        lambda: divergence(**tensors, **options) * case.upstream,
        {name: tensors[name] for name in ("hidden", "weight", "bias") if name in tensors},
    )
    loss = seqpar.linear_distillation(**tensors, **options)
    logits = plain_logits(tensors["hidden"], tensors["weight"], tensors.get("bias"), None, case.temperature)
    target = tensors["target"].flatten()
    kept = target != case.padding
    assert (loss.tokens, loss.correct) == (kept.sum(), ((logits.argmax(-1) == target) & kept).sum())
    nll = F.cross_entropy(logits, target, ignore_index=case.padding, reduction="sum")
    torch.testing.assert_close(loss.nll, nll.detach(), rtol=1e-12, atol=1e-13)


def test_forward_is_torchs_kl_div():
    torch.manual_seed(0)
    made = torch.randn(6, 3), torch.randn(9, 3), torch.randn(6, 5), torch.randn(9, 5)
    hidden, weight, teacher_hidden, teacher_weight = (t.double() for t in made)
    student, teacher = (hidden @ weight.t()).log_softmax(-1), (teacher_hidden @ teacher_weight.t()).log_softmax(-1)
    target = torch.zeros(6, dtype=torch.int64)
    for direction, (a, b) in {"forward": (student, teacher), "reverse": (teacher, student)}.items():
        loss = seqpar.linear_distillation(
            hidden, weight, teacher_hidden, teacher_weight, target, direction=direction, chunk_tokens=4
        )
        torch.testing.assert_close(loss.total, F.kl_div(a, b, log_target=True, reduction="sum"), rtol=1e-12, atol=0)


def test_a_teacher_gets_no_gradient_and_a_perfect_student_no_loss():
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 3, requires_grad=True), torch.randn(9, 3, requires_grad=True)
    for direction in ("forward", "reverse"):
        loss = seqpar.linear_distillation(
            hidden, weight, hidden, weight, torch.zeros(6, dtype=torch.int64), direction=direction
        )
        assert abs(loss.total) < 1e-6
        for grad in torch.autograd.grad(loss.total, (hidden, weight)):
            assert grad.abs().max() < 1e-6


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_most_twice_plain_torchs_own_error_in_the_root_mean_square_of_ten(direction, dtype):
    ours, theirs = [], []
    for seed in range(10):
        torch.manual_seed(seed)
        shapes = (128, 16), (300, 16), (128, 24), (300, 24)
        tensors = [(torch.randn(s) / s[1] ** 0.25).to(dtype) for s in shapes]
        leaves = [t.requires_grad_() for t in tensors[:2]]
        options = {"direction": direction, "temperature": 2.0, "ignore_index": -100}
        target = torch.zeros(128, dtype=torch.int64)
        exact = [t.detach().double().requires_grad_() for t in tensors]
        truth_loss = divergence(*exact, target, **options)
        truth = [truth_loss.detach(), *torch.autograd.grad(truth_loss, exact[:2])]
        mine = seqpar.linear_distillation(*tensors, target, **options, chunk_tokens=32).total
        for loss, errors in ((mine, ours), (divergence(*tensors, target, **options), theirs)):
            got = [loss.detach(), *torch.autograd.grad(loss, leaves)]
            errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, truth, strict=True)])
    rms = [torch.tensor(e).square().mean(0).sqrt() for e in (ours, theirs)]
    assert (rms[0] <= 2 * rms[1].clamp(min=torch.finfo(torch.float32).eps)).all(), rms


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"direction": "both"}, ValueError, "direction is 'both'; it must be 'forward' or 'reverse'"),
        ({"teacher_weight": torch.randn(8, 5)}, ValueError, "weight has 9 classes on cpu and teacher_weight 8 on cpu"),
        ({"teacher_hidden": torch.randn(6, 4)}, ValueError, r"teacher_hidden has shape \(6, 4\) and teacher_weight"),
        ({"teacher_hidden": torch.randn(5, 5)}, ValueError, r"teacher_hidden has shape .* target \(6,\)"),
        ({"temperature": -1.0}, ValueError, "temperature is -1.0"),
        ({"target": torch.full((6,), 9)}, IndexError, "target 9 at position"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(change, error, message):
    given = {
        "hidden": torch.randn(6, 3),
        "weight": torch.randn(9, 3),
        "teacher_hidden": torch.randn(6, 5),
        "teacher_weight": torch.randn(9, 5),
        "target": torch.zeros(6, dtype=torch.int64),
        "direction": "forward",
    }
    with pytest.raises(error, match=message):
        seqpar.linear_distillation(**(given | change))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_teacher_of_a_wider_dtype_is_not_rounded_to_the_students(direction):
    """The student knows nothing, so that what is left is the teacher's own numbers."""
    random = torch.Generator().manual_seed(0)
    teacher_hidden, teacher_weight = (torch.randn(s, generator=random) for s in ((6, 5), (9, 5)))
    student = {"hidden": torch.zeros(6, 3).bfloat16(), "weight": torch.zeros(9, 3).bfloat16()}
    teacher = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    rest = {"target": torch.zeros(6, dtype=torch.int64), "direction": direction}
    found = seqpar.linear_distillation(**student, **teacher, **rest).total
    options = {"direction": direction, "temperature": 1.0, "ignore_index": -100}

    def plain(**cast):
        wide = {name: t.double() for name, t in {**student, **cast}.items()}
        return divergence(**wide, target=rest["target"], **options)

    exact, rounded = plain(**teacher), plain(**{name: t.bfloat16() for name, t in teacher.items()})
    assert abs(found - exact) <= 1e-6 * exact
    assert abs(rounded - exact) > 1e-4 * exact

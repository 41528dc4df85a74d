"""Distillation in chunks: the plain divergence of two distributions and its gradient, without either's whole logits."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch.overrides import TorchFunctionMode

import seqpar
from seqpar.core.device_facts import why_no_kernel
from seqpar.kernels.row_kernel import align
from seqpar.testing import assert_same_gradients
from tests.seqpar.distributed.vocab_cases import PLAIN
from tests.seqpar.linear.distillation_cases import (
    DIVERGENCES,
    KINDS,
    Distillation,
    distillations,
    on_few_classes,
    plain_rows,
)
from tests.seqpar.linear.linear_loss import plain_logits

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")

BETA = {"jsd": 0.3}


@given(distillations())
def test_any_distillation_has_the_plain_value_and_gradient(drawn):
    case, tensors, teacher = drawn.case, drawn.student(), drawn.teacher()
    assert_same_gradients(
        lambda: seqpar.linear_distillation(**tensors, teacher=teacher, **drawn.options).total * case.upstream,
        lambda: drawn.plain(tensors) * case.upstream,
        {name: t for name, t in tensors.items() if name != "target"},
    )
    loss = seqpar.linear_distillation(**tensors, teacher=teacher, **drawn.options)
    logits = plain_logits(tensors["hidden"], tensors["weight"], tensors.get("bias"), None, case.temperature)
    target = tensors["target"].flatten()
    kept = target != case.padding
    assert (loss.tokens, loss.correct) == (kept.sum(), ((logits.argmax(-1) == target) & kept).sum())
    nll = F.cross_entropy(logits, target, ignore_index=case.padding, reduction="sum")
    torch.testing.assert_close(loss.nll, nll.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence_from_every_teacher_has_the_plain_value_and_gradient(divergence, kind):
    """Whatever hypothesis happens to draw: rows with fewer classes, ignored rows, several chunks."""
    case = replace(PLAIN, padding_share=0.3, token_weighted=True, temperature=2.0)
    one = Distillation(case, divergence, BETA.get(divergence), kind, 3, 4, True)
    tensors = one.student()
    assert_same_gradients(
        lambda: seqpar.linear_distillation(**tensors, teacher=one.teacher(), **one.options).total,
        lambda: one.plain(tensors),
        {name: t for name, t in tensors.items() if name != "target"},
    )


def given_tensors(rows=6, classes=9, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    shapes = (rows, 3), (classes, 3), (rows, 5), (classes, 5)
    return [torch.randn(shape, dtype=torch.float64, generator=random).to(dtype) for shape in shapes]


ZEROS = torch.zeros(6, dtype=torch.int64)


def test_the_kullback_leibler_divergences_are_torchs_kl_div():
    hidden, weight, teacher_hidden, teacher_weight = given_tensors()
    student, teacher = (hidden @ weight.t()).log_softmax(-1), (teacher_hidden @ teacher_weight.t()).log_softmax(-1)
    from_whom = seqpar.TeacherHidden(teacher_hidden, teacher_weight)
    for divergence, (a, b) in {"forward_kl": (student, teacher), "reverse_kl": (teacher, student)}.items():
        loss = seqpar.linear_distillation(hidden, weight, from_whom, ZEROS, divergence=divergence, chunk_tokens=4)
        torch.testing.assert_close(loss.total, F.kl_div(a, b, log_target=True, reduction="sum"), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("beta", "limit", "factor"), [(1e-9, "forward_kl", 1e-9), (1 - 1e-9, "reverse_kl", 1e-9)])
def test_jsd_behaves_as_forward_kl_near_0_and_as_reverse_kl_near_1(beta, limit, factor):
    hidden, weight, *others = given_tensors()
    hidden.requires_grad_()
    teacher = seqpar.TeacherHidden(*others)
    gradients = [
        torch.autograd.grad(seqpar.linear_distillation(hidden, weight, teacher, ZEROS, **options).total, hidden)[0]
        for options in ({"divergence": "jsd", "beta": beta}, {"divergence": limit})
    ]
    torch.testing.assert_close(gradients[0] / factor, gradients[1], rtol=1e-4, atol=1e-4)


def test_distributions_that_share_no_class_are_log_2_and_1_apart():
    """The largest values of the Jensen-Shannon divergence and of the total variation."""
    student = {"hidden": torch.ones(2, 1).double(), "weight": torch.tensor([[0.0], [-torch.inf]]).double()}
    teacher = seqpar.TeacherLogProbs(lambda rows: torch.tensor([[-torch.inf, 0.0]]).double().expand(2, 2)[rows])
    rest = {"teacher": teacher, "target": torch.zeros(2, dtype=torch.int64)}
    jsd = seqpar.linear_distillation(**student, **rest, divergence="jsd", beta=0.5)
    assert float(jsd.total) == pytest.approx(2 * math.log(2), rel=1e-14)
    assert float(seqpar.linear_distillation(**student, **rest, divergence="total_variation").total) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_teacher_gets_no_gradient_and_a_perfect_student_no_loss(divergence, kind):
    hidden, weight, *_ = (t.requires_grad_() for t in given_tensors())
    log_q = (hidden @ weight.t()).log_softmax(-1)
    top = log_q.topk(4)
    teacher = {
        "hidden": seqpar.TeacherHidden(hidden, weight),
        "log_probs": seqpar.TeacherLogProbs(lambda rows: log_q[rows]),
    }.get(kind) or seqpar.TeacherTopK(top.indices, top.values, kind)
    loss = seqpar.linear_distillation(
        hidden, weight, teacher, ZEROS, divergence=divergence, beta=BETA.get(divergence), chunk_tokens=4
    )
    assert abs(loss.total) < 1e-14
    if divergence != "total_variation":  # which has a kink there
        for grad in torch.autograd.grad(loss.total, (hidden, weight)):
            assert grad.abs().max() < 1e-14


def masked_pair(student_bias, teacher_bias):
    """Six classes; a bias of -inf masks some of them out."""
    hidden, weight, teacher_hidden, teacher_weight = given_tensors(classes=6)
    biases = [torch.tensor(b).double() for b in (student_bias, teacher_bias)]
    hidden.requires_grad_()
    return hidden, weight, biases[0], seqpar.TeacherHidden(teacher_hidden, teacher_weight, biases[1])


INF = math.inf


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_classes_that_both_mask_out_count_for_nothing(divergence):
    bias = [0.0, -INF, 0.5, 0.0, -INF, -0.5]
    hidden, weight, student_bias, teacher = masked_pair(bias, bias)
    options = {"divergence": divergence, "beta": BETA.get(divergence)}
    found = seqpar.linear_distillation(hidden, weight, teacher, ZEROS, bias=student_bias, **options)
    seen = torch.tensor([0, 2, 3, 5])
    log_p = F.linear(hidden, weight, student_bias)[:, seen].log_softmax(-1)
    log_q = F.linear(teacher.hidden, teacher.weight, teacher.bias)[:, seen].log_softmax(-1)
    expected = plain_rows(log_p, log_q, divergence, BETA.get(divergence)).sum()
    torch.testing.assert_close(found.total, expected, rtol=1e-12, atol=0)
    (grad,), (plain,) = (torch.autograd.grad(loss, hidden) for loss in (found.total, expected))
    torch.testing.assert_close(grad, plain, rtol=1e-12, atol=1e-13)


NONE, SECOND = [0.0] * 6, [0.0, -INF, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("student", "teacher", "infinite"), [(SECOND, NONE, "forward_kl"), (NONE, SECOND, "reverse_kl")]
)
def test_a_class_that_only_one_can_predict_is_infinite_where_kl_div_is_and_finite_elsewhere(student, teacher, infinite):
    hidden, weight, bias, from_whom = masked_pair(student, teacher)
    for divergence in DIVERGENCES:
        options = {"divergence": divergence, "beta": BETA.get(divergence)}
        total = seqpar.linear_distillation(hidden, weight, from_whom, ZEROS, bias=bias, **options).total
        assert bool(total == INF) == (divergence == infinite)
        if divergence != infinite:
            assert total.isfinite()
            assert torch.autograd.grad(total, hidden)[0].isfinite().all()
    log_p = F.linear(hidden, weight, bias).log_softmax(-1)
    log_q = F.linear(from_whom.hidden, from_whom.weight, from_whom.bias).log_softmax(-1)
    both = (log_p, log_q) if infinite == "forward_kl" else (log_q, log_p)
    assert F.kl_div(*both, log_target=True, reduction="sum") == INF


def test_a_rest_far_below_every_given_class_is_exact():
    """The others' logits are 800 below: 1 - sum_j p_j would be 0, and its logarithm -inf."""
    weight = torch.tensor([[0.0], [1.0], [-800.0], [-801.0]]).double().requires_grad_()
    teacher = seqpar.TeacherTopK(torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.5]]).double().log(), "one_class")
    one = {"hidden": torch.ones(1, 1).double(), "teacher": teacher, "target": torch.zeros(1, dtype=torch.int64)}
    loss = seqpar.linear_distillation(**one, weight=weight, divergence="forward_kl")
    lse = math.log1p(math.e)
    log_p = [-lse, 1 - lse, -800 + math.log1p(math.exp(-1)) - lse]
    q = [0.25, 0.5, 0.25]
    expected = sum(share * (math.log(share) - other) for share, other in zip(q, log_p, strict=True))
    assert float(loss.total.detach()) == pytest.approx(expected, rel=1e-13)
    (grad,) = torch.autograd.grad(loss.total, weight)
    within = 1 / (1 + math.exp(-1))  # of the rest, the third class has e times the fourth's
    wanted = [math.exp(-lse) - 0.25, math.exp(1 - lse) - 0.5, -0.25 * within, -0.25 * (1 - within)]
    torch.testing.assert_close(grad.flatten(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_without_other_classes_there_is_no_rest(divergence):
    """Rounding leaves the teacher a rest that the student cannot have: nothing is infinite."""
    hidden, weight, *others = given_tensors()
    hidden.requires_grad_()
    log_q = (others[0] @ others[1].t()).log_softmax(-1) - 1e-16
    teacher = seqpar.TeacherTopK(torch.arange(9).expand(6, 9), log_q, "one_class")
    options = {"divergence": divergence, "beta": BETA.get(divergence)}
    found = seqpar.linear_distillation(hidden, weight, teacher, ZEROS, **options).total
    expected = seqpar.linear_distillation(hidden, weight, seqpar.TeacherHidden(*others), ZEROS, **options).total
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    (grad,), (plain,) = (torch.autograd.grad(loss, hidden) for loss in (found, expected))
    torch.testing.assert_close(grad, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("masked", [0, 40])
@pytest.mark.parametrize("vocab_size", [3, 50, 200])
def test_in_float32_rounding_is_no_rest(vocab_size, masked):
    """Of 2,000 rows some sum to a little less than 1, and the student has nothing outside the given classes, either."""
    masked = min(masked, vocab_size - 2)
    torch.manual_seed(vocab_size)
    hidden, theirs, weight = torch.randn(2000, 8), torch.randn(2000, 8), torch.randn(vocab_size, 8)
    bias = torch.zeros(vocab_size)
    bias[:masked] = -INF
    log_q = (theirs @ weight.t() + bias).log_softmax(-1).topk(vocab_size - masked)
    target = torch.full((2000,), vocab_size - 1)
    options = {"bias": bias, "divergence": "forward_kl"}
    teacher = seqpar.TeacherTopK(log_q.indices, log_q.values, "one_class")
    found = seqpar.linear_distillation(hidden, weight, teacher, target, **options).total
    log_p = (hidden.double() @ weight.t().double() + bias).log_softmax(-1)[:, masked:]
    exact = (theirs.double() @ weight.t().double() + bias).log_softmax(-1)[:, masked:]
    expected = F.kl_div(log_p, exact, log_target=True, reduction="sum")
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_a_function_is_asked_for_the_rows_that_count_once_a_chunk_and_keeps_what_it_returned():
    hidden, weight, *others = given_tensors()
    log_q = (others[0] @ others[1].t()).log_softmax(-1)
    before, asked = log_q.clone(), []

    def function(rows):
        asked.append(torch.arange(6)[rows].tolist())
        assert not torch.is_grad_enabled()
        return log_q[rows]

    target = torch.tensor([0, -100, 3, 4, -100, 1])
    for rows in (target, ZEROS):
        weight.requires_grad_()
        teacher = seqpar.TeacherLogProbs(function)
        seqpar.linear_distillation(
            hidden, weight, teacher, rows, divergence="reverse_kl", chunk_tokens=2
        ).total.backward()
    assert asked == [[0, 2], [3, 5], [0, 1], [2, 3], [4, 5]]
    assert torch.equal(log_q, before)


def test_top_k_tensors_are_not_overwritten():
    hidden, weight, *others = given_tensors()
    top = (others[0] @ others[1].t()).log_softmax(-1).topk(3)
    top.indices[2, 1] = -1
    before = top.values.clone(), top.indices.clone()
    for divergence in DIVERGENCES:
        for rest in ("renormalize", "one_class"):
            teacher = seqpar.TeacherTopK(top.indices, top.values, rest)
            weight.requires_grad_()
            seqpar.linear_distillation(
                hidden, weight, teacher, ZEROS, divergence=divergence, beta=BETA.get(divergence)
            ).total.backward()
    assert torch.equal(top.values, before[0])
    assert torch.equal(top.indices, before[1])


class LargestTensor(TorchFunctionMode):
    """Note the most numbers that a tensor made meanwhile has."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else [result]
        self.numbers = max([self.numbers, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
        return result


@pytest.mark.parametrize("kind", [*KINDS, "soft target"])
def test_no_tensor_of_all_tokens_times_the_vocabulary_is_made(kind):
    rows, classes, chunk = 60, 200, 10
    hidden, weight, teacher_hidden, teacher_weight = given_tensors(rows, classes, torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    top = (teacher_hidden @ teacher_weight.t()).log_softmax(-1).topk(7)
    target = torch.zeros(rows, dtype=torch.int64)
    teacher = {
        "hidden": seqpar.TeacherHidden(teacher_hidden, teacher_weight),
        "log_probs": seqpar.TeacherLogProbs(lambda r: (teacher_hidden[r] @ teacher_weight.t()).log_softmax(-1)),
    }.get(kind) or seqpar.TeacherTopK(top.indices, top.values, kind)
    with LargestTensor() as seen:
        if kind == "soft target":
            soft = seqpar.SparseTarget(top.indices, top.values.softmax(-1))
            seqpar.linear_cross_entropy(hidden, weight, target, soft_target=soft, chunk_tokens=chunk).total.backward()
        for divergence in DIVERGENCES if kind != "soft target" else ():
            options = {"divergence": divergence, "beta": BETA.get(divergence), "chunk_tokens": chunk}
            seqpar.linear_distillation(hidden, weight, teacher, target, **options).total.backward()
    # A buffer has one row more than a chunk; for the kernels its rows begin at multiples of 16 numbers
    width = classes if why_no_kernel(hidden.device.type) else align(classes)
    assert (chunk - 1) * classes < seen.numbers <= (chunk + 1) * width


@pytest.mark.parametrize(
    ("divergence", "kind"),
    [
        *((d, "hidden") for d in DIVERGENCES),
        ("forward_kl", "renormalize"),
        ("reverse_kl", "one_class"),
        ("jsd", "one_class"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_most_twice_plain_torchs_own_error_in_the_root_mean_square_of_ten(divergence, dtype, kind):
    ours, theirs = [], []
    target, ids = torch.zeros(128, dtype=torch.int64), torch.arange(0, 300, 10).expand(128, 30)
    beta = BETA.get(divergence)
    for seed in range(10):
        torch.manual_seed(seed)
        shapes = (128, 16), (300, 16), (128, 24), (300, 24)
        tensors = [(torch.randn(s) / s[1] ** 0.25).to(dtype) for s in shapes]
        leaves = [t.requires_grad_() for t in tensors[:2]]
        log_q = (tensors[2] @ tensors[3].t() / 2).log_softmax(-1).gather(1, ids)
        exact = [t.detach().double().requires_grad_() for t in tensors]

        def plain(hidden, weight, *others, log_q=log_q):
            log_p, log_q = (hidden @ weight.t() / 2).log_softmax(-1), log_q.to(hidden.dtype)
            if kind == "hidden":
                log_q = (others[0] @ others[1].t() / 2).log_softmax(-1)
            else:
                whole = torch.full_like(log_p, -INF).scatter(1, ids, log_q)
                log_p, log_q = on_few_classes(log_p, whole, ids, kind)
            return plain_rows(log_p, log_q, divergence, beta).sum()

        truth_loss = plain(*exact)
        truth = [truth_loss.detach(), *torch.autograd.grad(truth_loss, exact[:2])]
        teacher = seqpar.TeacherHidden(*tensors[2:]) if kind == "hidden" else seqpar.TeacherTopK(ids, log_q, kind)
        mine = seqpar.linear_distillation(
            *tensors[:2], teacher, target, divergence=divergence, beta=beta, temperature=2.0, chunk_tokens=32
        ).total
        for loss, errors in ((mine, ours), (plain(*tensors), theirs)):
            got = [loss.detach(), *torch.autograd.grad(loss, leaves)]
            errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, truth, strict=True)])
    rms = [torch.tensor(e).square().mean(0).sqrt() for e in (ours, theirs)]
    assert (rms[0] <= 2 * rms[1].clamp(min=torch.finfo(torch.float32).eps)).all(), rms


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_teacher_of_a_wider_dtype_is_not_rounded_to_the_students(divergence):
    """The student knows nothing, so that what is left is the teacher's own numbers."""
    random = torch.Generator().manual_seed(0)
    teacher = [torch.randn(s, generator=random) for s in ((6, 5), (9, 5))]
    student = {"hidden": torch.zeros(6, 3).bfloat16(), "weight": torch.zeros(9, 3).bfloat16()}
    beta = BETA.get(divergence)
    found = seqpar.linear_distillation(
        **student, teacher=seqpar.TeacherHidden(*teacher), target=ZEROS, divergence=divergence, beta=beta
    ).total

    def plain(hidden, weight):
        log_q = (hidden.double() @ weight.double().t()).log_softmax(-1)
        return plain_rows(torch.zeros(6, 9).double().log_softmax(-1), log_q, divergence, beta).sum()

    exact, rounded = plain(*teacher), plain(*(t.bfloat16() for t in teacher))
    assert abs(found - exact) <= 1e-6 * exact
    assert abs(rounded - exact) > 1e-4 * exact

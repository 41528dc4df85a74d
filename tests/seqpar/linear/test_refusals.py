"""Every bad argument of the losses over a projection is answered in one clear line."""

import contextlib
import gc
import weakref

import pytest
import torch

import seqpar
from tests.seqpar.linear.linear_loss import on_another_device, small

BAD = {
    "float target": ({"target": torch.zeros(6)}, TypeError, "target has dtype torch.float32"),
    "bool target": ({"target": torch.zeros(6, dtype=torch.bool)}, TypeError, "target has dtype torch.bool"),
    "target's shape": ({"target": torch.zeros(5, dtype=torch.int64)}, ValueError, r"\(6, 4\) and target \(5,\)"),
    "weight's width": ({"weight": torch.zeros(9, 5)}, ValueError, r"\(6, 4\) and weight \(9, 5\)"),
    "weight's dims": ({"weight": torch.zeros(4)}, ValueError, r"\(6, 4\) and weight \(4,\)"),
    "bias's shape": ({"bias": torch.zeros(8)}, ValueError, r"bias has shape \(8,\) and weight \(9, 4\)"),
    "integer hidden": ({"hidden": torch.zeros(6, 4, dtype=torch.int64)}, TypeError, "hidden has dtype torch.int64"),
    "weight's dtype": ({"weight": torch.zeros(9, 4).bfloat16()}, TypeError, "float32 and weight torch.bfloat16"),
    "bias's dtype": ({"bias": torch.zeros(9).double()}, TypeError, "float32 and bias torch.float64"),
    "weight's device": ({"weight": on_another_device(9, 4)}, ValueError, "hidden is on cpu and weight on cuda:0"),
    "class weights": ({"class_weight": torch.ones(8)}, ValueError, r"class_weight has shape \(8,\); it must be \(9,\)"),
    "smoothing of 1": ({"label_smoothing": 1.0}, ValueError, r"label_smoothing is 1\.0"),
    "negative smoothing": ({"label_smoothing": -0.1}, ValueError, r"label_smoothing is -0\.1"),
    "convention": ({"smoothing_convention": "other"}, ValueError, "smoothing_convention is 'other'"),
    "harvard": ({"smoothing_convention": "harvard"}, ValueError, "ignore_index is -100; the 'harvard' convention"),
    "softcap 0": ({"softcap": 0.0}, ValueError, r"softcap is 0\.0"),
    "softcap inf": ({"softcap": float("inf")}, ValueError, "softcap is inf"),
    "z_loss": ({"z_loss": -1e-4}, ValueError, "z_loss is -0.0001"),
    "z_loss nan": ({"z_loss": float("nan")}, ValueError, "z_loss is nan"),
    "target too high": (
        {"target": torch.tensor([0, 0, 0, 9, 0, 0])},
        IndexError,
        r"target 9 at position \(3,\).*\[0, 9\)",
    ),
    "target negative": ({"target": torch.tensor([0, -1, 0, 9, 0, 0])}, IndexError, r"target -1 at position \(1,\)"),
    "a shard too long": ({"vocab": seqpar.VocabShard(None, 3, 9)}, ValueError, r"9 rows from class 3 on.*\[0, 9\)"),
    "a shard alone": ({"vocab": seqpar.VocabShard(None, 0, 12)}, RuntimeError, r"\[0, 9\) on rank 0.*\[0, 12\)"),
}


@pytest.mark.unswitched
@pytest.mark.parametrize("case", BAD)
def test_a_bad_input_is_one_clear_line(case):
    change, error, message = BAD[case]
    inputs = {"hidden": torch.zeros(6, 4), "weight": torch.zeros(9, 4), "target": torch.zeros(6, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        seqpar.linear_cross_entropy(**(inputs | change))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "5"])
def test_a_chunk_size_that_is_no_positive_int_is_refused(size):
    hidden, weight, target = small()
    with pytest.raises(ValueError, match=f"chunk_tokens is {size!r}; it must be a whole number of at least 1"):
        seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=size)


def good(**change):
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(6, 3),
        "weight": torch.randn(9, 3),
        "teacher": seqpar.TeacherHidden(torch.randn(6, 5), torch.randn(9, 5)),
        "target": torch.zeros(6, dtype=torch.int64),
        "divergence": "forward_kl",
    } | change


def head(hidden=(6, 5), weight=(9, 5)):
    return seqpar.TeacherHidden(torch.randn(hidden), torch.randn(weight))


def uniform(*shape):
    return torch.full(shape, 1 / shape[-1]).log()


def top(ids, log_probs=None, rest="one_class"):
    ids = torch.tensor(ids).expand(6, -1)
    return seqpar.TeacherTopK(ids, uniform(6, 9)[:, : ids.size(1)] if log_probs is None else log_probs, rest)


def function_of(result):
    return seqpar.TeacherLogProbs(lambda rows: result)


@pytest.mark.unswitched
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"divergence": "both"}, ValueError, "divergence is 'both'; it must be 'forward_kl', 'reverse_kl'"),
        ({"beta": 0.5}, ValueError, "beta is 0.5 and divergence 'forward_kl'; beta is for 'jsd', leave it out"),
        ({"divergence": "jsd"}, TypeError, "beta is None; it must be a finite number above 0 and below 1"),
        ({"divergence": "jsd", "beta": 1.0}, ValueError, "beta is 1.0"),
        ({"teacher": torch.randn(6, 9)}, TypeError, "teacher is a Tensor; it must be a seqpar.TeacherHidden"),
        ({"teacher": head(weight=(8, 5))}, ValueError, r"weight has shape \(9, 3\) and teacher.weight \(8, 5\)"),
        ({"teacher": head(hidden=(6, 4))}, ValueError, r"teacher.hidden has shape \(6, 4\) and teacher.weight"),
        (
            {"teacher": seqpar.TeacherHidden(torch.randn(6, 5), torch.randn(9, 5).bfloat16())}, TypeError,
            "teacher.hidden has dtype torch.float32 and teacher.weight torch.bfloat16; cast one, or use autocast",
        ),
        ({"teacher": head(hidden=(5, 5))}, ValueError, r"teacher.hidden has shape .* target \(6,\)"),
        ({"temperature": -1.0}, ValueError, "temperature is -1.0"),
        ({"target": torch.full((6,), 9)}, IndexError, "target 9 at position"),
        ({"teacher": seqpar.TeacherLogProbs(uniform(6, 9))}, TypeError, "teacher.function is a Tensor; it must be a f"),
        ({"teacher": function_of(None)}, TypeError, "what teacher.function returned is None"),
        ({"teacher": function_of(torch.ones(6, 9).long())}, TypeError, "function returned has dtype torch.int64"),
        ({"teacher": function_of(uniform(6, 8))}, ValueError, r"returned has shape \(6, 8\); it must be \(6, 9\)"),
        ({"teacher": function_of(torch.zeros(6, 9))}, ValueError, "sum to 9 as probabilities in row 0; they must"),
        ({"teacher": top([0, 3, 0])}, ValueError, r"teacher.ids repeats class 0 at position \(0,\)"),
        ({"teacher": top([0, 9])}, IndexError, r"teacher.ids has 9 at position \(0, 1\), outside the vocabulary"),
        ({"teacher": top([-2])}, IndexError, "teacher.ids has -2"),
        ({"teacher": top([-1, -1])}, ValueError, r"teacher.log_probs as probabilities sum to 0 at position \(0,\)"),
        ({"teacher": top([0, 1], torch.zeros(6, 2))}, ValueError, "log_probs as probabilities sum to 2 at"),
        ({"teacher": top([0, 1], uniform(6, 3))}, ValueError, r"teacher.log_probs has shape \(6, 3\) and teacher.ids"),
        ({"teacher": top([0], rest="drop")}, ValueError, "teacher.rest is 'drop'; it must be 'renormalize' or 'one_c"),
        (
            {"teacher": seqpar.TeacherTopK(torch.zeros(6).long(), uniform(6, 1), "one_class")}, ValueError,
            r"teacher.ids has shape \(6,\) and target \(6,\)",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(change, error, message):
    with pytest.raises(error, match=message) as caught:
        seqpar.linear_distillation(**good(**change))
    assert "\n" not in str(caught.value)


def test_ids_and_log_probabilities_of_ignored_rows_are_not_looked_at():
    teacher = top([0, 3])
    expected = seqpar.linear_distillation(**good(teacher=teacher, target=torch.tensor([0, 0, 0, 0, 0, -100]))).total
    ids, log_probs = teacher.ids.clone(), teacher.log_probs.clone()
    ids[5], log_probs[5] = 99, torch.nan
    odd = seqpar.TeacherTopK(ids, log_probs, "one_class")
    found = seqpar.linear_distillation(**good(teacher=odd, target=torch.tensor([0, 0, 0, 0, 0, -100]))).total
    assert torch.equal(found, expected)


def fails(rows):
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"teacher": seqpar.TeacherLogProbs(fails)}, torch.OutOfMemoryError),
        ({"target": torch.full((6,), 9)}, IndexError),
    ],
)
def test_the_inputs_are_freed_with_the_error(change, error):
    """A caller that tries again with fewer rows needs their memory, before Python looks for cycles."""
    given = good(**change)
    hidden = weakref.ref(given["hidden"])
    gc.disable()
    try:
        with contextlib.suppress(error):
            seqpar.linear_distillation(**given)
        given.clear()
        assert hidden() is None
    finally:
        gc.enable()

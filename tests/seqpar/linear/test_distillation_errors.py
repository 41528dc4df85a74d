"""Arguments of distillation that cannot be right, each with the one line that says so."""

import contextlib
import gc
import weakref

import pytest
import torch

import seqpar


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

"""Every bad argument of the losses over a projection is answered in one clear line."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

import seqpar
from seqpar.linear.lora import lora_scores
from tests.approved import assert_no_other_line, assert_refused
from tests.seqpar.linear.linear_loss import on_another_device


def loss(**change):
    given = {"hidden": torch.zeros(6, 4), "weight": torch.zeros(9, 4), "target": torch.zeros(6, dtype=torch.int64)}
    return seqpar.linear_cross_entropy(**given | change)


def soft(ids, probs, **change):
    target = seqpar.SparseTarget(torch.tensor(ids).expand(6, -1), torch.tensor(probs).expand(6, -1))
    return loss(**{"soft_target": target} | change)


def first_class(rows=6, dtype=torch.int64):
    return seqpar.SparseTarget(torch.zeros(rows, 1, dtype=dtype), torch.ones(rows, 1))


def scores(**change):
    given = {"hidden": torch.zeros(5, 3), "weight": torch.zeros(7, 3), "target": torch.zeros(5, dtype=torch.int64)}
    return seqpar.token_scores(**given | change)


def lora(**change):
    given = {"hidden": torch.zeros(6, 4), "base_weight": torch.zeros(9, 4), "target": torch.arange(6)}
    return lora_scores(**given | {"lora_A": torch.zeros(2, 4), "lora_B": torch.zeros(9, 2), "scaling": 1.0} | change)


def distillation_inputs(**change):
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(6, 3),
        "weight": torch.randn(9, 3),
        "teacher": seqpar.TeacherHidden(torch.randn(6, 5), torch.randn(9, 5)),
        "target": torch.zeros(6, dtype=torch.int64),
        "divergence": "forward_kl",
    } | change


def distillation(**change):
    return seqpar.linear_distillation(**distillation_inputs(**change))


def head(hidden=(6, 5), weight=(9, 5), dtype=torch.float32):
    return seqpar.TeacherHidden(torch.randn(hidden), torch.randn(weight, dtype=dtype))


def uniform(*shape):
    return torch.full(shape, 1 / shape[-1]).log()


def top(ids, log_probs=None, rest="one_class"):
    ids = torch.tensor(ids).expand(6, -1)
    return seqpar.TeacherTopK(ids, uniform(6, 9)[:, : ids.size(1)] if log_probs is None else log_probs, rest)


def function_of(result):
    return seqpar.TeacherLogProbs(lambda rows: result)


FLAT = seqpar.TeacherTopK(torch.zeros(6).long(), uniform(6, 1), "one_class")
"""Without a dimension for the classes."""

CASES = {
    "float target": lambda: loss(target=torch.zeros(6)),
    "bool target": lambda: loss(target=torch.zeros(6, dtype=torch.bool)),
    "target's shape": lambda: loss(target=torch.zeros(5, dtype=torch.int64)),
    "weight's width": lambda: loss(weight=torch.zeros(9, 5)),
    "weight's dims": lambda: loss(weight=torch.zeros(4)),
    "bias's shape": lambda: loss(bias=torch.zeros(8)),
    "integer hidden": lambda: loss(hidden=torch.zeros(6, 4, dtype=torch.int64)),
    "weight's dtype": lambda: loss(weight=torch.zeros(9, 4).bfloat16()),
    "bias's dtype": lambda: loss(bias=torch.zeros(9).double()),
    "weight's device": lambda: loss(weight=on_another_device(9, 4)),
    "class weights": lambda: loss(class_weight=torch.ones(8)),
    "smoothing of 1": lambda: loss(label_smoothing=1.0),
    "negative smoothing": lambda: loss(label_smoothing=-0.1),
    "convention": lambda: loss(smoothing_convention="other"),
    "harvard": lambda: loss(smoothing_convention="harvard"),
    "softcap 0": lambda: loss(softcap=0.0),
    "softcap inf": lambda: loss(softcap=float("inf")),
    "z_loss": lambda: loss(z_loss=-1e-4),
    "z_loss nan": lambda: loss(z_loss=float("nan")),
    "target too high": lambda: loss(target=torch.tensor([0, 0, 0, 9, 0, 0])),
    "target negative": lambda: loss(target=torch.tensor([0, -1, 0, 9, 0, 0])),
    "a shard too long": lambda: loss(vocab=seqpar.VocabShard(None, 3, 9)),
    "a shard alone": lambda: loss(vocab=seqpar.VocabShard(None, 0, 12)),
    "chunk_tokens 0": lambda: loss(chunk_tokens=0),
    "chunk_tokens -1": lambda: loss(chunk_tokens=-1),
    "chunk_tokens 2.0": lambda: loss(chunk_tokens=2.0),
    "chunk_tokens True": lambda: loss(chunk_tokens=True),
    "chunk_tokens 5": lambda: loss(chunk_tokens="5"),
    "divergence": lambda: distillation(divergence="both"),
    "beta without jsd": lambda: distillation(beta=0.5),
    "jsd without beta": lambda: distillation(divergence="jsd"),
    "jsd with beta 1": lambda: distillation(divergence="jsd", beta=1.0),
    "a tensor as teacher": lambda: distillation(teacher=torch.randn(6, 9)),
    "the teacher's classes": lambda: distillation(teacher=head(weight=(8, 5))),
    "the teacher's width": lambda: distillation(teacher=head(hidden=(6, 4))),
    "the teacher's dtypes": lambda: distillation(
        teacher=seqpar.TeacherHidden(torch.randn(6, 5), torch.randn(9, 5).bfloat16())
    ),
    "the teacher's rows": lambda: distillation(teacher=head(hidden=(5, 5))),
    "the teacher's temperature": lambda: distillation(temperature=-1.0),
    "the teacher's target": lambda: distillation(target=torch.full((6,), 9)),
    "no function": lambda: distillation(teacher=seqpar.TeacherLogProbs(uniform(6, 9))),
    "nothing from the function": lambda: distillation(teacher=function_of(None)),
    "integers from the function": lambda: distillation(teacher=function_of(torch.ones(6, 9).long())),
    "too few classes from the function": lambda: distillation(teacher=function_of(uniform(6, 8))),
    "no distribution from the function": lambda: distillation(teacher=function_of(torch.zeros(6, 9))),
    "a class twice in the teacher's ids": lambda: distillation(teacher=top([0, 3, 0])),
    "the teacher's ids too high": lambda: distillation(teacher=top([0, 9])),
    "the teacher's ids negative": lambda: distillation(teacher=top([-2])),
    "a row of gaps": lambda: distillation(teacher=top([-1, -1])),
    "too much probability": lambda: distillation(teacher=top([0, 1], torch.zeros(6, 2))),
    "log_probs' shape": lambda: distillation(teacher=top([0, 1], uniform(6, 3))),
    "rest": lambda: distillation(teacher=top([0], rest="drop")),
    "the teacher's ids' shape": lambda: distillation(
        teacher=seqpar.TeacherTopK(torch.zeros(6).long(), uniform(6, 1), "one_class")
    ),
    "soft probabilities below 1": lambda: soft([0, 1], [0.5, 0.4]),
    "a negative soft probability": lambda: soft([0, 1], [1.5, -0.5]),
    "a soft probability that is nan": lambda: soft([0, 1], [float("nan"), 1.0]),
    "a class twice in soft ids": lambda: soft([2, 2], [0.5, 0.5]),
    "a soft id too high": lambda: soft([0, 9], [0.5, 0.5]),
    "a soft row of gaps": lambda: soft([-1, -1], [0.5, 0.5]),
    "a tensor as soft target": lambda: loss(soft_target=torch.ones(6, 9)),
    "soft and smoothed": lambda: soft([0], [1.0], label_smoothing=0.1),
    "soft and class weights": lambda: soft([0], [1.0], class_weight=torch.ones(9)),
    "soft ids' shape": lambda: soft(
        [0], [1.0], soft_target=seqpar.SparseTarget(torch.zeros(5, 1).long(), torch.ones(5, 1))
    ),
    "soft ids' dtype": lambda: loss(soft_target=first_class(dtype=torch.float32)),
    "memory": lambda: loss(memory="little"),
    "weight_grad without least": lambda: loss(weight_grad=torch.zeros(9, 4)),
    "weight_grad's shape": lambda: loss(memory="least", weight_grad=torch.zeros(9, 3)),
    "weight_grad's dtype": lambda: loss(memory="least", weight_grad=torch.zeros(9, 4).half()),
    "a leaf as weight_grad": lambda: loss(memory="least", weight_grad=nn.Parameter(torch.zeros(9, 4))),
    "a number as weight_grad": lambda: loss(memory="least", weight_grad=1),
    "soft targets in least memory": lambda: loss(
        memory="least", soft_target=seqpar.SparseTarget(torch.zeros(6, 1).long(), torch.ones(6, 1))
    ),
    "temperatures' shape": lambda: scores(temperature=torch.ones(4)),
    "temperatures with a gradient": lambda: scores(temperature=torch.ones(5, requires_grad=True)),
    "a negative temperature": lambda: scores(temperature=torch.tensor([1.0, 1, -2, 1, 1])),
    "integer temperatures": lambda: scores(temperature=torch.ones(5, dtype=torch.long)),
    "ids' dims": lambda: scores(ids=torch.zeros(5, dtype=torch.long)),
    "ids too high": lambda: scores(ids=torch.full((5, 2), 7)),
    "ids' dtype": lambda: scores(ids=torch.zeros(5, 2)),
    "top_k too high": lambda: scores(top_k=8),
    "top_k 0": lambda: scores(top_k=0),
    "top_k 1.5": lambda: scores(top_k=1.5),
    "entropy": lambda: scores(entropy=1),
    "batch_invariant": lambda: scores(batch_invariant=None),
    "rank": lambda: scores(rank=1),
    "product_dtype": lambda: scores(product_dtype=torch.int64),
    "a scored target too high": lambda: scores(target=torch.tensor([0, 7, 0, 0, 0])),
    "temperature 0": lambda: scores(temperature=0.0),
    "lora_A's rank": lambda: lora(lora_A=torch.ones(3, 4)),
    "lora_A's width": lambda: lora(lora_A=torch.ones(2, 5)),
    "lora_B's classes": lambda: lora(lora_B=torch.ones(8, 2)),
    "lora_B's dtype": lambda: lora(lora_B=torch.ones(9, 2).long()),
    "scaling": lambda: lora(scaling=float("nan")),
    "adapter_hidden's shape": lambda: lora(adapter_hidden=torch.ones(5, 4)),
    "an adapted target too high": lambda: lora(target=torch.full((6,), 9)),
}


@pytest.mark.unswitched
@pytest.mark.parametrize("case", CASES)
def test_a_bad_argument_is_refused_in_its_approved_line(case):
    assert_refused("linear", case, CASES[case])


def test_every_approved_line_has_its_case():
    assert_no_other_line("linear", CASES)


def test_ids_and_log_probabilities_of_ignored_rows_are_not_looked_at():
    teacher = top([0, 3])
    expected = seqpar.linear_distillation(
        **distillation_inputs(teacher=teacher, target=torch.tensor([0, 0, 0, 0, 0, -100]))
    ).total
    ids, log_probs = teacher.ids.clone(), teacher.log_probs.clone()
    ids[5], log_probs[5] = 99, torch.nan
    odd = seqpar.TeacherTopK(ids, log_probs, "one_class")
    found = seqpar.linear_distillation(
        **distillation_inputs(teacher=odd, target=torch.tensor([0, 0, 0, 0, 0, -100]))
    ).total
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
    given = distillation_inputs(**change)
    hidden = weakref.ref(given["hidden"])
    gc.disable()
    try:
        with contextlib.suppress(error):
            seqpar.linear_distillation(**given)
        given.clear()
        assert hidden() is None
    finally:
        gc.enable()

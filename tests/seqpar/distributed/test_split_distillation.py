"""Distillation and soft targets over a vocabulary that is split over real ranks have the gradient of one device."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.testing import assert_same_results
from seqpar.testing.ranks import ranks
from seqpar.testing.strategies import vocabulary_splits
from tests.seqpar.distributed.layouts import message
from tests.seqpar.distributed.vocab_cases import (
    PLAIN,
    answer,
    assert_close,
    counted,
    leaves_and_gradients,
    own_rows,
    parts,
    shard_of,
    whole_gradients,
)
from tests.seqpar.linear.distillation_cases import DIVERGENCES, KINDS, Distillation, distillations
from tests.seqpar.linear.test_soft_targets import OPTIONS, plain, soft_target

WORLDS = st.sampled_from([1, 2, 2, 3, 4])


def student(case, vocab, rows, *without):
    """A rank's tensors of a case that has no class weights."""
    return parts(case, vocab, rows, without=("class_weight", *without))


def distill(rank, world, drawn):
    """Every (distillation, split, order) in turn; its loss and gradients."""
    answers = []
    for one, split, order in drawn:
        vocab, rows = shard_of(one.case, split, order, rank)
        tensors = student(one.case, vocab, rows)
        teacher = one.teacher(vocab.start, rows)
        loss = seqpar.linear_distillation(**tensors, teacher=teacher, **one.options, vocab=vocab)
        answers.append(answer(loss, tensors, one.case.upstream))
    return answers


def assert_answers(case, tensors, reference, expected_fields, order, per_rank):
    """Every rank's answer is the plain loss's; the shards' gradients together are the weight's."""
    leaves, gradients = leaves_and_gradients(tensors, reference, case.upstream)
    total, *others = per_rank[0][0]
    assert others == pytest.approx([float(t.detach()) for t in expected_fields], rel=1e-12, abs=1e-13)
    expected = (reference * case.upstream).detach(), dict(zip(leaves, gradients, strict=True))
    for got in whole_gradients(per_rank, leaves, order):
        assert_same_results((torch.tensor(total * case.upstream, dtype=torch.float64), got), expected)


@given(st.data())
def test_any_split_has_the_divergence_and_gradient_of_one_device(data):
    world, drawn = data.draw(WORLDS), []
    for _ in range(data.draw(st.integers(1, 2))):
        one = data.draw(distillations())
        order = data.draw(st.permutations(range(world)).map(list))
        drawn.append((one, data.draw(vocabulary_splits(one.case.vocab_size, world)), order))
    answers = ranks(world, distill, drawn)
    for i, (one, _, order) in enumerate(drawn):
        assert_divergence(one, order, [theirs[i] for theirs in answers])


def assert_divergence(one, order, per_rank):
    tensors = one.student()
    whole = seqpar.linear_distillation(**tensors, teacher=one.teacher(), **one.options)
    assert_answers(one.case, tensors, one.plain(tensors), whole[1:], order, per_rank)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence_from_every_teacher_is_that_of_one_device(divergence, kind):
    beta = 0.3 if divergence == "jsd" else None
    one = Distillation(PLAIN, divergence, beta, kind, 3, 4, True)
    assert_divergence(one, [0, 1], [theirs[0] for theirs in ranks(2, distill, [(one, [4, 7], [0, 1])])])


def soften(rank, world, case, k, split, order):
    vocab, rows = shard_of(case, split, order, rank)
    tensors = student(case, vocab, rows)
    options = {name: case.options[name] for name in OPTIONS}
    sparse, _ = soft_target(case, k, True)
    loss = seqpar.linear_cross_entropy(**tensors, **options, soft_target=sparse, vocab=vocab)
    return answer(loss, tensors, case.upstream)


@given(st.data())
def test_any_split_has_the_soft_cross_entropy_and_gradient_of_one_device(data):
    world, case = data.draw(WORLDS), data.draw(distillations()).case
    k = data.draw(st.integers(1, case.vocab_size))
    split = data.draw(vocabulary_splits(case.vocab_size, world))
    order = data.draw(st.permutations(range(world)).map(list))
    answers = ranks(world, soften, case, k, split, order)
    tensors = {name: t for name, t in case.tensors().items() if name != "class_weight"}
    hard = seqpar.linear_cross_entropy(**tensors, **{name: case.options[name] for name in OPTIONS})
    _, dense = soft_target(case, k, True)
    assert_answers(case, tensors, plain(tensors, dense, case), hard[1:], order, answers)


ONE = Distillation(PLAIN, "forward_kl", None, "hidden", 3, 4, False)
"""Ten rows in four chunks over eleven classes."""


def step(rank, world, change):
    """A good distillation over the ranks, but for what the change says of the last one and of the others."""
    vocab = seqpar.VocabShard(dist.group.WORLD, [0, 4, 4][rank], 11)
    rows = ([4, 0, 7] if world == 3 else [4, 7])[rank]
    changed = change(rank == world - 1)
    teacher = changed.get("teacher") or replace(ONE, kind=changed.get("kind", ONE.kind)).teacher(vocab.start, rows)
    options = ONE.options | changed.get("options", {})
    return seqpar.linear_distillation(**student(PLAIN, vocab, rows), teacher=teacher, **options, vocab=vocab)


def count_a_step(rank, world, kind):
    with counted() as calls:
        loss = step(rank, world, lambda last: {"kind": kind})
        forward = dict(calls)
        loss.total.backward()
    return forward, dict(calls)


@pytest.mark.parametrize(
    ("kind", "reduces", "gathers", "checks"),
    [("hidden", 1, 2, 2), ("log_probs", 2, 1, 1), ("renormalize", 0, 1, 2), ("one_class", 0, 1, 2)],
)
def test_a_chunk_costs_as_many_collectives_as_documented(kind, reduces, gathers, checks):
    for forward, whole in ranks(3, count_a_step, kind):
        assert forward == collectives(reduces * 4, gathers * 4 + checks)
        assert whole == collectives(reduces * 4 + 1, gathers * 4 + checks)


def collectives(reduces, gathers):
    return {name: count for name, count in (("all_reduce", reduces), ("all_gather", gathers)) if count}


def top_k(edit):
    """The last rank's classes and their probabilities are edited."""

    def change(last):
        teacher = replace(ONE, kind="one_class").teacher()
        if last:
            teacher = seqpar.TeacherTopK(*edit(teacher.ids, teacher.log_probs), "one_class")
        return {"teacher": teacher}

    return change


def flipped_hidden(last):
    made = ONE.teacher(4, 7)
    return {"teacher": seqpar.TeacherHidden(made.hidden.flip(0), made.weight, made.bias)} if last else {}


def by_function(function):
    """The last rank's log-probabilities are those of a function of the rows."""
    return lambda last: {"teacher": seqpar.TeacherLogProbs(function)} if last else {"kind": "log_probs"}


def broken(rows):
    raise ArithmeticError("no teacher")


DISAGREE = {
    "divergence": (
        lambda last: {"options": {"divergence": "reverse_kl" if last else "forward_kl"}},
        "divergence: 'forward_kl' on ranks [0]; 'reverse_kl' on ranks [1]",
    ),
    "beta": (
        lambda last: {"options": {"divergence": "jsd", "beta": 0.25 if last else 0.5}},
        "beta: 0.5 on ranks [0]; 0.25 on ranks [1]",
    ),
    "kind": (
        lambda last: {"kind": "log_probs" if last else "hidden"},
        "teacher: 'TeacherHidden' on ranks [0]; 'TeacherLogProbs' on ranks [1]",
    ),
    "rest": (
        lambda last: {"kind": "one_class" if last else "renormalize"},
        "teacher.rest: 'renormalize' on ranks [0]; 'one_class' on ranks [1]",
    ),
    "ids": (top_k(lambda ids, log_probs: (ids.flip(-1), log_probs.flip(-1))), "teacher.ids: ("),
    "log_probs": (
        top_k(lambda ids, log_probs: (ids, log_probs - 0.1)),
        "teacher.log_probs: ranks [1] have different numbers from rank 0",
    ),
    "a class twice": (
        top_k(lambda ids, log_probs: (torch.zeros_like(ids), log_probs)),
        "what is wrong: 'nothing' on ranks [0]; 'ValueError: teacher.ids repeats class 0",
    ),
    "hidden": (flipped_hidden, "teacher.hidden: ranks [1] have different hidden states from rank 0"),
}
FAILS = {
    "a function that raises": (by_function(broken), "ArithmeticError: no teacher"),
    "too many columns": (
        by_function(lambda rows: ONE.made()["log_q"][rows]),
        "ValueError: what teacher.function returned has shape (2, 11); it must be (2, 7)",
    ),
}


def said(rank, world, name):
    change = (DISAGREE | FAILS)[name][0]
    found = message(step, rank, world, change)
    return found, float(step(rank, world, lambda last: {}).total.detach())


@pytest.mark.parametrize("name", DISAGREE)
def test_ranks_that_disagree_are_named_on_every_rank_and_nothing_hangs(name):
    expected = float(ONE.plain(ONE.student()).detach())
    for text, again in ranks(2, said, name):
        assert text.startswith(f"RuntimeError: ranks disagree on {DISAGREE[name][1]}")
        assert again == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", FAILS)
def test_a_function_that_fails_on_one_rank_is_reported_on_every_rank_and_nothing_hangs(name):
    (first, _), (second, _) = ranks(2, said, name)
    failed = "teacher.function failed on another rank of the vocabulary's group; see its error"
    assert first == f"RuntimeError: {failed}"
    assert second.startswith(FAILS[name][1])


def said_of_soft_targets(rank, world, ids, probs):
    """Rank 1 has another soft target."""
    vocab = seqpar.VocabShard(dist.group.WORLD, 4 * rank, 11)
    sparse = seqpar.SparseTarget(*(torch.tensor(x).expand(*PLAIN.lead, 2) for x in (ids[rank], probs[rank])))
    tensors = student(PLAIN, vocab, [4, 7][rank])
    return message(seqpar.linear_cross_entropy, **tensors, soft_target=sparse, vocab=vocab)


@pytest.mark.parametrize(
    ("ids", "probs", "expected"),
    [
        ([[0, 3], [3, 0]], [[0.5, 0.5]] * 2, "soft_target.ids: ("),
        ([[0, 3]] * 2, [[0.5, 0.5], [0.25, 0.75]], "soft_target.probs: ranks [1] have different numbers from rank 0"),
        (
            [[0, 3]] * 2,
            [[0.5, 0.5], [0.25, 0.25]],
            "what is wrong: 'nothing' on ranks [0]; 'ValueError: soft_target",
        ),
    ],
)
def test_ranks_with_other_soft_targets_are_named_on_every_rank(ids, probs, expected):
    for text in ranks(2, said_of_soft_targets, ids, probs):
        assert text.startswith(f"RuntimeError: ranks disagree on {expected}")


def masked(rank, world, kind, divergence):
    """A bias of -inf on all of rank 1's classes, the student's and the teacher's."""
    vocab = seqpar.VocabShard.of([6, 5][rank], dist.group.WORLD)
    tensors = student(PLAIN, vocab, [6, 5][rank], "token_weight")
    tensors["bias"] = torch.full((len(tensors["weight"]),), -torch.inf if rank else 0.0).double()
    teacher = masked_teacher(kind, vocab.start, [6, 5][rank])
    options = {"divergence": divergence, "beta": 0.5 if divergence == "jsd" else None, "chunk_tokens": 3}
    return answer(seqpar.linear_distillation(**tensors, teacher=teacher, **options, vocab=vocab), tensors)


def masked_teacher(kind, start, classes):
    made = ONE.made()
    bias = torch.zeros(11).double()
    bias[6:] = -torch.inf
    logits = made["hidden"].flatten(0, -2) @ made["weight"].t() + bias
    log_q, end = logits.log_softmax(-1), start + classes
    if kind == "hidden":
        return seqpar.TeacherHidden(made["hidden"], made["weight"][start:end], bias[start:end])
    if kind == "log_probs":
        return seqpar.TeacherLogProbs(lambda rows: log_q[rows, start:end])
    ids = torch.arange(6).expand(*PLAIN.lead, 6)
    return seqpar.TeacherTopK(ids, log_q[:, :6].reshape(ids.shape), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_rank_whose_classes_are_all_masked_out_does_no_harm(divergence, kind):
    tensors = PLAIN.tensors()
    weight = own_rows(tensors["weight"], 0, 6)
    options = {"divergence": divergence, "beta": 0.5 if divergence == "jsd" else None}
    teacher = masked_teacher("hidden", 0, 6)
    whole = seqpar.linear_distillation(tensors["hidden"], weight, teacher, tensors["target"] % 6, **options)
    expected = torch.autograd.grad(whole.total, (tensors["hidden"], weight))
    first, second = ranks(2, masked, kind, divergence)
    assert first[0][0] == second[0][0]
    assert_close("the loss", first[0][0], whole.total)
    for _, grads in (first, second):
        assert_close("the gradient of hidden", grads["hidden"], expected[0])
    assert_close("the gradient of the weight", first[1]["weight"], expected[1])
    assert not torch.as_tensor(second[1]["weight"]).any()


def impossible(rank, world, divergence, masked):
    """The loss where one of the two cannot predict rank 1's classes, and the other can."""
    vocab = seqpar.VocabShard.of(3, dist.group.WORLD)
    hidden, weight = torch.ones(2, 4).double(), torch.ones(3, 4).double()
    bias = {masked: torch.full((3,), -torch.inf if rank else 0.0).double()}
    teacher = seqpar.TeacherHidden(hidden, weight, bias.get("teacher"))
    options = {"divergence": divergence, "bias": bias.get("student"), "vocab": vocab}
    return float(seqpar.linear_distillation(hidden, weight, teacher, torch.tensor([0, 1]), **options).total)


@pytest.mark.parametrize(("divergence", "masked"), [("forward_kl", "student"), ("reverse_kl", "teacher")])
def test_what_only_one_of_the_two_can_predict_is_infinite_where_it_is_a_whole_rank(divergence, masked):
    assert ranks(2, impossible, divergence, masked) == [torch.inf] * 2

"""Compute the divergence between a student's and a teacher's predictions in chunks.

`rows/divergences.py` has the divergences and their gradients; `against_teacher.py` and `few_classes.py` compare the
rows of a chunk over all classes, or over a few of them.

Shape suffixes: N rows (batch x time), D hidden, V vocabulary (this rank's classes, if it is split), C given classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seqpar.core.checks import check_floating, check_function, check_one_device, check_shapes, check_type
from seqpar.core.graphs import outside_graphs
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.against_teacher import AgainstHead, AgainstLogProbs, loss_against_teacher
from seqpar.linear.agreement import checksum, compare_ranks
from seqpar.linear.few_classes import DivergenceOfScores, loss_on_few_classes
from seqpar.linear.inputs import Inputs, Settings, check_inputs, check_tensors, tell_errors
from seqpar.linear.projection import Projection, product_dtype
from seqpar.linear.teachers import (
    Teacher,
    TeacherHidden,
    TeacherLogProbs,
    TeacherTopK,
    check_top_k,
    probabilities,
)
from seqpar.rows.divergences import Divergence, check_divergence, row_terms


@outside_graphs
def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    target: Tensor,
    *,
    divergence: Divergence,
    beta: float | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    loss_scale: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
    vocab: VocabShard | None = None,
) -> TokenLoss:
    """Return the summed divergence between a teacher's predictions and a student's.

    Plain equivalent of `divergence="forward_kl"` with a `TeacherHidden`, over the rows that are not ignored:

        student = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
        teacher = (F.linear(teacher.hidden, teacher.weight, teacher.bias) / temperature).log_softmax(-1)
        F.kl_div(student, teacher, log_target=True, reduction="sum")

    With p the student's distribution and q the teacher's, the divergence of a row is

        "forward_kl"        KL(q || p) (Hinton et al. 2015, section 2, but without their factor `temperature**2`, which
                            makes the gradient's size independent of the temperature)
        "reverse_kl"        KL(p || q) (MiniLLM, Gu et al. 2024, section 2)
        "jsd"               beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p (GKD, Agarwal et al.
                            2024, section 2)
        "total_variation"   sum |p - q| / 2

    Args:
        hidden, weight, bias: the student's, as in `linear_cross_entropy`.
        teacher: a `TeacherHidden`, `TeacherLogProbs` or `TeacherTopK`. It gets no gradient.
        target: the classes, of hidden's leading shape; for the loss they only say which rows are ignored.
        divergence: which one to use; all are at least 0, and 0 if student and teacher agree.
        beta: for "jsd" only, in (0, 1): near 0 it behaves like forward_kl, near 1 like reverse_kl.
        temperature: divides the student's logits and those of a `TeacherHidden`; above 0. Log-probabilities are used
            as they are, so they must have the same temperature.
        token_weight, loss_scale: as in `linear_cross_entropy`.
        chunk_tokens: the maximum number of rows whose logits (the student's and the teacher's) exist at once; None
            chooses it by size in bytes.
        vocab: as in `linear_cross_entropy`. A teacher's hidden states, ids and log-probabilities are the same on every
            rank; its weight, its bias and what a `TeacherLogProbs` returns are those of this rank's classes. Costs
            three all-reduces per chunk (four with a `TeacherLogProbs`, two with a `TeacherTopK`).

    Returns:
        `TokenLoss`, the same on every rank of the group: `total` in nats (total variation in probability), float32 or
        wider, differentiable once; `nll` and `correct` of the student against `target`, at this temperature.

    A class to which both give probability 0 (a bias of -inf) has no effect. One to which only the student gives 0
    makes "forward_kl" inf; one to which only the teacher gives 0 makes "reverse_kl" inf and its gradient nan. "jsd" and
    "total_variation" stay finite.

    Raises:
        TypeError: an unknown type of teacher; a float target; hidden and weight of different dtypes outside autocast.
        ValueError: shapes or devices that do not fit; a number out of its range; an unknown divergence;
            log-probabilities that do not sum to 1 as probabilities (with a `TeacherTopK`: that sum to more than 1); a
            class that occurs twice in a row of ids.
        IndexError: a target outside [0, vocab_size) that is not ignored, or an id outside it (with value and position).
        RuntimeError: on every rank, if ranks disagree.

    Example:
        >>> hidden, weight = torch.randn(2, 6, 8), torch.randn(50, 8)
        >>> teacher = seqpar.TeacherHidden(torch.randn(2, 6, 32), torch.randn(50, 32))
        >>> target = torch.randint(50, (2, 6))
        >>> loss = seqpar.linear_distillation(hidden, weight, teacher, target, divergence="jsd", beta=0.5)
        >>> p, q = (hidden @ weight.T).softmax(-1), (teacher.hidden @ teacher.weight.T).softmax(-1)
        >>> log_m = ((p + q) / 2).log()
        >>> plain = (F.kl_div(log_m, q, reduction="sum") + F.kl_div(log_m, p, reduction="sum")) / 2
        >>> torch.allclose(loss.total, plain)
        True
    """
    inputs = Inputs(hidden, weight, target, bias, token_weight=token_weight)
    settings = Settings(ignore_index=ignore_index, temperature=temperature, chunk_tokens=chunk_tokens)

    with tell_errors(vocab):
        given = check_inputs(inputs, settings, vocab, loss_scale)
        check_divergence(divergence, beta)
        _check_teacher(teacher, inputs, settings, given.shard)
    if vocab is not None:
        compare_ranks(inputs, settings, vocab, {"divergence": divergence, "beta": beta, **_teacher_facts(teacher)})
    terms = row_terms(divergence, beta)
    if isinstance(teacher, TeacherTopK):
        ids_NC = teacher.ids.detach().flatten(0, -2).long()
        log_q_NC = _log_q(teacher, ids_NC, given.shard.vocab_size).to(wide(product_dtype(hidden)))
        return loss_on_few_classes(inputs, settings, given, DivergenceOfScores(terms), ids_NC, log_q_NC, loss_scale)
    return loss_against_teacher(inputs, settings, given, _dense(teacher, inputs, settings), terms, loss_scale)


def _check_teacher(teacher: object, inputs: Inputs, settings: Settings, shard: VocabShard) -> None:
    """Raise unless this is a teacher whose tensors fit the student's."""
    kinds = (TeacherHidden, TeacherLogProbs, TeacherTopK)
    check_type(teacher, "teacher", kinds, "a seqpar.TeacherHidden, TeacherLogProbs or TeacherTopK")
    if isinstance(teacher, TeacherTopK):
        check_top_k(teacher, inputs.target, settings.ignore_index, shard.vocab_size)
    if isinstance(teacher, TeacherLogProbs):
        check_function(teacher.function, "teacher.function", "a function from rows to their log-probabilities")
    if isinstance(teacher, TeacherHidden):
        both = {"weight": inputs.weight, "teacher.weight": teacher.weight}
        check_floating(teacher.weight, "teacher.weight")
        check_shapes(
            inputs.weight.shape[:1] == teacher.weight.shape[:1], "(V, D) with the same V, each with its own D", **both
        )
        check_one_device(**both)
        check_tensors(Inputs(teacher.hidden, teacher.weight, inputs.target, teacher.bias), "teacher.")


def _teacher_facts(teacher: Teacher) -> Mapping[str, object]:
    """Return what about the teacher must be the same on all ranks, by name."""
    facts: dict[str, object] = {"teacher": type(teacher).__name__}
    if isinstance(teacher, TeacherHidden):
        facts["the width and dtype of teacher.hidden"] = (teacher.hidden.size(-1), teacher.hidden.dtype)
        facts["teacher.hidden"] = teacher.hidden
    if isinstance(teacher, TeacherTopK):
        facts["teacher.rest"] = teacher.rest
        facts["teacher.ids"] = (*teacher.ids.shape, checksum(teacher.ids))
        facts["teacher.log_probs"] = probabilities(teacher.ids, teacher.log_probs)
    return facts


def _dense(
    teacher: TeacherHidden | TeacherLogProbs, inputs: Inputs, settings: Settings
) -> AgainstHead | AgainstLogProbs:
    """Return the object that computes the teacher's log-probabilities of all classes, chunk by chunk."""
    if isinstance(teacher, TeacherHidden):
        dtype = product_dtype(teacher.hidden)
        head = Projection(teacher.weight, teacher.bias, dtype, None, float(settings.temperature))
        return AgainstHead(head, teacher.hidden.detach().flatten(0, -2))
    row_N = torch.arange(inputs.target.numel(), device=inputs.target.device)
    return AgainstLogProbs(teacher.function, len(inputs.weight), row_N)


SUM_ROUNDINGS = 4
"""A computed log_softmax's probabilities sum to at most this many roundings less than 1; 2 were measured."""


def _log_q(teacher: TeacherTopK, ids_NC: Tensor, vocab_size: int) -> Tensor:
    """Return log q of the given classes in float32 or wider; if the rest is kept, append its log q, in float64."""
    log_q_NC = teacher.log_probs.detach().flatten(0, -2)
    log_q_NC = log_q_NC.to(wide(log_q_NC.dtype)).masked_fill(ids_NC < 0, -torch.inf)
    if teacher.rest == "renormalize":
        return log_q_NC.log_softmax(-1)
    # In float64, because the sum's own rounding must not look like a rest
    log_q_NC = log_q_NC.double()
    rest_N1 = -torch.expm1(log_q_NC.logsumexp(-1, keepdim=True))
    # Computing and rounding each log q may have moved the sum by this much; a smaller rest is meaningless
    size_NC = (log_q_NC.exp() * log_q_NC).masked_fill(log_q_NC == -torch.inf, 0).abs()
    stored = teacher.log_probs.dtype
    eps = max(torch.finfo(stored).eps, SUM_ROUNDINGS * torch.finfo(wide(stored)).eps)
    is_rest_N1 = rest_N1 > eps * (1 + size_NC.sum(-1, keepdim=True))
    # A row with every class has no rest, whatever the sum
    is_rest_N1 &= (ids_NC >= 0).sum(-1, keepdim=True) < vocab_size
    return torch.cat([log_q_NC, rest_N1.where(is_rest_N1, 0).log()], -1)

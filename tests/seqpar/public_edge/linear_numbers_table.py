"""Odd but valid arguments of the losses and scores over hidden x weight: the numbers of plain float64 torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import seqpar
from tests.seqpar.public_edge.case import Case, Equals

LEAVES = ("hidden", "weight", "bias", "token_weight")
Given = dict[str, Any]


def good() -> Given:
    """Two sentences of four tokens, one of them ignored, over seven classes."""
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=random)

    return {
        "hidden": normal(2, 4, 3), "weight": normal(7, 3), "bias": normal(7),
        "target": torch.tensor([[0, 6, -100, 2], [2, 5, 1, 6]]),
    }  # fmt: skip


def teacher() -> Given:
    """The same for a wider teacher."""
    random = torch.Generator().manual_seed(2)
    shapes = {"teacher_hidden": (2, 4, 5), "teacher_weight": (7, 5), "teacher_bias": (7,)}
    return {name: torch.randn(shape, dtype=torch.float64, generator=random) for name, shape in shapes.items()}


def per_row(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """The plain log-probabilities (N, V), the targets (N,) as int64 with 0 where ignored, and which rows count."""
    logits = given["hidden"].flatten(0, -2).double() @ given["weight"].double().t()
    if given.get("bias") is not None:
        logits = logits + given["bias"].double()
    if given.get("softcap") is not None:
        logits = given["softcap"] * torch.tanh(logits / given["softcap"])
    target = given["target"].flatten().long()
    kept = target != given.get("ignore_index", -100)
    return (logits / float(given.get("temperature", 1.0))).log_softmax(-1), target.where(kept, 0), kept


def plain_cross_entropy(given: Given) -> Tensor:
    """The summed loss."""
    log_p, target, kept = per_row(given)
    weights = given.get("class_weight")
    weights = torch.ones(log_p.size(1), dtype=torch.float64) if weights is None else weights.double()
    eps = float(given.get("label_smoothing", 0.0))
    if given.get("soft_target") is not None:
        ids, probs = (t.flatten(0, -2) for t in (given["soft_target"].ids.long(), given["soft_target"].probs.double()))
        soft = -(probs * log_p.gather(1, ids)).sum(-1)
        weight = given.get("token_weight", torch.ones(len(ids))).flatten().double()
        return (soft * weight).where(kept, 0.0).sum()
    loss = -(1 - eps) * weights[target] * log_p.gather(1, target.unsqueeze(1)).squeeze(1)
    if eps:
        loss = loss - eps / log_p.size(1) * (log_p * weights).sum(-1)
    if given.get("token_weight") is not None:
        loss = loss * given["token_weight"].flatten().double()
    return loss.where(kept, 0.0).sum()


def plain_scores(given: Given) -> Tensor:
    """log p of each target."""
    log_p, target, kept = per_row(given)
    return log_p.gather(1, target.unsqueeze(1)).squeeze(1).where(kept, 0.0).reshape(given["target"].shape)


def plain_divergence(given: Given) -> Tensor:
    """KL(teacher || student)."""
    student, _, kept = per_row(given)
    of_teacher = {
        "hidden": given["teacher_hidden"],
        "weight": given["teacher_weight"],
        "bias": given.get("teacher_bias"),
    }
    teachers, *_ = per_row(given | of_teacher)
    rows = F.kl_div(student, teachers.detach(), log_target=True, reduction="none").sum(-1)
    if given.get("token_weight") is not None:
        rows = rows * given["token_weight"].flatten()
    return rows.where(kept, 0.0).sum()


def distilled(given: Given) -> seqpar.TokenLoss:
    """The loss of a teacher made from the arguments that begin with its name."""
    student = {name: value for name, value in given.items() if not name.startswith("teacher_")}
    of_teacher = {name.removeprefix("teacher_"): given[name] for name in given.keys() - student.keys()}
    return seqpar.linear_distillation(**student, teacher=seqpar.TeacherHidden(**of_teacher), divergence="forward_kl")


def total(loss: seqpar.TokenLoss) -> Tensor:
    """What is differentiated."""
    return loss.total


FUNCTIONS: dict[str, tuple[Callable[[Given], Tensor], Callable[[Given], Tensor], Callable[[], Given]]] = {
    "linear_cross_entropy": (lambda given: total(seqpar.linear_cross_entropy(**given)), plain_cross_entropy, good),
    "token_scores": (lambda given: seqpar.token_scores(**given).log_prob, plain_scores, good),
    "linear_distillation": (
        lambda given: total(distilled(given)),
        plain_divergence,
        lambda: good() | teacher(),
    ),
}


def value_and_gradients(loss: Callable[[Given], Tensor], given: Given) -> tuple[Tensor, ...]:
    """The value and the gradients of a multiple of it, of the leaves that need one."""
    leaves = [given[name] for name in LEAVES if isinstance(given.get(name), Tensor) and given[name].requires_grad]
    value = loss(given)
    if not leaves:
        return (value,)
    grads = torch.autograd.grad(value.sum() * -0.5, leaves, allow_unused=True)
    return value.detach(), *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True))


def changed(change: Callable[[Given], Given], make: Callable[[], Given], frozen: frozenset[str]) -> Given:
    """Good arguments with the change, whose leaves need a gradient."""
    given = make()
    given |= change(given)
    for name in LEAVES:
        tensor = given.get(name)
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.is_leaf:
            tensor.requires_grad_(name not in frozen)
    return given


def equals(name: str, about: str, change: Callable[[Given], Given], frozen: frozenset[str] = frozenset()) -> Case:
    """The function on changed arguments."""
    ours, plain, make = FUNCTIONS[name]
    call = partial(_answer, ours, change, make, frozen)
    return Case(f"{name}, {about}", call, Equals(partial(_answer, plain, change, make, frozen)))


def _answer(loss: Callable[[Given], Tensor], change: Any, make: Any, frozen: frozenset[str]) -> tuple[Tensor, ...]:
    return value_and_gradients(loss, changed(change, make, frozen))


def _with(**odd: Any) -> Callable[[Given], Given]:
    return lambda given: odd


def _rows(rows: slice) -> Callable[[Given], Given]:
    """Some sentences alone."""
    return lambda given: {k: t[rows] for k, t in given.items() if k in ("hidden", "target", "teacher_hidden")}


def _flat(given: Given) -> Given:
    """Without a dimension of time."""
    return {k: given[k].flatten(0, 1) for k in ("hidden", "target", "teacher_hidden") if k in given}


def _deep(given: Given) -> Given:
    """With a dimension more."""
    return {k: given[k].unflatten(1, (2, 2)) for k in ("hidden", "target", "teacher_hidden") if k in given}


def _classes(count: int) -> Callable[[Given], Given]:
    """The first classes alone, and targets among them."""
    names = ("weight", "bias", "teacher_weight", "teacher_bias")
    return lambda given: (
        {k: given[k][:count] for k in names if k in given}
        | {"target": given["target"].where(given["target"] == -100, given["target"] % count)}
    )


def _strided(given: Given) -> Given:
    """Every second number of a larger tensor."""
    return {k: torch.stack([t, t * 9], -1).flatten(-2)[..., ::2] for k, t in given.items() if isinstance(t, Tensor)}


def _transposed(given: Given) -> Given:
    """The same numbers, columns first."""
    return {k: given[k].t().contiguous().t() for k in ("weight", "teacher_weight") if k in given}


def _time_first(given: Given) -> Given:
    """Views of tensors whose first dimension is time."""
    names = ("hidden", "target", "teacher_hidden")
    return {k: given[k].transpose(0, 1).contiguous().transpose(0, 1) for k in names if k in given}


def _expanded(given: Given) -> Given:
    """One sentence seen twice."""
    names = ("hidden", "target", "teacher_hidden")
    return {k: given[k][:1].expand(2, *given[k].shape[1:]) for k in names if k in given}


def _tied(given: Given) -> Given:
    """Hidden states that are rows of the weight."""
    return {"hidden": given["weight"][given["target"].clamp(min=0)]}


def _target(dtype: torch.dtype, ignored: int) -> Callable[[Given], Given]:
    """Targets of another integer dtype, with another ignored one where theirs has no -100."""
    return lambda given: {
        "target": given["target"].where(given["target"] != -100, ignored).to(dtype), "ignore_index": ignored,
    }  # fmt: skip


CHANGES: dict[str, Callable[[Given], Given]] = {
    "as it is": _with(),
    "no rows": _rows(slice(0)),
    "one sentence": _rows(slice(1)),
    "one row": lambda given: {k: given[k][:1, :1] for k in ("hidden", "target", "teacher_hidden") if k in given},
    "one time step": lambda given: {k: given[k][:, :1] for k in ("hidden", "target", "teacher_hidden") if k in given},
    "no time": lambda given: {k: given[k][:, :0] for k in ("hidden", "target", "teacher_hidden") if k in given},
    "without time": _flat,
    "four dimensions": _deep,
    "all ignored": lambda given: {"target": given["target"].fill_(-100)},
    "none ignored": lambda given: {"target": given["target"].clamp(min=0)},
    "one class": _classes(1),
    "two classes": _classes(2),
    "hidden of width 1": lambda given: {k: given[k][..., :1] for k in ("hidden", "weight")},
    "hidden of width 0": lambda given: {k: given[k][..., :0] for k in ("hidden", "weight")},
    "no bias": _with(bias=None),
    "strided": _strided,
    "weight transposed": _transposed,
    "time first": _time_first,
    "expanded": _expanded,
    "tied to its input": _tied,
    "targets int32": _target(torch.int32, -100),
    "targets int16": _target(torch.int16, -100),
    "targets int8": _target(torch.int8, -100),
    "targets uint8": _target(torch.uint8, 255),
    "targets uint8, ignored 0": _target(torch.uint8, 0),
    "targets uint8, none ignored": lambda given: {"target": given["target"].clamp(min=0).to(torch.uint8)},
    "ignored a class": _target(torch.int64, 6),
    "ignored far out": _target(torch.int64, 2**40),
    "one row a chunk": _with(chunk_tokens=1),
    "chunks of three": _with(chunk_tokens=3),
    "a chunk larger than all": _with(chunk_tokens=10**9),
    "large numbers": lambda given: {"hidden": given["hidden"] * 1e3},
    "tiny numbers": lambda given: {"hidden": given["hidden"] * 1e-9},
    "all numbers 0": lambda given: {k: torch.zeros_like(given[k]) for k in ("hidden", "weight", "bias")},
}  # fmt: skip
"""What any of the functions takes."""

LOGITS: dict[str, Callable[[Given], Given]] = {
    "temperature 1": _with(temperature=1),
    "temperature an int": _with(temperature=3),
    "temperature small": _with(temperature=1e-3),
    "temperature large": _with(temperature=100.0),
}
CAPPED: dict[str, Callable[[Given], Given]] = {
    "softcap an int": _with(softcap=2),
    "softcap small": _with(softcap=1e-2),
    "softcap large": _with(softcap=1e9),
    "softcap and temperature": _with(softcap=3.0, temperature=0.5),
}


def _float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


CROSS_ENTROPY: dict[str, Callable[[Given], Given]] = {
    "smoothing 0": _with(label_smoothing=0),
    "smoothing 1/3": _with(label_smoothing=1 / 3),
    "smoothing all but 1": _with(label_smoothing=1 - 1e-9),
    "loss_scale an int": _with(loss_scale=8),
    "loss_scale tiny": _with(loss_scale=2.0**-60),
    "loss_scale huge": _with(loss_scale=2.0**60),
    "loss_scale a tensor": _with(loss_scale=torch.tensor(3.0)),
    "loss_scale a tensor of one row": _with(loss_scale=torch.tensor([4])),
    "loss_scale negative": _with(loss_scale=-2.0),
    "class weights": lambda given: {"class_weight": torch.linspace(0, 2, 7, dtype=torch.float64)},
    "class weights of float32": lambda given: {"class_weight": torch.tensor([1, 2, 3, 4, 5, 6, 7.0])},
    "class weights and smoothing": lambda given: {
        "class_weight": torch.linspace(0.5, 2, 7).double(), "label_smoothing": 0.1,
    },
    "class weight inf of nobody": lambda given: {"class_weight": _float64([1, 2, 1, float("inf"), 1, 1, 1])},
    "class weight nan of nobody": lambda given: {"class_weight": _float64([1, 2, 1, float("nan"), 1, 1, 1])},
    "class weights 0": lambda given: {"class_weight": torch.zeros(7).double()},
    "token weights of both signs": lambda given: {"token_weight": torch.linspace(-1, 2, 8).double().reshape(2, 4)},
    "token weights 0": lambda given: {"token_weight": torch.zeros(2, 4).double()},
    "token weights expanded": lambda given: {"token_weight": torch.tensor([[0.5], [2.0]]).double().expand(2, 4)},
    "a shard that is all of it": _with(vocab=seqpar.VocabShard(None, 0, 7)),
}  # fmt: skip


def _few_classes(**odd: Any) -> Callable[[Given], Given]:
    """Three classes for each row, and their probabilities."""
    ids = torch.tensor([[3, 0, 6], [1, 2, 4]]).unsqueeze(1).expand(2, 4, 3)
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.0, 0.875]]).double().unsqueeze(1).expand(2, 4, 3)
    return lambda given: {"soft_target": seqpar.SparseTarget(ids, probs)} | odd


SOFT: dict[str, Callable[[Given], Given]] = {
    "soft target": _few_classes(),
    "soft target, softcap and temperature": _few_classes(softcap=2.0, temperature=0.5),
    "soft target, token weights": _few_classes(token_weight=torch.linspace(-1, 2, 8).double().reshape(2, 4)),
    "soft target in float32": lambda given: (
        {"soft_target": seqpar.SparseTarget(*(f(_few_classes()(given)["soft_target"]) for f in (_ids, _narrow)))}
    ),
    "soft target of int8 ids": lambda given: (
        {"soft_target": seqpar.SparseTarget(*(f(_few_classes()(given)["soft_target"]) for f in (_bytes, _narrow)))}
    ),
    "soft target, a shard that is all of it": _few_classes(vocab=seqpar.VocabShard(None, 0, 7)),
}


def _ids(soft_target: seqpar.SparseTarget) -> Tensor:
    return soft_target.ids


def _bytes(soft_target: seqpar.SparseTarget) -> Tensor:
    return soft_target.ids.to(torch.int8)


def _narrow(soft_target: seqpar.SparseTarget) -> Tensor:
    return soft_target.probs.float()


def _all_of(name: str, changes: dict[str, Callable[[Given], Given]]) -> Iterator[Case]:
    for about, change in changes.items():
        yield equals(name, about, change)


def _everything() -> Iterator[Case]:
    for name in FUNCTIONS:
        yield from _all_of(name, CHANGES)
        for frozen in ("hidden", "weight", "bias"):
            yield equals(name, f"{frozen} frozen", _with(), frozenset({frozen}))
        yield equals(name, "everything frozen", _with(), frozenset(LEAVES))
    for name in ("linear_cross_entropy", "token_scores", "linear_distillation"):
        yield from _all_of(name, LOGITS)
    for name in ("linear_cross_entropy", "token_scores"):
        yield from _all_of(name, CAPPED)
    yield from _all_of("linear_cross_entropy", CROSS_ENTROPY)
    yield from _all_of("linear_cross_entropy", SOFT)
    weighted = {"token weights": CROSS_ENTROPY["token weights of both signs"]}
    scaled = {about: change for about, change in CROSS_ENTROPY.items() if about.startswith("loss_scale")}
    whole = {"a shard that is all of it": CROSS_ENTROPY["a shard that is all of it"]}
    yield from _all_of("linear_distillation", weighted | scaled | whole)


def _scores() -> Iterator[Case]:
    """Distributions whose scores are known without a softmax."""
    one_class = {"hidden": torch.ones(2, 1), "weight": torch.ones(1, 1), "target": torch.zeros(2, dtype=torch.int64)}
    certain = seqpar.TokenScores(torch.zeros(2), entropy=torch.zeros(2), top_log_probs=torch.zeros(2, 1))
    yield Case(
        "token_scores, a vocabulary of one class",
        lambda: tuple(seqpar.token_scores(**one_class, entropy=True, top_k=1)[:3]),
        Equals(lambda: tuple(certain[:3])),
    )
    equal = {"hidden": torch.zeros(2, 3), "weight": torch.ones(8, 3), "target": torch.tensor([0, 7])}
    bits = torch.full((2,), 8.0).log()
    yield Case(
        "token_scores, eight equal classes",
        lambda: tuple(seqpar.token_scores(**equal, entropy=True)[:2]),
        Equals(lambda: (-bits, bits)),
    )


CASES = [*_scores(), *_everything()]

"""Odd arguments of the losses and scores over hidden x weight, each with the one line that names the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import seqpar
from tests.seqpar.linear.linear_loss import on_another_device
from tests.seqpar.public_edge.case import Case
from tests.seqpar.public_edge.tables import NOT_TENSORS, raises

NAN, INF = float("nan"), float("inf")
N, D, V = 6, 4, 9
"""Rows, width and classes of a good call."""


def tensors(*names: str) -> dict[str, Tensor]:
    """Good ones, by the names of the arguments."""
    random = torch.Generator().manual_seed(0)
    made = {
        "hidden": torch.randn(N, D, generator=random),
        "weight": torch.randn(V, D, generator=random),
        "target": torch.tensor([0, 8, 3, -100, 3, 1]),
        "bias": torch.randn(V, generator=random),
        "class_weight": torch.rand(V, generator=random) + 0.5,
        "token_weight": torch.rand(N, generator=random),
        "old": torch.rand(N, generator=random),
        "teacher.hidden": torch.randn(N, 5, generator=random),
        "teacher.weight": torch.randn(V, 5, generator=random),
        "teacher.bias": torch.randn(V, generator=random),
        "teacher.ids": torch.tensor([0, 5]).repeat(N, 1),
        "teacher.log_probs": torch.tensor([-1.0, -2.0]).repeat(N, 1),
        "soft_target.ids": torch.tensor([0, 5]).repeat(N, 1),
        "soft_target.probs": torch.tensor([0.75, 0.25]).repeat(N, 1),
    }
    return {name: made[name] for name in names}


def split_names(given: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments whose names begin with the prefix, without it, and the others."""
    own = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
    return own, {name: value for name, value in given.items() if not name.startswith(prefix)}


def taught(kind: Callable[..., Any]) -> Callable[..., object]:
    """Distillation from a teacher of this kind, made from the arguments that begin with its name."""

    def call(**given: Any) -> object:
        of_teacher, others = split_names(given, "teacher.")
        return seqpar.linear_distillation(**others, teacher=kind(**of_teacher))

    return call


def softened(**given: Any) -> object:
    """The cross-entropy with a soft target."""
    of_target, others = split_names(given, "soft_target.")
    return seqpar.linear_cross_entropy(**others, soft_target=seqpar.SparseTarget(**of_target))


COMMON = ("hidden", "weight", "target", "bias")
FUNCTIONS: dict[str, tuple[Callable[..., object], tuple[str, ...], dict[str, Any]]] = {
    "linear_cross_entropy": (seqpar.linear_cross_entropy, (*COMMON, "class_weight", "token_weight"), {}),
    "token_scores": (seqpar.token_scores, COMMON, {}),
    "scored_loss": (seqpar.scored_loss, (*COMMON, "old"), {"loss": lambda scores, old: scores.log_prob - old}),
    "linear_distillation": (
        taught(seqpar.TeacherHidden),
        (*COMMON, "token_weight", "teacher.hidden", "teacher.weight", "teacher.bias"),
        {"divergence": "forward_kl"},
    ),
    "linear_distillation from top k": (
        taught(seqpar.TeacherTopK),
        (*COMMON, "teacher.ids", "teacher.log_probs"),
        {"divergence": "jsd", "beta": 0.5, "teacher.rest": "one_class"},
    ),
    "linear_cross_entropy with a soft target": (
        softened,
        (*COMMON, "token_weight", "soft_target.ids", "soft_target.probs"),
        {},
    ),
}
"""Each with the tensors it takes, and what else it needs."""
OPTIONAL = ("bias", "class_weight", "token_weight", "teacher.bias")


def called(name: str, **odd: Any) -> object:
    """The function on good arguments but for the odd ones; an odd argument may be a function that makes it."""
    function, names, options = FUNCTIONS[name]
    given = {**tensors(*names), **options}
    for key, value in odd.items():
        given[key] = value(given) if callable(value) else value
    return function(**given)


def refuses(name: str, about: str, error: type[Exception], words: tuple[str, ...], **odd: Any) -> Case:
    """A call of that function that must raise."""
    return raises(f"{name}, {about}", partial(called, name, **odd), error, *words)


def _not_dense() -> Iterator[Case]:
    """Whatever is no plain tensor, in every place where a tensor is taken."""
    for name, (_, names, _) in FUNCTIONS.items():
        for argument in names:
            for kind, (make, message) in NOT_TENSORS.items():
                if kind != "none" or argument not in OPTIONAL:
                    words = (f"{argument} is {message}",)
                    yield refuses(name, f"{argument} {kind}", TypeError, words, **{argument: lambda _, m=make: m()})


def _dtypes() -> Iterator[Case]:
    """Numbers of another kind."""
    floating = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    whole = (torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float32, torch.float64, torch.complex64)
    for name, (_, names, _) in FUNCTIONS.items():
        # What a loss takes for each token may be of any kind
        for argument in (name for name in names if name != "old"):
            for dtype in whole if argument in ("target", "teacher.ids", "soft_target.ids") else floating:
                odd = {argument: lambda given, a=argument, d=dtype: given[a].abs().to(d)}
                yield refuses(name, f"{argument} {dtype}", TypeError, (f"{argument} has dtype {dtype}",), **odd)
        for argument in ("weight", "bias"):
            odd = {argument: lambda given, a=argument: given[a].double()}
            words = (f"hidden has dtype torch.float32 and {argument} torch.float64",)
            yield refuses(name, f"{argument} of another dtype", TypeError, words, **odd)


def _shapes() -> Iterator[Case]:
    """Sizes that disagree."""
    for name, (_, names, _) in FUNCTIONS.items():
        odd_shapes: dict[str, list[tuple[tuple[int, ...], str]]] = {
            "hidden": [((N, D + 1), "hidden has shape (6, 5)"), ((N + 1, D), "hidden has shape (7, 4)")],
            "weight": [((V, D + 1), "weight (9, 5)"), ((V,), "weight (9,)"), ((V, D, 1), "weight (9, 4, 1)")],
            "target": [((N + 1,), "target (7,)"), ((N, 1), "target (6, 1)"), ((), "target ()")],
            "bias": [((V + 1,), "bias has shape (10,)"), ((1,), "bias has shape (1,)"), ((V, 1), "bias has shape (9,")],
            "class_weight": [((V - 1,), "class_weight has shape (8,)"), ((V, 1), "class_weight has shape (9, 1)")],
            "token_weight": [((N - 1,), "token_weight has shape (5,)"), ((), "token_weight has shape ()")],
            "old": [((N - 1,), "old has shape (5,)"), ((), "old has shape ()")],
            "teacher.hidden": [((N, 6), "teacher.hidden has shape (6, 6)"), ((5, 5), "teacher.hidden has shape (5,")],
            "teacher.weight": [((V - 1, 5), "teacher.weight (8, 5)"), ((V, 6), "teacher.weight (9, 6)")],
            "teacher.bias": [((V - 1,), "teacher.bias has shape (8,)")],
            "teacher.ids": [((N,), "teacher.ids has shape (6,)"), ((N, 0), "teacher.ids has shape (6, 0)")],
            "teacher.log_probs": [((N, 3), "teacher.log_probs has shape (6, 3)")],
            "soft_target.ids": [((N - 1, 2), "soft_target.ids has shape (5, 2)"), ((N, 2, 1), "shape (6, 2, 1)")],
            "soft_target.probs": [((N, 1), "soft_target.probs has shape (6, 1)")],
        }  # fmt: skip
        for argument in names:
            for shape, words in odd_shapes[argument]:
                odd = {argument: lambda given, a=argument, s=shape: given[a].new_zeros(s)}
                yield refuses(name, f"{argument} {shape}", ValueError, (words,), **odd)
        odd = {"hidden": torch.zeros(D), "target": torch.tensor(1)}
        yield refuses(name, "one row without its dimension", ValueError, ("hidden has shape (4,)",), **odd)
        none = {"weight": torch.zeros(0, D), "bias": None}
        yield refuses(name, "no classes", ValueError, ("weight has shape (0, 4)",), **none)


def _targets() -> Iterator[Case]:
    """Classes that there are not."""
    for name in FUNCTIONS:
        for value in (V, -1, 10**9):
            words = (f"target {value} at position (2,)",)
            odd = {"target": torch.tensor([0, 1, value, 0, 0, 0])}
            yield refuses(name, f"target {value}", IndexError, words, **odd)
        words = ("target 156 at position (1,)",)
        bytes_ = {"target": torch.tensor([0, 156, 1, 1, 1, 1], dtype=torch.uint8)}
        yield refuses(name, "target 156 of bytes, which is no -100", IndexError, words, **bytes_)


NO_NUMBER = {"text": "0.1", "a list": [0.1], "a bool": True, "complex": 1j, "a tensor": torch.ones(())}
ABOVE_0 = {"0": 0, "negative": -1.0, "nan": NAN, "inf": INF, "-inf": -INF, "too large": 10**400}
NUMBERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "label_smoothing": (NO_NUMBER | {"none": None}, {k: v for k, v in ABOVE_0.items() if k != "0"} | {"1": 1.0}),
    "z_loss": (NO_NUMBER | {"none": None}, {k: v for k, v in ABOVE_0.items() if k != "0"}),
    "softcap": (NO_NUMBER, ABOVE_0),
    "temperature": (NO_NUMBER | {"none": None}, ABOVE_0),
    "loss_scale": (
        {k: v for k, v in NO_NUMBER.items() if k != "a tensor"} | {"none": None},
        {k: v for k, v in ABOVE_0.items() if k != "negative"},
    ),
    "chunk_tokens": ({}, {"0": 0, "negative": -3, "a float": 2.0, "text": "5", "a bool": True, "nan": NAN}),
    "ignore_index": (
        {"a float": -100.0, "none": None, "text": "pad", "a bool": True, "a tensor": torch.tensor(-100)},
        {"too large": 2**70, "too small": -(2**70)},
    ),
}
TAKEN = {
    "linear_cross_entropy": tuple(NUMBERS),
    "token_scores": ("softcap", "temperature", "chunk_tokens", "ignore_index"),
    "scored_loss": ("softcap", "loss_scale", "chunk_tokens", "ignore_index"),
    "linear_distillation": ("temperature", "loss_scale", "chunk_tokens", "ignore_index"),
    "linear_cross_entropy with a soft target": ("z_loss", "softcap", "temperature", "loss_scale"),
}


def _numbers() -> Iterator[Case]:
    """What is no number, and numbers out of their range."""
    for name, taken in TAKEN.items():
        for argument in taken:
            for error, values in zip((TypeError, ValueError), NUMBERS[argument], strict=True):
                for kind, value in values.items():
                    if (name, argument, kind) == ("token_scores", "temperature", "a tensor"):
                        continue  # which is one number for each token, and tested below
                    yield refuses(name, f"{argument} {kind}", error, (f"{argument} is ",), **{argument: value})
    words = ("temperature has shape ()", "target (6,)")
    yield refuses("token_scores", "a temperature of no token", ValueError, words, temperature=torch.tensor(2.0))
    for kind, value in {"0": 0.0, "nan": NAN, "inf": INF}.items():
        odd = {"loss_scale": torch.tensor(value)}
        yield refuses("linear_cross_entropy", f"loss_scale a tensor of {kind}", ValueError, ("loss_scale is ",), **odd)
    odd = {"loss_scale": torch.ones(2)}
    yield refuses("linear_cross_entropy", "loss_scale of two", TypeError, ("loss_scale has shape (2,)",), **odd)


NAMED = {None: "None", "teacher": "the text 'teacher'", "rows": "the text 'rows'", "loss": "the text 'loss'"}
"""What an error says of them."""
WRONG_LOSSES: dict[str, tuple[type[Exception], Callable[..., object]]] = {
    "nothing": (TypeError, lambda scores, old: None),
    "a number": (TypeError, lambda scores, old: 1.0),
    "whole numbers": (TypeError, lambda scores, old: torch.ones(len(old), dtype=torch.int64)),
    "a sum": (ValueError, lambda scores, old: scores.log_prob.sum()),
    "a mean": (ValueError, lambda scores, old: scores.log_prob - scores.log_prob.mean()),
    "a column": (ValueError, lambda scores, old: scores.log_prob.unsqueeze(1)),
}


def _choices() -> Iterator[Case]:
    """Names that mean nothing, and what is no shard."""
    for value in ("Torch", "", None, 3, ["torch"]):
        odd = {"smoothing_convention": value, "label_smoothing": 0.1}
        yield refuses(
            "linear_cross_entropy", f"smoothing {value!r}", ValueError, (f"smoothing_convention is {value!r}",), **odd
        )
    for value in ("forward", "Forward_KL", "", None, 1, ["reverse_kl"]):
        words = (f"divergence is {value!r}",)
        yield refuses("linear_distillation", f"divergence {value!r}", ValueError, words, divergence=value)
    for error, values in ((TypeError, NO_NUMBER | {"none": None}), (ValueError, ABOVE_0 | {"1": 1.0})):
        for kind, value in values.items():
            yield refuses("linear_distillation from top k", f"beta {kind}", error, ("beta is ",), beta=value)
    for value in ("rest", "", None, 1, ["one_class"]):
        odd = {"teacher.rest": value}
        words = (f"teacher.rest is {value!r}",)
        yield refuses("linear_distillation from top k", f"rest {value!r}", ValueError, words, **odd)
    for value in (None, "teacher", torch.zeros(N, V), torch.nn.Linear(5, V)):
        call = partial(seqpar.linear_distillation, **tensors("hidden", "weight", "target"), divergence="forward_kl")
        words = (f"teacher is {NAMED.get(value, f'a {type(value).__name__}')}", "TeacherHidden")
        yield raises(f"teacher a {type(value).__name__}", partial(call, teacher=value), TypeError, *words)
    for value in (None, "rows", torch.zeros(N, V)):
        call = partial(seqpar.linear_distillation, **tensors("hidden", "weight", "target"), divergence="forward_kl")
        words = (f"teacher.function is {NAMED.get(value, 'a Tensor')}",)
        odd_call = partial(call, teacher=seqpar.TeacherLogProbs(value))  # type: ignore[arg-type]
        yield raises(f"teacher.function a {type(value).__name__}", odd_call, TypeError, *words)
    for name in ("linear_cross_entropy", "token_scores", "linear_distillation", "scored_loss"):
        for value in ("all", 3, (None, 0, V)):
            yield refuses(name, f"vocab {value!r}", TypeError, ("vocab is ",), vocab=value)
        beyond = seqpar.VocabShard(None, 1, V)
        yield refuses(
            name, "a shard beyond the vocabulary", ValueError, ("weight has 9 rows from class 1",), vocab=beyond
        )
        part = seqpar.VocabShard(None, 0, V + 1)
        yield refuses(
            name, "a shard of one process with a gap", RuntimeError, ("together they must be [0, 10)",), vocab=part
        )
    words = ("harvard", "ignore_index is -100")
    yield refuses(
        "linear_cross_entropy", "harvard without a padding class", ValueError, words, smoothing_convention="harvard"
    )


def _losses() -> Iterator[Case]:
    """What is no loss of a row."""
    for value in (None, "loss", 3):
        words = (f"loss is {NAMED.get(value, 'an int')}; it must be a function",)
        yield refuses("scored_loss", f"loss {value!r}", TypeError, words, loss=value)
    for kind, (error, wrong) in WRONG_LOSSES.items():
        yield refuses("scored_loss", f"a loss that returns {kind}", error, ("loss ",), loss=lambda _, w=wrong: w)


def _devices() -> Iterator[Case]:
    """A tensor that is somewhere else."""
    for name, (_, names, _) in FUNCTIONS.items():
        for argument in names[1:]:
            odd = {argument: lambda given, a=argument: on_another_device(*given[a].shape, dtype=given[a].dtype)}
            words = (argument, "cuda:0", "cpu")
            yield refuses(name, f"{argument} on another device", ValueError, words, **odd)


CASES = [*_not_dense(), *_dtypes(), *_shapes(), *_targets(), *_numbers(), *_choices(), *_losses(), *_devices()]

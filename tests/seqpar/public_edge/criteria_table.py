"""Criteria called directly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import seqpar
from seqpar.rows.conventions import CONVENTIONS
from tests.seqpar.public_edge.case import Case, Equals
from tests.seqpar.public_edge.tables import NOT_TENSORS, raises, refused, values
from tests.seqpar.published import Smoothing

V = 9
ODD_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
NO_INDICES = (torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float32, torch.float64, torch.complex64)

CRITERIA: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "CrossEntropy": (seqpar.CrossEntropy, lambda: Smoothing(0.0, "torch", -100)),
}
for name, shares in CONVENTIONS.items():
    padding = -100 if shares.padding else 0
    CRITERIA[name] = (
        partial(seqpar.LabelSmoothing, 0.1, name, ignore_index=padding),
        partial(Smoothing, 0.1, name, padding),
    )
"""Ours, and the published formula."""


def logits(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def targets(*shape: int, low: int = 1) -> Tensor:
    return torch.randint(low, V, shape, generator=torch.Generator().manual_seed(2))


def _marked(count: int, ignored: int) -> Tensor:
    target = targets(6)
    target[:count] = ignored
    return target


VALID: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "no rows": lambda _: (logits(0, V), targets(0)),
    "one row": lambda _: (logits(1, V), targets(1)),
    "two classes more than rows": lambda _: (logits(7, V), targets(7)),
    "an int32 target": lambda _: (logits(6, V), targets(6).int()),
    "an int16 target": lambda _: (logits(6, V), targets(6).short()),
    "an int8 target": lambda _: (logits(6, V), targets(6).to(torch.int8)),
    "a uint8 target": lambda _: (logits(6, V), targets(6).byte()),
    "transposed logits": lambda _: (logits(V, 6).t(), targets(6)),
    "every second row": lambda _: (logits(12, V)[::2], targets(12)[::2]),
    "every second class": lambda _: (logits(6, 2 * V)[:, ::2], targets(6)),
    "one row, expanded": lambda _: (logits(1, V).expand(6, V), targets(1).expand(6)),
    "nothing kept": lambda ignored: (logits(6, V), _marked(6, ignored)),
    "one kept": lambda ignored: (logits(6, V), _marked(5, ignored)),
    "log-probabilities": lambda _: (logits(6, V).log_softmax(-1), targets(6)),
    "logits of 100": lambda _: (50 * logits(6, V), targets(6)),
    "equal logits": lambda _: (torch.full((6, V), 3.0, dtype=torch.float64), targets(6)),
}


def _value_and_gradient(criterion: nn.Module, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    scores = given[0].detach().requires_grad_()
    loss = criterion(scores, given[1].long() if isinstance(criterion, Smoothing) else given[1])
    return loss.detach(), torch.autograd.grad(loss, scores)[0]


def _equal() -> list[Case]:
    cases = []
    for name, (ours, plain) in CRITERIA.items():
        for label, make in VALID.items():
            criterion, published = ours(), plain()
            given = make(criterion.ignore_index)
            call = partial(_value_and_gradient, criterion, given)
            reference = partial(_value_and_gradient, published, given)
            cases.append(Case(f"{name}: {label}", call, Equals(reference)))
    return cases


def _refused(name: str, criterion: nn.Module) -> list[Case]:
    six = targets(6)
    cases = refused(name, lambda odd: criterion(odd, six), "logits", NOT_TENSORS, TypeError)
    cases += refused(name, lambda odd: criterion(logits(6, V), odd), "target", NOT_TENSORS, TypeError)
    odd = {str(d): (partial(logits(6, V).to, d), "it must be a floating dtype") for d in ODD_DTYPES}
    cases += refused(name, lambda scores: criterion(scores, six), "logits", odd, TypeError)
    odd = {str(d): (partial(six.to, d), "it must hold class indices, int64: use target.long()") for d in NO_INDICES}
    cases += refused(name, lambda target: criterion(logits(6, V), target), "target", odd, TypeError)
    shapes = [((6, V), (1,)), ((6, V), (6, 1)), ((6, V), (5,)), ((6, V), (6, V)), ((6, V), ()), ((V,), ()), ((), ())]
    shapes += [((2, 3, V), (2, 3)), ((2, 3, V), (6,)), ((2, V, 3), (2, 3)), ((1, V), (6,)), ((0, V), (1,))]
    for a, b in shapes:
        words = ("logits", "target", str(a), str(b), "logits.flatten(0, -2) and target.flatten()")
        call = partial(criterion, logits(*a), targets(*b))
        cases.append(raises(f"{name}: shapes {a} and {b}", call, ValueError, *words))
    for bad in (V, -1, -99, 10**9):
        words = (f"target {bad} at position (1,)", "outside the vocabulary", "ignore_index")
        call = partial(criterion, logits(3, V), torch.tensor([1, bad, 2]))
        cases.append(raises(f"{name}: a target of {bad}", call, IndexError, *words))
    return cases


NO_NUMBERS = values(
    "it must be a finite number at least 0 and below 1",
    none=None, text="0.1", a_bool=True, complex=0.1j, a_list=[0.1], a_tensor=torch.tensor(0.1),
)  # fmt: skip
OUT_OF_RANGE = values(
    "it must be a finite number at least 0 and below 1",
    nan=float("nan"), infinite=float("inf"), below_0=-0.1, one=1.0, huge=10**400,
)  # fmt: skip
NO_CONVENTION = values(
    "is {value}; it must be 'torch', 'fairseq'", none=None, a_number=3, capital="Torch", empty="", a_list=["torch"]
)
NO_INDEX = values("it must be an int", text="0", a_float=1.5, a_bool=True, a_list=[0], pad_token_id_None=None)


def _settings() -> list[Case]:
    cases = refused(
        "LabelSmoothing", lambda x: seqpar.LabelSmoothing(x, "torch"), "label_smoothing", NO_NUMBERS, TypeError
    )
    cases += refused(
        "LabelSmoothing", lambda x: seqpar.LabelSmoothing(x, "torch"), "label_smoothing", OUT_OF_RANGE, ValueError
    )
    cases += refused("LabelSmoothing", lambda x: seqpar.LabelSmoothing(0.1, x), "convention", NO_CONVENTION, ValueError)
    cases += refused(
        "LabelSmoothing",
        lambda x: seqpar.LabelSmoothing(0.1, "torch", ignore_index=x),
        "ignore_index",
        NO_INDEX,
        TypeError,
    )
    cases += refused("CrossEntropy", lambda x: seqpar.CrossEntropy(ignore_index=x), "ignore_index", NO_INDEX, TypeError)
    for padding, classes, words in (
        (-100, V, "ignore_index is -100; the 'harvard' convention"),
        (0, 2, "2 classes are too few"),
    ):
        call = partial(seqpar.LabelSmoothing(0.1, "harvard", ignore_index=padding), logits(1, classes), targets(1))
        cases.append(raises(f"harvard: padding {padding} of {classes}", call, ValueError, words))
    return cases


CASES = [
    *_equal(),
    *_refused("CrossEntropy", seqpar.CrossEntropy()),
    *_refused("LabelSmoothing", seqpar.LabelSmoothing(0.1, "torch")),
    *_settings(),
]

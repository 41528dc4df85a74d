"""`LossCompute` with odd but valid arguments: the plain loss and its gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import seqpar
from tests.seqpar.public_edge.case import Case, Equals
from tests.seqpar.public_edge.criteria_table import V, targets
from tests.seqpar.public_edge.engine_table import D, Own, hidden
from tests.seqpar.published import Smoothing


class Pair(NamedTuple):
    """A generator, our criterion and the plain one."""

    generator: Callable[[], nn.Module]
    criterion: Callable[[], nn.Module]
    plain: Callable[[], nn.Module]


def _weighted() -> nn.Module:
    weight = torch.linspace(0.5, 2, V, dtype=torch.float64)
    return nn.CrossEntropyLoss(weight, ignore_index=0, label_smoothing=0.1, reduction="sum")


PAIRS = {
    "Linear, CrossEntropy": Pair(
        lambda: nn.Linear(D, V), lambda: seqpar.CrossEntropy(ignore_index=0), lambda: Smoothing(0.0, "torch", 0)
    ),
    "Linear, nn.CrossEntropyLoss": Pair(lambda: nn.Linear(D, V, bias=False), _weighted, _weighted),
    "LogSoftmax, LabelSmoothing": Pair(
        lambda: nn.Sequential(nn.Linear(D, V), nn.LogSoftmax(-1)),
        lambda: seqpar.LabelSmoothing(0.1, "harvard", ignore_index=0),
        lambda: Smoothing(0.1, "harvard", 0),
    ),
    "a module, LabelSmoothing": Pair(
        Own, lambda: seqpar.LabelSmoothing(0.1, "fairseq", ignore_index=0), lambda: Smoothing(0.1, "fairseq", 0)
    ),
}


class Batch(NamedTuple):
    """A batch and how the engine is made and called; `given` is what it is called with where that is not hidden."""

    hidden: Tensor
    target: Tensor
    options: dict[str, Any] = {}  # noqa: RUF012
    call: dict[str, Any] = {}  # noqa: RUF012
    given: Callable[[Tensor, Tensor], tuple[Any, Any]] = lambda h, t: (h, t)
    frozen: str = ""


def padded(*lead: int) -> Tensor:
    """Targets of which a third is padding, 0."""
    target = targets(*lead)
    target.view(-1)[::3] = 0
    return target


THREE = ["cpu"] * 3
BATCHES: dict[str, Callable[[], Batch]] = {
    "no rows": lambda: Batch(hidden(0), targets(0)),
    "no sequences": lambda: Batch(hidden(0, 3), targets(0, 3)),
    "no time": lambda: Batch(hidden(3, 0), targets(3, 0)),
    "no time on three devices": lambda: Batch(hidden(3, 0), targets(3, 0), {"devices": THREE}),
    "one row": lambda: Batch(hidden(1), targets(1)),
    "one time step": lambda: Batch(hidden(5, 1), targets(5, 1)),
    "nothing kept": lambda: Batch(hidden(3, 4), torch.zeros(3, 4, dtype=torch.int64)),
    "one kept": lambda: Batch(hidden(6), torch.tensor([0, 0, 0, 5, 0, 0])),
    "the last sequence all padding": lambda: Batch(hidden(2, 3), torch.tensor([[1, 2, 3], [0, 0, 0]])),
    "an int32 target": lambda: Batch(hidden(2, 3), padded(2, 3).int()),
    "an int8 target": lambda: Batch(hidden(2, 3), padded(2, 3).to(torch.int8)),
    "a uint8 target": lambda: Batch(hidden(2, 3), padded(2, 3).byte()),
    "time first": lambda: Batch(hidden(4, 3).transpose(0, 1), padded(4, 3).t()),
    "every second feature": lambda: Batch(hidden(12).view(6, 2 * D)[:, ::2], padded(6)),
    "expanded": lambda: Batch(hidden(1, 3).expand(4, 3, D), padded(1, 3).expand(4, 3)),
    "four dimensions": lambda: Batch(hidden(2, 3, 2), padded(2, 3, 2)),
    "one row a chunk": lambda: Batch(hidden(2, 5), padded(2, 5), {"chunk_tokens": 1}),
    "one time step a chunk": lambda: Batch(hidden(2, 5), padded(2, 5), {"chunk_size": 1}),
    "more time steps a chunk than there are": lambda: Batch(hidden(2, 5), padded(2, 5), {"chunk_size": 99}),
    "more devices than sequences": lambda: Batch(hidden(2, 5), padded(2, 5), {"devices": THREE}),
    "time steps on three devices": lambda: Batch(hidden(4, 5), padded(4, 5), {"devices": THREE, "chunk_size": 2}),
    "scattered": lambda: Batch(hidden(4, 5), padded(4, 5), given=lambda h, t: (list(h.split(3)), t)),
    "both scattered": lambda: Batch(hidden(4, 5), padded(4, 5), given=lambda h, t: (h.split(3), t.split(3))),
    "scattered with an empty one": lambda: Batch(hidden(4), padded(4), given=lambda h, t: ([h, h[:0]], t)),
    "a loss scale": lambda: Batch(hidden(6), padded(6), call={"loss_scale": 1024}),
    "a negative loss scale": lambda: Batch(hidden(6), padded(6), {"chunk_tokens": 2}, {"loss_scale": -0.5}),
    "a tensor as loss scale": lambda: Batch(hidden(6), padded(6), call={"loss_scale": torch.tensor([8.0])}),
    "a keyword that is None": lambda: Batch(hidden(6), padded(6), call={"extra": None}),
    "a frozen trunk": lambda: Batch(hidden(6), padded(6), frozen="hidden"),
    "a frozen generator": lambda: Batch(hidden(6), padded(6), frozen="generator"),
}


def _loss_and_gradients(
    generator: nn.Module, batch: Batch, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, ...]:
    rows = batch.hidden.detach().requires_grad_(batch.frozen != "hidden")
    parameters = [p.requires_grad_(batch.frozen != "generator") for p in generator.parameters()]
    leaves = [t for t in (rows, *parameters) if t.requires_grad]
    total = loss(rows, batch.target)
    return total.detach(), *torch.autograd.grad(3 * total, leaves)


def _ours(pair: Pair, make: Callable[[], Batch]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    generator, batch = pair.generator().double(), make()
    engine = seqpar.LossCompute(generator, pair.criterion(), **batch.options)
    return _loss_and_gradients(generator, batch, lambda h, t: engine(*batch.given(h, t), **batch.call).total)


def _plain(pair: Pair, make: Callable[[], Batch]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    generator, criterion, batch = pair.generator().double(), pair.plain(), make()
    return _loss_and_gradients(
        generator, batch, lambda h, t: criterion(generator(h).flatten(0, -2), t.long().flatten())
    )


def _evaluated(mode: Callable[[], Any], pair: Pair) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    engine = seqpar.LossCompute(pair.generator().double(), pair.criterion(), chunk_tokens=4).eval()
    with mode():
        loss = engine(hidden(3, 5), padded(3, 5))
    assert not loss.total.requires_grad
    return loss.total.clone(), loss.tokens.clone()


def _evaluated_plainly(pair: Pair) -> tuple[Tensor, ...]:
    return _plain(pair, lambda: Batch(hidden(3, 5), padded(3, 5)))[0], torch.tensor(10)


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
}


def _tied(pair: Pair, engine: bool) -> tuple[Tensor, ...]:
    """The generator's weight is the embedding that hidden comes from as well."""
    torch.manual_seed(0)
    generator, target = pair.generator().double(), padded(3, 5)
    weight = next(p for p in generator.parameters() if p.dim() == 2)
    rows = nn.functional.embedding(torch.arange(15).view(3, 5) % V, weight)
    if engine:
        total = seqpar.LossCompute(generator, pair.criterion(), chunk_tokens=4)(rows, target).total
    else:
        total = pair.plain()(generator(rows).flatten(0, -2), target.flatten())
    return total.detach(), *torch.autograd.grad(total, list(generator.parameters()))


def _autocast(pair: Pair, make: Callable[[], Batch]) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _ours(pair, make)


def _cases(name: str, pair: Pair) -> list[Case]:
    cases = []
    for label, make in BATCHES.items():
        cases.append(Case(f"{name}: {label}", partial(_ours, pair, make), Equals(partial(_plain, pair, make))))
    for label, mode in MODES.items():
        answer = Equals(partial(_evaluated_plainly, pair))
        cases.append(Case(f"{name}: {label}", partial(_evaluated, mode, pair), answer))
    make = BATCHES["one row a chunk"]
    answer = Equals(partial(_plain, pair, make))
    cases.append(Case(f"{name}: autocast, which leaves float64", partial(_autocast, pair, make), answer))
    cases.append(Case(f"{name}: tied", partial(_tied, pair, True), Equals(partial(_tied, pair, False))))
    return cases


CASES = [case for name, pair in PAIRS.items() for case in _cases(name, pair)]

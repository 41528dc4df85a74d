"""Draw a training step for the ranks of a layout, and compute its loss and gradients plainly in one process.

Shape suffixes: B batch, t this rank's time steps, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.torch_version import TorchVersion

from conformance.adapter import call_of
from conformance.layout_adapter import LAYOUTS, ROWS, Row, Work
from conformance.layout_experts import Experts
from seqpar.distributed.collectives import sum_from_group

SHAPE = (2, 3)
"""Number of sentences and time steps of a micro-batch on one rank."""
WIDTH = 4
IGNORED = -100
UNTIED = ("layers", "halves of layers", "time and classes", "DTensor classes")
"""Where the embedding and the generator are on different ranks, or are divided in different ways."""


Batch = tuple[Tensor, Tensor]
"""Tokens and target, (B, t) each."""


class Answer(NamedTuple):
    """The mean loss of a step, and its gradients by the names of the parameters."""

    loss: float
    """nan if none was returned."""
    gradients: dict[str, Tensor]


class Model(nn.Module):
    """A tiny decoder without context: an embedding, layers, and a generator."""

    def __init__(self, vocab_size: int, layers: int, tied: bool, has_experts: bool = False) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Embedding(vocab_size, WIDTH)
        kind = Experts if has_experts else functools.partial(nn.Linear, WIDTH)
        self.layers = nn.ModuleList(kind(WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    @property
    def experts(self) -> Experts:
        """Return the layer of experts, if it has one."""
        (layer,) = self.layers
        assert isinstance(layer, Experts)
        return layer

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


class SplitEmbedding(nn.Module):
    """An embedding that shares a rank's rows of the generator's weight, and is summed over the ranks."""

    def __init__(self, weight: Tensor, start: int, group: Any) -> None:
        super().__init__()
        self.weight, self.start, self.group = weight, start, group

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        here = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(here, 0), self.weight) * here.unsqueeze(-1)
        return sum_from_group(rows, self.group)


class Stage(nn.Module):
    """A stage of a pipeline."""

    def __init__(self, model: Model, number: int, count: int) -> None:
        super().__init__()
        if number == 0:
            self.embed = model.embed
        if number < count - 1:
            self.layer = model.layers[number]
        else:
            self.head = model.head

    def forward(self, hidden: Tensor) -> Tensor:
        if hasattr(self, "embed"):
            hidden = self.embed(hidden)
        # The last stage returns its input as hidden states; as a view, since a stage must not return its input itself
        if hasattr(self, "head"):
            return hidden.view_as(hidden)
        return torch.tanh(self.layer(hidden))


@dataclass(frozen=True)
class Case:
    """One training step over the ranks of a layout."""

    layout: str
    ranks: int
    tokens: tuple[tuple[int, ...], ...]
    """How many targets count in each micro-batch, at most 6, for each of the ranks with different tokens."""
    vocab_size: int = 8
    tied: bool = False
    frozen_head: bool = False
    few_classes: bool = False
    """Whether all targets are among the first rank's classes."""
    whole_head: bool = False
    """Whether every rank of a split vocabulary has the whole generator, as if its logits had been gathered."""
    label_smoothing: float = 0.0
    loss_scale: float = 1.0
    reduction: str = "sum"
    groups: int = 1
    """How many groups of ranks there are, each with its own step; with 2, a group is not the world."""
    seed: int = 0

    __repr__ = call_of

    @property
    def row(self) -> Row:
        """Return how the ranks divide the step among them."""
        return ROWS[self.layout]

    @property
    def inner(self) -> int:
        """Return the number of ranks that have the same tokens."""
        return self.ranks // self.groups // len(self.tokens)

    @property
    def count(self) -> int:
        """Return how many of the step's targets count."""
        return sum(map(sum, self.tokens[: self.staying]))

    @property
    def near(self) -> int:
        """Return the number of neighbours with different tokens."""
        return len(self.tokens) // self.row.outer

    @property
    def staying(self) -> int:
        """Return how many of the ranks with different tokens stay until the step is over."""
        return len(self.tokens) - self.row.loses_one

    @property
    def stage_count(self) -> int:
        """Return the number of pipeline stages."""
        return {"layers": self.inner, "halves of layers": 2 * self.inner}.get(self.row.inner, 0)

    def model(self, group: int = 0) -> Model:
        """Return the same model wherever it is called."""
        layers = max(1, self.stage_count - 1)
        # On the CPU, and without changing the random state of accelerators
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(self.seed + 7919 * group)
            model = Model(self.vocab_size, layers, self.tied, self.row.inner == "experts").double()
        model.head.requires_grad_(not self.frozen_head)
        return model

    def part(self, group: int, place: int) -> list[Batch]:
        """Return the micro-batches of the rank at a place among those with different tokens."""
        made = []
        for index, count in enumerate(self.tokens[place]):
            g = torch.Generator().manual_seed(1_000_003 * group + 997 * self.seed + 31 * place + index)
            highest = self.vocab_size
            if self.few_classes:
                highest = self.rows_of(0)[1]
            tokens = torch.randint(self.vocab_size, SHAPE, generator=g)
            target = torch.randint(highest, SHAPE, generator=g).flatten()
            target[torch.randperm(len(target), generator=g)[count:]] = IGNORED
            made.append((tokens, target.view(SHAPE)))
        return made

    def parts(self, group: int) -> list[list[Batch]]:
        """Return the micro-batches of all ranks with different tokens."""
        return [self.part(group, place) for place in range(len(self.tokens))]

    def rows_of(self, place: int) -> tuple[int, int]:
        """Return a rank's first class and the one after its last: even parts, rounded up, as DTensor divides them."""
        most = -(-self.vocab_size // self.inner)
        return min(place * most, self.vocab_size), min((place + 1) * most, self.vocab_size)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the plain summed loss."""
        eps = self.label_smoothing
        return F.cross_entropy(logits.flatten(0, -2), target.flatten(), label_smoothing=eps, reduction="sum")

    def summed(self, model: Model, batches: Sequence[Batch], auxiliary: float = 1.0) -> Tensor:
        """Return the plain summed loss of micro-batches, plus `auxiliary` times the router's loss of all together."""
        if self.row.inner != "experts":
            losses = [self.loss(model.head(model(tokens)), target) for tokens, target in batches]
            return torch.stack(losses).sum()
        # One batch, because the router's loss is defined over the whole step
        tokens, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
        total = self.loss(model.head(model(tokens)), target)
        of_router = model.experts.auxiliary(target.numel(), None)
        return total + auxiliary * of_router * max(1, self.count)

    def right(self, group: int = 0) -> Answer:
        """Return the plain loss's mean over all tokens, in one process and in float64, and its gradients."""
        model = self.model(group)
        batches = [batch for part in self.parts(group)[: self.staying] for batch in part]
        loss = self.summed(model, batches) / max(1, self.count)
        return Answer(float(loss.detach()), gradients(loss * self.loss_scale, model))

    def work(self, rank: int) -> tuple[Work, nn.Module]:
        """Return what a rank is given, and the model whose gradients are compared; every rank must call this."""
        data, inner = len(self.tokens), self.inner
        group, place, inner_place = rank // (data * inner), rank // inner % data, rank % inner
        model = self.model(group)
        given = self._groups()
        if self.stage_count:
            numbers = {inner_place, *([self.stage_count - 1 - inner_place] if self.stage_count > inner else [])}
            given["stages"] = {number: Stage(model, number, self.stage_count) for number in sorted(numbers)}
            given["stage_count"] = self.stage_count
        if self.row.inner == "experts":
            model.experts.keep_own(given["expert_group"])
        if self.row.splits_classes:
            first, end = self.rows_of(inner_place)
            given["start"] = first
            if not self.whole_head:
                whole = model.head.weight
                model.head.weight = nn.Parameter(whole.detach()[first:end].clone(), whole.requires_grad)
                model.head.out_features = end - first
            if self.tied:
                model.embed = SplitEmbedding(model.head.weight, first, given["vocab_group"])
        given |= {"label_smoothing": self.label_smoothing, "loss_scale": self.loss_scale, "reduction": self.reduction}
        return Work(self.layout, model, self.part(group, place), self.vocab_size, **given), model

    def _groups(self) -> dict[str, Any]:
        """Return the groups of this rank, by their names in `Work`."""
        groups, data, inner = self.groups, len(self.tokens), self.inner
        given: dict[str, Any] = {}
        lines = _mesh(("groups", groups), ("tokens", data), ("inner", inner))
        if data > 1:
            outer = self.row.outer
            rows = _mesh(("groups", groups), ("outer", outer), ("near", data // outer), ("inner", inner))
            given = {"token_group": lines.get_group("tokens"), "token_mesh": rows["outer", "near"]}
            given["sequence_group" if self.row.is_time else "data_group"] = rows.get_group("near")
            if self.row.is_time and outer > 1:
                given["data_group"] = rows.get_group("outer")
            if not self.row.is_time:
                given["data_group"] = given["token_group"]
            if self.row.inner == "experts":
                given |= {"expert_group": rows.get_group("near"), "data_group": rows.get_group("outer")}
        if self.row.loses_one:
            given["survivors"] = functools.partial(_still_there, data, inner, groups)
        if inner > 1:
            given["pipeline_group" if self.stage_count else "vocab_group"] = lines.get_group("inner")
        return given


class GoneError(Exception):
    """This rank goes away."""


def _still_there(data: int, inner: int, groups: int) -> ProcessGroup:
    """Return this rank's group without its last rank, on which GoneError is raised instead."""
    mine: ProcessGroup | None = None
    rank = dist.get_rank()
    for group in range(groups):
        there = [group * data * inner + place for place in range(data - 1)]
        made = _group(tuple(there))
        mine = made if rank in there else mine
    if mine is None:
        raise GoneError
    return mine


@functools.cache
def _group(members: tuple[int, ...]) -> ProcessGroup:
    """Return the group of some ranks; every rank must call this."""
    return dist.new_group([*members])  # type: ignore[no-any-return]


@functools.cache
def _mesh(*sizes: tuple[str, int]) -> DeviceMesh:
    """Return the ranks as a mesh, which is made once on each rank."""
    names, shape = zip(*sizes, strict=True)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a loss by the names of the trained parameters."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def cases(layout: str, seed: int = 0) -> dict[str, list[Case]]:
    """Return the cases of a layout by name, those over fewer ranks first."""
    made: dict[str, list[Case]] = {}
    # In older torch these schedules cannot go through an autograd.Function
    if layout == "zero bubble" and TorchVersion(torch.__version__) < "2.13":
        return made
    for ranks, data in ROWS[layout].sizes:
        for name, case in _over(layout, ranks, data, seed):
            made.setdefault(name, []).append(case)
    return made


def _over(layout: str, ranks: int, data: int, seed: int) -> Iterator[tuple[str, Case]]:
    """Yield the cases of a layout over this many ranks, of which `data` have different tokens."""
    row = ROWS[layout]
    g = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1, 7, (data, row.micro_batches), generator=g)
    # At least two that differ, whatever was drawn; 5 if there is only one micro-batch
    drawn[-1, -1] = 2
    drawn[0, 0] = 5
    groups = ranks if row.is_alone else 1
    unequal = Case(layout, ranks, tuple(map(tuple, drawn.tolist())), groups=groups, seed=seed)
    yield "unequal tokens", unequal
    if data > 1:
        drawn[-1] = 0
        yield "a rank without tokens", replace(unequal, tokens=tuple(map(tuple, drawn.tolist())))
        drawn[:-1], drawn[-1, -1] = 6, 1
        yield "padding on one rank only", replace(unequal, tokens=tuple(map(tuple, drawn.tolist())))
    elif row.micro_batches > 1:
        drawn[0, 0] = 0
        yield "a micro-batch without tokens", replace(unequal, tokens=tuple(map(tuple, drawn.tolist())))
    yield "frozen head", replace(unequal, frozen_head=True)
    yield "loss scale", replace(unequal, loss_scale=1024.0)
    yield "label smoothing", replace(unequal, label_smoothing=0.1)
    if row.inner not in UNTIED:
        yield "tied weights", replace(unequal, tied=True)
    if row.splits_classes:
        yield "a rank without the targets' classes", replace(unequal, few_classes=True)
    if row.splits_classes and row.inner != "DTensor classes":
        yield "odd vocabulary", replace(unequal, vocab_size=7)
    if row.inner == "classes":
        yield "the whole head passed as a shard", replace(unequal, whole_head=True, few_classes=True)
    if layout == "data parallel":
        yield "mean differentiated", replace(unequal, reduction="mean")
    if ranks == 4 and row.sizes[0][0] == 2 and not row.is_alone:
        half = next(_over(layout, *row.sizes[0], seed))[1]
        yield "a group that is not the world", replace(half, ranks=4, groups=2)


NEEDS: Mapping[str, str] = {
    "label smoothing": "smoothing",
    "odd vocabulary": "uneven vocabulary",
    "mean differentiated": "mean",
}
"""The feature that a case needs besides its layout."""
MAY_RAISE = ("the whole head passed as a shard", "mean differentiated")
"""The cases in which an error is the right response, because a number could hardly be right."""
NAMES: dict[str, tuple[str, ...]] = {layout: tuple(cases(layout)) for layout in LAYOUTS}
"""The names of the cases of each layout."""

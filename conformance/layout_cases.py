"""Draw a training step for the ranks of a layout, and compute its loss and gradients in one process, plainly.

Shape suffixes: B batch, t this rank's time steps, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance.layout_adapter import LAYOUTS, Layout, Work
from seqpar.distributed.collectives import sum_from_group

SHAPE = (2, 3)
"""Sentences and time steps of a micro-batch on one rank."""
WIDTH = 4
MICRO_BATCHES = {"accumulation": 3, "pipeline": 4}
SPLIT = ("split vocabulary", "data x vocabulary")
IGNORED = -100


class Answer(NamedTuple):
    """The mean loss of a step, and its gradients by the names of the parameters."""

    loss: float
    """Not a number where none was returned."""
    gradients: dict[str, Tensor]


class Model(nn.Module):
    """A decoder in small, of one token each: an embedding, layers, and a generator."""

    def __init__(self, vocab_size: int, layers: int, tied: bool) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Embedding(vocab_size, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


class SplitEmbedding(nn.Module):
    """An embedding of the classes that a rank has, the same parameter as its generator's, summed over the ranks."""

    def __init__(self, weight: Tensor, start: int, group: Any) -> None:
        super().__init__()
        self.weight, self.start, self.group = weight, start, group

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        here = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(here, 0), self.weight) * here.unsqueeze(-1)
        return sum_from_group(rows, self.group)


class Stage(nn.Module):
    """The layers of one rank of a pipeline."""

    def __init__(self, model: Model, rank: int, ranks: int) -> None:
        super().__init__()
        if rank == 0:
            self.embed = model.embed
        if rank < ranks - 1:
            self.layer = model.layers[rank]
        else:
            self.head = model.head

    def forward(self, hidden: Tensor) -> Tensor:
        if hasattr(self, "embed"):
            hidden = self.embed(hidden)
        # The last one hands its input on as hidden states; a view, because a stage must not return its input itself
        if hasattr(self, "head"):
            return hidden.view_as(hidden)
        return torch.tanh(self.layer(hidden))


@dataclass(frozen=True)
class Case:
    """One training step over the ranks of a layout."""

    layout: Layout
    ranks: int
    tokens: tuple[tuple[int, ...], ...]
    """How many targets count, for each rank that has other tokens, in each of its micro-batches; 6 at most."""
    vocab_size: int = 8
    tied: bool = False
    frozen_head: bool = False
    few_classes: bool = False
    """All targets are in the first rank's classes."""
    whole_head: bool = False
    """Every rank of a split vocabulary has the whole generator, as if its logits had been gathered."""
    label_smoothing: float = 0.0
    loss_scale: float = 1.0
    reduction: str = "sum"
    groups: int = 1
    """How many groups of ranks have a step of their own; with 2, the group is not the world."""
    seed: int = 0

    @property
    def mesh(self) -> tuple[int, int, int]:
        """Return the sizes of groups x ranks with other tokens x ranks with other classes or layers."""
        return self.groups, len(self.tokens), self.ranks // self.groups // len(self.tokens)

    @property
    def inner(self) -> int:
        """Return the number of ranks that have the same tokens."""
        return self.mesh[2]

    @property
    def count(self) -> int:
        """Return the number of the step's targets that count."""
        return sum(map(sum, self.tokens))

    def model(self, group: int = 0) -> Model:
        """Return the same model wherever it is called."""
        layers = 1
        if self.layout == "pipeline":
            layers = self.ranks // self.groups - 1
        # On the CPU, and without a change to the random numbers of accelerators
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(self.seed + 7919 * group)
            model = Model(self.vocab_size, layers, self.tied).double()
        model.head.requires_grad_(not self.frozen_head)
        return model

    def part(self, group: int, place: int) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of the rank at a place among those that have other tokens."""
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

    def parts(self, group: int) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the micro-batches of all ranks that have other tokens."""
        return [self.part(group, place) for place in range(len(self.tokens))]

    def rows_of(self, place: int) -> tuple[int, int]:
        """Return the first class of a rank and the one after its last: even parts, rounded up, as DTensor's."""
        most = -(-self.vocab_size // self.inner)
        return min(place * most, self.vocab_size), min((place + 1) * most, self.vocab_size)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the plain summed loss."""
        eps = self.label_smoothing
        return F.cross_entropy(logits.flatten(0, -2), target.flatten(), label_smoothing=eps, reduction="sum")

    def right(self, group: int = 0) -> Answer:
        """Return the mean of the plain loss of all tokens in one process, in float64, and its gradients."""
        model = self.model(group)
        batches = [batch for part in self.parts(group) for batch in part]
        total = torch.stack([self.loss(model.head(model(tokens)), target) for tokens, target in batches]).sum()
        loss = total / max(1, self.count)
        return Answer(float(loss.detach()), gradients(loss * self.loss_scale, model))

    def work(self, rank: int) -> tuple[Work, nn.Module]:
        """Return what a rank is given, and the model whose gradients are asked for; every rank must call it."""
        groups, data, inner = self.mesh
        group, place, inner_place = rank // (data * inner), rank // inner % data, rank % inner
        mesh = _mesh(groups, data, inner)
        model = self.model(group)
        given: dict[str, Any] = {}
        if data > 1:
            name = "sequence_group" if self.layout == "split sequence" else "data_group"
            given[name] = mesh.get_group("data")
        if self.layout == "pipeline":
            given |= {"pipeline_group": mesh.get_group("inner"), "stage": Stage(model, inner_place, inner)}
        if self.layout in SPLIT:
            first, end = self.rows_of(inner_place)
            given |= {"vocab_group": mesh.get_group("inner"), "start": first}
            if not self.whole_head:
                whole = model.head.weight
                model.head.weight = nn.Parameter(whole.detach()[first:end].clone(), whole.requires_grad)
                model.head.out_features = end - first
            if self.tied:
                model.embed = SplitEmbedding(model.head.weight, first, given["vocab_group"])
        given |= {"label_smoothing": self.label_smoothing, "loss_scale": self.loss_scale, "reduction": self.reduction}
        return Work(self.layout, model, self.part(group, place), self.vocab_size, **given), model


@functools.cache
def _mesh(*shape: int) -> DeviceMesh:
    """Return the ranks as a mesh, once in each rank."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("groups", "data", "inner"))


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a loss by the names of the trained parameters."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def cases(layout: Layout, seed: int = 0) -> dict[str, list[Case]]:
    """Return the cases of a layout by name, over 2 and over 4 ranks, the fewer first."""
    made: dict[str, list[Case]] = {}
    for ranks in (2, 4):
        for name, case in _over(layout, ranks, seed):
            made.setdefault(name, []).append(case)
    return made


def _over(layout: Layout, ranks: int, seed: int) -> Iterator[tuple[str, Case]]:
    """Yield the cases of a layout over that many ranks."""
    data = {"split vocabulary": 1, "pipeline": 1, "data x vocabulary": ranks // 2}.get(layout, ranks)
    if layout == "data x vocabulary" and ranks < 4:
        return
    micro_batches = MICRO_BATCHES.get(layout, 1)
    g = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1, 7, (data, micro_batches), generator=g)
    # At least two that differ, whatever was drawn; 5 where there is only one micro-batch
    drawn[-1, -1] = 2
    drawn[0, 0] = 5
    unequal = Case(layout, ranks, tuple(map(tuple, drawn.tolist())), seed=seed)
    yield "unequal tokens", unequal
    if data > 1:
        drawn[-1] = 0
        yield "a rank without tokens", replace(unequal, tokens=tuple(map(tuple, drawn.tolist())))
        drawn[:-1], drawn[-1, -1] = 6, 1
        yield "padding on one rank only", replace(unequal, tokens=tuple(map(tuple, drawn.tolist())))
    elif micro_batches > 1:
        drawn[0, 0] = 0
        yield "a micro-batch without tokens", replace(unequal, tokens=tuple(map(tuple, drawn.tolist())))
    yield "frozen head", replace(unequal, frozen_head=True)
    yield "loss scale", replace(unequal, loss_scale=1024.0)
    yield "label smoothing", replace(unequal, label_smoothing=0.1)
    if layout != "pipeline":
        yield "tied weights", replace(unequal, tied=True)
    if layout in SPLIT:
        yield "a rank without the targets' classes", replace(unequal, few_classes=True)
        yield "odd vocabulary", replace(unequal, vocab_size=7)
        yield "the whole head passed as a shard", replace(unequal, whole_head=True, few_classes=True)
    if layout == "data parallel":
        yield "mean differentiated", replace(unequal, reduction="mean")
    if ranks == 4 and layout != "data x vocabulary":
        half = next(_over(layout, 2, seed))[1]
        yield "a group that is not the world", replace(half, ranks=4, groups=2)


NEEDS: Mapping[str, str] = {
    "label smoothing": "smoothing",
    "odd vocabulary": "uneven vocabulary",
    "mean differentiated": "mean",
}
"""The feature that a case needs beside its layout."""
MAY_RAISE = ("the whole head passed as a shard", "mean differentiated")
"""The cases in which an error is right, because a number would hardly be."""
NAMES: dict[Layout, tuple[str, ...]] = {layout: tuple(cases(layout)) for layout in LAYOUTS}
"""The names of the cases of each layout."""

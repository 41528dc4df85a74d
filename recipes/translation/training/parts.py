"""The part of each weight, moment and average that a process has, and how whole tensors are divided and reassembled.

The vocabulary ranks cut a weight by the table in `models.sharding`; FSDP2 then divides the rows of each slice among the
ranks that shard. Only one whole tensor exists at a time: when a run begins, every rank draws it, or receives it from
rank 0, and keeps its part; when a run is saved, rank 0 receives the parts and writes the tensor to a file. A saved run
therefore fits any layout, and no rank needs room for all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import EncoderDecoder
from models.sharding import cut, cut_of, join
from recipes.translation.files.tensors import AskedOnce
from recipes.translation.processes.ranks import Ranks
from recipes.translation.run_folder.checkpoint import SavedModel
from recipes.translation.run_folder.saving import copies
from recipes.translation.run_folder.translator import model_on_meta, model_sizes, tensors_of
from seqpar.core.checks import is_dtensor


class Axes(NamedTuple):
    """The number of processes along each axis of a layout."""

    data: int
    shard: int
    vocab: int


class Parts:
    """How the tensors of a whole model are divided among the ranks, by the names of its parameters.

    Ranks are numbered by (copy, shard, vocab), the last one fastest. The ranks of the first copy save their parts.
    """

    def __init__(self, axes: Axes, ranks: Ranks, model: nn.Module) -> None:
        self.ranks = ranks
        self.shapes = {name: weight.shape for name, weight in model.named_parameters()}
        """The shape of each whole parameter."""
        self.cuts = axes.vocab
        self.shards = axes.shard
        self.mine = divmod(ranks.rank % (self.shards * self.cuts), self.cuts)
        """Which shard of which cut this rank has."""

    def part(self, name: str, whole: Tensor, shard: int, cut_index: int) -> Tensor:
        """Return one rank's part of a whole parameter, or of a moment; it may be a view."""
        if not whole.dim():  # Adam's number of steps, which every rank has
            return whole
        rows = cut(name, whole, cut_index, self.cuts)
        shards = rows.chunk(self.shards)  # as FSDP2 divides rows: the last ranks may have fewer, or none
        if shard < len(shards):
            return shards[shard]
        return rows[:0]

    @torch.no_grad()
    def fill(self, name: str, tensor: Tensor, whole: Tensor) -> None:
        """Copy this rank's part of a whole tensor into its own parameter, moment or average."""
        local_of(tensor).copy_(self.part(name, whole, *self.mine))

    def fill_model(self, model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's part of every whole weight into the model."""
        parameters = dict(model.named_parameters())
        for name, whole in weights:
            self.fill(name, parameters.pop(name), whole)
        assert not parameters, f"without weights: {', '.join(parameters)}"

    def receive(self, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of rank 0's whole tensors into its own; keys are as in `copy_parts`."""
        for key, whole in self.ranks.tensors_of_main(saved, self._describe_whole(own)):
            self.fill(_parameter_of(key), own[key], whole)

    def copy_parts(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy this rank's parts to the CPU; return the whole tensors, which rank 0 receives when it asks for them.

        Every rank must ask for every tensor in its result, in the same order, though only rank 0 gets what it asks for.
        Any rank may do so in a separate thread: nothing else uses the group over which parts are sent while a run
        trains.

        Args:
            tensors: this rank's parameters, or moments as `optimizer/<parameter>/<what>`, or `weights/<parameter>`.
        """
        if self.ranks.world == 1:
            return copies(tensors)
        if self.ranks.rank >= self.shards * self.cuts:
            return AskedOnce({}, tensors.__getitem__)
        described = self._describe_whole(tensors)
        own = {
            key: local_of(tensor).to("cpu", copy=True)
            for key, tensor in tensors.items()
            if self.mine in self._owners(_parameter_of(key), described[key])
        }
        return AskedOnce(described, lambda key: self._gather(_parameter_of(key), described[key], own.pop(key, None)))

    def _describe_whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole tensors that these are parts of, on "meta"."""
        shapes = {key: self.shapes[_parameter_of(key)] if part.dim() else part.shape for key, part in tensors.items()}
        return {key: torch.empty(shapes[key], dtype=part.dtype, device="meta") for key, part in tensors.items()}

    def _owners(self, name: str, whole: Tensor) -> list[tuple[int, int]]:
        """Return the ranks, as (shard, cut), whose distinct parts make up a tensor, cut by cut."""
        shards = self.shards if whole.dim() else 1
        cuts = self.cuts if whole.dim() and cut_of(name) else 1
        return [(shard, cut_index) for cut_index in range(cuts) for shard in range(shards)]

    def _gather(self, name: str, whole: Tensor, own: Tensor | None) -> Tensor:
        """Return a whole tensor on rank 0, assembled from the parts of all ranks, and `whole` elsewhere."""
        if not self.ranks.is_main:
            if own is not None and own.numel():
                dist.send(own.contiguous(), 0, group=self.ranks.group)
            return whole
        assert own is not None  # rank 0 has a part of everything
        slices: list[list[Tensor]] = []
        for shard, cut_index in self._owners(name, whole):
            if shard == 0:
                slices.append([])
            part = own
            if (shard, cut_index) != self.mine:
                part = torch.empty(self.part(name, whole, shard, cut_index).shape, dtype=whole.dtype)
                if part.numel():
                    dist.recv(part, shard * self.cuts + cut_index, group=self.ranks.group)
            slices[-1].append(part)
        if not whole.dim():
            return own
        return join(name, [torch.cat(rows) if len(rows) > 1 else rows[0] for rows in slices])


class OpenedModel(NamedTuple):
    """A saved model on every rank, before memory is allocated for it."""

    saved: SavedModel
    """Only rank 0 has its weights."""
    model: EncoderDecoder
    """On the device "meta"."""
    weights: Iterator[tuple[str, Tensor]]
    """Each weight of the model, whole, produced when asked for; every rank must ask for all of them."""


def open_model(read: Callable[[], SavedModel], ranks: Ranks, dtype: torch.dtype = torch.float32) -> OpenedModel:
    """Return the model that `read` opens on rank 0, with weights in this dtype."""
    mine = ranks.run_on_all(lambda: read() if ranks.is_main else None)
    shared = ranks.run_on_main(lambda: mine and replace(mine, weights={}))
    saved = mine or shared
    assert saved is not None
    model = model_on_meta(model_sizes(saved.config.model), saved.source, saved.target).to(dtype)
    return OpenedModel(saved, model, ranks.tensors_of_main(saved.weights, tensors_of(model)))


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a parameter, or of a tensor like it, that is in this rank's memory."""
    tensor = tensor.detach()
    if is_dtensor(tensor):
        return tensor.to_local()  # type: ignore[attr-defined, no-any-return]
    return tensor


def _parameter_of(key: str) -> str:
    """Return the parameter that a key in a file of weights or moments refers to."""
    first, *rest = key.split("/")
    return rest[0] if rest else first

"""The part of each weight, moment and average that a process has, and how whole tensors are divided and reassembled.

The vocabulary ranks cut a weight by the table in `models.sharding`; FSDP2 then divides the rows of each slice among the
ranks that shard. Only one whole tensor exists at a time: when a run begins, every rank draws it, or receives it from
rank 0, and keeps its part; when a run is saved, rank 0 receives the parts and writes the tensor to a file. A saved run
therefore fits any layout, and no rank needs room for all of it.

FSDP2's units are each layer and everything outside them. In training every rank calls every layer equally often. In a
validation it does not: one rank may have more batches than another, and one search more steps. So before each layer the
ranks tell each other which one they need next. All of them gather the earliest of these, even those that then drop it;
a rank that needs a later one asks again. A rank that has finished keeps helping until all have. As the earliest layer
goes first, ranks in different places soon fall into step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from models import EncoderDecoder
from models.sharding import cut, cut_of, join
from models.transformer import Layer, allocate
from recipes.translation.files.tensors import AskedOnce
from recipes.translation.processes.ranks import Ranks
from recipes.translation.run_folder.checkpoint import SavedModel
from recipes.translation.run_folder.saving import copies
from recipes.translation.run_folder.translator import model_on_meta, model_sizes, tensors_of
from seqpar.core.checks import is_dtensor
from seqpar.distributed.collectives import gather_numbers
from seqpar.distributed.torch_private import forget_forwards, take_for_root

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


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
    saved = ranks.share(read, lambda saved: replace(saved, weights={}))
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


def shard_module(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module a unit of FSDP2, over a mesh."""
    # Importing FSDP2 takes a second, which most runs need not spend
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh)


def unshard(unit: nn.Module) -> None:
    """Gather the weights of a unit."""
    cast("FSDPModule", unit).unshard()


def reshard(unit: nn.Module) -> None:
    """Free the weights of a unit, except this rank's rows."""
    cast("FSDPModule", unit).reshard()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of encoder and decoder, in the order in which they are called."""
    return [module for module in model.modules() if isinstance(module, Layer)]


def shard_layers(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard the layers of a model that is on "meta", and give memory to this rank's rows."""
    for layer in layers_of(model):
        allocate(layer, device)  # the next line frees all but this rank's rows
        shard_module(layer, mesh)


def fill(opened: OpenedModel, axes: Axes, ranks: Ranks, mesh: DeviceMesh | None, device: torch.device) -> None:
    """Allocate a model and fill it with its weights: all of it or, over a mesh, only this rank's rows."""
    parts = Parts(axes, ranks, opened.model)
    if mesh is not None:
        shard_layers(opened.model, mesh, device)
    allocate(opened.model, device)
    if mesh is not None:
        shard_module(opened.model, mesh)
    parts.fill_model(opened.model, opened.weights)


@contextmanager
def gather_together(roots: Sequence[nn.Module], group: ProcessGroup) -> Iterator[Callable[[], None]]:
    """Within the block, let each rank call the layers of one or several models as often as it needs them.

    There are no gradients. `roots` has one module for each model; whatever is in it but in none of the layers stays
    gathered throughout: the embeddings and the generator, which every step needs. Every rank of the group must enter
    and leave the block, and call the function that it yields before any other collective; it returns when all have
    called it. If one rank leaves because of an error, the others wait until they hear that it has ended.
    """
    layers = [layer for root in roots for layer in layers_of(root)]

    def wait_for_turn(number: int) -> None:
        """Help to gather the layers that others need first, until layer `number` is the next to be gathered."""
        while (turn := min(wanted for (wanted,) in gather_numbers([number], group))) != number:
            unshard(layers[turn])
            reshard(layers[turn])

    with torch.no_grad():
        for root in roots:
            take_for_root(root)
            unshard(root)
        hooks = []
        for number, layer in enumerate(layers):
            turn = partial(wait_for_turn, number)
            # Before the layer's own hook, which gathers it
            hooks.append(layer.register_forward_pre_hook(lambda *_, turn=turn: turn(), prepend=True))
        try:
            yield partial(wait_for_turn, len(layers))
            wait_for_turn(len(layers))
        finally:
            for hook in hooks:
                hook.remove()
            for root in roots:
                reshard(root)
                # In backward, FSDP2 prefetches by the order of forward calls, which differ between the ranks here
                forget_forwards(root)

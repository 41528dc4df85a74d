"""The units of a model that FSDP2 shards, each layer and everything outside them, and how ranks gather layers together.

In training every rank calls every layer equally often. In a validation it does not: one rank may have more batches than
another, and one search more steps. So before each layer the ranks tell each other which one they need next. All of them
gather the earliest of these, even those that then drop it; a rank that needs a later one asks again. A rank that has
finished keeps helping until all have. As the earliest layer goes first, ranks in different places soon fall into step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from models.transformer import Layer, allocate
from recipes.translation.processes.ranks import Ranks
from recipes.translation.training.parts import Axes, OpenedModel, Parts
from seqpar.distributed.collectives import gather_numbers
from seqpar.distributed.torch_private import forget_forwards, take_for_root

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


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

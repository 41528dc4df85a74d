"""The units of a model that FSDP2 shards: each layer, and what is in none of them; how ranks gather layers together.

In training every rank calls every layer as often as the others. In a validation it does not: a rank has more batches
than another, and a search more steps. So before each layer the ranks say which one they need next. The first of these
is gathered by all, also by those that will drop it; who needs a later one asks again. A rank that has finished goes on
until all have. As the earliest layer goes first, ranks that are in different places soon take their steps together.
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
    # Importing FSDP2 takes a second, which most runs need not wait for
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh)


def unshard(unit: nn.Module) -> None:
    """Gather the weights of a unit."""
    cast("FSDPModule", unit).unshard()


def reshard(unit: nn.Module) -> None:
    """Free the weights of a unit, but for this rank's rows."""
    cast("FSDPModule", unit).reshard()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of encoder and decoder, in the order in which they are called."""
    return [module for module in model.modules() if isinstance(module, Layer)]


def shard_layers(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard the layers of a model that is on "meta", and give memory to this rank's rows."""
    for layer in layers_of(model):
        allocate(layer, device)  # and, by the next line, freed but for this rank's rows
        shard_module(layer, mesh)


def fill(opened: OpenedModel, axes: Axes, ranks: Ranks, mesh: DeviceMesh | None, device: torch.device) -> None:
    """Give memory to a model and its weights to it: to all of it or, over a mesh, to this rank's rows."""
    parts = Parts(axes, ranks, opened.model)
    if mesh is not None:
        shard_layers(opened.model, mesh, device)
    allocate(opened.model, device)
    if mesh is not None:
        shard_module(opened.model, mesh)
    parts.fill_model(opened.model, opened.weights)


@contextmanager
def gather_together(roots: Sequence[nn.Module], group: ProcessGroup) -> Iterator[Callable[[], None]]:
    """Within the block, let each rank call the layers of one model or several as often as it needs them.

    There are no gradients. What is in `roots`, one of each model, but in none of the layers is gathered throughout: the
    embeddings and the generator, which every step needs. Every rank of the group must enter and leave the block, and
    call the function that it yields before any other collective: it returns when all have called it. Where one leaves
    by an error the others wait, until they hear that it has ended.
    """
    layers = [layer for root in roots for layer in layers_of(root)]

    def wait_for_turn(number: int) -> None:
        """Help to gather what others need before layer `number`, until it is the one that is gathered next."""
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
                # FSDP2 gathers ahead, in backward, what was called before; other ranks have made other calls
                forget_forwards(root)

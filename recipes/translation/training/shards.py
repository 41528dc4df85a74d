"""The units of a model that FSDP2 shards: each layer, gathered for its own calls, and what is in none of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from models.transformer import Layer
from recipes.translation.run_folder.translator import allocate


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of encoder and decoder, in the order in which they are called."""
    return [module for module in model.modules() if isinstance(module, Layer)]


def shard_layers(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard the layers of a model that is on "meta", and give memory to this rank's rows."""
    for layer in layers_of(model):
        allocate(layer, device)  # and, by the next line, freed but for this rank's rows
        fully_shard(layer, mesh=mesh)


def shard(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard a model that is on "meta", and give memory to this rank's rows."""
    shard_layers(model, mesh, device)
    allocate(model, device)
    fully_shard(model, mesh=mesh)

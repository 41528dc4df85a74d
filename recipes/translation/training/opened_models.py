"""Models that rank 0 opens for all ranks, each with whole weights that are read and sent one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from models import EncoderDecoder
from recipes.translation.processes.ranks import Ranks
from recipes.translation.run_folder.checkpoint import SavedModel
from recipes.translation.run_folder.translator import model_on_meta, model_sizes, tensors_of


class OpenedModel(NamedTuple):
    """A saved model on every rank, before there is memory for it."""

    saved: SavedModel
    """Only rank 0 has its weights."""
    model: EncoderDecoder
    """On the device "meta"."""
    weights: Iterator[tuple[str, Tensor]]
    """Each weight of the model, whole, when it is asked for; every rank must ask for all."""


def opened(read: Callable[[], SavedModel], ranks: Ranks, dtype: torch.dtype = torch.float32) -> OpenedModel:
    """Return the model that `read` opens on rank 0, with weights of this dtype."""
    mine = ranks.run_on_all(lambda: read() if ranks.is_main else None)
    shared = ranks.run_on_main(lambda: mine and replace(mine, weights={}))
    saved = mine or shared
    assert saved is not None
    model = model_on_meta(model_sizes(saved.config.model), saved.source, saved.target).to(dtype)
    return OpenedModel(saved, model, ranks.tensors_of_main(saved.weights, tensors_of(model)))

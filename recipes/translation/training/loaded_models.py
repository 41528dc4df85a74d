"""Trained models, read to translate with: whole on every rank or, if they were trained in parts, in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from recipes.translation.processes.ranks import Ranks
from recipes.translation.run_folder.checkpoint import SavedModel
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import LayoutConfig
from recipes.translation.text.subwords import EOS
from recipes.translation.training.layout import Groups
from recipes.translation.training.machine import device_of
from recipes.translation.training.parts import Axes, fill, gather_together, open_model, reshard


@contextmanager
def loaded_models(reads: Sequence[Callable[[], SavedModel]], ranks: Ranks) -> Iterator[tuple[list[Translator], Ranks]]:
    """Within the block, let each rank translate sentences of its own with models that rank 0 reads.

    Yields the models, in eval mode on this process's GPU, if any, and the ranks that divide the sentences. A model that
    was trained with `layout.shard` or `layout.vocab` is sharded over all ranks, as it may be too large for one process.
    Weights are read and sent one at a time. Every rank must enter and leave the block.
    """
    device = device_of(ranks)
    if device.type != "cpu":
        # FSDP2 gathers weights on the current device, and NCCL assumes that it belongs to this process
        torch.accelerator.set_device_index(device.index)
    translators = []
    in_parts = []
    for read in reads:
        made = open_model(read, ranks)
        saved = made.saved
        axes, mesh = Axes(ranks.world, 1, 1), None
        if was_in_parts(saved.config.layout) and ranks.world > 1:
            axes = Axes(1, ranks.world, 1)
            mesh = Groups.of(axes, ranks, saved.config.layout.timeout, device).shards
        fill(made, axes, ranks, mesh, device)
        if mesh is not None:
            in_parts.append((made.model, mesh.get_group("shard")))
        translators.append(
            Translator(saved.config, made.model.eval(), saved.source, saved.target, digests=(saved.digest,))
        )
    if not in_parts:
        yield translators, ranks
        return
    ids = torch.full((1, 1), EOS, device=device)
    for model, _ in in_parts:
        with torch.no_grad():
            model(ids, ids)  # since FSDP2 treats the module that is called first as the root
        reshard(model)
    with gather_together([model for model, _ in in_parts], in_parts[0][1]) as meet:
        yield translators, replace(ranks, meet=meet)


def was_in_parts(layout: LayoutConfig) -> bool:
    """Return whether no process of the training had the whole model."""
    return layout.shard > 1 or layout.vocab > 1

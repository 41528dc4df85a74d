"""The average of a run's last models: the arithmetic mean of their weights.

Vaswani et al. 2017, "Attention Is All You Need", section 6.1: the reported models are averages of the last checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from recipes.translation.errors import CheckpointError
from recipes.translation.files.atomic_folder import read_consistently
from recipes.translation.files.tensors import OneByOne, describe_tensors
from recipes.translation.run_folder.checkpoint import SavedModel, load_saved, write_model
from recipes.translation.run_folder.numbered import kept_models, step_of
from recipes.translation.run_folder.outputs import is_run


def average(run: Path, last: int | None = None) -> list[int]:
    """Write `<run>/averaged`, the mean of the `last` kept models, or of all; return their steps, in ascending order.

    The models belong to one run, since a run refuses to resume next to kept models of another. Raises CheckpointError
    if fewer are kept than asked for.
    """

    def read() -> list[SavedModel]:
        kept = kept_models(run)
        count = last or len(kept)
        check_enough(kept, count, run)
        return [load_saved(folder) for folder in kept[-count:]]

    # Training may meanwhile keep a later model, and remove the earliest
    models = read_consistently(run, read, kept_models)
    steps = [step_of(model.folder) for model in models]
    write_model(run / "averaged", models[-1], mean_of_weights(models), {"step": steps[-1], "averaged_steps": steps})
    return steps


def check_enough(kept: Sequence[Path], count: int, run: Path) -> None:
    """Raise CheckpointError if no model is kept, or fewer than are to be averaged."""
    if not is_run(run):
        raise CheckpointError(f"there is no run in {run}: name the folder of a run with --run")
    if not kept:
        raise CheckpointError(f"{run} keeps no models: train with --training.keep_checkpoints 10")
    if count > len(kept):
        raise CheckpointError(
            f"--last asks for {count} models, but {run} keeps {len(kept)}: ask for fewer, or train with "
            f"--training.keep_checkpoints {count}"
        )


def mean_of_weights(models: Sequence[SavedModel]) -> OneByOne:
    """Compute each tensor's mean when it is asked for, in float64, rounded once to the last model's dtype."""
    shapes = describe_tensors(models[-1].weights)

    def mean(name: str) -> Tensor:
        total = models[0].weights[name].to(torch.float64, copy=True)
        for model in models[1:]:
            total += model.weights[name]
        return (total / len(models)).to(shapes[name].dtype)

    return OneByOne(shapes, mean)

"""The average of a run's last models: the arithmetic mean of their weights.

Vaswani et al. 2017, "Attention Is All You Need", section 6.1: the reported models are averages of the last checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from recipes.translation.errors import CheckpointError
from recipes.translation.files.atomic_folder import listed_files, verified_folder, whole_folder
from recipes.translation.files.tensors import OneByOne, described
from recipes.translation.run_folder.checkpoint import (
    BELONGINGS,
    load_belongings,
    load_facts,
    load_weights,
    saved_config,
    subword_names,
    write_model,
)
from recipes.translation.run_folder.numbered import kept_models
from recipes.translation.run_folder.resume import MAY_CHANGE, flat, without_paths
from recipes.translation.run_folder.translator import WEIGHTS, Translator, check_sizes, model_on_meta, model_sizes


def average(run: Path, last: int | None = None) -> list[int]:
    """Write `<run>/averaged`, the mean of the `last` kept models, or of all; return their steps, in their order.

    Raises CheckpointError if fewer models are kept than asked for, or they do not belong together.
    """
    while True:
        kept = kept_models(run)
        try:
            return average_of_kept(run, kept, last)
        except (CheckpointError, OSError):
            if kept_models(run) == kept:
                raise
            # Otherwise training has kept a later model meanwhile, and removed the earliest


def average_of_kept(run: Path, kept: Sequence[Path], last: int | None) -> list[int]:
    """Do the same with these models, of which none may be removed meanwhile."""
    if not kept:
        raise CheckpointError(f"{run} keeps no models: train with --training.keep_checkpoints 10")
    last = last or len(kept)
    if last > len(kept):
        raise CheckpointError(
            f"--last asks for {last} models, but {run} keeps {len(kept)}: ask for fewer, or train with "
            f"--training.keep_checkpoints {last}"
        )
    check_same_run(kept[-last:])
    return write_average(run / "averaged", kept[-last:])


def write_average(target: Path, folders: Sequence[Path]) -> list[int]:
    """Write the mean of the models in `folders` to `target`, with the settings and subwords of the last one."""
    weights = mean_of_weights(folders)
    config, source, target_subwords = load_belongings(verified_folder(folders[-1], BELONGINGS))
    sizes = model_sizes(config.model)
    check_sizes(sizes, source, target_subwords, weights, folders[-1])
    steps = [int(load_facts(folder)["step"]) for folder in folders]
    # Only what belongs to it is written
    newest = Translator(config, model_on_meta(sizes, source, target_subwords), source, target_subwords)
    write_model(target, newest, weights, {"step": steps[-1], "averaged_steps": steps})
    return steps


def mean_of_weights(folders: Sequence[Path]) -> OneByOne:
    """Compute the mean of each tensor, when it is asked for, in float64, rounded once to its own dtype."""
    models = [load_weights(folder) for folder in folders]
    shapes = described(models[0])

    def mean(name: str) -> Tensor:
        total = models[0][name].to(torch.float64, copy=True)
        for weights in models[1:]:
            total += weights[name]
        return (total / len(models)).to(shapes[name].dtype)

    return OneByOne(shapes, mean)


def check_same_run(folders: Sequence[Path]) -> None:
    """Raise CheckpointError, naming the first difference, unless all are models of one run."""
    first = identity_of(folders[0])
    for folder in folders[1:]:
        other = identity_of(folder)
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise CheckpointError(
                    f"{key} is {other.get(key)!r} in {folder} and {first.get(key)!r} in {folders[0]}: only models of "
                    "one run can be averaged; move the others away"
                )


def identity_of(folder: Path) -> dict[str, object]:
    """Return what all models of a run share: its settings, except those in MAY_CHANGE, its subwords, and the dtype."""
    config = saved_config(folder)
    settings = {name: value for name, value in flat(without_paths(config)).items() if name not in MAY_CHANGE}
    files = listed_files(whole_folder(folder) or folder)
    subwords = {f"the SHA-256 of {name}.model": files.get(f"{name}.model") for name in subword_names(config)}
    return {**settings, **subwords, "weights.dtype": WEIGHTS[config.training.precision]}

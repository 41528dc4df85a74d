"""The average of a run's last models: the arithmetic mean of their weights.

Vaswani et al. 2017, "Attention Is All You Need", section 6.1: the reported models are averages of the last checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from recipes.translation.errors import CheckpointError
from recipes.translation.files.atomic_folder import sha256, verified_folder, whole_folder
from recipes.translation.files.tensors import OneByOne, described
from recipes.translation.run_folder.checkpoint import (
    BELONGINGS,
    load_belongings,
    load_facts,
    load_weights,
    saved_config,
    write_model,
)
from recipes.translation.run_folder.numbered import kept_models
from recipes.translation.run_folder.resume import MAY_CHANGE, flat, without_paths
from recipes.translation.run_folder.translator import Translator, check_sizes, model_on_meta, model_sizes
from recipes.translation.settings.config import RunConfig
from recipes.translation.settings.metrics import METRICS
from recipes.translation.text.subwords import subword_names


def average(run: Path, last: int | None = None, best: int | None = None) -> list[int]:
    """Write `<run>/averaged`, the mean of the `last` kept models, of the `best` by their validation, or of all.

    Return the steps of these models, in their order.

    Raises CheckpointError if fewer models are kept than asked for, or they do not belong together.
    """
    while True:
        kept = kept_models(run)
        try:
            return average_of_kept(run, kept, last, best)
        except (CheckpointError, OSError):
            if kept_models(run) == kept:
                raise
            # Otherwise training has kept a later model meanwhile, and removed the earliest


def average_of_kept(run: Path, kept: Sequence[Path], last: int | None, best: int | None) -> list[int]:
    """Do the same with these models, of which none may be removed meanwhile."""
    check_enough(kept, last, best, run)
    chosen = kept
    if last is not None:
        chosen = kept[-last:]
    if best is not None:
        better = best_first(kept)[:best]
        chosen = [folder for folder in kept if folder in better]
    check_same_run(chosen)
    return write_average(run / "averaged", chosen)


def check_enough(kept: Sequence[Path], last: int | None, best: int | None, run: Path) -> None:
    """Raise CheckpointError if no model is kept, or fewer than are to be averaged."""
    if not kept:
        raise CheckpointError(f"{run} keeps no models: train with --training.keep_checkpoints 10")
    for option, count in (("--last", last), ("--best", best)):
        if count is not None and count > len(kept):
            raise CheckpointError(
                f"{option} asks for {count} models, but {run} keeps {len(kept)}: ask for fewer, or train with "
                f"--training.keep_checkpoints {count}"
            )


def best_first(folders: Sequence[Path]) -> list[Path]:
    """Sort folders by their validation, the best first by `training.best_by`; of equal ones the earlier comes first."""
    best_by = config_of(folders[0]).training.best_by
    values = {}
    for folder in folders:
        value = load_facts(folder).get(f"valid_{best_by}")
        if not isinstance(value, float):
            raise CheckpointError(f"{folder / 'model.json'} has no valid_{best_by}: use --last instead of --best")
        values[folder] = value
        if not METRICS[best_by].smaller_is_better:
            values[folder] = -value
    return sorted(folders, key=values.__getitem__)


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
    """Compute the mean of each tensor, when it is asked for, in float64, rounded once to its own dtype.

    Raises CheckpointError if the models' tensors differ in name, shape or dtype.
    """
    models = [load_weights(folder) for folder in folders]
    first = described(models[0])
    for folder, weights in zip(folders[1:], models[1:], strict=True):
        check_same_tensors(first, described(weights), folders[0], folder)

    def mean(name: str) -> Tensor:
        total = models[0][name].to(torch.float64, copy=True)
        for weights in models[1:]:
            total += weights[name]
        return (total / len(models)).to(first[name].dtype)

    return OneByOne(first, mean)


def check_same_tensors(
    first: Mapping[str, Tensor], other: Mapping[str, Tensor], first_folder: Path, folder: Path
) -> None:
    """Raise CheckpointError, naming the first difference, unless both have the same names, shapes and dtypes."""
    for name in sorted(first.keys() | other.keys()):
        here = _shape_of(first, name)
        there = _shape_of(other, name)
        if here != there:
            raise CheckpointError(
                f"{name} is {there} in {folder} and {here} in {first_folder}: only models of one run can be averaged; "
                "move the others away"
            )


def _shape_of(weights: Mapping[str, Tensor], name: str) -> str:
    if name not in weights:
        return "missing"
    return f"{tuple(weights[name].shape)} {weights[name].dtype}"


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


def config_of(folder: Path) -> RunConfig:
    """Return the settings of a kept model; raise CheckpointError if training has removed it."""
    config = saved_config(folder)
    if config is None:
        raise CheckpointError(f"there is no checkpoint at {folder}")
    return config


def identity_of(folder: Path) -> dict[str, object]:
    """Return what all models of a run share: its settings, except those in MAY_CHANGE, and its subwords' SHA-256."""
    config = config_of(folder)
    settings = {name: value for name, value in flat(without_paths(config)).items() if name not in MAY_CHANGE}
    whole = whole_folder(folder) or folder
    subwords = {f"the SHA-256 of {name}.model": sha256(whole / f"{name}.model") for name in subword_names(config)}
    return {**settings, **subwords}

"""The average of a run's last models: the arithmetic mean of their weights.

Vaswani et al. 2017, "Attention Is All You Need", section 6.1: the reported models are averages of the last checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.translation.atomic_folder import CheckpointError, sha256, whole_folder
from recipes.translation.run_folder.checkpoint import (
    fill_model,
    load_facts,
    load_translator,
    load_weights,
    save_model,
    saved_config,
    subword_names,
)
from recipes.translation.run_folder.kept_models import kept_in, kept_models
from recipes.translation.run_folder.resume import MAY_CHANGE, flat, without_paths


class Averaged(NamedTuple):
    """An average that was written."""

    folder: Path
    steps: list[int]
    """The steps whose models were averaged, in their order."""


def average(run: Path, last: int | None = None, best: int | None = None) -> Averaged:
    """Write `<run>/averaged`, the mean of the `last` kept models, of the `best` by their validation, or of all.

    Raises CheckpointError if fewer models are kept than asked for, or they do not belong together.
    """
    kept = kept_models(run)
    check_enough(kept, last, best, run)
    chosen = kept
    if last is not None:
        chosen = kept[-last:]
    if best is not None:
        better = best_first(kept)[:best]
        chosen = [folder for folder in kept if folder in better]
    return write_average(run / "averaged", chosen)


def check_enough(kept: Sequence[Path], last: int | None, best: int | None, run: Path) -> None:
    """Raise CheckpointError if no model is kept, or fewer than are to be averaged."""
    if not kept:
        raise CheckpointError(f"there are no models in {kept_in(run)}: train with --training.keep_checkpoints 10")
    for option, count in (("--last", last), ("--best", best)):
        if count is not None and count > len(kept):
            raise CheckpointError(
                f"{option} asks for {count} models, but {kept_in(run)} has {len(kept)}: ask for fewer, or train with "
                f"--training.keep_checkpoints {count}"
            )


def best_first(folders: Sequence[Path]) -> list[Path]:
    """Sort folders by their validation, the best first by `training.best_by`; of equal ones the earlier comes first."""
    config = saved_config(folders[0])
    assert config is not None  # `kept_models` returns complete folders only
    best_by = config.training.best_by
    values = {}
    for folder in folders:
        value = load_facts(folder).get(f"valid_{best_by}")
        if not isinstance(value, float):
            raise CheckpointError(f"{folder / 'model.json'} has no valid_{best_by}: use --last instead of --best")
        values[folder] = value
        if best_by != "loss":
            values[folder] = -value  # the higher, the better
    return sorted(folders, key=values.__getitem__)


def write_average(target: Path, folders: Sequence[Path]) -> Averaged:
    """Write the mean of the models in `folders` to `target`, with the settings and subwords of the last one."""
    check_same_run(folders)
    weights = mean_of_weights(folders)
    newest = load_translator(folders[-1])
    dtype = next(iter(weights.values())).dtype
    fill_model(newest.model.to(dtype), weights, target)
    steps = [int(load_facts(folder)["step"]) for folder in folders]
    save_model(target, newest, {"step": steps[-1], "averaged_steps": steps})
    return Averaged(target, steps)


@torch.no_grad()
def mean_of_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """Compute the mean of each tensor in float64, rounded once to its own dtype.

    Raises CheckpointError if the models' tensors differ in name, shape or dtype.
    """
    first = load_weights(folders[0])
    totals = {name: tensor.to(torch.float64, copy=True) for name, tensor in first.items()}
    for folder in folders[1:]:
        weights = load_weights(folder)
        check_same_tensors(first, weights, folders[0], folder)
        for name, tensor in weights.items():
            totals[name] += tensor
    return {name: (total / len(folders)).to(first[name].dtype) for name, total in totals.items()}


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
    """Raise CheckpointError unless all models were trained with the same settings and have the same subwords."""
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
    """Return what all models of a run share: its settings, except those in MAY_CHANGE, and its subwords' SHA-256."""
    config = saved_config(folder)
    assert config is not None  # `kept_models` returns complete folders only
    settings = {name: value for name, value in flat(without_paths(config)).items() if name not in MAY_CHANGE}
    whole = whole_folder(folder) or folder
    files = {f"the SHA-256 of {name}.model": sha256(whole / f"{name}.model") for name in subword_names(config)}
    return {**settings, **files}

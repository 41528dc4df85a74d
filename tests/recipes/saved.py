"""The files that a run has saved, wherever its pointers lead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from recipes.translation.files.atomic_folder import whole_folder
from recipes.translation.run_folder.checkpoint import load_saved, save_model
from recipes.translation.run_folder.numbered import model_at, point_at, state_of
from recipes.translation.run_folder.translator import Translator


def model_in(run: Path, name: str) -> Path:
    """The folder of the run's model `best` or `last`."""
    folder = whole_folder(run / name)
    assert folder is not None
    return folder


def saved_file(run: Path, name: str, file: str) -> Path:
    """A file of the run's model `best` or `last`, or of the state that belongs to it."""
    folder = model_in(run, name)
    if file.startswith("training."):
        folder = state_of(folder)
    return folder / file


def load_weights(folder: Path) -> Mapping[str, Tensor]:
    """The weights of a model, in the dtype in which they were saved."""
    return load_saved(folder).weights


def keep_model(run: Path, translator: Translator, facts: Mapping[str, object], step: int, most: int) -> None:
    """Save a validated model of a step, without a state, as the newest of the `most` that are kept."""
    save_model(model_at(run, step), translator, facts)
    point_at(run, step, better=False, keep=most)

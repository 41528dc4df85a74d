"""What a run has saved and noted, wherever its pointers lead."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from recipes.translation.files.atomic_folder import MANIFEST, sha256, whole_folder
from recipes.translation.run_folder.checkpoint import load_saved, save_model
from recipes.translation.run_folder.numbered import model_at, point_at, state_of
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import RunConfig
from recipes.translation.train import train
from tests.recipes.tiny import tiny


def trained_run(
    folders: pytest.TempPathFactory, changes: dict[str, Any], make: Callable[..., RunConfig] = tiny
) -> Path:
    """A run that is trained with these settings in a folder of its own."""
    run = folders.mktemp("trained") / "run"
    train(make(run, changes))
    return run


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


def resealed(folder: Path) -> Path:
    """The folder with a manifest that lists its files as they are."""
    (folder / MANIFEST).unlink()
    files = {path.name: {"bytes": 0, "sha256": sha256(path)} for path in folder.iterdir()}
    (folder / MANIFEST).write_text(json.dumps({"files": files}))
    return folder


def state_in(run: Path) -> dict[str, Any]:
    """The state of the run's model `last`."""
    state: dict[str, Any] = json.loads(saved_file(run, "last", "training.json").read_text())
    return state


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The records of optimizer steps."""
    return [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def validations_of(run: Path) -> list[dict[str, Any]]:
    """The records of validations."""
    return [record for record in read_metrics(run / "metrics.jsonl") if "valid_loss" in record]


TRAINED = ("model.safetensors", "training.safetensors")
"""What a training changes of `last`: the weights, and the moments."""


def assert_same_last(one: Path, other: Path, *more: str) -> None:
    """Weights, moments and `more` files of `last` are the same bits."""
    for name in (*TRAINED, *more):
        assert saved_file(one, "last", name).read_bytes() == saved_file(other, "last", name).read_bytes(), name


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, moments, random states, position and every number logged are the same bits."""
    assert_same_last(one, other)
    best = [saved_file(run, "best", "model.safetensors").read_bytes() for run in (one, other)]
    assert best[0] == best[1]
    assert read_metrics(one / "metrics.jsonl") == read_metrics(other / "metrics.jsonl")
    states = [{**state_in(run), "seconds": None, "train_seconds": None} for run in (one, other)]
    assert states[0] == states[1]

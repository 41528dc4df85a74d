"""One run that several modules look at, resume and spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recipes.translation.train import train
from tests.recipes.run_folder.made import MADE
from tests.recipes.tiny import tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four validations that keeps three models."""
    folder = tmp_path_factory.mktemp("made") / "run"
    train(tiny(folder, MADE))
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(made, tmp_path / "run")

"""One run that several modules look at, resume and spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.recipes.run_folder.made import MADE
from tests.recipes.saved import trained_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four validations that keeps three models."""
    return trained_run(tmp_path_factory, MADE)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(made, tmp_path / "run")

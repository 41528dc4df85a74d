"""The settings of the run that the fixture `made` makes, and what tests ask of its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.train import train
from tests.recipes.tiny import tiny

MADE: dict[str, Any] = {
    "data.builtin_pairs": 120,
    "training.batch_tokens": 400,
    "training.steps": 4,
    "training.validate_every": 1,
    "training.keep_checkpoints": 3,
}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but the log, to which each start and each refusal adds its lines."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "train.log")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(run: Path, settings: dict[str, Any], *, fresh: bool = False) -> str:
    """The one line that training is refused with, in a folder that stays as it was."""
    before = contents(run)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        train(tiny(run, settings), fresh=fresh)
    assert contents(run) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)

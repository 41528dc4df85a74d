"""Settings other than the defaults mean in every layout what they mean in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.settings.config import RunConfig
from recipes.translation.train import train
from seqpar.testing.ranks import ranks
from tests.recipes.tiny import tiny

pytestmark = pytest.mark.launched

UNLIKE_DEFAULTS: dict[str, Any] = {
    "data.builtin_pairs": 120,
    "model.dropout": 0,
    "model.norm": "post",
    "model.tie": "target",
    "training.precision": "float64",
    "training.devices": "auto",
    "training.batch_tokens": 300,
    "training.chunk_tokens": 30,
    "training.accumulate": 3,
    "training.steps": 5,
    "training.schedule": "noam",
    "training.learning_rate": 0.3,
    "training.warmup": 3,
    "training.betas": (0.6, 0.7),
    "training.clip": 0.05,
    "training.label_smoothing": 0.3,
    "training.max_length": 24,
    "training.seed": 7,
}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "fairseq": {"vocab 2": {"layout.vocab": 2}, "data 2": {}},
    "harvard": {"data 2": {}, "shard 2": {"layout.shard": 2}},
}


def trained(rank: int, world: int, config: RunConfig) -> None:
    train(config)


@pytest.mark.parametrize("smoothing", list(LAYOUTS))
def test_settings_unlike_the_defaults_give_the_same_numbers_in_every_layout(smoothing: str, tmp_path: Path) -> None:
    changes = {**UNLIKE_DEFAULTS, "training.smoothing_convention": smoothing}
    trained(0, 1, tiny(tmp_path / "one", {**changes, "training.devices": "[cpu]"}))
    expected = steps_of(tmp_path / "one")
    for layout, sizes in LAYOUTS[smoothing].items():
        ranks(2, trained, tiny(tmp_path / layout, {**changes, **sizes}))
        for found, record in zip(steps_of(tmp_path / layout), expected, strict=True):
            assert found == pytest.approx(record, rel=1e-8), layout


def steps_of(run: Path) -> list[dict[str, float]]:
    """The records of optimizer steps: loss, rate, norm of the gradient, tokens."""
    return [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]

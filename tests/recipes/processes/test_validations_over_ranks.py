"""Validation data of several corpora have the same figures over two processes as in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.settings.config import RunConfig
from recipes.translation.settings.metrics import METRICS
from recipes.translation.train import train
from seqpar.testing.ranks import ranks
from tests.recipes.tiny import tiny

pytestmark = pytest.mark.launched

CORPORA = {
    "forward": {"train": ["train.en", "train.de"], "valid": ["many.en", "many.de"]},
    "back": {
        "train": ["train.de", "train.en"],
        "valid": ["one.de", "one.en"],
        "source": "de",
        "target": "en",
        "tag": "<back>",
    },
}
"""The second one's validation data are a single sentence, of which one of two processes has nothing."""


def trained(rank: int, world: int, config: RunConfig) -> None:
    train(config)


def config_of(folder: Path, run: str, changes: dict[str, Any]) -> RunConfig:
    settings = {
        "data.path": str(folder),
        "data.language_tags": True,
        "corpora": CORPORA,
        "model.dropout": 0,
        "training.precision": "float64",
        "training.devices": "auto",
        "training.batch_tokens": 200,
        "training.steps": 2,  # after which translations are random words; later they are empty for a while
        "training.accumulate": 2,
        "training.seed": 2,
        "training.validate_every": 1,
        "training.validate_bleu": 7,
        "training.best_by": "chrf",
        "decoding.max_length": 30,
    }
    return tiny(folder / run, {**settings, **changes})


def validations(config: RunConfig) -> list[dict[str, Any]]:
    return [record for record in read_metrics(Path(config.run) / "metrics.jsonl") if "valid_loss" in record]


def test_every_corpus_and_all_together_have_the_figures_of_one_process(tmp_path: Path) -> None:
    for name, start, end in (("train", 0, 120), ("many", 120, 140), ("one", 140, 141)):
        for side, language in (("source", "en"), ("target", "de")):
            lines = [f"{getattr(pair, side)}\n" for pair in pairs(141, 3)[start:end]]
            (tmp_path / f"{name}.{language}").write_text("".join(lines))
    one = config_of(tmp_path, "one", {"training.devices": "[cpu]"})
    train(one)
    two = config_of(tmp_path, "two", {})
    ranks(2, trained, two)
    expected, found = validations(one), validations(two)
    assert len(expected) == len(found) == 2
    names = {"step", *(f"valid_{name}{suffix}" for name in METRICS for suffix in ("", ".forward", ".back"))}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() == names
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-10), name
    assert 0 < expected[-1]["valid_chrf.forward"] != expected[-1]["valid_chrf.back"]

"""What training can do beside the usual: a run that was stopped goes on as if it had not been, bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.resume import begin
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.train import train
from tests.recipes.saved import saved_file
from tests.recipes.tiny import tiny

OPTIONS: dict[str, Any] = {
    "data.builtin_pairs": 120,
    "subwords.sampling": 0.3,
    "model.tie": "none",
    "model.dropout": 0.2,
    "training.accumulate": 5,
    "training.batch_tokens": 400,
    "training.ema": 0.9,
    "training.weight_decay": 0.1,
    "training.adam_eps": 1e-6,
    "training.freeze": ("encoder", "source_embedding"),
    "training.best_by": "chrf",
    "training.validate_bleu": 4,
    "training.validate_every": 2,
    "training.steps": 8,
}


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_resumed_run_with_every_option_is_the_uninterrupted_one_bit_for_bit(kind: str, tmp_path: Path) -> None:
    for run, ends in (("through", [8]), ("resumed", [3, 8])):
        for steps in ends:
            train(tiny(tmp_path / run, {**OPTIONS, "subwords.kind": kind, "training.steps": steps}))
            state = json.loads(saved_file(tmp_path / run, "last", "training.json").read_text())
            assert run == "through" or state["batch"] > 0  # in the middle of an epoch
    assert state["epoch"] > 1
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    for name in ("model.safetensors", "training.safetensors"):
        there, here = (saved_file(run, "last", name).read_bytes() for run in (through, resumed))
        assert there == here, name
    steps_through, steps_resumed = (
        [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record] for run in (through, resumed)
    )
    assert steps_through == steps_resumed
    assert all(math.isfinite(record["loss"]) for record in steps_through)


def test_a_run_judged_by_its_translations_keeps_what_they_are_scored_by(tmp_path: Path) -> None:
    changes = {**OPTIONS, "training.steps": 1}
    train(tiny(tmp_path / "run", changes))
    for name, other in (("training.validate_bleu", 3), ("data.tokenize", "char"), ("decoding.max_length", 9)):
        with pytest.raises(ConfigError, match=rf"^{name} is .* was trained with .* --fresh$"):
            begin(tiny(tmp_path / "run", {**changes, name: other}), False)

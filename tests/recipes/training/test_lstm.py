"""The LSTM model through the recipe: trained, resumed, in two processes, translating."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.run_folder.translator import model_sizes
from recipes.translation.settings.config import ModelConfig, RunConfig
from recipes.translation.train import train
from recipes.translation.translating.translate import translate
from seqpar.testing.ranks import ranks
from tests.recipes.saved import load_weights
from tests.recipes.tiny import tiny_lstm


def trained(rank: int, world: int, config: RunConfig) -> None:
    train(config)


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "gradient_norm" in record]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_it_learns_and_translates_from_its_checkpoint(precision: str, tmp_path: Path) -> None:
    changes = {
        "training.steps": 30,
        "training.learning_rate": 0.02,
        "training.precision": precision,
        "training.seed": 3,
    }
    config = tiny_lstm(tmp_path / "run", changes)
    train(config)
    found = losses(tmp_path / "run")
    assert found[-1] < 0.8 * found[0]
    translator = load_translator(tmp_path / "run" / "best")
    assert any(translate(translator, [pair.source for pair in pairs(8, 3)]))


def test_a_run_in_two_parts_is_the_run_in_one(tmp_path: Path) -> None:
    whole = tiny_lstm(tmp_path / "whole", {"training.steps": 4, "training.validate_every": 2})
    train(whole)
    train(tiny_lstm(tmp_path / "parts", {"training.steps": 2, "training.validate_every": 2}))
    train(tiny_lstm(tmp_path / "parts", {"training.steps": 4, "training.validate_every": 2}))
    expected = load_weights(tmp_path / "whole" / "last")
    found = load_weights(tmp_path / "parts" / "last")
    assert all(bool((found[name] == tensor).all()) for name, tensor in expected.items())


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    changes = {"training.precision": "float64", "model.dropout": 0.0, "training.accumulate": 2}
    train(tiny_lstm(tmp_path / "one", changes))
    ranks(2, trained, tiny_lstm(tmp_path / "two", {**changes, "training.devices": "auto"}))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)


@pytest.mark.parametrize("axis", ["shard", "vocab", "sequence"])
def test_it_is_never_split(axis: str, tmp_path: Path) -> None:
    config = tiny_lstm(tmp_path / "run", {f"layout.{axis}": 2, "training.devices": "auto"})
    with pytest.raises(Exception, match="an LSTM can be copied"):
        ranks(2, trained, config)


def test_a_setting_that_it_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.heads is not a setting of lstm, which has d_model, .*"):
        model_sizes(ModelConfig(preset="lstm", heads=4))

"""What is made of a model while training replaces it says of which model it is, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.translation.commands import main
from recipes.translation.errors import ConfigError
from recipes.translation.export import ctranslate2_model
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.made_from import origin_digest, weights_digest
from recipes.translation.run_folder.translator import build_model, model_sizes
from recipes.translation.settings.config import ModelConfig
from recipes.translation.translating.translate import best
from tests.recipes.command_line import refusal
from tests.recipes.random_translator import random_translator

EXPORT = import_module("recipes.translation.commands.export")
"""The module, whose name in its package is that of the command."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_model(tmp_path / "run" / "best", random_translator(tmp_path / "first"), {"step": 1})
    return tmp_path / "run"


def replacing(run: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, before which training saves a better model."""
    later = random_translator(run.parent / "later", seed=5)

    def replaced(*arguments: Any, **options: Any) -> Any:
        save_model(run / "best", later, {"step": 2})
        return function(*arguments, **options)

    return replaced


def test_scores_are_of_the_model_that_translated(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("Two trains.\n")
    first = weights_digest(run / "best")
    monkeypatch.setattr("recipes.translation.scores.evaluate.best", replacing(run, best))
    files = ["--sources", str(tmp_path / "text"), "--references", str(tmp_path / "text")]
    assert main(["evaluate", "--run", str(run), *files, "--ensemble", str(run)]) == 0
    scores = json.loads((run / "text.ensemble.scores.json").read_text())
    assert scores["weights"] == [first, first]
    assert weights_digest(run / "best") != first


@pytest.mark.formats
def test_an_export_says_from_which_model_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights_digest(run / "best")
    monkeypatch.setattr(ctranslate2_model, "write", replacing(run, ctranslate2_model.write))
    assert main(["export", "--run", str(run), "--to", "ctranslate2"]) == 0
    assert origin_digest(run / "ctranslate2") == first


def test_an_export_never_has_the_step_of_another_model(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EXPORT, "facts_of", replacing(run, EXPORT.facts_of))
    told = refusal(capsys, "export", "--run", str(run), "--to", "safetensors")
    assert told == f"error: training replaced {run / 'best'} while it was being exported: export it again"
    assert not (run / "safetensors").exists()


def test_sizes_that_do_not_fit_each_other_are_a_mistake_in_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"^model: d_model 30 is not divisible by heads 4"):
        model_sizes(ModelConfig(preset="tiny", d_model=30, heads=4))


def test_one_matrix_for_vocabularies_of_two_sizes_is_a_mistake_in_the_settings() -> None:
    source: Any = range(8)
    target: Any = range(9)
    sizes = replace(model_sizes(ModelConfig(preset="tiny")), tie="all")
    with torch.device("meta"), pytest.raises(ConfigError, match=r"^model: tie='all' shares one embedding, .* 8 .* 9"):
        build_model(sizes, source, target)

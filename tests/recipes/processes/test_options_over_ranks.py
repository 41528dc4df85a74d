"""Sampled subwords, a moving average, frozen parts and another run's model give the same training in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.settings.config import RunConfig
from recipes.translation.train import train
from seqpar.testing.ranks import ranks
from tests.recipes.processes.layouts import LAYOUTS, assert_same_weights, records
from tests.recipes.tiny import tiny, tiny_decoder_only

pytestmark = pytest.mark.launched

OPTIONS: dict[str, Any] = {
    "data.builtin_pairs": 120,
    "subwords.kind": "bpe",
    "subwords.sampling": 0.2,
    "model.dropout": 0,
    "model.tie": "none",
    "training.precision": "float64",
    "training.devices": "auto",
    "training.batch_tokens": 300,
    "training.accumulate": 5,
    "training.steps": 6,
    "training.validate_every": 3,
    "training.validate_bleu": 4,
    "training.best_by": "chrf",
    "training.ema": 0.7,
    "training.weight_decay": 0.3,
    "training.freeze": ("decoder", "source_embedding"),
}


def trained(rank: int, world: int, config: RunConfig) -> int:
    return train(config).state.step


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("options") / "start"
    train(
        tiny(
            run,
            {**OPTIONS, "training.devices": "[cpu]", "training.steps": 1, "training.freeze": (), "training.seed": 8},
        )
    )
    return run


@pytest.fixture(scope="module")
def one_process(start: Path) -> Path:
    run = start.parent / "one"
    train(tiny(run, {**OPTIONS, "training.devices": "[cpu]", "training.start_from": str(start)}))
    return run


def by_step(run: Path, kind: str) -> dict[int, float]:
    """The values of a kind in the records of a run, the latest of each step."""
    return {each["step"]: each[kind] for each in read_metrics(run / "metrics.jsonl") if kind in each}


@pytest.mark.parametrize("layouts", [("shard 2", "vocab 2"), ("data 3", "data 2")], ids=" then ".join)
def test_layouts_one_after_the_other_give_the_weights_and_averages_of_one_device(
    layouts: tuple[str, str], start: Path, one_process: Path, tmp_path: Path
) -> None:
    for layout, steps in zip(layouts, (4, 6), strict=True):
        world, changes = LAYOUTS[layout]
        changes = {**OPTIONS, **changes, "training.start_from": str(start), "training.steps": steps}
        assert ranks(world, trained, tiny(tmp_path / "run", changes)) == [steps] * world
    assert_same_weights(tmp_path / "run", one_process, 1e-10)
    for kind in ("loss", "gradient_norm", "tokens"):
        assert records(tmp_path / "run", kind) == pytest.approx(records(one_process, kind), rel=1e-10), kind
    for kind in ("valid_loss", "valid_bleu", "valid_chrf"):
        found, expected = by_step(tmp_path / "run", kind), by_step(one_process, kind)
        # The first layout ended with a validation of its own
        assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-10), kind


@pytest.mark.parametrize("layout", ["shard 2", "vocab 2"])
def test_a_decoder_alone_is_trained_in_parts_and_its_samples_are_those_of_one_device(
    layout: str, tmp_path: Path
) -> None:
    world, sizes = LAYOUTS[layout]
    changes = {
        "subwords.vocab_size": 600,
        "training.precision": "float64",
        "training.steps": 3,
        "training.validate_bleu": 5,
        "model.dropout": 0,
    }
    train(tiny_decoder_only(tmp_path / "one", {**changes, "training.devices": "[cpu]"}))
    config = tiny_decoder_only(tmp_path / "run", {**changes, "training.devices": "auto", **sizes})
    assert ranks(world, trained, config) == [3] * world
    assert_same_weights(tmp_path / "run", tmp_path / "one", 1e-10)
    for kind in ("loss", "valid_loss", "valid_chrf"):
        assert records(tmp_path / "run", kind) == pytest.approx(records(tmp_path / "one", kind), rel=1e-10), kind
    found, expected = (read_metrics(tmp_path / run / "samples.jsonl")[0]["samples"] for run in ("run", "one"))
    assert found == expected

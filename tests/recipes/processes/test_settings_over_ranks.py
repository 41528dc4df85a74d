"""Settings, options and validation data mean in every layout what they mean in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.settings.config import RunConfig
from recipes.translation.settings.metrics import METRICS
from recipes.translation.train import train
from seqpar.testing.ranks import ranks
from tests.recipes.processes.layouts import LAYOUTS, assert_same_weights, records, trained
from tests.recipes.saved import steps_of, validations_of
from tests.recipes.tiny import tiny, tiny_decoder_only, write_pairs

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
OF_SMOOTHING: dict[str, dict[str, dict[str, Any]]] = {
    "fairseq": {"vocab 2": {"layout.vocab": 2}, "data 2": {}},
    "harvard": {"data 2": {}, "shard 2": {"layout.shard": 2}},
}


@pytest.mark.parametrize("smoothing", list(OF_SMOOTHING))
def test_settings_unlike_the_defaults_give_the_same_numbers_in_every_layout(smoothing: str, tmp_path: Path) -> None:
    changes = {**UNLIKE_DEFAULTS, "training.smoothing_convention": smoothing}
    trained(0, 1, tiny(tmp_path / "one", {**changes, "training.devices": "[cpu]"}))
    expected = steps_of(tmp_path / "one")
    for layout, sizes in OF_SMOOTHING[smoothing].items():
        ranks(2, trained, tiny(tmp_path / layout, {**changes, **sizes}))
        for found, record in zip(steps_of(tmp_path / layout), expected, strict=True):
            assert found == pytest.approx(record, rel=1e-8), layout


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


def test_every_corpus_and_all_together_have_the_figures_of_one_process(tmp_path: Path) -> None:
    write_pairs(tmp_path, {"train": (0, 120), "many": (120, 140), "one": (140, 141)})
    one = config_of(tmp_path, "one", {"training.devices": "[cpu]"})
    train(one)
    two = config_of(tmp_path, "two", {})
    ranks(2, trained, two)
    expected, found = (validations_of(Path(config.run)) for config in (one, two))
    assert len(expected) == len(found) == 2
    names = {"step", *(f"valid_{name}{suffix}" for name in METRICS for suffix in ("", ".forward", ".back"))}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() == names
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-10), name
    assert 0 < expected[-1]["valid_chrf.forward"] != expected[-1]["valid_chrf.back"]

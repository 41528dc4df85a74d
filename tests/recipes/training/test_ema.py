"""The moving average of the weights, and that a run with it or another option goes on bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.run_folder.numbered import kept_models
from recipes.translation.run_folder.resume import begin
from recipes.translation.run_folder.translator import build_model, model_sizes, tensors_of
from recipes.translation.train import train
from tests.recipes.plain_scores import plain_sums
from tests.recipes.saved import (
    assert_same_last,
    load_weights,
    saved_file,
    state_in,
    steps_of,
    trained_run,
    validations_of,
)
from tests.recipes.tiny import tiny

STEPS = 6
CHANGES: dict[str, Any] = {
    "data.builtin_pairs": 120,
    "training.batch_tokens": 400,
    "training.steps": STEPS,
    "training.validate_every": 1,
    "training.keep_checkpoints": STEPS,
    "training.precision": "float64",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps the weights after each of its steps."""
    return trained_run(tmp_path_factory, CHANGES)


def averages_by_hand(plain: Path, decay: float) -> list[dict[str, torch.Tensor]]:
    """The average after each step, from the first weights and those that the plain run kept."""
    config = tiny(plain, CHANGES)
    corpus = load_corpus(config)
    torch.manual_seed(config.training.seed)
    model = build_model(model_sizes(config.model), corpus.source, corpus.target).double()
    average = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    found = []
    for step, folder in enumerate(kept_models(plain), start=1):
        d = min(decay, (1 + step) / (10 + step))
        weights = load_weights(folder)
        average = {name: d * tensor + (1 - d) * weights[name] for name, tensor in average.items()}
        found.append(average)
    return found


def test_the_average_is_the_recursion_and_training_is_as_without_it(plain: Path, tmp_path: Path) -> None:
    decay = 0.3  # above that of the first two steps, 2/11 and 3/12, and below that of the third
    run = tmp_path / "run"
    config = tiny(run, {**CHANGES, "training.ema": decay})
    train(config)
    expected = averages_by_hand(plain, decay)
    for folder, average in zip(kept_models(run), expected, strict=True):
        found = load_weights(folder)
        assert found.keys() == average.keys()
        for name, tensor in average.items():
            assert float((found[name] - tensor).abs().max()) <= 1e-12 * max(1.0, float(tensor.abs().max())), name
    trained = load_file(saved_file(run, "last", "training.safetensors"))
    for name, tensor in load_weights(plain / "last").items():
        assert torch.equal(trained[f"weights/{name}"], tensor)
        assert f"optimizer/{name}/exp_avg" in trained
    for kind in ("loss", "gradient_norm"):
        assert [step[kind] for step in steps_of(run)] == [step[kind] for step in steps_of(plain)]


def test_the_average_is_what_is_validated(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny(run, {**CHANGES, "training.ema": 0.5, "training.label_smoothing": 0.0})
    train(config)
    corpus = load_corpus(config)
    for name, step in (("last", STEPS), ("best", None)):
        translator = load_translator(run / name)
        model = translator.model.double()
        total, _, _, tokens = plain_sums(model, corpus.valid[0].batches, smoothing=0.0)
        records = validations_of(run)
        if step is None:
            step = min(records, key=lambda record: record["valid_loss"])["step"]
        (record,) = [record for record in records if record["step"] == step]
        assert total / tokens == pytest.approx(record["valid_loss"], rel=1e-6)


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
            state = state_in(tmp_path / run)
            assert run == "through" or state["batch"] > 0  # in the middle of an epoch
    assert state["epoch"] > 1
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    assert_same_last(through, resumed)
    assert steps_of(through) == steps_of(resumed)
    assert all(math.isfinite(record["loss"]) for record in steps_of(through))


def test_a_run_judged_by_its_translations_keeps_what_they_are_scored_by(tmp_path: Path) -> None:
    changes = {**OPTIONS, "training.steps": 1}
    train(tiny(tmp_path / "run", changes))
    for name, other in (("training.validate_bleu", 3), ("data.tokenize", "char"), ("decoding.max_length", 9)):
        with pytest.raises(ConfigError, match=rf"^{name} is .* was trained with .* --fresh$"):
            begin(tiny(tmp_path / "run", {**changes, name: other}), False)

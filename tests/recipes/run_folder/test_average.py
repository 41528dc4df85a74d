"""The average is the mean of the weights, and a model like any other."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from recipes.translation.commands import main
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.errors import CheckpointError
from recipes.translation.run_folder import average as averages
from recipes.translation.run_folder.average import average
from recipes.translation.run_folder.checkpoint import SavedModel, load_facts, load_saved, load_translator
from recipes.translation.run_folder.numbered import kept_models
from recipes.translation.run_folder.translator import WEIGHTS, Translator, build_model, model_sizes
from recipes.translation.text.subwords import Subwords, train_subwords
from recipes.translation.translating.translate import translate
from tests.recipes.saved import keep_model
from tests.recipes.tiny import tiny

LOSSES = {1: 3.0, 2: 1.0, 3: 4.0, 5: 2.0}
"""Validation losses by step."""


def translator(folder: Path, seed: int, **changes: object) -> Translator:
    """Random weights with the subwords in a folder."""
    config = tiny(folder, {name.replace("__", "."): value for name, value in changes.items()})
    subwords = Subwords.load(folder / "joint.model")
    torch.manual_seed(seed)
    model = build_model(model_sizes(config.model), subwords, subwords).to(WEIGHTS[config.training.precision])
    return Translator(config, model.eval(), subwords, subwords)


def keep(run: Path, step: int, made: Translator) -> None:
    keep_model(run, made, {"step": step, "valid_loss": LOSSES.get(step, 9.0)}, step, 10)


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with subwords."""
    folder = tmp_path_factory.mktemp("average")
    train_subwords([side for pair in pairs(200, 1) for side in pair], folder / "joint", tiny(folder).subwords)
    return folder


@pytest.fixture(scope="module", params=["float32", "float64"])
def made(request: pytest.FixtureRequest, subwords: Path) -> Path:
    """A run with four kept models, which share the embeddings of both languages and the generator."""
    run = shutil.copytree(subwords, subwords.parent / f"run-{request.param}")
    for step in LOSSES:
        keep(run, step, translator(run, step, training__precision=request.param))
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(made, tmp_path / "run")


def test_models_that_training_keeps_and_removes_meanwhile_are_averaged_anew(
    run: Path, subwords: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(folder: Path) -> SavedModel:
        monkeypatch.undo()
        keep_model(run, translator(subwords, 7), {"step": 7, "valid_loss": 0.5}, 7, 1)
        return load_saved(folder)

    monkeypatch.setattr(averages, "load_saved", later)
    assert average(run, last=1) == [7]


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def mean(folders: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each number, its sum rounded once by math.fsum."""
    every = [stored(folder) for folder in folders]
    found = {}
    for name, first in every[0].items():
        columns = zip(*(weights[name].flatten().tolist() for weights in every), strict=True)
        numbers = torch.tensor([math.fsum(column) / len(every) for column in columns], dtype=torch.float64)
        found[name] = numbers.view(first.shape).to(first.dtype)
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        if tensor.dtype == torch.float32:
            assert torch.equal(found[name], tensor), name
        torch.testing.assert_close(found[name], tensor, rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize(("last", "steps"), [(None, [1, 2, 3, 5]), (4, [1, 2, 3, 5]), (3, [2, 3, 5]), (1, [5])])
def test_the_average_is_the_mean_of_the_models_asked_for(last: int | None, steps: list[int], run: Path) -> None:
    assert average(run, last) == steps
    same(stored(run / "averaged"), mean([run / "checkpoints" / f"step-{step:08d}" for step in steps]))
    assert load_facts(run / "averaged") == {"step": steps[-1], "averaged_steps": steps}


def test_a_sum_is_not_rounded_to_the_weights_own_precision(subwords: Path, tmp_path: Path) -> None:
    run = shutil.copytree(subwords, tmp_path / "run")
    for step, number in enumerate((1.0, 2.0**-24, 2.0**-24, -1.0)):  # in float32 1 + 2^-24 is 1, and their mean 0
        made = translator(run, 1)
        with torch.no_grad():
            made.model.generator.bias.fill_(number)
        keep(run, step, made)
    average(run)
    assert stored(run / "averaged")["generator.bias"].unique().tolist() == [2.0**-25]


def test_tied_weights_are_averaged_once_and_stay_tied(run: Path) -> None:
    average(run)
    model = load_translator(run / "averaged").model
    assert model.generator.weight is model.src_embed.lookup.weight
    assert stored(run / "averaged").keys() == stored(kept_models(run)[0]).keys()
    expected = mean(kept_models(run))
    (name,) = [name for name, tensor in expected.items() if tensor.shape == model.generator.weight.shape]
    assert torch.equal(model.generator.weight, expected[name].float())


def test_an_average_replaces_the_one_before_and_leaves_the_kept_models(run: Path) -> None:
    before = [stored(folder) for folder in kept_models(run)]
    assert average(run, last=2) == [3, 5]
    assert average(run, last=3) == [2, 3, 5]
    assert load_facts(run / "averaged")["averaged_steps"] == [2, 3, 5]
    for old, folder in zip(before, kept_models(run), strict=True):
        same(stored(folder), old)


def refused(run: Path, last: int | None = None) -> str:
    """The one line that averaging is refused with; nothing is written."""
    with pytest.raises(CheckpointError) as caught:
        average(run, last)
    assert not (run / "averaged").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fewer_models_than_asked_for_are_refused_with_both_numbers(run: Path) -> None:
    assert f"--last asks for 5 models, but {run} keeps 4: ask for fewer" in refused(run, last=5)


def test_a_run_without_kept_models_is_refused_with_the_setting_that_keeps_them(tmp_path: Path) -> None:
    assert "there is no run in" in refused(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert "train with --training.keep_checkpoints" in refused(tmp_path / "run")


def test_a_damaged_model_is_never_averaged(run: Path) -> None:
    path = kept_models(run)[1] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert f"{path} is damaged" in refused(run)


SENTENCE = "The number is six."


def test_the_commands_average_and_use_the_average(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["translate", "--run", str(run), "--checkpoint", "averaged", SENTENCE]
    assert main(words) == 2
    assert "no trained model in" in (said := capsys.readouterr().err)
    assert "make it with python -m recipes.translation average" in said
    assert main(["average", "--run", str(run), "--last", "3"]) == 0
    assert "is the average of 3 models, from steps 2, 3, 5" in capsys.readouterr().out
    assert main(words) == 0
    averaged = load_translator(run / "averaged")
    assert capsys.readouterr().out.splitlines() == translate(averaged, [SENTENCE])


@pytest.mark.parametrize("words", [["--last", "0"], ["--last", "-1"], ["--last", "x"]])
def test_a_number_that_cannot_be_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["average", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_evaluate_scores_the_average(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    average(run, last=2)
    assert main(["evaluate", "--run", str(run), "--checkpoint", "averaged", "--tokenize", "none"]) == 0
    scores = json.loads((run / "test.scores.json").read_text())
    averaged = load_translator(run / "averaged")
    sources = [pair.source for pair in load_pairs(averaged.config.data, "test")]
    assert (run / "test.translations.txt").read_text().splitlines() == translate(averaged, sources)
    assert f"multi-bleu -lc      {scores['multi_bleu_lowercase']:5.2f}" in capsys.readouterr().out

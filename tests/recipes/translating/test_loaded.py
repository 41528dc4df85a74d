"""A model as Python code opens it: from a folder that may be anywhere, with every option checked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models import beam_search, default_limit
from recipes.translation import load_translator
from recipes.translation.commands import main
from recipes.translation.data.batches import pad_rows
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import CheckpointError, ConfigError, DataError
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.run_folder.checkpoint import load_facts, save_model
from recipes.translation.run_folder.checkpoint import load_translator as load_parts
from recipes.translation.text.subwords import BOS, EOS, Subwords, train_subwords
from recipes.translation.train import train
from recipes.translation.translating.loaded import LoadedTranslator
from recipes.translation.translating.translate import translate
from tests.recipes.random_translator import random_translator, translator_of
from tests.recipes.saved import load_weights
from tests.recipes.tiny import tiny

ROOT = Path(__file__).parents[3]
SENTENCES = ["The number is six.", "", "Two trains leave.", "The number is four."]


@pytest.fixture(scope="module", params=["joint", "separate"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, with a model of random weights as its best."""
    folder = tmp_path_factory.mktemp("loaded")
    found = random_translator(folder)
    if request.param == "separate":
        config = tiny(folder, {"subwords.joint": False, "model.tie": "target"})
        train_subwords(
            [pair.target for pair in pairs(200, 2)], folder / "target", replace(config.subwords, vocab_size=340)
        )
        target = Subwords.load(folder / "target.model")
        found = translator_of(config, found.source, target, 2.0)
    save_model(folder / "run/best", found, {"step": 7})
    return folder / "run"


@pytest.fixture(scope="module")
def elsewhere(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that was exported, moved away from its run."""
    folder = tmp_path_factory.mktemp("elsewhere")
    assert main(["export", "--run", str(run), "--to", "safetensors", "--out", str(folder / "out")]) == 0
    shutil.move(folder / "out", folder / "moved")
    return folder / "moved"


@pytest.fixture(scope="module")
def moved(elsewhere: Path) -> LoadedTranslator:
    return load_translator(elsewhere)


def test_the_exported_model_is_the_best_of_the_run_to_the_last_bit(run: Path, elsewhere: Path) -> None:
    ours, theirs = load_weights(run / "best"), load_weights(elsewhere)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert load_facts(run / "best") == load_facts(elsewhere) == {"step": 7}
    assert {path.name for path in elsewhere.iterdir()} == {path.name for path in (run / "best").iterdir()}


def test_it_translates_as_the_run_does(run: Path, moved: LoadedTranslator) -> None:
    parts = load_parts(run / "best")
    ours = translate(parts, SENTENCES)
    assert moved.translate(SENTENCES) == ours
    assert load_translator(run).translate(SENTENCES) == ours
    assert ours[1] == ""


def test_options_of_a_call_replace_the_run_s_for_that_call(run: Path, moved: LoadedTranslator) -> None:
    parts = load_parts(run / "best")
    for options in ({"beam": 3}, {"max_length": 3}, {"beam": 5, "length_penalty": 2.0, "length_norm": "length"}):
        decoding = replace(parts.config.decoding, **options)
        assert moved.translate(SENTENCES, **options) == translate(parts.with_decoding(decoding), SENTENCES)
    assert moved.translate(SENTENCES, max_length=1) != moved.translate(SENTENCES)


def test_the_n_best_are_those_of_a_beam_search(moved: LoadedTranslator) -> None:
    parts = moved.translator
    (ids,) = parts.source.encode(SENTENCES[:1])
    limit = min(default_limit(len(ids) + 1), 8)
    src = pad_rows([[*ids, EOS]])
    (expected,) = beam_search(
        parts.model, src, bos=BOS, eos=EOS, beam=4, length_penalty=1.0, n_best=3, max_length=limit
    )
    found, empty = moved.n_best(SENTENCES[:2], 3, beam=4, length_penalty=1.0, max_length=8)
    assert [one.score for one in found] == pytest.approx([one.score for one in expected])
    assert [one.log_probability for one in found] == pytest.approx([one.log_probability for one in expected])
    assert [one.text for one in empty] == [""]
    assert [len(moved.n_best(SENTENCES[:1], n, beam=4)[0]) for n in (1, 4)] == [1, 4]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda model: model.translate("Two trains."), TypeError, "sentences is a str: give a list"),
        (lambda model: model.n_best("Two trains.", 1), TypeError, "sentences is a str: give a list"),
        (lambda model: model.translate(["six", 6]), TypeError, "sentence 2 is int, not str"),
        (lambda model: model.translate(None), TypeError, "sentences is None: give a list of sentences"),
        (lambda model: model.n_best(["six"], "2"), TypeError, "n is '2', not a whole number"),
        (
            lambda model: load_translator("nowhere", device="xyz"),
            ConfigError,
            "device is 'xyz', which torch cannot use",
        ),
        (lambda model: model.translate(["\udcff"]), DataError, "sentence 1 is not UTF-8"),
        (lambda model: model.translate([], beam=0), ConfigError, r"decoding.beam \(this call\) expects a whole number"),
        (lambda model: model.translate([], bean=2), ConfigError, r"unknown setting decoding.bean .*decoding.beam\?"),
        (lambda model: model.n_best([], 0, beam=2), ConfigError, "n is 0, below 1"),
        (lambda model: model.n_best([], 5, beam=2), ConfigError, "n is 5, above the beam of 2: .* beam=5"),
    ],
)
def test_a_wrong_call_is_one_line(call: Any, error: type[Exception], message: str, moved: LoadedTranslator) -> None:
    with pytest.raises(error, match=message) as caught:
        call(moved)
    assert "\n" not in str(caught.value)


def test_a_folder_for_another_program_or_a_damaged_one_is_refused(elsewhere: Path, tmp_path: Path) -> None:
    with replaced_folder(tmp_path / "onnx") as folder:
        (folder / "encoder.onnx").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"onnx has no model.json, so it was written for another program"):
        load_translator(tmp_path / "onnx")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*nowhere"):
        load_translator(tmp_path / "nowhere")
    shutil.copytree(elsewhere, tmp_path / "elsewhere")
    weights = tmp_path / "elsewhere/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        load_translator(tmp_path / "elsewhere")


def test_an_installed_checkout_is_imported_from_any_folder_and_help_needs_no_torch(tmp_path: Path) -> None:
    """What `pip install -e` does: it puts the checkout on the path."""
    code = "import recipes.translation, sys; print('torch' in sys.modules, recipes.translation.__all__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False ['LoadedTranslator', 'load_translator']\n"


def test_longer_translations_than_a_model_has_learned_positions_for_are_refused(tmp_path: Path) -> None:
    positions = {"model.preset": "mbart", "model.max_positions": 100, "training.max_length": 90}
    train(tiny(tmp_path / "run", {**positions, "decoding.max_length": 30, "training.steps": 1}))
    wrong = r"^decoding\.max_length is 200, but the model has learned positions for 99 subwords"
    with pytest.raises(ConfigError, match=wrong):
        load_parts(tmp_path / "run" / "best", overrides={"decoding.max_length": 200})
    loaded = load_translator(tmp_path / "run")
    with pytest.raises(ConfigError, match=wrong):
        loaded.translate(["A train leaves."], max_length=200)
    assert loaded.translate(["A train leaves."], max_length=99, max_ratio=99)

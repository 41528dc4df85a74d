"""A run that came from elsewhere, whose files say anything under hashes that fit: one line, in little memory."""

from __future__ import annotations

import json
import math
import os
import pty
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from recipes.translation.commands import main
from recipes.translation.files.atomic_folder import sha256
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.settings.config import load_config
from recipes.translation.text.sentencepiece_file import NOTES, model_of
from tests.recipes.command_line import refusal
from tests.recipes.export.translators import as_saved
from tests.recipes.random_translator import random_translator
from tests.recipes.saved import resealed

pytestmark = pytest.mark.faults

Change = Callable[[Path], None]
ESCAPE = "\x1b[2J"


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a file of JSON or YAML."""
    found = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def reseal_state(folder: Path) -> None:
    """Write the hashes of a state, and that of the weights it belongs to, as the files are."""
    weights = folder.with_name(folder.name.replace("state", "step")) / "model.safetensors"
    changed(folder / "training.json", lambda found: found.update({"of": {weights.name: sha256(weights)}}))
    resealed(folder)


def setting(section: str, name: str, value: Any) -> Change:
    return lambda folder: changed(folder / "config.yaml", lambda found: found[section].update({name: value}))


def state(name: str, value: Any) -> Change:
    return lambda folder: changed(folder / "training.json", lambda found: found.update({name: value}))


def spoiled_weights(folder: Path) -> None:
    change_weights(folder, "generator.bias", slice(20, 21), math.nan)


def change_weights(folder: Path, name: str, where: slice, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name][where] = value
    save_file(weights, folder / "model.safetensors")


def nothing_to_say(folder: Path) -> None:
    """Only padding and the start may come, which no search chooses."""
    change_weights(folder, "generator.bias", slice(1, 2), -math.inf)
    change_weights(folder, "generator.bias", slice(3, None), -math.inf)


def weight_of_minus_infinity(folder: Path) -> None:
    change_weights(folder, "decoder.layers.0.residuals.0.norm.weight", slice(0, 1), -math.inf)


def piece_that_is_no_text(folder: Path) -> None:
    model = (folder / "joint.model").read_bytes()
    last = model_of(model).pieces[-1]
    piece, text = last.SerializeToString(), last.piece.encode()
    (folder / "joint.model").write_bytes(model.replace(piece, piece.replace(text, b"\xff" * len(text))))


def notes(text: str) -> Change:
    def write(folder: Path) -> None:
        model = model_of((folder / "joint.model").read_bytes())
        model.Extensions[NOTES] = text.encode()
        (folder / "joint.model").write_bytes(model.SerializeToString())

    return write


def state_with_another_moment(folder: Path) -> None:
    moments = load_file(folder / "training.safetensors")
    moments["optimizer/generator.other/exp_avg"] = moments.pop("optimizer/generator.bias/exp_avg")
    save_file(moments, folder / "training.safetensors")


TRANSLATES = ("translate", "--run", "RUN", "Two trains.")
RESUMES = ("train", "--run", "RUN")
SCORES = ("evaluate", "--run", "RUN", "--sources", "TEXT", "--references", "TEXT")
DOES_NOT_FIT = "does not fit the model its config.yaml describes"
HOSTILE: dict[str, tuple[tuple[str, ...], Change, str]] = {
    "width": (TRANSLATES, setting("model", "d_model", 10**7), f"{DOES_NOT_FIT}: "),
    "width to train on": (RESUMES, setting("model", "d_ff", 10**9), f"{DOES_NOT_FIT}: "),
    "beam": (TRANSLATES, setting("decoding", "beam", 2**31 - 1), "expects a whole number from 1 to 1,000; got"),
    "layers": (TRANSLATES, setting("model", "encoder_layers", 10**9), f"{DOES_NOT_FIT}: 1,000,000,00"),
    "layers to train on": (RESUMES, setting("model", "decoder_layers", 10**9), f"{DOES_NOT_FIT}: 1,000,000,00"),
    "moment": (
        RESUMES,
        state_with_another_moment,
        "has no optimizer/generator.bias/exp_avg",
    ),
    "language": (TRANSLATES, setting("data", "source", ESCAPE), r"it contains the control character '\x1b'"),
    "name of a field": (RESUMES, state(ESCAPE, 1), "training.json does not have the fields that this version writes"),
    "pieces": (TRANSLATES, piece_that_is_no_text, "is not UTF-8 text; restore it from a copy"),
    "notes that are no object": (TRANSLATES, notes("[1]"), "joint.model is damaged: it is [1], but must be an object"),
    "deep notes": (TRANSLATES, notes("[" * 100_000), "joint.model is damaged: "),
    "ids in notes": (
        TRANSLATES,
        notes('{"size": 9, "prefix": [9], "suffix": [], "start": [2]}'),
        "joint.model is damaged: prefix[0] is 9, but must be the number of a subword",
    ),
    "nan translates": (TRANSLATES, spoiled_weights, "model.safetensors: generator.bias has values that are nan or inf"),
    "nothing to say": (TRANSLATES, nothing_to_say, "generator.bias has values that are nan or inf"),
    "another weight": (
        TRANSLATES,
        weight_of_minus_infinity,
        "decoder.layers.0.residuals.0.norm.weight has values that are nan or inf",
    ),
    "nan scores": (SCORES, spoiled_weights, "generator.bias has values that are nan or inf"),
    "nan averages": (("average", "--run", "RUN"), spoiled_weights, "generator.bias has values that are nan or inf"),
    "nan exports": (
        ("export", "--run", "RUN", "--to", "safetensors"),
        spoiled_weights,
        "generator.bias has values that are nan or inf",
    ),
    "nan to train on": (RESUMES, spoiled_weights, "generator.bias has values that are nan or inf"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_under_hashes_that_fit_is_refused_in_one_line(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, change, reason = HOSTILE[name]
    kind = "state" if change.__qualname__.startswith("state") else "step"
    for folder in (run / "checkpoints").glob(f"{kind}-*"):
        change(folder)
        resealed(folder)
    for folder in (run / "checkpoints").glob("state-*"):
        reseal_state(folder)
    (tmp_path / "text").write_text("Two trains.\n")
    places = {"RUN": str(run), "TEXT": str(tmp_path / "text")}
    capsys.readouterr()
    assert main([places.get(word, word) for word in words]) == 2
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert reason in line
    assert said.splitlines()[-1] == line
    assert line.isprintable()


def test_settings_of_subwords_that_are_nested_too_deeply_are_made_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "subwords" / "settings.json").write_text("[" * 100_000)
    resealed(run / "subwords")
    assert main(["prepare", "--run", str(run)]) == 0
    assert f"[prepare] written to {run / 'subwords'}" in capsys.readouterr().out


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """An export to CTranslate2."""
    from recipes.translation.export import ctranslate2_model

    folder = tmp_path / "run" / "ctranslate2"
    ctranslate2_model.write(as_saved(random_translator(tmp_path)), folder, None)
    return folder


@pytest.mark.formats
def test_an_export_to_ctranslate2_without_a_variable_is_refused_in_one_line(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = (exported / "model.bin").read_bytes()
    # A variable begins with its name, which a length precedes and NUL ends: under another name it is missing
    name = b"encoder/layer_0/ffn/linear_0/weight\0"
    assert model.count(struct.pack("<H", len(name)) + name) == 1
    (exported / "model.bin").write_bytes(model.replace(name, name.swapcase()))
    resealed(exported)
    line = refusal(capsys, "translate", "--run", str(exported), "--engine", "ctranslate2", "Two trains.")
    assert "cannot be opened by CTranslate2: variable encoder/layer_0/ffn/linear_0/weight not found" in line


@pytest.mark.formats
def test_an_export_to_ctranslate2_with_another_vocabulary_is_refused_in_one_line(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = json.loads((exported / "shared_vocabulary.json").read_text())
    for others in ([*pieces[:-1], "another"], [*pieces[:-2], *pieces[:-3:-1]]):
        (exported / "shared_vocabulary.json").write_text(json.dumps(others))
        resealed(exported)
        line = refusal(capsys, "translate", "--run", str(exported), "--engine", "ctranslate2", "Two trains.")
        assert "CTranslate2's source vocabulary does not match its subwords" in line


def test_control_characters_are_shown_escaped_in_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert r"\x1b[2J" in refusal(capsys, "translate", "--run", str(tmp_path), "--file", f"{tmp_path}/{ESCAPE}")


@pytest.fixture
def says_escapes(tmp_path: Path) -> Path:
    """A run whose model says nothing but the byte with which escape sequences begin."""
    translator = random_translator(tmp_path)
    with torch.no_grad():
        for parameter in translator.model.parameters():
            parameter.zero_()
        translator.model.generator.bias[translator.target.pieces().index("<0x1B>")] = 8
    config = load_config(None, {"run": str(tmp_path / "run"), "decoding.beam": 1, "decoding.max_length": 3})
    config = replace(translator.config, decoding=config.decoding)
    save_model(tmp_path / "run" / "best", replace(translator, config=config), {"step": 1})
    return tmp_path / "run"


@pytest.mark.parametrize("options", [[], ["--n-best", "1"]])
def test_translations_are_escaped_on_a_terminal_and_nowhere_else(
    options: list[str], says_escapes: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = ["translate", "--run", str(says_escapes), *options, "Two."]
    assert main(words) == 0
    piped = capfdbinary.readouterr().out
    assert piped.endswith(b"\x1b\x1b\x1b\n")
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-m", "recipes.translation", *words], stdout=theirs, check=True, timeout=120)
    os.close(theirs)
    shown = os.read(ours, 10_000)
    os.close(ours)
    assert shown.replace(b"\r\n", b"\n") == piped.replace(b"\x1b", rb"\x1b")

"""Options given twice, paths, pipes, tags and cut translations: nothing is dropped or cut without a word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.translation.commands import main
from recipes.translation.commands.arguments import path
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import load_config
from recipes.translation.settings.options import OneLineParser, add_config_options, overrides
from recipes.translation.text.model_text import ModelText
from recipes.translation.translating.translate import best, note_unfinished
from tests.recipes.random_translator import random_translator

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "words",
    [
        ["--data.train", "a", "b", "--data.train", "c", "d"],
        ["--training.steps", "1", "--training.steps=1"],
        ["--run", "a", "--folder", "b"],
        ["--corpora", "{a: {train: x.tsv}}", "--corpora", "{}"],
    ],
)
def test_an_option_given_twice_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = OneLineParser("train", "", "")
    add_config_options(parser)
    with pytest.raises(SystemExit):
        parser.parse(words)
    error = capsys.readouterr().err
    assert "given twice" in error
    assert ("`corpora`" in error) == (words[0] == "--data.train")


@pytest.mark.parametrize(
    "words", [["translate", "--file", "a", "--file", "b"], ["train", "--processes", "1", "--processes", "2"]]
)
def test_every_command_refuses_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(words)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert "given twice" in capsys.readouterr().err


def test_paths_are_expanded_wherever_they_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch")
    (tmp_path / "a.yaml").write_text("run: ~/x\ntraining: {start_from: '${SCRATCH}/y', teacher: $SCRATCH/z}\n")
    config = load_config(tmp_path / "a.yaml")
    assert (config.run, config.training.start_from) == (f"{tmp_path}/x", "/scratch/y")
    assert config.training.teacher == "/scratch/z"
    parser = OneLineParser("train", "", "")
    add_config_options(parser)
    given = overrides(parser.parse(["--run=~/x", "--training.teacher=${SCRATCH}/t"]))
    assert given == {"run": f"{tmp_path}/x", "training.teacher": "/scratch/t"}
    assert path("~/x") == f"{tmp_path}/x"
    (tmp_path / "a.yaml").write_text("run: ${ABSENT}/x\n")
    monkeypatch.delenv("ABSENT", raising=False)
    with pytest.raises(ConfigError, match=r"^run is .*, but the environment variable ABSENT is not set"):
        load_config(tmp_path / "a.yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_model(folder / "best", random_translator(folder / "made"), {"step": 1})
    return folder


def test_packages_in_the_working_directory_are_not_in_the_way(run: Path, tmp_path: Path) -> None:
    for package in ("models", "seqpar"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    words = [sys.executable, "-m", "recipes.translation", "translate", "--run", str(run), "Two trains."]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)


def test_a_pipe_is_answered_line_by_line(run: Path) -> None:
    words = [sys.executable, "-m", "recipes.translation", "translate", "--run", str(run), "--n-best", "1"]
    with subprocess.Popen(
        words, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        for number in ("1", "2"):
            process.stdin.write("Two trains.\n")
            process.stdin.flush()
            assert process.stdout.readline().split("\t")[0] == number
        process.stdin.close()
        assert process.stdout.read() == ""


def test_translations_that_are_cut_are_counted(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translator = random_translator(tmp_path)
    sentences = ["Two trains leave.", "six"]
    limited = translator.with_decoding(replace(translator.config.decoding, max_length=3, beam=1))
    found = best(limited, sentences)
    assert [one.finished for one in found] == [len(limited.target.encode([one.text])[0]) < 3 for one in found]
    cut = note_unfinished([one._replace(finished=False) for one in found], "translate", 5)
    assert cut == 2
    assert "2 of 2 translations are unfinished, the first that of sentence 6" in capsys.readouterr().err
    (tmp_path / "t").write_text("Two trains leave.\nsix\n")
    files = ["--sources", str(tmp_path / "t"), "--references", str(tmp_path / "t")]
    assert main(["evaluate", "--run", str(run), *files, "--max-length", "1"]) == 0
    assert json.loads((run / "t.scores.json").read_text())["unfinished"] == 2


def test_a_larger_ratio_lets_translations_be_longer(tmp_path: Path) -> None:
    translator = random_translator(tmp_path)
    lengths = []
    for ratio in (0.0, 9.0):
        decoding = replace(translator.config.decoding, max_ratio=ratio, max_length=200, min_length=0, beam=1)
        model = translator.model
        model.generator.bias.data[3] = -100.0  # which never ends by itself
        (one,) = best(translator.with_decoding(decoding), ["six"])
        lengths.append(len(one.text))
    assert lengths[1] > lengths[0]


def test_the_tag_of_an_unknown_language_is_refused(tmp_path: Path) -> None:
    translator: Translator = random_translator(tmp_path)
    config = replace(translator.config, data=replace(translator.config.data, language_tags=True))
    assert ModelText.of(config).source("<2de>we go") == "<2de> we go"
    tagged = replace(translator, config=config)
    best(tagged, ["<2de> Two trains.", "<3 Two trains."])
    with pytest.raises(DataError, match="sentence 2 begins with <2xx>, but the model has no such language: it has 1"):
        best(tagged, ["six", "<2xx> Two trains."])
    best(translator, ["<2xx> Two trains."])  # text, in a model without tags

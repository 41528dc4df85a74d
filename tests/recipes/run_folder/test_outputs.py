"""What a user names for results never takes the place of what a run keeps, by any command, nor of what is read."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from recipes.translation.commands import main
from recipes.translation.files.atomic_folder import check_removable
from recipes.translation.report.draw import report
from recipes.translation.report.records import read_run
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.outputs import owner_of, write_output
from tests.recipes.command_line import refusal
from tests.recipes.files.watching import done_by_two
from tests.recipes.random_translator import random_translator
from tests.recipes.report.made import make_run
from tests.recipes.run_folder.made import contents

KEPT = [
    *("metrics.jsonl", "resources.jsonl", "samples.jsonl", "validation.json", "trackers.json", "metrics.odd.txt"),
    *(
        "test.scores.json",
        "test.translations.txt",
        "best/model.json",
        "best/manifest.json",
        "averaged/model.safetensors",
    ),
    *("checkpoints/step-00000004/config.yaml", "subwords/manifest.json", "onnx/manifest.json"),
    *("translations/1.source.txt", "translations/1.json", "tensorboard/events", "wandb/run-1/files/config.yaml"),
]
"""Files of a run."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every file."""
    run = make_run(tmp_path_factory.mktemp("outputs") / "run")
    translator = random_translator(run.parent)
    for name in ("best", "averaged", "checkpoints/step-00000004", "subwords", "onnx"):
        save_model(run / name, translator, {"step": 4})
    for name in KEPT:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        if not (run / name).exists():
            (run / name).write_text("kept\n")
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("name", KEPT)
def test_no_file_of_a_run_is_replaced_by_a_report_or_by_alignments(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    (tmp_path / "in").write_text("Two trains.\n")
    (tmp_path / "link").symlink_to(run / name)
    translate = ["translate", "--run", str(run), "--file", str(tmp_path / "in"), "--alignments"]
    for words in (["report", str(run), "--output"], translate):
        for output in (run / name, run / "best" / ".." / name, tmp_path / "link"):
            told = refusal(capsys, *words, str(output))
            assert told.startswith(f"error: {words[-1]}: {output} belongs to {run}")
            assert told.endswith(", and would be replaced: choose another name")
    assert contents(run) == before


def test_the_report_of_a_run_is_not_replaced_by_that_of_another(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_run(tmp_path / "other")
    told = refusal(capsys, "report", str(other), "--output", str(run / "report.html"))
    assert told.startswith(f"error: --output: {run / 'report.html'} belongs to {run}")


def test_files_of_an_export_are_not_replaced_wherever_it_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "onnx").rename(tmp_path / "taken")
    before = contents(tmp_path / "taken")
    told = refusal(capsys, "report", str(run), "--output", str(tmp_path / "taken" / "config.yaml"))
    assert f"config.yaml belongs to {tmp_path / 'taken'}, and would be replaced" in told
    assert contents(tmp_path / "taken") == before


def test_what_a_command_has_made_itself_and_files_of_others_may_be_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("of no run\n")
    for output in (
        run / "report.html",
        run / "short.html",
        run / "best" / "mine.html",
        tmp_path / "samples.jsonl",
    ):
        for _ in range(2):
            assert main(["report", str(run), "--output", str(output)]) == 0
        assert output.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["best", "checkpoints", "checkpoints/step-00000004", "metrics.jsonl", "wandb"])
def test_a_folder_is_not_named_as_a_part_of_a_run(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    told = refusal(capsys, "export", "--run", str(run), "--to", "safetensors", "--out", str(run / name))
    assert f"--out: {run / name} " in told
    assert "would be replaced: choose another name" in told
    assert contents(run) == before


def test_folders_of_others_in_a_run_belong_to_nobody(run: Path) -> None:
    for name in (
        "ctranslate2",
        "best/ctranslate2",
        "checkpoints/mine",
        "translations/news.align",
        "notes/metrics.jsonl",
    ):
        assert owner_of(run / name) is None


def test_results_of_an_evaluation_never_replace_what_it_reads(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = run / "news.translations.txt"
    read.write_text("Zwei Züge.\n")
    (tmp_path / "news").write_text("Two trains.\n")
    words = ["--run", str(run), "--sources", str(tmp_path / "news"), "--references", str(read)]
    told = refusal(capsys, "evaluate", *words)
    assert told == f"error: --sources: {read} is an input, and would be replaced: choose another name"
    assert read.read_text() == "Zwei Züge.\n"


@pytest.mark.parametrize(
    ("name", "said"), [("averaged", "averaged"), ("checkpoints/step-00000004", "an earlier model")]
)
def test_results_of_a_model_of_a_run_are_in_the_run_where_training_may_remove_the_model(
    name: str, said: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(run / name, random_translator(tmp_path, seed=5), {"step": 4})
    (tmp_path / "news").write_text("Two trains.\n")
    monkeypatch.chdir(run / name)
    files = ["--sources", str(tmp_path / "news"), "--references", str(tmp_path / "news")]
    for named in (run / name, "."):
        assert main(["evaluate", "--run", str(named), *files]) == 0
        check_removable(run / name)
        assert f">run ({said})<" in report(read_run(run))
        (run / "news.scores.json").unlink()
    save_model(tmp_path / "alone", random_translator(tmp_path), {"step": 4})
    assert main(["evaluate", "--run", str(tmp_path / "alone"), *files]) == 0
    assert (tmp_path / "alone" / "news.scores.json").is_file()


@pytest.mark.parametrize("name", ["best", "onnx", "checkpoints"])
@pytest.mark.parametrize("command", ["train", "prepare", "demo", "distil", "import", "average"])
def test_no_run_is_written_into_a_model_or_a_part_of_another_run(
    command: str, name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    words = {
        "import": [str(run / "best")],
        "distil": ["--teacher", str(run)],
    }
    told = refusal(capsys, command, "--run", str(run / name), *words.get(command, []))
    said = f"--run: {run / name} is the folder of a model: name the folder of a run, such as the one around it"
    if name == "checkpoints":
        said = f"--run: {run / name} belongs to {run}: name the folder of a run"
    assert told == f"error: {said}"
    assert contents(run) == before


@pytest.mark.parametrize("below", ["", "below/it"])
@pytest.mark.parametrize("command", ["train", "prepare", "import", "average"])
def test_a_run_that_is_no_folder_is_refused_by_name(
    command: str, below: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    words = {"import": [str(run / "best")]}.get(command, [])
    for name, what in (("file", "not a folder"), ("link", "a link to a folder that is missing")):
        told = refusal(capsys, command, "--run", str(tmp_path / name / below), *words)
        assert told == (f"error: --run: {tmp_path / name} is {what}: name another folder for the run, or move it away")


@pytest.mark.parametrize("name", ["averaged", "metrics.jsonl", "resources.jsonl", "checkpoints/step-00000004"])
def test_no_model_is_imported_into_a_run_whatever_it_has(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    (other / name).parent.mkdir(parents=True)
    (run / name).rename(other / name)
    before = contents(other)
    told = refusal(capsys, "import", str(run / "best"), "--run", str(other))
    assert told == (
        f"error: {other} is a run already, with records, subwords or models: name another folder with --run"
    )
    assert contents(other) == before


@pytest.mark.parametrize("missing", [True, False])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    missing: bool, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path
    if missing:
        output = tmp_path / "no" / "file"
    words = ["translate", "Two trains.", "--run", str(run), "--alignments", str(output)]
    said = {True: f"there is no folder {tmp_path / 'no'} for file: make it first", False: "is a folder: name a file"}
    assert said[missing] in refusal(capsys, *words)


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_output(tmp_path / "pipe", b"a page")
    reader.join(20)
    assert read == [b"a page"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_that_two_processes_write_at_once_is_that_of_one(tmp_path: Path) -> None:
    def write(number: int) -> None:
        write_output(tmp_path / "page", str(number).encode() * 100_000 * number)

    def check() -> None:
        assert (tmp_path / "page").read_bytes() in (b"1" * 100_000, b"2" * 200_000)
        assert [path.name for path in tmp_path.iterdir()] == ["page"]

    done_by_two(100, write, check)


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("earlier")
    (tmp_path / "link").symlink_to("file")
    write_output(tmp_path / "link", json.dumps({}).encode())
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}

"""The command `export`, as it is typed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchmarks import distilled
from recipes.translation.commands import main
from recipes.translation.commands.arguments import require
from recipes.translation.errors import ConfigError
from recipes.translation.scores.scores import measure
from recipes.translation.train import train
from tests.recipes.run_folder.made import contents
from tests.recipes.saved import model_in, saved_file
from tests.recipes.tiny import tiny, tiny_decoder_only

pytestmark = pytest.mark.formats


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    train(tiny(folder, {"training.steps": 1}))
    return folder


@pytest.mark.parametrize(
    ("format", "file"),
    [
        ("safetensors", "model.safetensors"),
        ("ctranslate2", "model.bin"),
        ("hf", "model.safetensors"),
    ],
)
def test_a_run_is_exported_into_its_folder_and_elsewhere(
    format: str, file: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--run", str(run), "--to", format, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / file).is_file()
    assert f"[export] {tmp_path / 'out'}: 0." in capsys.readouterr().out
    # Not onnx, which takes longest: test_export_memory.py and test_documents.py export graphs by this command
    assert main(["export", "--run", str(run), "--to", format]) == 0
    assert f"[export] {run / format}: 0." in capsys.readouterr().out
    assert (run / format / file).stat().st_size == (tmp_path / "out" / file).stat().st_size


def test_a_quantisation_makes_the_folder_smaller(run: Path, tmp_path: Path) -> None:
    assert main(["export", "--run", str(run), "--to", "ctranslate2", "--out", str(tmp_path / "float32")]) == 0
    words = ["--quantization", "int8", "--out", str(tmp_path / "int8")]
    assert main(["export", "--run", str(run), "--to", "ctranslate2", *words]) == 0
    assert (tmp_path / "int8" / "model.bin").stat().st_size < (tmp_path / "float32" / "model.bin").stat().st_size


def test_a_quantisation_for_transformers_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--run", str(run), "--to", "hf", "--quantization", "int8"])
    assert "--quantization is for --to ctranslate2: leave it out with --to hf" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_package is not installed: pip install no_such_package"):
        require("no_such_package")


def test_a_folder_of_someone_else_is_left_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["export", "--run", str(run), "--to", "ctranslate2", "--out", str(tmp_path)]) == 2
    assert "is not empty and is not an export" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_translate_uses_the_exported_model_by_its_run_or_by_its_own_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--run", str(run), "--to", "ctranslate2"]) == 0
    (tmp_path / "in.txt").write_text("The number is six.\n\nTwo trains.\n")
    words = ["--file", str(tmp_path / "in.txt"), "--beam", "1"]
    capsys.readouterr()
    assert main(["translate", "--run", str(run), *words]) == 0
    expected = capsys.readouterr().out
    assert len(expected.splitlines()) == 3
    for folder in (run, run / "ctranslate2"):
        assert main(["translate", "--run", str(folder), "--engine", "ctranslate2", *words]) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--n-best", "2"], "--n-best is not for --engine ctranslate2"),
        (["--alignments", "a"], "--alignments is not for --engine ctranslate2"),
        (["--run", "nowhere"], "there is no nowhere/ctranslate2; write it with"),
    ],
)
def test_what_the_engine_cannot_do_is_one_line(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["translate", "six", "--engine", "ctranslate2", *words])
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2
    assert answer in capsys.readouterr().err


def test_a_decoder_only_model_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny_decoder_only(tmp_path / "run", {"training.steps": 1}))
    for format in ("ctranslate2", "hf"):
        assert main(["export", "--run", str(tmp_path / "run"), "--to", format]) == 2
        assert "model.preset decoder_only has no encoder; only encoder-decoders are exported" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["safetensors", "ctranslate2", "onnx", "hf"])
def test_an_export_never_replaces_the_model_that_it_reads(
    format: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copied"
    shutil.copytree(model_in(run, "last"), folder)
    before = contents(folder)
    assert main(["export", "--run", str(folder), "--to", format, "--out", str(folder / ".." / "copied")]) == 2
    assert f"--out: {folder / '..' / 'copied'} is an input, and would be replaced" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize("format", ["safetensors", "ctranslate2", "onnx", "hf"])
@pytest.mark.parametrize("name", ["best", "last", "averaged", "checkpoints/step-00000001", "subwords"])
def test_an_export_never_replaces_a_part_of_a_run(
    name: str,
    format: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run" / name
    folder.parent.mkdir(parents=True)
    shutil.copytree(model_in(run, "last"), folder)
    before = contents(folder)
    assert main(["export", "--run", str(run), "--to", format, "--out", str(folder)]) == 2
    assert f"error: --out: {folder} belongs to {tmp_path / 'run'}, and would be replaced" in capsys.readouterr().err
    assert contents(folder) == before
    monkeypatch.chdir(folder)
    assert main(["export", "--run", str(run), "--to", format, "--out", "."]) == 2
    assert contents(folder) == before


def test_translating_by_an_export_older_than_the_best_model_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("ctranslate2"))
    words = ["--run", str(tmp_path / "run")]
    assert main(["export", *words, "--to", "ctranslate2"]) == 0
    translating = ["translate", *words, "--engine", "ctranslate2", "Two trains leave."]
    assert main(translating) == 0
    best, exported = (tmp_path / "run" / name for name in ("best", "ctranslate2"))
    later = best.stat().st_mtime + 3600
    os.utime(saved_file(tmp_path / "run", "best", "manifest.json"), (later, later))  # as copying may leave it
    assert main(translating) == 0
    assert "earlier model" not in capsys.readouterr().err
    train(tiny(tmp_path / "other", {"training.seed": 9, "training.steps": 1}))
    for name in ("best", "last", "checkpoints/step-00000001"):
        (tmp_path / "run" / name).rename(tmp_path / Path(name).name)
        (tmp_path / "other" / name).rename(tmp_path / "run" / name)
    assert main(translating) == 0
    line = f"[translate] {exported} was made from an earlier model than {best}: export it again\n"
    assert line == without_unfinished(capsys.readouterr().err)


def without_unfinished(err: str) -> str:
    """What was said besides that an untrained model's translation does not end."""
    return "".join(line for line in err.splitlines(keepends=True) if "are unfinished" not in line)


def test_an_export_of_a_model_that_is_named_by_its_own_folder_is_current(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = tmp_path / "run" / "best"
    shutil.copytree(model_in(run, "best"), best)
    words = ["--run", str(best)]
    assert main(["export", *words, "--to", "ctranslate2"]) == 0
    translating = ["translate", *words, "--engine", "ctranslate2", "Two trains leave."]
    capsys.readouterr()
    assert main(translating) == 0
    assert without_unfinished(capsys.readouterr().err) == ""
    train(tiny(tmp_path / "other", {"training.seed": 9, "training.steps": 1}))
    shutil.copytree(model_in(tmp_path / "other", "best"), best, dirs_exist_ok=True)
    assert main(translating) == 0
    assert f"{best / 'ctranslate2'} was made from an earlier model than {best}" in capsys.readouterr().err


def test_a_checkpoint_cannot_be_chosen_for_an_export(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["translate", "--run", str(run), "--engine", "ctranslate2", "--checkpoint", "last", "Two trains leave."])
    assert "--checkpoint is not for --engine ctranslate2" in capsys.readouterr().err
    assert main(["export", "--run", str(run), "--to", "ctranslate2"]) == 0
    assert main(["serve", str(run), "--checkpoint", "last", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert f"error: {run} translates with {run / 'ctranslate2'}, and --checkpoint is for torch: leave it out" in said


def test_the_benchmark_of_a_teacher_and_a_student_measures_what_is_exported(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--teacher", str(run), "--student", str(run), "--sentences", "4", "--rounds", "1", "--student-beams", "3"]
    monkeypatch.setattr("sys.argv", ["benchmarks.distilled", *words])
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    # What a model of one step says has a BLEU of 0, of which no other is a part
    monkeypatch.setattr(distilled, "measure", lambda _, right, **options: measure(right, right, **options))
    distilled.main()
    table = capsys.readouterr().out.splitlines()
    systems = [line.split(" | ")[0] for line in table if line.startswith(("| teacher", "| student"))]
    exported = [f"CTranslate2, {kind}" for kind in ("float32", "int8", "int8, beam 3")]
    assert systems == ["| teacher, torch", f"| teacher, {exported[0]}", *(f"| student, {one}" for one in exported)]

"""A COMET model is used where one is installed and on disk; otherwise one line says what is missing.

The package itself needs models of gigabytes: a stand-in with its interface takes its place.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.translation.commands import main
from tests.recipes.command_line import refusal

CALLS: list[Any] = []


class StandIn:
    """Scores a translation by its length over the reference's."""

    def predict(self, data: list[dict[str, str]], batch_size: int, gpus: int, progress_bar: bool) -> Any:
        CALLS.append(data)
        scores = [len(one["mt"]) / len(one["ref"]) for one in data]
        return SimpleNamespace(scores=scores, system_score=sum(scores) / len(scores))


def load_from_checkpoint(path: str, *, local_files_only: bool) -> StandIn:
    assert local_files_only
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["TRANSFORMERS_OFFLINE"] == "1"
    if "broken" in path:
        raise OSError("no tokeniser\nin the cache")
    if "code" in path:
        torch.load(path, weights_only=False)  # as versions of Lightning do
    return StandIn()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("comet")
    module.__spec__ = ModuleSpec("comet", None)
    module.load_from_checkpoint = load_from_checkpoint  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet", module)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    yield
    CALLS.clear()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, text in (("s", "one\ntwo\n"), ("h", "eine\nzwei\n"), ("r", "ein\nzwei\n")):
        (tmp_path / name).write_text(text)
    for model in ("model", "broken"):
        (tmp_path / model / "checkpoints").mkdir(parents=True)
        (tmp_path / model / "checkpoints" / "model.ckpt").write_text("")
    return [f"--hypotheses={tmp_path / 'h'}", f"--references={tmp_path / 'r'}", f"--sources={tmp_path / 's'}"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("model", ["model", "model/checkpoints/model.ckpt"])
def test_the_score_is_the_mean_of_the_models(
    files: list[str], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *files, "--comet", str(tmp_path / model)]) == 0
    printed = capsys.readouterr().out
    mean = 100 * (4 / 3 + 1) / 2
    assert (
        f"COMET              {mean:6.2f}  [100.00, 133.33]  mean of the sentences x 100, by {tmp_path / model}"
        in printed
    )
    assert CALLS == [[{"src": "one", "mt": "eine", "ref": "ein"}, {"src": "two", "mt": "zwei", "ref": "zwei"}]]


@pytest.mark.usefixtures("installed")
def test_a_model_that_is_not_on_disk_is_one_line(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "evaluate", *files, "--comet", "Unbabel/wmt22-comet-da")
    assert "there is no Unbabel/wmt22-comet-da: name the folder of a model on this disk" in line
    line = refusal(capsys, "evaluate", *files, "--comet", str(tmp_path))
    assert f"there is no {tmp_path / 'checkpoints' / 'model.ckpt'}" in line
    line = refusal(capsys, "evaluate", *files, "--comet", str(tmp_path / "broken"))
    assert line.endswith("cannot be loaded without the network: no tokeniser in the cache")


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.usefixtures("installed")
def test_code_in_a_checkpoint_is_never_run(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code" / "checkpoints").mkdir(parents=True)
    path = tmp_path / "code" / "checkpoints" / "model.ckpt"
    torch.save({"hyper_parameters": Code(tmp_path / "made")}, path)
    torch.load(path, weights_only=False)
    (tmp_path / "made").rmdir()
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    line = refusal(capsys, "evaluate", *files, "--comet", str(tmp_path / "code"))
    assert f"{path} is not loaded: it is not a checkpoint, or contains more than weights and plain settings" in line
    assert not (tmp_path / "made").exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    torch.save({"hyper_parameters": {"layer": "mix"}}, path)
    assert main(["evaluate", *files, "--comet", str(tmp_path / "code")]) == 0


def test_without_the_package_it_says_how_to_install_it(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recipes.translation.scores.comet.find_spec", lambda _: None)
    line = refusal(capsys, "evaluate", *files, "--comet", str(tmp_path / "model"))
    assert line == "error: --comet needs a package that is not installed: pip install unbabel-comet"


def test_without_sources_it_is_refused(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "name them with --sources" in refusal(capsys, "evaluate", *files[:2], "--comet", "model")


def test_scores_without_it_say_none() -> None:
    from tests.recipes.scores.scored import score

    found = json.loads(json.dumps(score(["a"], ["a"])))
    assert found["comet"] is found["comet_signature"] is None

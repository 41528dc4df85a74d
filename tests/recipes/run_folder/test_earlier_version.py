"""A run of an earlier version, with copies in the pointers' place: it is read, and goes on with pointers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from recipes.translation.errors import CheckpointError
from recipes.translation.files.atomic_folder import MANIFEST, sha256
from recipes.translation.run_folder.average import average
from recipes.translation.run_folder.checkpoint import (
    load_facts,
    load_training,
    load_translator,
    load_weights,
    weights_digest,
)
from recipes.translation.run_folder.numbered import kept_models
from recipes.translation.run_folder.saving import Saver
from recipes.translation.run_folder.translator import fingerprint, tensors_of
from recipes.translation.settings.training import TrainingConfig
from recipes.translation.train import train
from tests.recipes.run_folder.made import MADE, contents, refused
from tests.recipes.saved import model_in, saved_file
from tests.recipes.tiny import tiny

LONGER = {**MADE, "training.steps": 6}


def of_tensors(folder: Path) -> None:
    """Write the hashes of tensors, and a manifest, as the earlier version did."""
    of = {name: sha256(folder / name) for name in ("config.yaml", "joint.model")}
    weights = {"weights": fingerprint(load_file(folder / "model.safetensors"))}
    for name, hashes in (("model.json", {**of, **weights}), ("training.json", weights)):
        if not (folder / name).exists():
            continue
        if name == "training.json":
            hashes = {**weights, "moments": fingerprint(load_file(folder / "training.safetensors"))}
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), "of": hashes}))
    (folder / MANIFEST).unlink(missing_ok=True)
    files = {path.name: {"bytes": 0, "sha256": sha256(path)} for path in folder.iterdir()}
    (folder / MANIFEST).write_text(json.dumps({"files": files}))


@pytest.fixture
def earlier(made: Path, tmp_path: Path) -> Path:
    """The run that `made` is, as the earlier version would have left it."""
    run = shutil.copytree(made, tmp_path / "run")
    for name in ("best", "last"):
        folder = model_in(made, name)
        (run / name).unlink()
        shutil.copytree(folder, run / name)
    for path in saved_file(made, "last", "training.json").parent.iterdir():
        shutil.copy(path, run / "last")
    shutil.rmtree(run / "checkpoints" / "state-00000004")
    (run / "kept").unlink()
    for folder in (run / "best", run / "last", *(run / "checkpoints").iterdir()):
        of_tensors(folder)
    return run


def test_it_is_read_as_before(earlier: Path, made: Path) -> None:
    for name in ("best", "last"):
        ours, theirs = (load_weights(run / name) for run in (earlier, made))
        assert all(bool((ours[key] == theirs[key]).all()) for key in theirs)
        assert weights_digest(earlier / name) == fingerprint(theirs) == load_translator(earlier / name).digests[0]
        assert load_facts(earlier / name) == load_facts(made / name)
    assert [folder.name for folder in kept_models(earlier)] == [folder.name for folder in kept_models(made)]
    ours, theirs = (load_weights(average(run).folder) for run in (earlier, made))
    assert all(bool((ours[key] == theirs[key]).all()) for key in theirs)
    assert load_training(earlier / "last").state == load_training(made / "last").state


def test_it_goes_on_as_the_uninterrupted_run_with_pointers(earlier: Path, made: Path, tmp_path: Path) -> None:
    through = shutil.copytree(made, tmp_path / "through")
    for run in (earlier, through):
        train(tiny(run, LONGER))
    ours, theirs = (contents(run / "checkpoints") for run in (earlier, through))
    assert {name for name in theirs if name.endswith("safetensors")} <= ours.keys()
    assert {name for name in theirs if name.endswith("safetensors") and ours[name] != theirs[name]} == set()
    for name in ("last", "best", "kept"):
        assert (earlier / name).read_text() == (through / name).read_text()
    assert not [path for path in earlier.iterdir() if path.name.startswith(".")]


def test_a_best_that_stays_the_best_stays_where_it_is(earlier: Path) -> None:
    state = load_training(earlier / "last").state
    with Saver(earlier, TrainingConfig(), 4) as saver:
        translator = load_translator(earlier / "last")
        saver.save(translator, {"step": 5}, tensors_of(translator.model), {}, replace(state, step=5))
    assert (earlier / "best").is_dir()
    assert load_facts(earlier / "best")["step"] == 4
    assert [load_facts(folder)["step"] for folder in kept_models(earlier)] == [2, 3, 4]


@pytest.mark.parametrize("name", ["last", "best"])
def test_files_of_others_in_it_are_named_before_anything_is_trained(name: str, earlier: Path) -> None:
    (earlier / name / "notes.txt").write_text("mine")
    said = refused(earlier, LONGER)
    assert f"{earlier / name / 'notes.txt'} was not written here, and would be removed: move it away first" in said


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "config.yaml", "joint.model"])
def test_files_of_two_checkpoints_are_refused(name: str, earlier: Path, tmp_path: Path) -> None:
    train(tiny(tmp_path / "other", {**MADE, "training.seed": 2, "data.builtin_pairs": 130}))
    shutil.copy(saved_file(tmp_path / "other", "last", name), earlier / "last" / name)
    (earlier / "last" / MANIFEST).unlink()
    files = {path.name: {"bytes": 0, "sha256": sha256(path)} for path in (earlier / "last").iterdir()}
    (earlier / "last" / MANIFEST).write_text(json.dumps({"files": files}))
    with pytest.raises(CheckpointError, match=r"belongs to (an)?other .* than (the one|those) beside it"):
        load_training(earlier / "last")


@pytest.mark.faults
def test_a_kill_before_any_change_of_the_disk_leaves_a_checkpoint_of_one_form_or_the_other(
    earlier: Path, tmp_path: Path, killed_before: Callable[[int, Callable[[], None]], bool]
) -> None:
    translator = load_translator(earlier / "last")
    saved = load_training(earlier / "last")

    def save(run: Path) -> None:
        with Saver(run, TrainingConfig(keep_checkpoints=2), 4) as saver:
            state = replace(saved.state, step=5, best_step=5)
            weights = tensors_of(translator.model)
            saver.save(translator, {"step": 5}, weights, dict(saved.moments), state, validated=True, better=True)

    seen = []
    for number in range(1, 600, 2):  # every other one: two changes lie between any two of the pointers
        run = shutil.copytree(earlier, tmp_path / str(number))
        killed = killed_before(number, lambda run=run: save(run))  # type: ignore[misc]
        seen.append((load_training(run / "last").state.step, load_facts(run / "best")["step"]))
        assert all(load_translator(folder).digests for folder in (run / "best", *kept_models(run)))
        save(run)  # what was left behind is no obstacle, and goes
        assert load_training(run / "last").state.step == load_facts(run / "best")["step"] == 5
        assert [folder.name for folder in kept_models(run)] == ["step-00000004", "step-00000005"]
        assert not [path for path in run.iterdir() if path.name.startswith(".") and path.name != ".lock"]
        shutil.rmtree(run)
        if not killed:
            break
    assert not killed
    assert list(dict.fromkeys(seen)) == [(4, 4), (4, 5), (5, 5)]

"""The models of the last validations: kept step by step, never lost to a kill, and nothing of others is touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.translation.files import atomic_folder, writing
from recipes.translation.files.atomic_folder import MANIFEST
from recipes.translation.run_folder.checkpoint import load_facts, load_translator
from recipes.translation.run_folder.numbered import kept_models
from recipes.translation.run_folder.resume import begin
from recipes.translation.train import train
from tests.recipes.conftest import KilledError
from tests.recipes.run_folder.made import MADE, contents, refused
from tests.recipes.saved import keep_model, model_in, resealed, saved_file, validations_of
from tests.recipes.tiny import tiny

LONGER = {**MADE, "training.steps": 5}


def steps(run: Path) -> list[int]:
    """The steps of the kept models, every file of which is whole."""
    return [load_facts(folder)["step"] for folder in kept_models(run)]


def weights(run: Path) -> dict[str, bytes]:
    """The weights of every kept model."""
    return {folder.name: (folder / "model.safetensors").read_bytes() for folder in kept_models(run)}


def test_the_models_of_the_last_validations_are_kept_with_their_facts(made: Path) -> None:
    assert sorted(path.name for path in (made / "checkpoints").iterdir()) == [
        "state-00000004",
        "step-00000002",
        "step-00000003",
        "step-00000004",
    ]
    assert [load_facts(folder) for folder in kept_models(made)] == validations_of(made)[1:]


def test_a_kept_model_is_that_of_its_step(made: Path, tmp_path: Path) -> None:
    assert len(set(weights(made).values())) == 3
    train(tiny(tmp_path / "three", {**MADE, "training.steps": 3, "training.keep_checkpoints": 0}))
    assert not (tmp_path / "three" / "kept").exists()
    assert {path.name for path in (tmp_path / "three" / "checkpoints").glob("step-*")} == {
        model_in(tmp_path / "three", name).name for name in ("best", "last")
    }
    assert saved_file(tmp_path / "three", "last", "model.safetensors").read_bytes() == weights(made)["step-00000003"]
    assert saved_file(made, "last", "model.safetensors").read_bytes() == weights(made)["step-00000004"]


def test_fewer_are_kept_when_fewer_are_asked_for_on_resuming(run: Path) -> None:
    train(tiny(run, {**MADE, "training.steps": 5, "training.keep_checkpoints": 2}), insist=True)
    assert steps(run) == [4, 5]


def test_the_last_ones_are_told_by_their_numbers_not_by_the_names_order(run: Path) -> None:
    translator = load_translator(run / "last")
    for step in (99_999_999, 100_000_000):
        keep_model(run, translator, {"step": step}, step, 2)
    assert steps(run) == [99_999_999, 100_000_000]


def test_a_kill_while_a_model_is_written_again_loses_no_model_that_was_to_stay(
    made: Path, tmp_path: Path, killed_before: Callable[[int, Callable[[], None]], bool]
) -> None:
    translator = load_translator(made / "last")
    seen = []
    for number in range(1, 200):
        run = shutil.copytree(made, tmp_path / str(number))
        killed = killed_before(number, lambda run=run: keep_model(run, translator, {"step": 4}, 4, 2))  # type: ignore[misc]
        seen.append(steps(run))
        assert all(load_translator(run / name).digests for name in ("best", "last"))
        keep_model(run, translator, {"step": 6}, 6, 1)  # what was left behind is no obstacle, and goes
        (run / "best").unlink()
        keep_model(run, translator, {"step": 6}, 6, 1)
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000006"]
        if not killed:
            break
    assert not killed
    assert len(seen) > 15
    assert [each for index, each in enumerate(seen) if index == 0 or each != seen[index - 1]] == [[2, 3, 4], [3, 4]]


@pytest.mark.parametrize("moment", ["model", "state", "kept", "best", "removed"])
def test_a_run_killed_while_it_saves_keeps_the_same_models_after_all(
    moment: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        killed_at(patch, moment, 4)
        with pytest.raises(KilledError):
            train(tiny(run, MADE))
    assert steps(run) == ([1, 2, 3] if moment in ("model", "state") else [2, 3, 4])
    assert load_facts(run / "last")["step"] == (4 if moment == "removed" else 3)
    train(tiny(run, MADE))
    assert weights(run) == weights(made)
    if moment != "removed":  # after the last save
        assert contents(run / "checkpoints").keys() == contents(made / "checkpoints").keys()
    for name in ("best", "last"):
        assert (run / name).read_bytes() == (made / name).read_bytes()


def test_a_run_that_resumes_before_a_killed_ones_best_has_the_best_of_its_own_steps(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        killed_at(patch, "best", 4)
        with pytest.raises(KilledError):
            train(tiny(run, MADE))
    assert load_facts(run / "best")["step"] == 4
    saved = begin(tiny(run, MADE), False)
    assert saved is not None
    assert load_facts(run / "best")["step"] == saved.state.best_step == 3


@pytest.mark.parametrize("moment", ["model", "state", "kept", "best"])
def test_a_run_killed_before_its_first_state_begins_again(
    moment: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        killed_at(patch, moment, 1)
        with pytest.raises(KilledError):
            train(tiny(tmp_path / "run", MADE))
    assert not (tmp_path / "run" / "last").exists()
    train(tiny(tmp_path / "run", MADE))
    assert weights(tmp_path / "run") == weights(made)


def killed_at(patch: pytest.MonkeyPatch, moment: str, step: int) -> None:
    """End the process at a moment of the saving of a step, after the folder or pointer of this name got its own."""
    put = writing.move_into_place
    target = {"model": f"step-{step:08d}", "state": f"state-{step:08d}", "removed": "last"}.get(moment, moment)
    dead = []

    def killing(new: Path, path: Path) -> None:
        if dead:
            raise KilledError
        put(new, path)
        saved = path.parent if path.parent.name != "checkpoints" else path.parent.parent
        if path.name == target and (saved / "checkpoints" / f"step-{step:08d}").exists():
            dead.append(path)
            raise KilledError

    patch.setattr(writing, "move_into_place", killing)
    patch.setattr(atomic_folder, "move_into_place", killing)


def test_a_model_of_a_later_step_than_the_newest_validation_is_stale_and_goes(run: Path) -> None:
    keep_model(run, load_translator(run / "last"), {"step": 3}, 3, 1)
    assert steps(run) == [3]


def test_what_else_is_in_the_folder_is_left_alone(run: Path) -> None:
    others = {"notes.txt": b"mine", "step-best/a": b"mine", "step-12/a": b"mine", ".hidden": b"mine"}
    for name, data in others.items():
        (run / "checkpoints" / name).parent.mkdir(exist_ok=True)
        (run / "checkpoints" / name).write_bytes(data)
    train(tiny(run, {**MADE, "training.steps": 5}))
    assert steps(run) == [3, 4, 5]
    assert others.items() <= contents(run / "checkpoints").items()
    train(tiny(run, {**MADE, "training.keep_checkpoints": 0}), fresh=True)
    assert others.items() <= contents(run / "checkpoints").items()


def test_a_kept_model_with_a_file_of_others_is_never_removed(run: Path) -> None:
    (run / "checkpoints" / "step-00000002" / "valid.scores.json").write_text("{}")
    train(tiny(run, {**MADE, "training.steps": 6}))
    assert steps(run) == [4, 5, 6]
    assert load_facts(run / "checkpoints" / "step-00000002")["step"] == 2
    said = refused(run, LONGER, fresh=True)
    assert (
        "step-00000002/valid.scores.json was not written by the recipe, and would be removed: move it away first"
        in said
    )


def test_a_step_folder_that_is_not_ours_is_refused_before_anything_is_trained(run: Path) -> None:
    (run / "checkpoints" / "step-00000005").mkdir()
    (run / "checkpoints" / "step-00000005" / "thesis.tex").write_text("mine")
    for fresh in (False, True):
        for keep in (3, 0):
            said = refused(run, {**LONGER, "training.keep_checkpoints": keep}, fresh=fresh)
            assert f"{run / 'checkpoints' / 'step-00000005'} has no {MANIFEST}" in said


def test_kept_models_of_another_run_are_named_before_anything_is_trained(run: Path, tmp_path: Path) -> None:
    train(tiny(tmp_path / "other", {**MADE, "training.seed": 2}))
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", run / "checkpoints")
    assert "training.seed is 1 but" in refused(run, LONGER)


def test_fresh_removes_the_kept_models_and_their_average(run: Path) -> None:
    shutil.copytree(model_in(run, "best"), run / "averaged")
    (run / "checkpoints" / "step-00000003").rename(run / "checkpoints" / ".step-00000003.previous")
    train(tiny(run, {**MADE, "training.keep_checkpoints": 0}), fresh=True)
    assert not (run / "averaged").exists()
    assert not (run / "kept").exists()
    assert {model_in(run, name) for name in ("best", "last")} == set((run / "checkpoints").glob("step-*"))


def test_a_run_whose_saved_settings_lack_the_new_ones_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny(run, {**MADE, "training.keep_checkpoints": 0}))
    for folder in {model_in(run, name) for name in ("last", "best")}:
        without(folder, "keep_checkpoints", "length_norm", *SINCE)
    train(tiny(run, {**MADE, "training.steps": 6}))
    assert steps(run) == [5, 6]


SINCE = ("sampling", "sampled", "best_by", "ema", "start_from", "freeze")
"""Settings of training that came later still."""


def without(folder: Path, *names: str) -> None:
    """Remove settings from a checkpoint's config.yaml, as a version that did not have them would have written it."""
    text = (folder / "config.yaml").read_text()
    lines = [line for line in text.splitlines() if line.split(":")[0].strip() not in names]
    assert len(lines) == len(text.splitlines()) - len(names)
    (folder / "config.yaml").write_text("\n".join(lines) + "\n")
    resealed(folder)

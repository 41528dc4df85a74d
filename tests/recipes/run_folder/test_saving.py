"""Saving beside the training: one step's state, one save at a time, written and hashed once, no error lost."""

from __future__ import annotations

import hashlib
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.files import atomic_folder, tensors
from recipes.translation.files.atomic_folder import MANIFEST, whole_folder
from recipes.translation.processes.ranks import ALONE
from recipes.translation.run_folder import checkpoint, saving
from recipes.translation.run_folder.checkpoint import TrainingState, load_facts, load_training, load_translator
from recipes.translation.run_folder.numbered import kept_models
from recipes.translation.run_folder.saving import Saver
from recipes.translation.run_folder.translator import Translator, tensors_of
from recipes.translation.settings.training import TrainingConfig, save_interval
from recipes.translation.train import train
from recipes.translation.training import training
from recipes.translation.training.progress import StepNumbers
from tests.recipes.processes.started import forked
from tests.recipes.random_translator import fingerprint, random_translator
from tests.recipes.run_folder.made import MADE, contents
from tests.recipes.saved import assert_same_last, assert_same_run
from tests.recipes.tiny import tiny

EVERY: dict[str, Any] = {
    **MADE,
    "training.validate_every": 3,
    "training.save_every": "1",
    "training.keep_checkpoints": 2,
}
KEEPS_TWO = TrainingConfig(keep_checkpoints=2)


@pytest.fixture
def translator(tmp_path: Path) -> Translator:
    return random_translator(tmp_path)


def moments(number: float) -> dict[str, Tensor]:
    return {"optimizer/a/exp_avg": torch.full((3, 5), float(number)), "optimizer/a/step": torch.tensor(float(number))}


def save(saver: Saver, translator: Translator, step: int, **how: bool) -> None:
    weights = tensors_of(translator.model)
    state = TrainingState(step=step, data="x")
    saver.save(translator, {"step": step, "valid_loss": 1.0}, weights, moments(step), state, **how)


class Held:
    """A disk that does not write before it may."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked = threading.Event()
        self.free = threading.Event()
        write = saving.write_model

        def waiting(*given: Any) -> str:
            self.asked.set()
            assert self.free.wait(30)
            return write(*given)

        patch.setattr(saving, "write_model", waiting)


def test_what_is_saved_is_the_step_at_which_it_began_whatever_the_training_does_meanwhile(
    translator: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Held(monkeypatch)
    before = {name: tensor.clone() for name, tensor in tensors_of(translator.model).items()}
    state = TrainingState(step=7, tokens=5, data="x")
    facts = {"step": 7}
    with Saver(tmp_path / "run", KEEPS_TWO, None) as saver:
        of_step = moments(7)
        saver.save(translator, facts, tensors_of(translator.model), of_step, state)
        assert disk.asked.wait(30)
        for tensor in (*tensors_of(translator.model).values(), *of_step.values()):
            tensor.add_(1)
        state.step = state.tokens = 99
        facts["step"] = 99
        assert whole_folder(tmp_path / "run" / "last") is None
        disk.free.set()
    saved = load_training(tmp_path / "run" / "last")
    assert all(torch.equal(saved.weights[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(saved.moments[name], tensor) for name, tensor in moments(7).items())
    assert (saved.state.step, saved.state.tokens, load_facts(tmp_path / "run" / "last")["step"]) == (7, 5, 7)


def test_a_run_on_a_slow_disk_is_the_same_run_bit_for_bit(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, written = [], []
    save, write_model, write_state = Saver.save, saving.write_model, saving.write_state

    def noted(saver: Saver, translator: Translator, facts: Any, *tensors: Any, **how: bool) -> None:
        begun.append((fingerprint(tensors[0]), fingerprint(tensors[1])))
        save(saver, translator, facts, *tensors, **how)

    def slowly(folder: Path, translator: Translator, weights: Any, facts: Any) -> str:
        time.sleep(0.3)  # in which the next step is made
        written.append(fingerprint(weights))
        return write_model(folder, translator, weights, facts)

    def noted_state(folder: Path, digest: str, moments: Any, state: TrainingState) -> None:
        written[-1] = (written[-1], fingerprint(moments))
        write_state(folder, digest, moments, state)

    monkeypatch.setattr(Saver, "save", noted)
    monkeypatch.setattr(saving, "write_model", slowly)
    monkeypatch.setattr(saving, "write_state", noted_state)
    train(tiny(tmp_path / "run", MADE))
    assert written == begun
    assert len(set(begun)) == 4
    ours, theirs = (contents(run / "checkpoints") for run in (tmp_path / "run", made))
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name] and "safetensors" in name} == set()


def test_a_save_begins_after_the_one_before_has_ended(
    translator: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Held(monkeypatch)
    with Saver(tmp_path / "run", KEEPS_TWO, None) as saver:
        save(saver, translator, 1)
        assert disk.asked.wait(30)
        disk.asked.clear()
        second = threading.Thread(target=save, args=(saver, translator, 2))
        second.start()
        assert not disk.asked.wait(0.3)
        assert second.is_alive()
        disk.free.set()
        second.join()
    assert load_training(tmp_path / "run" / "last").state.step == 2
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step-00000002", "state-00000002"}


def test_the_last_checkpoint_is_waited_for_while_it_is_written(
    translator: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Held(monkeypatch)
    with Saver(tmp_path / "run", KEEPS_TWO, None) as saver:
        save(saver, translator, 1)
        assert disk.asked.wait(30)
        threading.Timer(0.2, disk.free.set).start()
        assert saver.last() == tmp_path / "run" / "last"


def failing(*_: object) -> str:
    raise CheckpointError("the disk is full")


def test_an_error_of_a_save_ends_the_training_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "write_model", failing)
    steps = []
    check = training.check_finite

    def waiting(step: int, done: StepNumbers, saver: Saver) -> None:
        steps.append(step)
        saver.last()  # until the thread has ended
        check(step, done, saver)

    monkeypatch.setattr(training, "check_finite", waiting)
    with pytest.raises(CheckpointError, match="the disk is full"):
        train(tiny(tmp_path / "run", {**MADE, "training.validate_every": 2, "training.steps": 9}))
    assert steps in ([1, 2], [1, 2, 3])


@pytest.mark.parametrize("call", ["check", "wait", "save", "end"])
def test_an_error_of_a_save_is_raised_once_by_whatever_comes_next(
    call: str, translator: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "write_model", failing)
    saver = Saver(tmp_path / "run", KEEPS_TWO, None)
    save(saver, translator, 1)
    saver.last()
    calls: dict[str, Callable[[], object]] = {
        "check": saver.check,
        "wait": saver.wait,
        "save": lambda: save(saver, translator, 2),
        "end": lambda: saver.__exit__(None, None, None),
    }
    with pytest.raises(CheckpointError, match="the disk is full"):
        calls[call]()
    saver.check()


def test_the_error_that_ends_a_run_is_not_replaced_by_that_of_its_last_save(
    translator: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saving, "write_model", failing)

    def spoiled() -> None:
        with Saver(tmp_path / "run", KEEPS_TWO, None) as saver:
            save(saver, translator, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        spoiled()
    assert capsys.readouterr().err == "[train] the disk is full\n"


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_the_end_of_a_training_waits_for_its_last_save(
    error: type[BaseException] | None, translator: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = saving.write_state
    monkeypatch.setattr(saving, "write_state", lambda *given: (time.sleep(0.3), write(*given)))
    try:
        with Saver(tmp_path / "run", KEEPS_TWO, None) as saver:
            save(saver, translator, 1)
            if error:
                raise error
    except (ZeroDivisionError, KeyboardInterrupt):
        pass
    assert load_training(tmp_path / "run" / "last").state.step == 1


def test_one_process_of_several_writes(translator: Translator, tmp_path: Path) -> None:
    with Saver(tmp_path / "run", KEEPS_TWO, None, writes=False) as saver:
        save(saver, translator, 1)
    assert saver.saved_step == 1
    assert not (tmp_path / "run").exists()


def test_a_state_is_due_by_steps_or_by_rank_0s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert not any(Saver(Path(), TrainingConfig(), None).is_due(step) for step in range(9))
    steps = Saver(Path(), TrainingConfig(save_every="3"), 6)
    assert [step for step in range(1, 13) if steps.is_due(step)] == [3, 9, 12]  # 6 is saved
    asked = []
    minutes = Saver(
        Path(), TrainingConfig(save_every="2min"), None, main_says=lambda own: bool(asked.append(own)) or not own
    )
    assert minutes.is_due(1)
    now += 119.0
    assert minutes.is_due(2)
    now += 1.0
    assert not minutes.is_due(3)
    assert asked == [False, False, True]
    assert [ALONE.main_says(value) for value in (True, False)] == [True, False]
    assert save_interval("2min") == (0, 120.0)
    assert save_interval("500") == (500, 0.0)


def test_minutes_are_counted_from_the_save_before(
    translator: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Saver(tmp_path / "run", TrainingConfig(save_every="1min"), None) as saver:
        now += 59.0
        save(saver, translator, 1)
        now += 59.0
        assert not saver.is_due(2)
        now += 1.0
        assert saver.is_due(3)
        assert not saver.is_due(1)


@pytest.mark.parametrize("text", ["often", "", "-1", "1.5", "30 min", "30s", "min", "1e3", "99999999999"])
def test_any_other_interval_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.save_every is '.*': it is a number of steps, such as 500, or of"):
        tiny(tmp_path, {"training.save_every": text})


def test_a_run_killed_between_validations_loses_no_step_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny(tmp_path / "through", EVERY))
    check = training.check_finite

    def killed(step: int, *given: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt
        check(step, *given)

    with monkeypatch.context() as patch:
        patch.setattr(training, "check_finite", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(tmp_path / "run", EVERY))
    assert load_training(tmp_path / "run" / "last").state.step == 2
    assert not (tmp_path / "run" / "best").exists()
    assert not (tmp_path / "run" / "kept").exists()
    assert train(tiny(tmp_path / "run", EVERY)).state.step == 4
    assert_same_last(tmp_path / "run", tmp_path / "through")
    assert [folder.name for folder in kept_models(tmp_path / "run")] == ["step-00000003", "step-00000004"]


def test_a_save_between_validations_keeps_the_best_and_the_kept_models(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny(run, {**EVERY, "training.validate_every": 2}))
    train(tiny(run, {**EVERY, "training.validate_every": 2, "training.steps": 5}))
    before = (run / "kept").read_bytes()
    with Saver(run, KEEPS_TWO, 5) as saver:
        save(saver, load_translator(run / "last"), 6)
    assert (run / "kept").read_bytes() == before
    assert load_facts(run / "best")["step"] <= 5
    assert load_training(run / "last").state.step == 6


def test_the_best_model_stays_when_it_is_no_longer_among_the_kept_ones(translator: Translator, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Saver(run, KEEPS_TWO, None) as saver:
        for step in range(1, 6):
            save(saver, translator, step, validated=True, better=step == 2)
    assert load_facts(run / "best")["step"] == 2
    assert load_translator(run / "best").digests
    assert {path.name for path in (run / "checkpoints").glob("step-*")} == {
        *("step-00000002", "step-00000004", "step-00000005")
    }


def test_a_validated_step_is_not_saved_once_more_when_the_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = training.Journal.announce_validation

    def stopping(*given: Any) -> None:
        kept(*given)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(training.Journal, "announce_validation", stopping)
    assert train(tiny(tmp_path / "run", {**MADE, "training.validate_every": 2})).state.step == 2
    assert "valid_loss" in load_facts(tmp_path / "run" / "last")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that is hashed."""
    sizes: list[int] = []

    class Counted:
        def __init__(self) -> None:
            self.digest = hashlib.new("sha256")

        def update(self, data: Any) -> None:
            sizes.append(memoryview(data).nbytes)
            self.digest.update(data)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    def counted_file(path: Path) -> str:
        sizes.append(path.stat().st_size)
        return hashlib.new("sha256", path.read_bytes()).hexdigest()

    monkeypatch.setattr(tensors.hashlib, "sha256", Counted)
    monkeypatch.setattr(atomic_folder, "sha256", counted_file)
    return sizes


def size_of(*folders: Path) -> int:
    """The bytes of all files but the manifests."""
    return sum(path.stat().st_size for folder in folders for path in folder.iterdir() if path.name != MANIFEST)


def test_every_byte_is_hashed_once_when_it_is_saved_and_once_when_it_is_read(
    translator: Translator, tmp_path: Path, hashed: list[int]
) -> None:
    run = tmp_path / "run"
    with Saver(run, KEEPS_TWO, None) as saver:
        save(saver, translator, 5, validated=True, better=True)
    model, state = run / "checkpoints" / "step-00000005", run / "checkpoints" / "state-00000005"
    assert sum(hashed) == size_of(model, state)
    hashed.clear()
    load_training(run / "last")
    assert sum(hashed) == size_of(model, state)
    hashed.clear()
    load_translator(run / "best")
    assert sum(hashed) == size_of(model)


def test_facts_and_settings_are_read_without_hashing_the_weights(
    translator: Translator, tmp_path: Path, hashed: list[int]
) -> None:
    checkpoint.save_model(tmp_path / "model", translator, {"step": 1})
    hashed.clear()
    load_facts(tmp_path / "model")
    checkpoint.saved_config(tmp_path / "model")
    files = [tmp_path / "model" / name for name in ("model.json", "config.yaml")]
    assert sum(hashed) == sum(path.stat().st_size for path in files)


def test_a_validation_that_is_the_best_writes_the_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = checkpoint.write_tensors

    def noted(path: Path, tensors: Any) -> str:
        written.append(path.name)
        return write(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", noted)
    train(tiny(tmp_path / "run", MADE))
    assert written == ["model.safetensors", "training.safetensors"] * 4


def test_a_kill_before_any_change_of_the_disk_leaves_the_old_checkpoint_or_the_new_one(
    made: Path, tmp_path: Path, killed_before: Callable[[int, Callable[[], None]], bool]
) -> None:
    """`last`, with its state, `best` and every kept model, while a validation that is the best is saved."""
    translator = load_translator(made / "last")
    state = load_training(made / "last").state

    def saved(run: Path) -> None:
        with Saver(run, KEEPS_TWO, 4) as saver:
            weights = tensors_of(translator.model)
            of_step = replace(state, step=5, best_step=5)
            saver.save(translator, {"step": 5}, weights, moments(5), of_step, validated=True, better=True)

    seen = []
    for number in range(1, 300):
        run = shutil.copytree(made, tmp_path / str(number))
        killed = killed_before(number, lambda run=run: saved(run))  # type: ignore[misc]
        found = [load_training(run / "last").state.step, load_facts(run / "best")["step"]]
        found.append([load_facts(folder)["step"] for folder in kept_models(run)])
        assert all(load_translator(folder).digests for folder in (run / "best", *kept_models(run)))
        seen.append(found)
        saved(run)  # what was left behind is no obstacle, and goes
        assert {path.name for path in (run / "checkpoints").iterdir()} == {
            *("step-00000004", "step-00000005", "state-00000005")
        }
        assert {path.name for path in run.iterdir() if path.name.startswith(".")} <= {".lock"}
        shutil.rmtree(run)
        if not killed:
            break
    assert not killed
    assert len(seen) > 50
    before, after = [4, 4, [2, 3, 4]], [5, 5, [4, 5]]
    assert [each for index, each in enumerate(seen) if index == 0 or each != seen[index - 1]] == [
        before,
        [4, 4, [4, 5]],
        [4, 5, [4, 5]],
        after,
    ]


@pytest.mark.faults
def test_a_run_killed_at_any_time_goes_on_and_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    changes = {**EVERY, "training.steps": 30, "training.validate_every": 2}
    train(tiny(tmp_path / "through", changes))
    draw = random.Random(3)
    run = tmp_path / "run"
    for _ in range(4):
        begun = (run / "last").read_text() if (run / "last").exists() else ""
        process = forked(train, tiny(run, changes))
        deadline = time.monotonic() + 120
        while process.is_alive() and time.monotonic() < deadline:
            if (run / "last").exists() and (run / "last").read_text() != begun:
                break
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.15))
        process.kill()
        process.join()
        for name in ("last", "best"):
            if (run / name).exists():
                load_translator(run / name)
        load_training(run / "last")
    train(tiny(run, changes))
    ours, theirs = (contents(each / "checkpoints") for each in (run, tmp_path / "through"))
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if name.endswith(".safetensors") and ours[name] != theirs[name]} == set()
    assert_same_run(run, tmp_path / "through")

"""What a checkpoint is made of: files that belong together, written from memory, readable by whom the umask says."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.data.corpora import Corpora
from recipes.translation.data.prepare import prepare
from recipes.translation.errors import CheckpointError, ConfigError, DataError
from recipes.translation.files import atomic_folder
from recipes.translation.files.atomic_folder import (
    MANIFEST,
    check_replaceable,
    read_consistently,
    remove_folder,
    replaced_folder,
    sha256,
    verified_folder,
)
from recipes.translation.files.writing import beside
from recipes.translation.run_folder.checkpoint import (
    load_facts,
    load_training,
    load_translator,
    save_model,
)
from recipes.translation.train import train
from recipes.translation.training import training
from tests.recipes.files.watching import Event, done_by_two, not_on_the_disk
from tests.recipes.random_translator import random_translator
from tests.recipes.saved import model_in, resealed, saved_file, trained_run
from tests.recipes.tiny import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run."""
    return trained_run(tmp_path_factory, {"training.validate_every": 2})


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same settings with other first weights, other subwords of the same number, and another width of a layer."""
    return trained_run(tmp_path_factory, {"training.seed": 2, "data.builtin_pairs": 240, "model.heads": 1})


FILES = ("config.yaml", "joint.model", "model.safetensors", "model.json", "training.safetensors", "training.json")


@pytest.mark.parametrize("name", FILES)
def test_files_of_two_runs_are_refused(name: str, run: Path, other_run: Path, tmp_path: Path) -> None:
    mixed = shutil.copytree(run, tmp_path / "run")
    shutil.copyfile(saved_file(other_run, "last", name), saved_file(mixed, "last", name))
    with pytest.raises(CheckpointError, match=rf"{name} is damaged: its SHA-256 is not the one in manifest") as caught:
        load_training(mixed / "last")
    assert "\n" not in str(caught.value)
    if not name.startswith("training."):
        with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
            load_translator(mixed / "last")


def test_a_model_and_a_state_of_two_steps_of_one_run_are_refused(run: Path, tmp_path: Path) -> None:
    later = shutil.copytree(run, tmp_path / "later")
    train(tiny(later, {"training.validate_every": 2, "training.steps": 6}))
    for name in ("model.safetensors", "training.safetensors"):
        mixed = shutil.copytree(later, tmp_path / name)
        folder = saved_file(mixed, "last", name).parent
        shutil.rmtree(folder)
        shutil.copytree(saved_file(run, "last", name).parent, folder)
        with pytest.raises(
            CheckpointError, match=r"training\.json does not belong to the weights in .*step-\d+; restore"
        ):
            load_training(mixed / "last")


def changed_header(data: bytes, change: str) -> bytes:
    """A safetensors file with another header and the same numbers."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    names = sorted(name for name in header if name != "__metadata__")
    first = header[names[0]]
    if change == "shapes":
        first["shape"] = [1, *first["shape"]]
    elif change == "dtypes":
        first["dtype"] = {"F32": "I32"}[first["dtype"]]
    elif change == "names":
        header["another.name"] = header.pop(names[0])
    elif change == "swapped":
        same = next(name for name in names[1:] if header[name]["shape"] == first["shape"])
        header[names[0]], header[same] = header[same], first
    elif change == "offsets":
        first["data_offsets"] = [0, 1 << 40]
    text = b"[[[" if change == "no JSON" else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("model.safetensors", each) for each in ("shapes", "dtypes", "names", "swapped", "offsets", "no JSON")),
        *(("training.safetensors", each) for each in ("dtypes", "offsets", "no JSON")),
    ],
)
def test_a_resealed_header_is_one_line_and_never_other_weights(
    name: str, change: str, run: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    path = saved_file(copy, "last", name)
    path.write_bytes(changed_header(path.read_bytes(), change))
    resealed(path.parent)
    with pytest.raises(CheckpointError) as caught:
        load_training(copy / "last")
    assert "\n" not in str(caught.value)
    assert "restore the folder from a copy" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "read", "text"),
    [
        *(("model.json", load_facts, text) for text in ("[]", "{", "[" * 100_000)),
        *(("training.json", load_training, text) for text in ("[]", "{}", "{", "[" * 100_000, '{"of": 3}')),
    ],
)
def test_resealed_json_of_another_kind_is_one_line(
    name: str, read: Callable[[Path], object], text: str, run: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    path = saved_file(copy, "last", name)
    path.write_text(text)
    resealed(path.parent)
    with pytest.raises(CheckpointError, match=rf"{name} (is|does not (belong|have)|cannot)") as caught:
        read(copy / "last")
    assert "\n" not in str(caught.value)


def test_a_manifest_that_names_files_elsewhere_is_refused(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_in(run, "best"), tmp_path / "run" / "best")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    listed = json.loads((folder / MANIFEST).read_text())
    listed["files"]["../notes.txt"] = {"bytes": 4, "sha256": sha256(tmp_path / "run" / "notes.txt")}
    (folder / MANIFEST).write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="is damaged"):
        remove_folder(folder)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_checkpoint_holds_the_subwords_in_memory_whatever_lies_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path / "run", {"training.steps": 2})
    validate = training.validate

    def prepare_beside(*given: Any) -> Any:
        prepare(Corpora(tiny(tmp_path / "run", {"data.builtin_pairs": 240})))
        return validate(*given)

    monkeypatch.setattr(training, "validate", prepare_beside)
    source, _ = prepare(Corpora(config))
    train(config)
    sentence = ["The number is sixty-six."]
    for name in ("best", "last"):
        assert load_translator(tmp_path / "run" / name).source.encode(sentence) == source.encode(sentence)
    other, _ = prepare(Corpora(tiny(tmp_path / "run", {"data.builtin_pairs": 240})))
    assert other.encode(sentence) != source.encode(sentence)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_every_file_of_a_checkpoint_follows_the_umask(mask: int, run: Path, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        save_model(tmp_path / "best", load_translator(run / "best"), {"step": 1})
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "best").iterdir()}
    assert modes == {0o666 & ~mask}


@pytest.mark.parametrize("room", [100, 2_000, 20_000])
def test_a_disk_that_is_full_is_one_line_that_names_what_was_written(room: int, run: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    folder = shutil.copytree(model_in(run, "best"), tmp_path / "best")
    translator = load_translator(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            save_model(folder, translator, {"step": 9})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == f"{folder} cannot be written: File too large; its old contents are still there"
    assert load_facts(folder) == load_facts(run / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize(
    "moment",
    ["files.atomic_folder.sha256", "run_folder.checkpoint.read_tensors", "run_folder.checkpoint.load_belongings"],
)
def test_a_model_that_training_replaces_while_it_is_read_is_read_again(
    moment: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = load_translator(run / "best")
    other = random_translator(tmp_path / "other", seed=5)
    save_model(tmp_path / "best", translator, {"step": 1})
    module, _, name = f"recipes.translation.{moment}".rpartition(".")
    function = getattr(import_module(module), name)

    def replacing(path: Path, *arguments: Any) -> Any:
        monkeypatch.undo()
        save_model(tmp_path / "best", other, {"step": 2})
        return function(path, *arguments)

    monkeypatch.setattr(f"{module}.{name}", replacing)
    found = load_translator(tmp_path / "best")
    assert found.digests == load_translator(tmp_path / "best").digests != translator.digests
    assert found.source.digest == other.source.digest != translator.source.digest


@pytest.mark.parametrize("error", [CheckpointError, ConfigError, DataError, FileNotFoundError])
def test_whatever_fails_while_a_folder_is_replaced_is_done_again(error: type[Exception], tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def write(text: str) -> None:
        with replaced_folder(folder) as new:
            (new / "text").write_text(text)

    def read() -> str:
        found = (folder / "text").read_text()
        if found == "old":
            write("new")
            raise error
        return found

    write("old")
    assert read_consistently(folder, read) == "new"

    def fail() -> None:
        raise error

    with pytest.raises(error):
        read_consistently(folder, fail)


@pytest.mark.parametrize("locks", [True, False])
def test_a_folder_that_a_killed_process_was_writing_is_made_anew(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".best.new" / "half").mkdir(parents=True)

    def unlockable(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not locks:  # as on some network file systems
        monkeypatch.setattr(fcntl, "flock", unlockable)
    with replaced_folder(tmp_path / "best") as folder:
        (folder / "a").write_text("a")
    assert {path.name for path in verified_folder(tmp_path / "best").iterdir()} == {"a", MANIFEST}
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_folder_that_two_processes_replace_at_once_is_that_of_one(tmp_path: Path) -> None:
    def write(number: int) -> None:
        with replaced_folder(tmp_path / "export") as folder:
            for name in ("a", "b"):
                (folder / name).write_text(str(number) * 10_000)

    def check() -> None:
        texts = [(verified_folder(tmp_path / "export") / name).read_text() for name in ("a", "b")]
        assert texts in (["1" * 10_000] * 2, ["2" * 10_000] * 2)
        assert [path.name for path in tmp_path.iterdir()] == ["export"]

    done_by_two(50, write, check)


def test_a_folder_is_looked_at_while_no_other_process_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks the other one might rename it, and it would not be a folder."""
    claimed: list[bool] = []

    def look(target: Path) -> None:
        claimed.append(beside(target, "new").is_dir())
        check_replaceable(target)

    monkeypatch.setattr(atomic_folder, "check_replaceable", look)
    for text in "ab":
        with replaced_folder(tmp_path / "best") as folder:
            (folder / "a").write_text(text)
    assert claimed == [True, True]


@pytest.mark.parametrize("missed", ["", ".best.new", ".best.new/a", f".best.new/{MANIFEST}"])
def test_every_test_of_the_recipe_tells_what_a_power_failure_could_lose(
    missed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: list[Event]
) -> None:
    fsync = os.fsync

    def misses_one(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) != tmp_path / missed:
            fsync(descriptor)

    monkeypatch.setattr(os, "fsync", misses_one)
    with replaced_folder(tmp_path / "best") as folder:
        (folder / "a").write_text("a")
    (told,) = not_on_the_disk(durable)
    durable.clear()
    assert told.startswith(f"{tmp_path / missed} was renamed" if missed else f"the name {tmp_path / 'best'} was")

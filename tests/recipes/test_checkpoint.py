"""Checkpoints: whole or not there, verified, free of code, enough to translate and to go on training."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import make_transformer
from models.presets import TransformerConfig
from recipes.translation import train as training
from recipes.translation.checkpoint import (
    check_moments,
    fill_model,
    load_facts,
    load_training,
    load_translator,
    save_model,
    tensors_of,
)
from recipes.translation.durable import (
    MANIFEST,
    CheckpointError,
    remove_folder,
    replaced_folder,
    sha256,
    verified_folder,
    whole_folder,
)
from recipes.translation.prepare import prepare
from recipes.translation.train import train
from recipes.translation.translate import translate
from tests.recipes.tiny import tiny

# Writes folder after folder, every file of one holding the same number. With a number as second argument it kills
# itself before that call that changes the disk, counted over the second folder's replacement.
WRITER = """
import itertools, os, shutil, signal, sys
from pathlib import Path
from recipes.translation import durable

target, deadly = Path(sys.argv[1]), int(sys.argv[2])
calls = 0

def counted(function):
    def call(*arguments, **keywords):
        global calls
        calls += number >= 1
        if deadly and calls == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)
    return call

os.fsync, shutil.rmtree, os.rename = map(counted, (os.fsync, shutil.rmtree, os.rename))
for each in ("mkdir", "rename", "write_text", "write_bytes", "unlink", "rmdir", "chmod"):
    setattr(Path, each, counted(getattr(Path, each)))
for number in itertools.count():
    if deadly and number == 2:
        break
    with durable.replaced_folder(target) as new:
        for name in ("a", "b", "c"):
            (new / name).write_bytes(str(number).encode() * (10 if deadly else 300_000))
    print(number, flush=True)
"""


def written(target: Path) -> int:
    """The number in the files, which must agree."""
    contents = {path.read_bytes() for path in verified_folder(target).iterdir() if path.name != MANIFEST}
    (content,) = contents
    number = content[: len(content) // 10] if len(content) < 1000 else content[: len(content) // 300_000]
    return int(number)


def writer(target: Path, deadly: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(target), str(deadly)], stdout=subprocess.PIPE, text=True)


def test_a_kill_before_any_call_that_changes_the_disk_leaves_the_old_folder_or_the_new_one(tmp_path: Path) -> None:
    outcomes = []
    for deadly in range(1, 100):
        target = tmp_path / str(deadly) / "last"
        with writer(target, deadly) as process:
            process.communicate()
        outcomes.append(written(target))
        with replaced_folder(target) as new:  # and what is left behind is no obstacle
            (new / "a").write_bytes(b"7" * 10)
        assert written(target) == 7
        assert [path.name for path in target.parent.iterdir()] == ["last"]
        if process.returncode == 0:  # it has fewer calls than this: every one has been tried
            break
    assert process.returncode == 0
    assert len(outcomes) > 8
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 1}


def test_a_process_killed_at_any_time_while_saving_leaves_a_whole_folder(tmp_path: Path) -> None:
    draw = random.Random(1)
    for trial in range(5):
        target = tmp_path / str(trial) / "last"
        with writer(target, 0) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n"
            time.sleep(draw.uniform(0.0, 0.1))
            process.send_signal(signal.SIGKILL)
            printed = process.stdout.read().split()
        last_printed = int(printed[-1]) if printed else 0
        assert last_printed <= written(target) <= last_printed + 1


def test_an_error_while_writing_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "last"
    with replaced_folder(target) as new:
        (new / "a").write_text("old")

    def fail_half_way() -> None:
        with replaced_folder(target) as new:
            (new / "a").write_text("new")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail_half_way()
    assert (verified_folder(target) / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run with tied weights."""
    folder = tmp_path_factory.mktemp("checkpoint") / "run"
    train(tiny(folder, {"training.validate_every": 2}))
    return folder


def test_a_flipped_bit_in_any_file_is_one_clear_error(run: Path, tmp_path: Path) -> None:
    draw = random.Random(2)
    whole = whole_folder(run / "last")
    assert whole is not None
    names = sorted(path.name for path in whole.iterdir() if path.name != MANIFEST)
    assert len(names) == 6
    for name in names:
        folder = shutil.copytree(whole, tmp_path / name)
        data = bytearray((folder / name).read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (folder / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{name} is damaged: its SHA-256") as caught:
            load_translator(folder)
        assert "\n" not in str(caught.value)


def test_a_flipped_bit_in_the_manifest_never_goes_unseen_where_it_matters(run: Path, tmp_path: Path) -> None:
    draw = random.Random(3)
    folder = shutil.copytree(run / "best", tmp_path / "best")
    original = (folder / MANIFEST).read_bytes()
    listed = json.loads(original)["files"]
    refused = 0
    for _ in range(200):
        data = bytearray(original)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (folder / MANIFEST).write_bytes(data)
        try:
            verified_folder(folder)
        except CheckpointError:
            refused += 1
        else:  # white space, or the number of bytes, which only people read
            found = json.loads(data)["files"]
            assert {name: entry["sha256"] for name, entry in found.items()} == {
                name: entry["sha256"] for name, entry in listed.items()
            }
    assert refused > 100


def test_a_missing_file_is_named(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run / "best", tmp_path / "best")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_translator(folder)


def test_a_best_folder_alone_translates_as_the_run_did(run: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(run / "best", tmp_path / "alone")
    sentences = ["The number is six.", "The teacher is thirty years old."]
    there, here = load_translator(run / "best"), load_translator(alone)
    assert translate(here, sentences, here.config.decoding) == translate(there, sentences, there.config.decoding)
    assert {path.name for path in alone.iterdir()} == {
        "config.yaml",
        "joint.model",
        "model.json",
        "model.safetensors",
        MANIFEST,
    }


def test_a_tied_weight_is_stored_once_and_still_tied_when_read(run: Path) -> None:
    stored = load_file(run / "best" / "model.safetensors")
    model = load_translator(run / "best").model
    assert sum(tensor.numel() for tensor in stored.values()) == sum(each.numel() for each in model.parameters())
    assert model.generator.weight is model.src_embed.lookup.weight
    assert sum(tensor.shape == model.generator.weight.shape for tensor in stored.values()) == 1


def test_nothing_is_pickled_or_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    for module, name in ((pickle, "dumps"), (pickle, "loads"), (torch, "save"), (torch, "load")):
        monkeypatch.setattr(module, name, forbidden)
    train(tiny(tmp_path / "run", {"training.steps": 2}))
    train(tiny(tmp_path / "run", {"training.steps": 3}))
    load_translator(tmp_path / "run" / "last")


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_of_another_model_are_refused_by_name(change: str) -> None:
    model = make_transformer(TransformerConfig(8, 8, 2, 1, 1, tie="none"), 300, 300)
    saved = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    if change == "missing":
        del saved["generator.bias"]
    elif change == "unknown":
        saved["generator.extra"] = torch.zeros(1)
    else:
        saved["generator.bias"] = torch.zeros(299)
    with pytest.raises(CheckpointError, match=r"does not fit the model .*generator\.(bias|extra)"):
        fill_model(model, saved, Path("somewhere"))


def test_loading_restores_every_weight_bit_for_bit(tmp_path: Path) -> None:
    model = make_transformer(TransformerConfig(8, 8, 2, 1, 1, tie="target"), 300, 310)
    save_file(tensors_of(model), tmp_path / "model.safetensors")
    other = make_transformer(TransformerConfig(8, 8, 2, 1, 1, tie="target"), 300, 310)
    assert not torch.equal(other.generator.weight, model.generator.weight)
    fill_model(other, load_file(tmp_path / "model.safetensors"), tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def resealed(folder: Path) -> Path:
    """The folder with a manifest that lists its files as they are."""
    (folder / MANIFEST).unlink()
    files = {path.name: {"bytes": 0, "sha256": sha256(path)} for path in folder.iterdir()}
    (folder / MANIFEST).write_text(json.dumps({"files": files}))
    return folder


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same settings with other first weights, other subwords of the same number, and another width of a layer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "other"
    train(tiny(folder, {"training.seed": 2, "data.builtin_pairs": 240, "model.heads": 1}))
    return folder


FILES = ("config.yaml", "joint.model", "model.safetensors", "model.json", "training.safetensors", "training.json")


@pytest.mark.parametrize("name", FILES)
def test_files_of_two_runs_are_refused_even_under_one_manifest(
    name: str, run: Path, other_run: Path, tmp_path: Path
) -> None:
    mixed = shutil.copytree(run, tmp_path / "run")
    shutil.copyfile(other_run / "last" / name, mixed / "last" / name)
    with pytest.raises(
        CheckpointError, match=r"is of (an)?other .* lies? beside it; restore .* mixed, or changed"
    ) as caught:
        load_training(resealed(mixed / "last"))
    assert "\n" not in str(caught.value)
    if not name.startswith("training."):
        with pytest.raises(CheckpointError, match=r"lies? beside it"):
            load_translator(mixed / "last")


def test_files_of_two_steps_of_one_run_are_refused(run: Path, tmp_path: Path) -> None:
    mixed = shutil.copytree(run, tmp_path / "run")
    config = tiny(mixed, {"training.validate_every": 2, "training.steps": 6})
    train(config)
    shutil.copyfile(run / "last" / "training.safetensors", mixed / "last" / "training.safetensors")
    with pytest.raises(CheckpointError, match="is of other weights or moments"):
        load_training(resealed(mixed / "last"))


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


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors"])
@pytest.mark.parametrize("change", ["shapes", "dtypes", "names", "swapped", "offsets", "no JSON"])
def test_a_resealed_header_is_one_line_and_never_other_weights(
    name: str, change: str, run: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(run / "last", tmp_path / "last")
    (folder / name).write_bytes(changed_header((folder / name).read_bytes(), change))
    with pytest.raises(CheckpointError) as caught:
        load_training(resealed(folder))
    assert "\n" not in str(caught.value)
    assert "restore the folder from a copy" in str(caught.value)


@pytest.mark.parametrize("name", ["model.json", "training.json"])
@pytest.mark.parametrize("text", ["[]", "{}", "{", "[" * 100_000, '{"of": 3}', '{"of": {}, "step": "many"}'])
def test_resealed_json_of_another_kind_is_one_line(name: str, text: str, run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run / "last", tmp_path / "last")
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name} (is|cannot)") as caught:
        load_training(resealed(folder))
    assert "\n" not in str(caught.value)


def test_moments_that_do_not_fit_are_refused_by_name(run: Path) -> None:
    saved, model = load_training(run / "last"), load_translator(run / "last").model
    check_moments(model, saved, run)
    for change in ("missing", "unknown", "shape"):
        moments = dict(saved.moments)
        if change == "missing":
            del moments["optimizer/generator.bias/exp_avg"]
        else:
            key = {"unknown": "optimizer/generator.bias/amsgrad", "shape": "optimizer/generator.bias/exp_avg"}[change]
            moments[key] = torch.zeros(3)
        with pytest.raises(CheckpointError, match=r"does not fit the model .* optimizer/generator\.bias/\w+ is"):
            check_moments(model, replace(saved, moments=moments), run)


def test_a_manifest_that_names_files_elsewhere_is_refused(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run / "best", tmp_path / "run" / "best")
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
        prepare(tiny(tmp_path / "run", {"data.builtin_pairs": 240}))
        return validate(*given)

    monkeypatch.setattr(training, "validate", prepare_beside)
    source, _ = prepare(config)
    train(config)
    sentence = ["The number is sixty-six."]
    for name in ("best", "last"):
        assert load_translator(tmp_path / "run" / name).source.encode(sentence) == source.encode(sentence)
    assert prepare(tiny(tmp_path / "run", {"data.builtin_pairs": 240}))[0].encode(sentence) != source.encode(sentence)


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
    folder = shutil.copytree(run / "best", tmp_path / "best")
    translator = load_translator(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            save_model(folder, translator, {"step": 9})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == f"{folder} cannot be written: File too large; what it held is kept"
    assert load_facts(folder) == load_facts(run / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_every_file_is_on_the_disk_before_the_folder_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        events.append(("flushed", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(("renamed", str(target)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    target, new = tmp_path / "last", tmp_path / ".last.new"
    with replaced_folder(target) as folder:
        for name in ("a", "b"):
            (folder / name).write_text(name)
    done = events.index(("renamed", str(target)))
    assert set(events[:done]) == {("flushed", str(path)) for path in (new, new / "a", new / "b", new / MANIFEST)}
    assert events[done + 1 :] == [("flushed", str(tmp_path))]

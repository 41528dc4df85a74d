"""Checkpoints: whole or not there, verified, free of code, enough to translate and to go on training."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import make_transformer
from models.presets import TransformerConfig
from recipes.translation.errors import CheckpointError
from recipes.translation.files.atomic_folder import MANIFEST, replaced_folder, verified_folder, whole_folder
from recipes.translation.run_folder import checkpoint
from recipes.translation.run_folder.checkpoint import load_training, load_translator, save_model
from recipes.translation.run_folder.translator import Translator, build_model, fill_model, model_sizes, tensors_of
from recipes.translation.settings.config import load_config
from recipes.translation.train import train
from recipes.translation.translating.translate import translate
from tests.recipes.random_translator import random_translator
from tests.recipes.saved import model_in, saved_file, trained_run
from tests.recipes.tiny import tiny

# Writes folder after folder, every file of one holding the same number. With a number as second argument it kills
# itself before that call that changes the disk, counted over the second folder's replacement.
WRITER = """
import itertools, os, shutil, signal, sys
from pathlib import Path
from recipes.translation.files import atomic_folder as durable

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

os.fsync, shutil.rmtree, os.rename, os.replace = map(counted, (os.fsync, shutil.rmtree, os.rename, os.replace))
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


@pytest.mark.parametrize("way", [".", "./", "../made", "{path}/../made", "inside/.."])
def test_a_folder_may_be_named_through_itself(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "made"
    with replaced_folder(folder) as new:
        (new / "file").write_text("old")
    monkeypatch.chdir(folder)
    if way == "inside/..":
        (folder / "inside").mkdir()
    target = Path(way.format(path=folder))
    assert whole_folder(target) is not None
    with replaced_folder(target) as new:
        (new / "file").write_text("new")
    assert (folder / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


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
    return trained_run(tmp_path_factory, {"training.validate_every": 2})


def test_a_flipped_bit_in_any_file_is_one_clear_error(run: Path, tmp_path: Path) -> None:
    draw = random.Random(2)
    files = [path for path in (run / "checkpoints").glob("*/*") if path.name != MANIFEST]
    assert {path.parent.name.partition("-")[0] for path in files} == {"step", "state"}
    seen = set()
    for number, path in enumerate(files):
        copy = shutil.copytree(run, tmp_path / str(number))
        damaged = copy / path.relative_to(run)
        data = bytearray(damaged.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        damaged.write_bytes(data)
        readers = [lambda copy=copy: load_training(copy / "last")]
        if not path.name.startswith("training."):
            readers.append(lambda damaged=damaged: load_translator(damaged.parent))
        for read in readers:
            if damaged.parent.name in ((copy / "last").read_text().strip(), damaged.parent.name):
                with pytest.raises(CheckpointError, match=rf"{path.name} is damaged: its SHA-256") as caught:
                    read()
                assert "\n" not in str(caught.value)
        seen.add(path.name)
    assert len(seen) == 6


def test_a_flipped_bit_in_the_manifest_never_goes_unseen_where_it_matters(run: Path, tmp_path: Path) -> None:
    draw = random.Random(3)
    folder = shutil.copytree(model_in(run, "best"), tmp_path / "best")
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
    folder = shutil.copytree(model_in(run, "best"), tmp_path / "best")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_translator(folder)


def test_a_best_folder_alone_translates_as_the_run_did(run: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(model_in(run, "best"), tmp_path / "alone")
    sentences = ["The number is six.", "The teacher is thirty years old."]
    there, here = load_translator(run / "best"), load_translator(alone)
    assert translate(here, sentences) == translate(there, sentences)
    assert {path.name for path in alone.iterdir()} == {
        "config.yaml",
        "joint.model",
        "model.json",
        "model.safetensors",
        MANIFEST,
    }


def test_a_model_is_verified_once_and_its_settings_are_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("verified_folder", "load_config"):
        function = getattr(checkpoint, name)
        monkeypatch.setattr(
            checkpoint, name, lambda *given, name=name, function=function: calls.append(name) or function(*given)
        )
    load_translator(run / "best")
    assert calls == ["verified_folder", "load_config"]


def test_a_tied_weight_is_stored_once_and_still_tied_when_read(run: Path) -> None:
    stored = load_file(saved_file(run, "best", "model.safetensors"))
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


@pytest.mark.parametrize("preset", ["tiny", "base", "decoder_only", "m2m100"])
@pytest.mark.parametrize("tie", ["none", "all"])
def test_reading_a_model_draws_nothing_and_what_is_tied_stays_tied(preset: str, tie: str, tmp_path: Path) -> None:
    subwords = random_translator(tmp_path).source
    sizes = {"model.preset": preset, "model.d_model": 16, "model.tie": tie}
    config = load_config(None, {"run": str(tmp_path / "run"), "subwords.vocab_size": 360, **sizes})
    model = build_model(model_sizes(config.model), subwords, subwords)
    save_model(tmp_path / "model", Translator(config, model, subwords, subwords), {"step": 1})
    before = torch.get_rng_state()
    found = load_translator(tmp_path / "model").model
    assert torch.equal(torch.get_rng_state(), before)
    weights, expected = tensors_of(found), tensors_of(model)
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert (found.generator.weight is found.tgt_embed.lookup.weight) == (tie == "all")
    ids = torch.randint(4, 90, (2, 5))
    assert torch.equal(found(ids, ids), model.eval()(ids, ids))


def test_the_state_of_a_run_that_begins_says_that_nothing_is_done(tmp_path: Path) -> None:
    checkpoint.write_state(tmp_path / "state", "", {}, checkpoint.TrainingState())
    said = json.loads((tmp_path / "state" / "training.json").read_text())
    del said["of"]
    assert said.pop("loss_scale") == 65_536
    assert len(said) > 10
    assert not any(said.values())

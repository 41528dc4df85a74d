"""Files: replaced as a whole, tensors as safetensors writes them, and JSON that may be damaged."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from recipes.translation.errors import CheckpointError
from recipes.translation.files.json_fields import field_in, parse_json
from recipes.translation.files.tensors import read_tensors, write_tensors
from recipes.translation.files.writing import (
    add_to,
    beside,
    check_regular,
    claim,
    make_folder,
    replace_file,
    replace_files,
)
from recipes.translation.run_folder.outputs import write_output
from tests.recipes.files.watching import Event, done_by_two, watched
from tests.recipes.report.made import make_run

Killing = Callable[[int, Callable[[], None]], bool]


def test_a_kill_at_any_moment_leaves_each_file_old_or_new(tmp_path: Path, killed_before: Killing) -> None:
    seen = []
    for number in range(1, 50):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = [folder / "first", folder / "second"]
        replace_files(dict.fromkeys(files, b"old"))
        killed = killed_before(number, lambda files=files: replace_files(dict.fromkeys(files, b"new")))  # type: ignore[misc]
        seen.append(tuple(file.read_bytes() for file in files))
        replace_files(dict.fromkeys(files, b"once more"))  # what is left behind is no obstacle, and goes
        assert {path: path.read_bytes() for path in folder.iterdir()} == dict.fromkeys(files, b"once more")
        if not killed:
            break
    assert not killed
    assert list(dict.fromkeys(seen)) == [(b"old", b"old"), (b"old", b"new"), (b"new", b"new")]


def test_what_a_killed_process_has_left_is_not_written_into(tmp_path: Path) -> None:
    left = beside(tmp_path / "file", "new")
    left.write_text("much longer than what comes next")
    with left.open() as there:
        replace_file(tmp_path / "file", b"short")
        assert there.read().startswith("much longer")
    assert (tmp_path / "file").read_bytes() == b"short"


def test_files_that_two_processes_replace_at_once_are_all_of_one(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first", "second", "third")]

    def write(number: int) -> None:
        replace_files(dict.fromkeys(files, str(number).encode() * 10_000 * number))

    def check() -> None:
        assert len({path.read_bytes() for path in files}) == 1
        assert sorted(tmp_path.iterdir()) == files

    done_by_two(100, write, check)


def test_a_file_that_another_process_renames_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, flock, locked = beside(tmp_path / "file", "new"), fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not locked:
            new.rename(tmp_path / "file")
        flock(descriptor, operation)
        locked.append(descriptor)

    monkeypatch.setattr("fcntl.flock", late)
    replace_file(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    assert len(locked) == 2


def test_the_first_file_is_the_lock_of_all_until_they_have_their_names(tmp_path: Path) -> None:
    with watched() as events:
        replace_files(dict.fromkeys([tmp_path / "first", tmp_path / "second"], b""))
    assert [event.to.name for event in events if event.to] == ["second", "first"]
    opened = [event.path for event in events if event.what == "opened"]
    assert opened[0] == beside(tmp_path / "first", "new")


def test_what_is_added_is_on_the_disk(tmp_path: Path) -> None:
    with watched() as events:
        add_to(tmp_path / "file", b"a")
        add_to(tmp_path / "file", b"b")
    assert (tmp_path / "file").read_bytes() == b"ab"
    assert events == [Event("opened", tmp_path / "file"), Event("flushed", tmp_path / "file")] * 2


@pytest.mark.parametrize("name", ["report.html", "page.html", "below/page.html"])
@pytest.mark.parametrize("kind", ["file", "pipe", "missing"])
def test_a_link_in_a_run_is_replaced_by_the_file_that_a_user_names(name: str, kind: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to({"pipe": "/dev/null"}.get(kind, elsewhere))
    if kind == "file":
        elsewhere.write_text("mine")
    write_output(run / name, b"page")
    assert not (run / name).is_symlink()
    assert (run / name).read_bytes() == b"page"
    assert not elsewhere.exists() or elsewhere.read_text() == "mine"


def test_a_folder_that_another_process_renames_at_this_moment_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir
    calls = []

    def renamed_since(path: Path, mode: int = 0o777) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise FileExistsError(errno.EEXIST, "it was there", str(path))
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", renamed_since)
    with claim(tmp_path / "new", folder=True):
        assert (tmp_path / "new").is_dir()
    assert len(calls) == 2


def test_a_file_that_another_process_renames_after_a_look_is_no_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, look = tmp_path / ".page.new", os.stat
    path.touch()
    looks: list[Path] = []

    def renamed_since(name: Path, **how: bool) -> os.stat_result:
        found = look(name, **how)
        looks.append(name)
        if len(looks) == 1:
            path.rename(tmp_path / "page")
        return found

    monkeypatch.setattr(os, "stat", renamed_since)
    check_regular(path)
    assert looks[0] == path
    assert (tmp_path / "page").is_file()


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("mine")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "new")


WRITTEN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(st.text(max_size=5), st.tuples(SHAPES, st.sampled_from(WRITTEN)), max_size=6)


@given(described=TENSORS, metadata=st.sampled_from([None, {"format": "pt"}]))
def test_a_file_has_the_bytes_that_the_package_writes_and_their_hash(
    described: dict[str, tuple[list[int], torch.dtype]],
    metadata: dict[str, str] | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    described.pop("__metadata__", None)
    folder = tmp_path_factory.mktemp("tensors")
    found: dict[str, Tensor] = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in described.items()}
    digest = write_tensors(folder / "ours", found, metadata)
    save_file(found, folder / "theirs", metadata)
    data = (folder / "ours").read_bytes()
    assert data == (folder / "theirs").read_bytes()
    assert digest == hashlib.sha256(data).hexdigest()
    again = read_tensors(folder / "ours")
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], found[name]) and again[name].dtype == found[name].dtype for name in found)


def test_parts_of_larger_tensors_and_transposed_ones_are_written_as_they_look(tmp_path: Path) -> None:
    large = torch.arange(24.0).view(4, 6)
    found = {"part": large[1:3, ::2], "transposed": large.T, "parameter": torch.nn.Parameter(large)}
    write_tensors(tmp_path / "file", found)
    again = read_tensors(tmp_path / "file")
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "file", {"a": torch.zeros(2)})
    assert (tmp_path / "file").read_text() == "mine"


def test_another_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"file cannot be read: .*; restore the folder from a copy"):
        read_tensors(tmp_path / "file")


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"file: a is I64, but weights must be float32 or float64; restore"):
        read_tensors(tmp_path / "file")


UNREADABLE = {
    "not UTF-8": b'{"a": ["\xff"]}',
    "cut off": b'{"a": [3]',
    "nested too deeply": b"[" * 100_000,
    "another name": b'{"b": [3]}',
    "an empty list": b'{"a": []}',
    "a list": b"[[3]]",
    "null": b"null",
}


@pytest.mark.parametrize("content", [*UNREADABLE.values(), None, ...], ids=[*UNREADABLE, "no file", "a folder"])
def test_a_field_that_cannot_be_read_is_none_whatever_is_wrong(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    assert field_in(path, "a", 0) is None


def test_a_field_is_named_from_the_outside_in(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text('{"a": [3, {"b": "ü"}]}', encoding="utf-8")
    assert field_in(tmp_path / "facts.json", "a", 1, "b") == "ü"
    assert field_in(tmp_path / "facts.json") == {"a": [3, {"b": "ü"}]}


def test_json_that_is_nested_too_deeply_is_none() -> None:
    with pytest.raises(ValueError, match="it is nested too deeply"):
        parse_json("[" * 100_000)

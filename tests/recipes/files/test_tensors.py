"""Files of tensors: byte for byte those of the package safetensors, and hashed as they are written."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from recipes.translation.errors import CheckpointError
from recipes.translation.files.tensors import read_tensors, write_tensors

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
    with pytest.raises(CheckpointError, match=r"file: a is I64, and weights are float32 or float64; restore"):
        read_tensors(tmp_path / "file")

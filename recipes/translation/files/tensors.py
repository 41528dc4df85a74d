"""Tensors in a file of safetensors, whose SHA-256 is computed while it is written.

The format is a number of eight bytes, a JSON header of that many bytes, and the tensors' bytes one after another. It
is written here and not by the package, which leaves the hash for a second pass; the tests compare the bytes of the two.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recipes.translation.errors import CheckpointError
from recipes.translation.files.json_fields import parse_json

MIXED = "restore the folder from a copy: files of two checkpoints have been mixed, or changed"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The format's names of the dtypes, in the order in which the package writes tensors."""


class OneByOne(Mapping[str, Tensor]):
    """Lazy tensors: each is made when it is requested, and freed when the caller drops it.

    Args:
        described: every tensor on the device "meta", with its shape and dtype.
        make: returns the tensor of a name.
    """

    def __init__(self, described: Mapping[str, Tensor], make: Callable[[str], Tensor]) -> None:
        self.described = described
        self.make = make

    def __getitem__(self, name: str) -> Tensor:
        self.described[name]  # raises for a name that there is not
        return self.make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)


class AskedOnce(OneByOne):
    """The same, of which each must be asked for once, as other processes take part in making it."""

    def __init__(self, described: Mapping[str, Tensor], make: Callable[[str], Tensor]) -> None:
        super().__init__(described, make)
        self.left = in_order(described)

    def __getitem__(self, name: str) -> Tensor:
        self.left.remove(name)
        return super().__getitem__(name)

    def finish(self) -> None:
        """Ask for all that nobody has asked for."""
        while self.left:
            self[self.left[0]]


def describe_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors of these shapes and dtypes, without making any."""
    if isinstance(tensors, OneByOne):
        return tensors.described
    return tensors


def rename(tensors: Mapping[str, Tensor], old_names: Mapping[str, str]) -> OneByOne:
    """Return some of the tensors by new names, each of which has its old one in `old_names`."""
    shapes = {name: describe_tensors(tensors)[old] for name, old in old_names.items()}
    return OneByOne(shapes, lambda name: tensors[old_names[name]])


def in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order in which the package writes tensors: wide numbers come first, and are aligned."""
    return sorted(tensors, key=lambda name: ([*DTYPES].index(describe_tensors(tensors)[name].dtype), name))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a new file and return its SHA-256; each tensor is asked for once, `in_order`.

    The file is not yet flushed to the disk: `replaced_folder` does that for all of a folder's files.

    `metadata` is what another program looks for in the file's header.
    """
    digest = hashlib.sha256()
    # Both let go of Python's lock, so that hashing takes place while the disk writes
    with ThreadPoolExecutor(1) as beside, path.open("xb") as file:
        for part in _parts(tensors, metadata):
            hashed = beside.submit(digest.update, part)
            file.write(part)
            hashed.result()  # before the next part is in memory
    return digest.hexdigest()


def _parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[memoryview]:
    """Yield the bytes of a file, part by part."""
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = metadata
    end = 0
    names = in_order(tensors)
    for name in names:
        tensor = describe_tensors(tensors)[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        # As bytes, since numpy has no bfloat16
        yield tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> OneByOne:
    """Open a file, of which each tensor is mapped into memory when it is asked for, until it is dropped.

    Raises CheckpointError if it is not in the safetensors format. The contents are those of now, even if the file is
    replaced meanwhile.
    """
    try:
        with safe_open(path, framework="np"):  # which checks the header against the file's size
            descriptor = os.open(path, os.O_RDONLY)
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {MIXED}") from error
    size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = parse_json(os.pread(descriptor, size, 8))
    header.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in dtypes:
            os.close(descriptor)
            raise CheckpointError(f"{path}: {name} is {entry['dtype']}, and weights are float32 or float64; {MIXED}")
        found[name] = torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]], device="meta")

    def map_tensor(name: str) -> Tensor:
        like = found[name]
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        begin = 8 + size + header[name]["data_offsets"][0]
        inside = begin % mmap.ALLOCATIONGRANULARITY
        # A copy when it is written to, which changes no file
        part = mmap.mmap(descriptor, inside + like.nbytes, access=mmap.ACCESS_COPY, offset=begin - inside)
        return torch.frombuffer(part, dtype=like.dtype, count=like.numel(), offset=inside).view(like.shape)

    tensors = OneByOne(found, map_tensor)
    weakref.finalize(tensors, os.close, descriptor)
    return tensors

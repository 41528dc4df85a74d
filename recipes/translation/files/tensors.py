"""Tensors in a safetensors file, whose SHA-256 is computed while it is written.

The format is an eight-byte number, a JSON header of that many bytes, and the tensors' bytes one after another. It is
written here rather than by the package, which would need a second pass for the hash; the tests compare both outputs.
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

MIXED = "restore the folder from a copy: its files come from two checkpoints, or were changed"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The format's names for the dtypes, in the order in which the package writes tensors."""


class OneByOne(Mapping[str, Tensor]):
    """Lazy tensors: each is made when it is requested, and freed when the caller drops it.

    Args:
        described: every tensor on the device "meta", with its shape and dtype.
        make: returns the tensor with a given name.
    """

    def __init__(self, described: Mapping[str, Tensor], make: Callable[[str], Tensor]) -> None:
        self.described = described
        self.make = make

    def __getitem__(self, name: str) -> Tensor:
        self.described[name]  # raises for a name that does not exist
        return self.make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)


class AskedOnce(OneByOne):
    """Lazy tensors that must each be requested exactly once, since other processes take part in making them."""

    def __init__(self, described: Mapping[str, Tensor], make: Callable[[str], Tensor]) -> None:
        super().__init__(described, make)
        self.left = in_order(described)

    def __getitem__(self, name: str) -> Tensor:
        self.left.remove(name)
        return super().__getitem__(name)

    def finish(self) -> None:
        """Request all tensors that have not been requested yet."""
        while self.left:
            self[self.left[0]]


def describe_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors with these shapes and dtypes, without making any lazy ones."""
    if isinstance(tensors, OneByOne):
        return tensors.described
    return tensors


def rename(tensors: Mapping[str, Tensor], old_names: Mapping[str, str]) -> OneByOne:
    """Return some of the tensors under new names; `old_names` maps each new name to its old one."""
    shapes = {name: describe_tensors(tensors)[old] for name, old in old_names.items()}
    return OneByOne(shapes, lambda name: tensors[old_names[name]])


def in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order in which the package writes tensors: wide dtypes first, so that all are aligned."""
    return sorted(tensors, key=lambda name: ([*DTYPES].index(describe_tensors(tensors)[name].dtype), name))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a new file and return its SHA-256; each tensor is requested once, `in_order`.

    The file is not yet flushed to the disk: `replaced_folder` does that for all of a folder's files.

    `metadata` is what other programs look for in the file's header.
    """
    digest = hashlib.sha256()
    # Hashing and writing both release the GIL, so that they run at the same time
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
    """Open a file; each tensor is mapped into memory when it is requested, until the caller drops it.

    Raises CheckpointError if it is not in the safetensors format. The contents stay those at the time of this call,
    even if the file is replaced later.
    """
    try:
        with safe_open(path, framework="np"):  # checks the header against the file's size
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
            raise CheckpointError(
                f"{path}: {name} is {entry['dtype']}, but weights must be float32 or float64; {MIXED}"
            )
        found[name] = torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]], device="meta")

    def map_tensor(name: str) -> Tensor:
        like = found[name]
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        begin = 8 + size + header[name]["data_offsets"][0]
        inside = begin % mmap.ALLOCATIONGRANULARITY
        # Copied on write, so that writing to a tensor does not change the file
        part = mmap.mmap(descriptor, inside + like.nbytes, access=mmap.ACCESS_COPY, offset=begin - inside)
        return torch.frombuffer(part, dtype=like.dtype, count=like.numel(), offset=inside).view(like.shape)

    tensors = OneByOne(found, map_tensor)
    weakref.finalize(tensors, os.close, descriptor)
    return tensors

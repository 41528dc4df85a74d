"""Tensors in a file of safetensors, whose SHA-256 is computed while it is written.

The format is a number of eight bytes, a header of so many bytes of JSON, and the tensors' bytes one after another. It
is written here and not by the package, which leaves the hash for a second pass; the tests compare the bytes of the two.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from recipes.translation.errors import CheckpointError

MIXED = "restore the folder from a copy: files of two checkpoints have been mixed, or changed"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The format's names of the dtypes, in the order in which the package writes tensors."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a new file, flush it to the disk, and return its SHA-256."""
    digest = hashlib.sha256()
    # Both let go of Python's lock, so that hashing takes place while the disk writes
    with ThreadPoolExecutor(1) as beside, path.open("xb", buffering=0) as file:
        for part in _parts(tensors):
            hashed = beside.submit(digest.update, part)
            _write_all(file.fileno(), part)
        os.fsync(file.fileno())
        hashed.result()
    return digest.hexdigest()


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a file, part by part."""
    # The package's own order, in which wide numbers come first and are aligned
    order = sorted(tensors, key=lambda name: ([*DTYPES].index(tensors[name].dtype), name))
    header = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in order:
        # As bytes, since numpy has no bfloat16
        yield tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_all(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Map a file into memory; raise CheckpointError if it is none of safetensors."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {MIXED}") from error

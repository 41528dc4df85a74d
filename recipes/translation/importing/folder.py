"""A folder as transformers' `save_pretrained` writes it, read without transformers and without running code from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from recipes.translation.errors import CheckpointError
from recipes.translation.files.json_fields import parsed
from recipes.translation.importing.fields import check_fields

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Folder:
    """Reads the files of a folder; a file that is missing or not what its name says raises CheckpointError."""

    path: Path

    def json(self, name: str) -> dict[str, Any]:
        """Return what a JSON file says, with the types of `fields.py`."""
        content = self.content(name)
        try:
            found = parsed(content)
        except ValueError as error:
            raise CheckpointError(f"{self.path / name} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path / name} is a JSON {type(found).__name__}, not an object of names")
        check_fields(found, name, str(self.path / name))
        return found

    def json_or_nothing(self, name: str) -> dict[str, Any]:
        """Return what a JSON file says, and nothing where there is none."""
        if not (self.path / name).is_file():
            return {}
        return self.json(name)

    def content(self, name: str) -> bytes:
        """Return a file's content."""
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder: give one with a model as transformers saves it")
        if not (self.path / name).is_file():
            raise CheckpointError(
                f"{self.path} has no {name}: it needs all files of the model and its tokenizer as they were published"
            )
        return (self.path / name).read_bytes()

    def subwords(self, name: str) -> bytes:
        """Return the content of a sentencepiece model."""
        content = self.content(name)
        check_subwords(content, f"{self.path / name} is not a sentencepiece model")
        return content

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights, in float32 where they are in half precision; of one file, or of several with an index."""
        names = [WEIGHTS]
        index = self.json_or_nothing(f"{WEIGHTS}.index.json")
        if index:
            names = sorted(set(index["weight_map"].values()))
        elif not (self.path / WEIGHTS).is_file() and (pickled := sorted(self.path.glob("pytorch_model*.bin"))):
            raise CheckpointError(
                f"{pickled[0]} is pickled, and reading it could run any code: convert it to {WEIGHTS} first, where you "
                "trust it, by transformers' from_pretrained and save_pretrained"
            )
        found: dict[str, Tensor] = {}
        for name in names:
            found |= self._tensors_of(name)
        return found

    def _tensors_of(self, name: str) -> dict[str, Tensor]:
        if not (self.path / name).is_file():
            raise CheckpointError(f"{self.path} has no {name}, with weights of the model: copy it there")
        try:
            tensors = load_file(self.path / name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path / name} is not a file of safetensors: {error}") from None
        for weight, tensor in tensors.items():
            if not bool((tensor < math.inf).all()):  # a bias may be -inf: a token that is never to come
                raise CheckpointError(
                    f"{self.path / name}: {weight} has values that are nan or inf: download or convert the model again"
                )
        half = (torch.float16, torch.bfloat16)
        return {name: tensor.float() if tensor.dtype in half else tensor for name, tensor in tensors.items()}


def check_subwords(model: bytes, otherwise: str) -> None:
    """Raise CheckpointError with the message `otherwise` if sentencepiece cannot load the model."""
    try:
        sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise CheckpointError(otherwise) from None


class Weights:
    """Weights under their names in transformers, each of which must be used."""

    def __init__(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        self._tensors = dict(tensors)
        self.path = path
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a weight; raise CheckpointError if there is none, or one of another shape."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} has no weight {name}, which its config.json promises")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.path}: {name} is {tuple(tensor.shape)}, and by config.json it is {shape}: one of the two "
                "files belongs to another model"
            )
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(f"{self.path}: {name} is {tensor.dtype}, not floating-point numbers")
        self._used.add(name)
        return tensor

    def take_any(self, name: str) -> Tensor | None:
        """Return a weight that need not be there, of any shape."""
        self._used.add(name)
        return self._tensors.get(name)

    def take_same(self, names: tuple[str, ...], *shape: int) -> Tensor:
        """Return a weight that may be stored under several names, or under one of them, all with the same bits."""
        there = [name for name in names if name in self]
        if not there:
            raise CheckpointError(f"{self.path} has no weight {names[-1]}, which its config.json promises")
        first, *others = (self.take(name, *shape) for name in there)
        for name, other in zip(there[1:], others, strict=True):
            if not torch.equal(first, other):
                raise CheckpointError(
                    f"{self.path}: {there[0]} and {name} differ, and by config.json they are one matrix"
                )
        return first

    def check_all_used(self) -> None:
        """Raise CheckpointError for a weight that nothing has asked for."""
        left = sorted(self._tensors.keys() - self._used)
        if left:
            raise CheckpointError(
                f"{self.path} has {left[0]}, and {len(left)} such weights in all, for which there is no place: it is "
                "not the architecture that its config.json names, or it has extra parts"
            )

"""Draw the micro-batches of a step, all of which are held until the last one has run.

The tokens of a step are counted before its first loss, so a loader gives all of its micro-batches before one is used. A
loader that fills the same memory for each (pinned buffers, arrays of numpy, tensors that DALI writes to) has then
overwritten the earlier ones. Their contents tell: memory that several micro-batches share is right as long as nobody
writes to it (a mask, windows of one tensor).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from numbers import Number
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from seqpar.core.checks import is_dense
from seqpar.core.structures import leaves

MicroBatch = TypeVar("MicroBatch")

MOST_ENTRIES = 1024
"""How many entries of a tensor are compared; of a larger one so many, spread evenly."""

REMEDY = "give each its own memory (batch.clone() for a tensor, copy.deepcopy(batch) for any other)"


def draw(micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
    """Return all micro-batches.

    Raises:
        ValueError: one was changed after it had been drawn; or a list has two with the same memory, which was written
            to. A list of one object several times is not refused.
    """
    if isinstance(micro_batches, (list, tuple)):
        _refuse_same_memory(micro_batches)
        return list(micro_batches)
    drawn: list[MicroBatch] = []
    records: list[list[_Record]] = []
    for micro_batch in micro_batches:
        drawn.append(micro_batch)
        records.append([_Record.of(leaf) for leaf in _contents(micro_batch)])
    uses = Counter(address for record in records for address in {leaf.address for leaf in record})
    for i, (micro_batch, record) in enumerate(zip(drawn, records, strict=True)):
        now = list(_contents(micro_batch))
        if len(now) != len(record) or not all(
            then.holds(leaf, uses[then.address] > 1) for then, leaf in zip(record, now, strict=True)
        ):
            raise ValueError(
                f"micro-batch {i} of {len(drawn)} changed when a later one was drawn: the loader fills the same memory "
                f"again, and all micro-batches of a step are drawn and counted before the first one runs; {REMEDY}"
            )
    return drawn


class _Record(NamedTuple):
    """A leaf of a micro-batch as it was drawn."""

    value: object
    address: int
    """Of the memory that it is part of; 0 for anything but a tensor with memory of its own."""
    version: int
    """How often a tensor had been written to by torch."""
    entries: Any
    """A copy of some entries of a tensor or an array; None for anything else."""

    @staticmethod
    def of(leaf: object) -> _Record:
        if isinstance(leaf, Tensor):
            if not is_dense(leaf):
                return _Record(leaf, 0, 0, None)
            return _Record(leaf, leaf.untyped_storage().data_ptr(), _version(leaf), _entries(leaf))
        if hasattr(leaf, "__array_interface__"):
            return _Record(leaf, 0, 0, _bytes(leaf))
        return _Record(leaf, 0, 0, None)

    def holds(self, leaf: object, is_shared: bool) -> bool:
        """Return whether a leaf is what it was; `is_shared` says whether another micro-batch has the same memory."""
        if isinstance(leaf, Tensor) and self.entries is not None:
            # To compare contents on an accelerator is to wait for it
            if leaf is self.value and not leaf.is_cpu and not is_shared and _version(leaf) == self.version:
                return True
            now = _entries(leaf)
            return now.shape == self.entries.shape and torch.equal(now, self.entries)
        if self.entries is not None:
            return hasattr(leaf, "__array_interface__") and _bytes(leaf) == self.entries
        if isinstance(self.value, (Number, str, bytes)):
            return leaf is self.value or leaf == self.value
        return True


def _contents(micro_batch: object) -> Iterator[object]:
    """Yield what is in the containers of a micro-batch, and the tensors and arrays of objects of other kinds."""
    for leaf in leaves(micro_batch):
        yield leaf
        if not isinstance(leaf, (Tensor, nn.Module, type)) and hasattr(leaf, "__dict__"):
            yield from (inner for inner in leaves(vars(leaf)) if _has_memory(inner))


def _has_memory(leaf: object) -> bool:
    return isinstance(leaf, Tensor) or hasattr(leaf, "__array_interface__")


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written to; 0 for one of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _entries(tensor: Tensor) -> Tensor:
    """Return a copy of some entries as bytes, in which nan is the same as nan."""
    tensor = tensor.detach()
    size = tensor.numel()
    if size <= MOST_ENTRIES:
        some = tensor.clone(memory_format=torch.contiguous_format).flatten()
    else:
        index = torch.arange(MOST_ENTRIES, device=tensor.device) * size // MOST_ENTRIES
        some = tensor[torch.unravel_index(index, tensor.shape)]
    return some.view(torch.uint8)


def _bytes(array: Any) -> bytes:
    """Return some entries of an array of numpy."""
    return array.flat[:: max(1, array.size // MOST_ENTRIES)].tobytes()  # type: ignore[no-any-return]


def _refuse_same_memory(micro_batches: Sequence[object]) -> None:
    """Raise ValueError if two of a list have all of their tensors in common and each of these was written to.

    Nobody has seen when, so a tensor that only some of them have in common may be a constant.
    """
    first: dict[tuple[object, ...], int] = {}
    for i, micro_batch in enumerate(micro_batches):
        held = [leaf for leaf in _contents(micro_batch) if _has_memory(leaf)]
        if not held or not all(map(_may_be_refilled, held)):
            continue
        earlier = first.setdefault(tuple(map(_place, held)), i)
        if micro_batches[earlier] is not micro_batch:
            raise ValueError(
                f"micro_batches[{earlier}] and [{i}] are two objects with the same memory: a loader that fills it "
                f"again has overwritten the earlier one; {REMEDY}; for one batch several times pass [batch] * n"
            )


def _may_be_refilled(leaf: Any) -> bool:
    """Return whether a tensor or array was written to after it was made, as far as torch knows."""
    if not isinstance(leaf, Tensor):
        return True
    if not is_dense(leaf) or not leaf.numel():
        return False
    # Memory that is not torch's own is written to without its knowing
    return _version(leaf) > 0 or not leaf.untyped_storage().resizable()


def _place(leaf: Any) -> tuple[object, ...]:
    """Return which memory a tensor or array is."""
    if isinstance(leaf, Tensor):
        return (leaf.device, leaf.data_ptr(), leaf.shape, leaf.stride())
    return (leaf.__array_interface__["data"][0], leaf.shape, leaf.strides)

"""Draw the micro-batches of a step, all of which are held until the last one has run.

The tokens of a step are counted before its first loss, so all micro-batches are drawn from the loader before one is
used. By then a loader that fills the same memory for each (pinned buffers, numpy arrays, tensors that DALI writes to)
has overwritten the earlier ones. This is detected by comparing contents, because micro-batches may share memory as long
as nobody writes to it (a mask, windows of one tensor).
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from numbers import Number
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from seqpar.core.checks import is_dense
from seqpar.core.device_facts import is_on_host
from seqpar.core.graphs import version_of
from seqpar.core.structures import attributes_of, has_in_class, leaves

MicroBatch = TypeVar("MicroBatch")

MOST_ENTRIES = 1024
"""How many entries of a tensor are compared; those of a larger one are spread evenly."""

MOST_LEAVES = 1024
"""How many tensors and other values are inspected in an object that another object holds."""

REMEDY = "give each its own memory (batch.clone() for a tensor, copy.deepcopy(batch) for any other)"


def draw(micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
    """Return all micro-batches.

    Raises:
        ValueError: one was changed after it had been drawn; or two in a list share memory that was written to. A list
            may contain one object several times.
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
    """The address of the memory that it is part of; 0 for anything but a dense tensor."""
    version: int
    """How often a tensor had been written to by torch."""
    entries: Any
    """A copy of some entries of a tensor or an array; None for anything else."""

    @staticmethod
    def of(leaf: object) -> _Record:
        if isinstance(leaf, Tensor):
            if not is_dense(leaf):
                return _Record(leaf, 0, 0, None)
            return _Record(leaf, leaf.untyped_storage().data_ptr(), version_of(leaf), _entries(leaf))
        return _Record(leaf, 0, 0, _contents_of(leaf))

    def holds(self, leaf: object, is_shared: bool) -> bool:
        """Return whether a leaf is still what it was; `is_shared` says whether another micro-batch has its memory."""
        if isinstance(leaf, Tensor) and self.entries is not None:
            # Comparing contents on an accelerator means waiting for it
            if leaf is self.value and not is_on_host(leaf) and not is_shared and version_of(leaf) == self.version:
                return True
            now = _entries(leaf)
            return now.shape == self.entries.shape and torch.equal(now, self.entries)
        if self.entries is not None:
            return bool(_contents_of(leaf) == self.entries)
        if isinstance(self.value, (Number, str, bytes)):
            return leaf is self.value or leaf == self.value
        return True


def _contents(micro_batch: object) -> Iterator[object]:
    """Yield what is in the containers of a micro-batch, and the tensors and arrays in objects of other kinds.

    In an object inside such an object, which may be a data set, only `MOST_LEAVES` values are inspected.
    """
    for leaf in leaves(micro_batch):
        yield leaf
        for inner in _attributes(leaf):
            yield from (own for own in (inner, *islice(_attributes(inner), MOST_LEAVES)) if _has_memory(own))


def _attributes(leaf: object) -> Iterator[object]:
    """Yield what is in the attributes of an object, and in their containers."""
    if not isinstance(leaf, (Tensor, nn.Module, type, Number, str, bytes)):
        yield from leaves(attributes_of(leaf))


def _has_memory(leaf: object) -> bool:
    return isinstance(leaf, Tensor) or has_in_class(leaf, "__array_interface__")


def _entries(tensor: Tensor) -> Tensor:
    """Return a copy of some entries as bytes, so that nan is the same as nan."""
    tensor = tensor.detach()
    size = tensor.numel()
    if size <= MOST_ENTRIES:
        some = tensor.clone(memory_format=torch.contiguous_format).flatten()
    else:
        index = torch.arange(MOST_ENTRIES, device=tensor.device) * size // MOST_ENTRIES
        some = tensor[torch.unravel_index(index, tensor.shape)]
    return some.view(torch.uint8)


def _contents_of(leaf: Any) -> object:
    """Return a copy of what can be changed in place in an array, or in a queue or set of numbers and strings.

    None for anything else; of a long numpy array only some entries.
    """
    if has_in_class(leaf, "__array_interface__"):
        return leaf.flat[:: max(1, leaf.size // MOST_ENTRIES)].tobytes()
    if isinstance(leaf, (array, bytearray)):
        return bytes(leaf)
    if isinstance(leaf, (deque, set)):
        return type(leaf)(each for each in leaf if isinstance(each, (Number, str, bytes)))
    return None


def _refuse_same_memory(micro_batches: Sequence[object]) -> None:
    """Raise ValueError if two micro-batches of a list share memory that, as far as torch knows, was refilled.

    When it was written to is not known, and a constant may be shared. So two are refused only if they share all of
    their tensors, each of which was written to, or one that `_is_refilled` takes for refilled.
    """
    # If one object occurs several times, nothing was overwritten
    distinct = {id(micro_batch): i for i, micro_batch in reversed([*enumerate(micro_batches)])}
    held = {i: [leaf for leaf in _contents(micro_batches[i]) if _has_memory(leaf)] for i in sorted(distinct.values())}
    first: dict[tuple[object, ...], int] = {}
    for i, mine in held.items():
        if mine and all(map(_may_be_refilled, mine)):
            earlier = first.setdefault(tuple(map(_place, mine)), i)
            if earlier != i:
                raise ValueError(_two_objects(earlier, i))
    written = {i: [t for t in mine if isinstance(t, Tensor) and _may_be_refilled(t)] for i, mine in held.items()}
    users: dict[object, list[int]] = {}
    for i, tensors in written.items():
        for start in set(map(_start, tensors)):
            users.setdefault(start, []).append(i)
    for i, tensors in written.items():
        common = [t for t in tensors if len(users[_start(t)]) > 1]
        own = {t.shape[:1] for t in held[i] if isinstance(t, Tensor) and all(t is not other for other in common)}
        for tensor in common:
            if _is_refilled(tensor, len(users[_start(tensor)]), own):
                raise ValueError(_two_objects(*users[_start(tensor)][:2]))


def _is_refilled(tensor: Tensor, users: int, rows: set[torch.Size]) -> bool:
    """Return whether a tensor was written to at least once for each of `users` micro-batches, and is not a constant.

    A constant is one whose numbers are all the same, or whose number of rows is not that of the micro-batch's own
    tensors.
    """
    if version_of(tensor) < users or (rows and tensor.shape[:1] not in rows):
        return False
    tensor = tensor.detach()
    return bool((tensor != tensor.flatten()[0]).any())


def _two_objects(earlier: int, later: int) -> str:
    """Return what is wrong with two micro-batches of a list, in words."""
    return (
        f"micro_batches[{earlier}] and [{later}] are two objects with the same memory: a loader that fills it "
        f"again has overwritten the earlier one; {REMEDY}; for one batch several times pass [batch] * n"
    )


def _start(tensor: Tensor) -> object:
    """Return where a tensor's numbers begin."""
    return tensor.device, tensor.data_ptr()


def _may_be_refilled(leaf: Any) -> bool:
    """Return whether a tensor or array was written to after it was made, as far as torch knows."""
    if not isinstance(leaf, Tensor):
        return True
    if not is_dense(leaf) or not leaf.numel():
        return False
    # torch does not notice what is written to memory that is not its own
    return version_of(leaf) > 0 or not leaf.untyped_storage().resizable()


def _place(leaf: Any) -> tuple[object, ...]:
    """Return what identifies the memory of a tensor or array."""
    if isinstance(leaf, Tensor):
        return (leaf.device, leaf.data_ptr(), leaf.shape, leaf.stride())
    return (leaf.__array_interface__["data"][0], leaf.shape, leaf.strides)

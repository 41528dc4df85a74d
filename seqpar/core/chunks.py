"""Cut the rows of a batch into chunks, and choose how many rows a chunk has.

Shape suffixes: B batch, T time, N = B*T rows, K counted rows (their target is not ignored).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.core.device_facts import FACTS, current, is_on_host

CPU_BUDGET = 16 * 2**20
"""Bytes of one chunk's logits on a CPU when the caller names no size: small enough that its allocator and caches reuse
them."""

ACCELERATOR_BUDGET = 512 * 2**20
"""Bytes of one chunk's logits on an accelerator: as they are allocated where a kernel overwrites them, else in float32,
in which the softmax stands beside them."""

FEWEST_ROWS = 512
"""Below this many rows the matrix products are bound by reading the weight and summing its gradient. In bfloat16 and
float16, whose products are faster, the CPU takes twice as many. Measured (docs/results/chunk_rows.md): within 8 % of
the best number of rows at every shape on 2 cores, where 64 rows cost 1.4 to 1.7 times as much.

An accelerator without the kernel takes four times as many: reading and writing the weight gradient's float32 sum moves
8 bytes for 6 x rows operations. On an H100, at 8,192 x 2,048 x 128,256 in bfloat16, 2,048 rows are within 3 % of the
best number and 512 take 1.59 times as long (docs/results/gpu.md)."""

FULL_PRODUCT = 2**22
"""Numbers of a chunk's hidden gradient that keep all multiprocessors of an accelerator at work: they are computed in
tiles of 128 x 256, of which an H100 has 132 under way. A narrow chunk may take twice its budget to have that many."""

ENOUGH_ROWS = 4096
"""Rows of an accelerator's chunk with which half the budget is enough, where its product is full: on an H200, at
16,384 x 1,024 x 37,000 in bfloat16, four chunks take 1 % longer than three and 102 MiB less
(docs/results/chunk_rows.md)."""

TILE_ROWS = 128
"""An accelerator's products are computed in tiles of this many rows."""

Chunk = slice | Tensor
"""The rows of a chunk: a slice where they are adjacent (a view, no copy), else their int64 indices."""


def note_rows(error: Exception, chunk: Chunk) -> None:
    """Add to an error which rows were being computed."""
    error.add_note(f"in the chunk of {_describe(chunk)}")


def _describe(chunk: Chunk) -> str:
    """Return which rows a chunk has, for an error message."""
    if isinstance(chunk, slice):
        last = "the last" if chunk.stop is None else chunk.stop - 1
        return f"rows {chunk.start or 0} to {last}"
    if is_on_host(chunk) and len(chunk):
        return f"{len(chunk)} rows from {int(chunk.min())} to {int(chunk.max())}"
    # An accelerator may have failed, and is not asked
    return f"{len(chunk)} rows"


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the device.

    No number can be read then, and the shapes must be the same in every replay, so every row is computed.
    """
    if FACTS[device.type].is_host:
        return False
    is_capturing = getattr(torch.get_device_module(device.type), "is_current_stream_capturing", None)
    if is_capturing is None:
        return False
    # It asks the current device, which need not be this one
    with current(device):
        return bool(is_capturing())


class LateNumber:
    """An int64 on its way from the device; on a GPU it is waited for only when it is read, for itself alone."""

    def __init__(self, number: Tensor) -> None:
        self.on_device = number
        # To pinned memory, behind what has been launched so far
        has_events = FACTS[number.device.type].has_events
        self.here = number.to("cpu", non_blocking=has_events)
        self.arrived: torch.cuda.Event | None = None
        if has_events:
            self.arrived = torch.cuda.current_stream(number.device).record_event()

    def read(self) -> int:
        """Return the number, as soon as it is there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        # Not by `item`, which goes through torch's dispatcher
        return ctypes.c_int64.from_address(self.here.data_ptr()).value


def rows_per_chunk(vocab_size: int, dtype: torch.dtype, device_type: str, width: int | None = None) -> int:
    """Return how many rows of `vocab_size` logits a chunk has on that kind of device.

    Args:
        width: that of the hidden states where a kernel overwrites the logits by their gradient; None elsewhere.
    """
    if width is not None:
        rows = ACCELERATOR_BUDGET // max(1, vocab_size * dtype.itemsize)
        full = FULL_PRODUCT // max(1, width)
        rows = max(rows, min(full, 2 * rows))
        rows = min(rows, max(full, ENOUGH_ROWS, rows // 2))
        return max(1, rows // TILE_ROWS) * TILE_ROWS
    # Bytes of logits as the softmax sees them, float32 or wider, whatever the dtype of the products
    budget = ACCELERATOR_BUDGET
    narrow_factor = 4
    if FACTS[device_type].is_host:
        budget = CPU_BUDGET
        narrow_factor = 2
    fewest = FEWEST_ROWS
    if dtype.itemsize < 4:
        fewest *= narrow_factor
    return max(fewest, budget // max(1, vocab_size * max(4, dtype.itemsize)))


def cut_rows(counted_N: Tensor, rows: int, count: int | None = None) -> list[Chunk]:
    """Return the rows where the mask `counted_N` is true, in order, in the fewest even chunks of at most `rows`.

    While a CUDA graph is captured, all rows are returned: a graph has one number of rows.

    Args:
        count: how many they are; None reads it from the device.
    """
    if is_capturing(counted_N.device):
        return list(even_slices(len(counted_N), rows))
    if count is None:
        indices_K = counted_N.nonzero().squeeze(1)
    else:
        indices_K = torch.nonzero_static(counted_N, size=count).squeeze(1)
    slices = even_slices(len(indices_K), rows)
    if len(indices_K) == len(counted_N):
        return list(slices)
    return [indices_K[s] for s in slices]


def rows_in(chunk: Chunk) -> int:
    """Return how many rows a chunk has, whose bounds are numbers if it is a slice."""
    return chunk.stop - chunk.start if isinstance(chunk, slice) else len(chunk)


def cover(chunks: Sequence[Chunk], rows: int) -> bool:
    """Return whether the chunks are known to have all rows between them: adjacent slices from the first to the last."""
    end = 0
    for chunk in chunks:
        if not isinstance(chunk, slice) or chunk.start != end or chunk.step is not None:
            return False
        # One that ends before it begins is empty, and the next would begin there again
        if chunk.stop is None or chunk.stop < end:
            return False
        end = chunk.stop
    return end == rows


def even_slices(count: int, most: int) -> list[slice]:
    """Return adjacent slices of `range(count)`, at most `most` long and of sizes that differ by at most one."""
    if not count:
        return []
    number = -(-count // most)
    # The bounds are rounded and not the size, so that the remainder is spread over the slices
    bounds = [i * count // number for i in range(number + 1)]
    return list(map(slice, bounds, bounds[1:]))


def cut_time(counted_BT: Tensor, steps: int) -> list[Chunk]:
    """Return the rows where the mask is true, `steps` time steps of the whole batch to a chunk.

    Rows are numbered as in `counted_BT.flatten()`: sequence b at time t is row b * T + t.
    """
    batch, time = counted_BT.shape
    if is_capturing(counted_BT.device):
        # No row may be dropped, so chunks of steps x batch rows cover all of them
        rows_TB = torch.arange(batch * time, device=counted_BT.device).view(batch, time).t()
        return list(rows_TB.reshape(-1).split(steps * batch))
    # Time-major positions t * B + b, in order, so that the rows of a chunk are adjacent here
    position_K = counted_BT.t().reshape(-1).nonzero().squeeze(1)
    time_K = position_K.div(max(1, batch), rounding_mode="floor")
    sequence_K = position_K % max(1, batch)
    # A chunk's number of counted rows; it is 0 where all of its time steps are padding
    sizes = torch.bincount(time_K // steps).tolist()
    row_K = sequence_K * time + time_K
    return [chunk for chunk in row_K.split(sizes) if len(chunk)]


def even_sizes(rows: int, parts: int) -> list[int]:
    """Return `min(rows, parts)` sizes that add up to `rows`, differ by at most one, larger ones first.

    Without rows it is [0].
    """
    parts = max(1, min(rows, parts))
    # The remainder, fewer than `parts` rows, is given out one row each from the front
    return [rows // parts + (i < rows % parts) for i in range(parts)]

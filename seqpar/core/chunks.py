"""Cut the rows of a batch into chunks, and choose how many rows a chunk has.

Shape suffixes: B batch, T time, N = B*T rows, K counted rows (their target is not ignored).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.core.device_facts import FACTS, is_capturing, is_on_host

CPU_BUDGET = 16 * 2**20
"""Bytes of one chunk's logits on a CPU when the caller names no size: small enough that its allocator and caches reuse
them."""

ACCELERATOR_BUDGET = 512 * 2**20
"""Bytes of one chunk's logits on an accelerator: in their own dtype if a kernel overwrites them, else in float32, like
the softmax that exists beside them."""

FEWEST_ROWS = 512
"""Below this many rows the matrix products are bound by reading the weight and summing its gradient. In bfloat16 and
float16, whose products are faster, the CPU takes twice as many. Measured (docs/results/chunk_rows.md): within 8 % of
the best number of rows at every shape on 2 cores, where 64 rows cost 1.4 to 1.7 times as much.

An accelerator without the kernel takes four times as many: reading and writing the weight gradient's float32 sum moves
8 bytes for 6 x rows operations. On an H100, at 8,192 x 2,048 x 128,256 in bfloat16, 2,048 rows are within 3 % of the
best number and 512 take 1.59 times as long (docs/results/gpu.md)."""

FULL_PRODUCT = 2**22
"""How many numbers in a chunk's hidden gradient keep all multiprocessors of an accelerator busy: they are computed in
tiles of 128 x 256, 132 at a time on an H100. A narrow chunk may take twice its budget to have that many."""

ENOUGH_ROWS = 4096
"""With this many rows in an accelerator's chunk, half the budget is enough if its product is full: on an H200, at
16,384 x 1,024 x 37,000 in bfloat16, four chunks take 1 % longer than three and 102 MiB less
(docs/results/chunk_rows.md)."""

TILE_ROWS = 128
"""An accelerator's products are computed in tiles of this many rows."""

Chunk = slice | Tensor
"""The rows of a chunk: a slice where they are adjacent (a view, no copy), else their int64 indices."""


def note_rows(error: Exception, chunk: Chunk) -> None:
    """Add a note to an error that says which rows were being computed."""
    error.add_note(f"in the chunk of {_describe(chunk)}")


def _describe(chunk: Chunk) -> str:
    """Return which rows a chunk has, for an error message."""
    if isinstance(chunk, slice):
        last = "the last" if chunk.stop is None else chunk.stop - 1
        return f"rows {chunk.start or 0} to {last}"
    if is_on_host(chunk) and len(chunk):
        return f"{len(chunk)} rows from {int(chunk.min())} to {int(chunk.max())}"
    # An accelerator may have failed, so nothing is read from it
    return f"{len(chunk)} rows"


def rows_per_chunk(vocab_size: int, dtype: torch.dtype, device_type: str, width: int | None = None) -> int:
    """Return how many rows of `vocab_size` logits a chunk has on that kind of device.

    Args:
        width: the width of the hidden states, if a kernel overwrites the logits with their gradient; otherwise None.
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
    """Return how many rows a chunk has; if it is a slice, its bounds must be numbers."""
    return chunk.stop - chunk.start if isinstance(chunk, slice) else len(chunk)


def cover(chunks: Sequence[Chunk], rows: int) -> bool:
    """Return whether the chunks are known to cover all rows: adjacent slices from the first row to the last."""
    end = 0
    for chunk in chunks:
        if not isinstance(chunk, slice) or chunk.start != end or chunk.step is not None:
            return False
        # A slice that ends before it begins is empty, and the next one would begin there again
        if chunk.stop is None or chunk.stop < end:
            return False
        end = chunk.stop
    return end == rows


def even_slices(count: int, most: int) -> list[slice]:
    """Return adjacent slices of `range(count)`, at most `most` long and of sizes that differ by at most one."""
    if not count:
        return []
    number = -(-count // most)
    # The bounds are rounded, not the size, so that the remainder is spread over the slices
    bounds = [i * count // number for i in range(number + 1)]
    return list(map(slice, bounds, bounds[1:]))


def cut_time(counted_BT: Tensor, steps: int) -> list[Chunk]:
    """Return the rows where the mask is true, in chunks of `steps` time steps of the whole batch.

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
    # Each chunk's number of counted rows, 0 if all of its time steps are padding
    sizes = torch.bincount(time_K // steps).tolist()
    row_K = sequence_K * time + time_K
    return [chunk for chunk in row_K.split(sizes) if len(chunk)]


def even_sizes(rows: int, parts: int) -> list[int]:
    """Return `min(rows, parts)` sizes that add up to `rows` and differ by at most one, larger ones first.

    Without rows, return [0].
    """
    parts = max(1, min(rows, parts))
    # The remainder, fewer than `parts` rows, is given out one row each from the front
    return [rows // parts + (i < rows % parts) for i in range(parts)]

"""How rows are cut into chunks, and how many rows a chunk may have.

Shape suffixes: B batch, T time, N = B*T rows, K kept rows (their target is not ignored).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

CPU_BUDGET, ACCELERATOR_BUDGET = 16 * 2**20, 256 * 2**20
"""Bytes that one chunk's logits may take when the caller names no size: what a CPU's allocator and caches reuse; on
an accelerator, enough rows to be bound by arithmetic at a hidden size of 512."""

FEWEST_ROWS = 512
"""Below this many rows the matrix products are bound by reading the weight and adding up its gradient; of bfloat16 and
float16, whose products are faster, the CPU takes twice as many. Measured (docs/results/chunk_rows.md): within
8 % of the best number of rows at every shape on 2 cores, where 64 rows cost 1.4 to 1.7 times as much.

On an accelerator four times as many, not measured yet: reading and writing the weight gradient's float32 sum moves
8 bytes for 6 x rows operations, so that at 4.8 TB/s and 750 TFLOP/s (an H200) it takes 208 / rows of the products'
time: 10 % of it with 2,048 rows, 41 % with 512."""

Chunk = slice | Tensor
"""Which rows: a slice where they lie side by side (a view, no copy), else their int64 indices."""


class Disjoint(list[Chunk]):
    """Chunks that were cut so that no row is in two of them."""


def check_chunks(chunks: Sequence[Chunk], rows: int, device: torch.device) -> None:
    """Raises ValueError where a row is in two chunks, or twice in one: its gradients would overwrite each other.

    Slices are compared as they are and indices on the CPU counted; on an accelerator a device-side assertion looks,
    so that nothing waits, and while a CUDA graph is recorded nothing does.
    """
    if isinstance(chunks, Disjoint):
        return
    if not isinstance(chunks, (list, tuple)):
        raise TypeError(f"chunks is a {type(chunks).__name__}; it must be a list of slices or of index tensors")
    for i, chunk in enumerate(chunks):
        _check_chunk(chunk, f"chunks[{i}]", rows)
    if recording(device):
        return
    uses_N = torch.zeros(rows, dtype=torch.int32, device=device)
    for chunk in chunks:
        if isinstance(chunk, slice):
            uses_N[chunk] += 1
        else:
            uses_N.index_put_((chunk,), torch.ones_like(chunk, dtype=torch.int32), accumulate=True)
    if device.type != "cpu":
        torch._assert_async((uses_N <= 1).all(), "chunks overlap: each row may be in one of them, once")
    elif (uses_N > 1).any():
        row = int(uses_N.argmax())
        raise ValueError(
            f"chunks overlap: row {row} is in them {int(uses_N[row])} times; each row may be in one chunk, once"
        )


def _check_chunk(chunk: object, name: str, rows: int) -> None:
    if isinstance(chunk, slice):
        if chunk.step is not None and chunk.step < 1:
            raise ValueError(f"{name} is {chunk}; a slice of rows goes forwards")
        return
    if not isinstance(chunk, Tensor) or chunk.dtype != torch.int64 or chunk.dim() != 1:
        shape = f" of shape {tuple(chunk.shape)} and {chunk.dtype}" if isinstance(chunk, Tensor) else ""
        raise TypeError(f"{name} is a {type(chunk).__name__}{shape}; it must be a slice or a vector of int64 indices")
    if chunk.device.type == "cpu" and len(chunk) and not -rows <= int(chunk.min()) <= int(chunk.max()) < rows:
        raise IndexError(f"{name} has rows from {int(chunk.min())} to {int(chunk.max())}, and there are {rows}")


def recording(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded there: no number can be looked at, so every row is taken."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_size(size: int | None, name: str) -> None:
    """Raises ValueError unless `size` is None or an int of at least 1."""
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"{name} is {size!r}; it must be a whole number of at least 1, or None to choose it")


def rows_per_chunk(vocab_size: int, dtype: torch.dtype, device_type: str) -> int:
    """The rows of `vocab_size` logits, in float32 or wider, that fit in the budget of that kind of device."""
    on_cpu = device_type == "cpu"
    budget, fewest = CPU_BUDGET if on_cpu else ACCELERATOR_BUDGET, FEWEST_ROWS
    if dtype.itemsize < 4:
        fewest *= 2 if on_cpu else 4
    return max(fewest, budget // max(1, vocab_size * max(4, dtype.itemsize)))


def cut_rows(kept_N: Tensor, rows: int) -> list[Chunk]:
    """The rows where the mask `kept_N` is true, in order, in as few even chunks of at most `rows` as there can be.

    All rows while a CUDA graph is recorded, which is of one number of rows.
    """
    indices_K = None if recording(kept_N.device) else kept_N.nonzero().squeeze(1)
    count = len(kept_N if indices_K is None else indices_K)
    parts = -(-count // rows)
    bounds = [i * count // parts for i in range(parts + 1)] if parts else []
    slices = [slice(a, b) for a, b in pairwise(bounds)]
    if indices_K is None or count == len(kept_N):
        return Disjoint(slices)
    return Disjoint(indices_K[s] for s in slices)


def cut_time(kept_BT: Tensor, steps: int) -> list[Chunk]:
    """The same rows (numbered as in `kept_BT.flatten()`), `steps` time steps of the whole batch at a time."""
    batch, time = kept_BT.shape
    if recording(kept_BT.device):
        return Disjoint(
            torch.arange(batch * time, device=kept_BT.device).view(batch, time).t().reshape(-1).split(steps * batch)
        )
    by_time_K = kept_BT.t().reshape(-1).nonzero().squeeze(1)
    step_K, row_K = by_time_K.div(max(1, batch), rounding_mode="floor"), by_time_K % max(1, batch)
    sizes = torch.bincount(step_K // steps).tolist()
    return Disjoint(chunk for chunk in (row_K * time + step_K).split(sizes) if len(chunk))


def even_sizes(rows: int, parts: int) -> list[int]:
    """`rows` split into `min(rows, parts)` sizes that differ by at most one, larger ones first; [0] for no rows."""
    parts = max(1, min(rows, parts))
    return [rows // parts + (i < rows % parts) for i in range(parts)]

"""Bytes per device of the loss by layout, before anything runs.

    python -m seqpar.memory_plan --tokens 16384 --d 4096 --vocab 256000 --devices 8 --layout vocab

Counted are the tensors that the projection onto the vocabulary and the loss make and read. Not counted: the model
below the projection, the optimizer's state, vectors (a bias, row sums), and what an allocator or a matrix library keeps
for itself (a few MiB). Tests hold every figure of the CPU within 10 % of measured peaks, and where there is a CUDA
device with Triton, its figures, too. Without Triton an accelerator has a float32 softmax of a chunk beside its logits.

Symbols: N tokens on this device, K rows of one chunk, D hidden, V the classes on this device, P devices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from seqpar.core.chunks import check_size, rows_per_chunk
from seqpar.core.stored_gradients import PRODUCT_ROWS
from seqpar.core.token_loss import wide
from seqpar.markdown_table import markdown_table

Layout = Literal["ddp", "fsdp", "vocab"]
Loss = Literal["plain", "LossCompute", "linear_cross_entropy"]
DeviceKind = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class LossBytes:
    """Bytes on one device of one way to compute the loss. Items do not all live at once; `peak` says what does."""

    loss: Loss
    chunk_rows: int
    """K, rows whose logits exist at once; all N of the plain loss."""
    logits: int
    beside_logits: int
    """What is kept beside the logits: their softmax, and what plain torch adds in its backward."""
    weight: int
    """What this device holds of the weight between steps."""
    gathered_weight: int
    """The whole weight, and what it was gathered in, while FSDP2 has it unsharded; 0 elsewhere."""
    weight_gradient: int
    """As the weight's dtype has it, whole on this device (before FSDP2 cuts it)."""
    accumulator: int
    """The float32 (or wider) sum of the chunks' weight gradients, where it is not the gradient's own memory."""
    hidden: int
    hidden_gradient: int
    exchange: int
    """DDP's bucket (0 with gradient_as_bucket_view=True), or the input of FSDP2's reduce-scatter."""
    peak: int
    """The most that a step takes above weight and hidden, which are there before it."""

    @property
    def total(self) -> int:
        """The most that is taken at once, weight and hidden included."""
        return self.weight + self.hidden + self.peak


@dataclass(frozen=True)
class MemoryPlan:
    """The loss of one step in one layout, on one of its devices."""

    layout: Layout
    devices: int
    tokens_here: int
    """N: the tokens whose loss this device computes."""
    vocab_here: int
    """V: the classes whose logits this device computes."""
    dtype: torch.dtype
    losses: tuple[LossBytes, ...]
    """The plain loss first, then the chunked ones this layout can use."""

    @property
    def best(self) -> LossBytes:
        """The one with the smallest total."""
        return min(self.losses, key=lambda loss: loss.total)

    def of(self, loss: Loss) -> LossBytes:
        """One of `losses` by its name; raises ValueError if the layout has no such loss."""
        for known in self.losses:
            if known.loss == loss:
                return known
        raise ValueError(f"layout {self.layout!r} has {[known.loss for known in self.losses]} and not {loss!r}")


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the tensors that every loss is made of; `wide` is float32, or float64 where the input has it."""

    logits: int
    wide_logits: int
    weight: int
    wide_weight: int
    hidden: int
    chunk_hidden: int
    added_at_once: int
    chunks: int
    narrow: bool
    """Whether the dtype is narrower than the sums."""
    cpu: bool
    split: bool
    """Whether the vocabulary is split over ranks."""


def memory_plan(
    *,
    tokens: int,
    d: int,
    vocab: int,
    devices: int = 1,
    layout: Layout = "ddp",
    dtype: torch.dtype | str = torch.bfloat16,
    chunk_tokens: int | None = None,
    device: DeviceKind = "cuda",
) -> MemoryPlan:
    """What the loss of one forward and backward takes on each device.

    Args:
        tokens: target tokens of one micro-batch that are not padding, over ALL devices. "ddp" and "fsdp" give each
            device its share of them; in "vocab" every device has all of them and its share of the classes.
        d: the width of the hidden states.
        vocab: classes of the whole vocabulary.
        devices: ranks over which tokens (ddp, fsdp) or classes (vocab) are split.
        layout: "ddp"; "fsdp": FSDP2, the generator in a `fully_shard` unit; "vocab": `linear_cross_entropy` with a
            `VocabShard`, of which "plain" is this device's part of the logits, all of them at once.
        dtype: of weight, hidden and logits, as torch's or by its name.
        chunk_tokens: as `LossCompute` takes it; None is its own choice.
        device: "cuda" for an accelerator with Triton, or "cpu"; they differ in the chunk's size and in what is done in
            place.

    A `LossCompute` that has its pair by formula (`explain()` says so) is as "linear_cross_entropy".

    Raises:
        ValueError: a count below 1; an unknown layout, dtype or device.
    """
    for name, count in (("tokens", tokens), ("d", d), ("vocab", vocab), ("devices", devices)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be a whole number of at least 1")
    check_size(chunk_tokens, "chunk_tokens")
    for name, value, known in (("layout", layout, get_args(Layout)), ("device", device, get_args(DeviceKind))):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    dtype = _dtype(dtype)
    tokens_here, vocab_here = (tokens, -(-vocab // devices)) if layout == "vocab" else (-(-tokens // devices), vocab)
    most = chunk_tokens or rows_per_chunk(vocab_here, dtype, device)
    chunks = -(-tokens_here // most)
    rows = -(-tokens_here // chunks)  # even chunks, as `chunks.cut_rows` cuts them

    def sizes(rows: int, chunks: int) -> _Sizes:
        narrow, wider = dtype.itemsize, wide(dtype).itemsize
        return _Sizes(
            logits=rows * vocab_here * narrow,
            wide_logits=rows * vocab_here * wider,
            weight=vocab_here * d * narrow,
            wide_weight=vocab_here * d * wider,
            hidden=tokens_here * d * narrow,
            chunk_hidden=rows * d * narrow,
            added_at_once=min(PRODUCT_ROWS, vocab_here) * d * wider,
            chunks=chunks,
            narrow=narrow < wider,
            cpu=device == "cpu",
            split=layout == "vocab" and devices > 1,
        )

    whole, part = sizes(tokens_here, 1), sizes(rows, chunks)
    losses = [_in_layout("plain", whole, tokens_here, layout, devices)]
    if layout != "vocab":
        losses.append(_in_layout("LossCompute", part, rows, layout, devices))
    losses.append(_in_layout("linear_cross_entropy", part, rows, layout, devices))
    return MemoryPlan(layout, devices, tokens_here, vocab_here, dtype, tuple(losses))


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype!r}; it must be float64, float32, bfloat16 or float16")
    return found


class _Walk(NamedTuple):
    """What a loss makes: beside the logits, as accumulator, and its peaks in forward and in backward."""

    beside_logits: int
    accumulator: int
    forward: int
    backward: int


def _plain(s: _Sizes) -> _Walk:
    """`F.cross_entropy(F.linear(hidden, weight), target)`."""
    # Backward: the kept log-softmax, the gradient with respect to it, and the gradient with respect to the logits
    return _Walk(2 * s.logits, 0, 2 * s.logits, max(3 * s.logits, s.logits + s.weight + s.hidden))


def _engine(s: _Sizes) -> _Walk:
    """`LossCompute` where autograd takes each chunk's gradient: a projection of one's own and `LabelSmoothing`."""
    accumulator = s.wide_weight if s.chunks > 1 else 0
    so_far = s.hidden + accumulator
    # One wide tensor is the softmax, in whose place its gradient is made; narrow logits get a narrow copy of it
    softmax = so_far + s.logits + s.wide_logits
    products = so_far + s.logits + s.weight + s.chunk_hidden
    adding = so_far + s.weight + s.chunk_hidden + (s.added_at_once if s.narrow else 0)
    # Backward: upstream x gradient, in place unless autograd may share it; a float32 sum is written over by it
    backward = 2 * s.hidden + (accumulator or 2 * s.weight)
    return _Walk(s.wide_logits, accumulator, max(softmax, products, adding), backward)


def _formula(s: _Sizes) -> _Walk:
    """`linear_cross_entropy`: buffers of one chunk that all chunks use again."""
    # The gradient takes the logits' place, and the softmax between is never whole: Triton has it in registers, the CPU
    # some rows that fit its cache; but a split vocabulary on the CPU has all rows, to wait for the other ranks once
    softmax = s.wide_logits if s.cpu and s.narrow and s.split else 0
    accumulator = s.wide_weight if s.narrow and s.chunks > 1 else 0
    # The product is added up where the gradient will be; of a narrow one the CPU has some rows at a time in both dtypes
    product = (2 * s.added_at_once if s.cpu else 0) if accumulator else s.weight
    forward = s.logits + softmax + product + accumulator + s.hidden
    return _Walk(softmax, accumulator, forward, 2 * s.hidden + (accumulator or s.weight))


def _in_layout(loss: Loss, s: _Sizes, rows: int, layout: Layout, devices: int) -> LossBytes:
    """What the layout adds to one device's loss."""
    walk = {"plain": _plain, "LossCompute": _engine, "linear_cross_entropy": _formula}[loss](s)
    weight, gathered, exchange, peak = s.weight, 0, 0, max(walk.forward, walk.backward)
    if layout == "ddp" and devices > 1:
        exchange = s.weight
        peak += exchange
    if layout == "fsdp":
        # In forward the all-gather's output lives on beside the weight that is copied out of it, until the next unit's
        weight, gathered, exchange = -(-s.weight // devices), 2 * s.weight, s.weight
        reduced = s.weight + exchange + weight + s.hidden
        peak = max(gathered + walk.forward, s.weight + walk.backward, s.weight + reduced)
    return LossBytes(
        loss=loss,
        chunk_rows=rows,
        logits=s.logits,
        beside_logits=walk.beside_logits,
        weight=weight,
        gathered_weight=gathered,
        weight_gradient=s.weight,
        accumulator=walk.accumulator,
        hidden=s.hidden,
        hidden_gradient=s.hidden,
        exchange=exchange,
        peak=peak,
    )


SIMPLEST_FIRST: tuple[Layout, ...] = ("ddp", "fsdp", "vocab")

COLUMNS = {
    "chunk rows": "chunk_rows",
    "logits": "logits",
    "beside them": "beside_logits",
    "weight held": "weight",
    "gathered": "gathered_weight",
    "weight grad": "weight_gradient",
    "float32 sum": "accumulator",
    "hidden": "hidden",
    "hidden grad": "hidden_gradient",
    "exchange": "exchange",
    "peak, total": "total",
}


def table(plans: Sequence[MemoryPlan]) -> str:
    """Return a Markdown table: a row per layout and loss, in MiB per device."""
    rows = []
    for plan in plans:
        for loss in plan.losses:
            chunk_rows, *sizes = [getattr(loss, field) for field in COLUMNS.values()]
            shown = [f"{size / 2**20:,.0f}" for size in sizes]
            rows.append([plan.layout, loss.loss, str(chunk_rows), *shown])
    return markdown_table(["layout", "loss", *COLUMNS], rows)


def advice(plans: Sequence[MemoryPlan]) -> str:
    """One line: the simplest of the layouts whose best loss is within a quarter of the smallest."""
    least = min(plan.best.total for plan in plans)
    near = [plan for plan in plans if plan.best.total <= 1.25 * least]
    chosen = min(near, key=lambda plan: SIMPLEST_FIRST.index(plan.layout))
    best, plain = chosen.best, chosen.of("plain")
    return (
        f"Choose {chosen.layout} with {best.loss}: {best.total / 2**20:,.0f} MiB per device, "
        f"{best.total / plain.total:.0%} of the plain loss in that layout"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and which to choose."""
    parser = argparse.ArgumentParser(prog="python -m seqpar.memory_plan", description="Bytes of the loss per device.")
    for name, text in (
        ("tokens", "target tokens of a micro-batch, over all devices"),
        ("d", "width of the hidden states"),
        ("vocab", "classes of the whole vocabulary"),
    ):
        parser.add_argument(f"--{name}", type=int, required=True, help=text)
    parser.add_argument("--devices", type=int, default=1, help="ranks that share the tokens or the classes out")
    parser.add_argument("--layout", default=None, help="ddp, fsdp or vocab; default: all three")
    parser.add_argument("--dtype", default="bfloat16", help="of weight, hidden and logits")
    parser.add_argument("--chunk-tokens", type=int, default=None, help="rows of a chunk; default: chosen by bytes")
    parser.add_argument("--device", default="cuda", help="cuda (any accelerator) or cpu")
    options = vars(parser.parse_args(arguments))
    layouts = [options.pop("layout")]
    if layouts == [None]:
        layouts = list(SIMPLEST_FIRST)
    try:
        plans = [memory_plan(layout=layout, **options) for layout in layouts]
    except ValueError as error:
        sys.exit(f"memory_plan: {error}")
    first = plans[0]
    print(
        f"{options['tokens']} tokens, D={options['d']}, V={options['vocab']}, {first.devices} devices, "
        f"{str(first.dtype).removeprefix('torch.')}; MiB per device\n"
    )
    print(table(plans))
    print(f"\n{advice(plans)}")


if __name__ == "__main__":
    main()

"""Calculate the bytes that the loss needs per device in each layout, before anything runs.

    python -m seqpar.memory_plan --tokens 16384 --d 4096 --vocab 256000 --devices 8 --layout vocab

The plan counts the tensors that the projection onto the vocabulary and the loss create and read. It does not count the
model below the projection, the optimizer's state, vectors (a bias, row sums), or the memory that an allocator or a
matrix library reserves (a few MiB). Tests compare every figure with measured peaks, within 10 %, on the CPU and, if
there is one, on a CUDA device with Triton. Without Triton an accelerator also needs a float32 softmax of a chunk in
addition to its logits.

Symbols: N tokens on this device, K rows of one chunk, D hidden, V the classes on this device, P devices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from seqpar.core.checks import FLOATING, check_choice, check_integer, check_size
from seqpar.core.chunks import rows_per_chunk
from seqpar.core.device_facts import FACTS
from seqpar.core.stored_gradients import PRODUCT_ROWS
from seqpar.core.token_loss import wide
from seqpar.markdown_table import markdown_table

Layout = Literal["ddp", "fsdp", "vocab"]
Loss = Literal["plain", "LossCompute", "linear_cross_entropy"]
DeviceKind = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class LossBytes:
    """The bytes that one way of computing the loss needs on one device. Not all items exist at the same time.

    Example:
        >>> from seqpar.memory_plan import memory_plan
        >>> plain = memory_plan(tokens=4096, d=512, vocab=32000, dtype="float32").of("plain")
        >>> plain.logits == 4096 * 32000 * 4
        True
    """

    loss: Loss
    chunk_rows: int
    """K, the rows whose logits exist at once; for the plain loss all N."""
    logits: int
    beside_logits: int
    """The tensors as large as the logits that exist in addition to them, such as their softmax."""
    weight: int
    """The rows of the weight that this device has between steps."""
    gathered_weight: int
    """The whole weight and the buffer it was gathered in, while FSDP2 has it unsharded; 0 in other layouts."""
    weight_gradient: int
    """The gradient, in the weight's dtype, of the whole weight on this device (before FSDP2 shards it)."""
    accumulator: int
    """The float32 (or wider) sum of the chunks' weight gradients, if it is not the gradient's own memory."""
    hidden: int
    hidden_gradient: int
    exchange: int
    """DDP's bucket (0 with gradient_as_bucket_view=True), or the input of FSDP2's reduce-scatter."""
    peak: int
    """The most that a step needs at once in addition to weight and hidden, which exist before it."""

    @property
    def total(self) -> int:
        """Return the most that is needed at once, including weight and hidden."""
        return self.weight + self.hidden + self.peak


@dataclass(frozen=True)
class MemoryPlan:
    """The loss of one step in one layout, on one of its devices.

    Example:
        >>> from seqpar.memory_plan import memory_plan
        >>> plan = memory_plan(tokens=16384, d=4096, vocab=256000, devices=8, layout="vocab")
        >>> plan.tokens_here, plan.vocab_here, plan.best.loss
        (16384, 32000, 'linear_cross_entropy')
    """

    layout: Layout
    devices: int
    tokens_here: int
    """N, the tokens whose loss this device computes."""
    vocab_here: int
    """V, the classes whose logits this device computes."""
    dtype: torch.dtype
    losses: tuple[LossBytes, ...]
    """The plain loss first, then the chunked ones this layout can use."""

    @property
    def best(self) -> LossBytes:
        """Return the loss with the smallest total."""
        return min(self.losses, key=lambda loss: loss.total)

    def of(self, loss: Loss) -> LossBytes:
        """Return one of `losses` by its name; raise ValueError if the layout has no such loss."""
        for known in self.losses:
            if known.loss == loss:
                return known
        raise ValueError(f"layout {self.layout!r} has {[known.loss for known in self.losses]}, not {loss!r}")


@dataclass(frozen=True)
class _Sizes:
    """The bytes of the tensors that the losses consist of; `wide` is float32, or float64 for float64."""

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
    """Return the memory of the loss in one forward and backward on each device.

    Args:
        tokens: target tokens of one micro-batch that are not padding, over ALL devices. "ddp" and "fsdp" split them
            over the devices; in "vocab" every device has all of them, and the classes are split.
        d: the width of the hidden states.
        vocab: the number of classes in the whole vocabulary.
        devices: the ranks over which tokens (ddp, fsdp) or classes (vocab) are split.
        layout: "ddp"; "fsdp": FSDP2, the generator in a `fully_shard` unit; "vocab": `linear_cross_entropy` with a
            `VocabShard`; its "plain" loss has the logits of this device's classes for all tokens at once.
        dtype: that of weight, hidden and logits: a torch dtype or its name.
        chunk_tokens: as in `LossCompute`, whose own choice None means.
        device: "cuda" for an accelerator with Triton, or "cpu"; they differ in the size of chunks and in which results
            overwrite their inputs.

    A `LossCompute` whose pair has a closed form (see `explain()`) needs as much as "linear_cross_entropy".

    Raises:
        ValueError: a count below 1; an unknown layout, dtype or device.

    Example:
        >>> from seqpar.memory_plan import memory_plan
        >>> plan = memory_plan(tokens=16384, d=4096, vocab=256000, devices=8, layout="vocab")
        >>> [(loss.loss, loss.total // 2**20) for loss in plan.losses]
        [('plain', 3378), ('linear_cross_entropy', 1256)]
    """
    for name, count in (("tokens", tokens), ("d", d), ("vocab", vocab), ("devices", devices)):
        check_integer(count, name, 1, wrong_kind=ValueError)
    check_size(chunk_tokens, "chunk_tokens")
    check_choice(layout, "layout", get_args(Layout))
    check_choice(device, "device", get_args(DeviceKind))
    dtype = _dtype(dtype)
    tokens_here = tokens
    vocab_here = vocab
    if layout == "vocab":
        # The largest shard decides: an even split, rounded up
        vocab_here = -(-vocab // devices)
    else:
        tokens_here = -(-tokens // devices)
    narrow = dtype.itemsize
    wider = wide(dtype).itemsize

    def sizes(rows: int, chunks: int) -> _Sizes:
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
            cpu=FACTS[device].is_host,
            split=layout == "vocab" and devices > 1,
        )

    def chunked_loss(loss: Loss, width: int | None) -> LossBytes:
        # The same choice as the loss makes: K <= most rows per chunk, in ceil(N / most) chunks
        most = chunk_tokens or rows_per_chunk(vocab_here, dtype, device, width)
        chunks = -(-tokens_here // most)
        # `cut_rows` cuts even chunks
        rows = -(-tokens_here // chunks)
        return _in_layout(loss, sizes(rows, chunks), rows, layout, devices)

    # The plain loss is one chunk of all rows
    losses = [_in_layout("plain", sizes(tokens_here, 1), tokens_here, layout, devices)]
    # LossCompute splits a vocabulary only in closed form, where it is linear_cross_entropy
    if layout != "vocab":
        losses.append(chunked_loss("LossCompute", None))
    losses.append(chunked_loss("linear_cross_entropy", None if FACTS[device].is_host else d))
    return MemoryPlan(layout, devices, tokens_here, vocab_here, dtype, tuple(losses))


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype, given as such or by name; raise ValueError for one that the losses do not support."""
    found: object = dtype
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or found not in FLOATING:
        raise ValueError(f"dtype is {dtype!r}; it must be float64, float32, bfloat16 or float16")
    return found


class _Peaks(NamedTuple):
    """Two items of `LossBytes`, and the most bytes that exist at once in forward and in backward."""

    beside_logits: int
    accumulator: int
    forward: int
    backward: int


def _plain(s: _Sizes) -> _Peaks:
    """Return the peaks of `F.cross_entropy(F.linear(hidden, weight), target)`."""
    # Forward: logits and their log-softmax. Backward: the saved log-softmax, its gradient, and the logits' gradient;
    # then the logits' gradient with those of weight and hidden
    return _Peaks(
        beside_logits=2 * s.logits,
        accumulator=0,
        forward=2 * s.logits,
        backward=max(3 * s.logits, s.logits + s.weight + s.hidden),
    )


def _engine(s: _Sizes) -> _Peaks:
    """Return the peaks of a `LossCompute` whose pair has no closed form: a custom generator and `LabelSmoothing`."""
    # The gradient of a single chunk needs no sum
    accumulator = 0
    if s.chunks > 1:
        accumulator = s.wide_weight
    stored = s.hidden + accumulator
    # The softmax is one wide tensor, which its gradient overwrites; for narrow logits the gradient is copied once
    softmax = stored + s.logits + s.wide_logits
    products = stored + s.logits + s.weight + s.chunk_hidden
    # A narrow weight gradient is widened in blocks of rows while it is added
    adding = stored + s.weight + s.chunk_hidden
    if s.narrow:
        adding += s.added_at_once
    # upstream x gradient, in place unless autograd may share the tensor; it overwrites a float32 sum
    backward = 2 * s.hidden + (accumulator or 2 * s.weight)
    return _Peaks(s.wide_logits, accumulator, max(softmax, products, adding), backward)


def _formula(s: _Sizes) -> _Peaks:
    """Return the peaks of `linear_cross_entropy`, whose chunks all use the same buffers."""
    # The gradient overwrites the logits. Triton has the softmax in registers, the CPU has it in cache for a block of
    # rows; but with a split vocabulary the CPU computes it for all rows, so that ranks exchange sums once per chunk
    softmax = 0
    if s.cpu and s.narrow and s.split:
        softmax = s.wide_logits
    accumulator = 0
    # The products are summed in the gradient's own memory
    product = s.weight
    if s.narrow and s.chunks > 1:
        accumulator = s.wide_weight
        # An accelerator adds narrow products to the wide sum; the CPU holds a block of their rows, narrow and widened
        product = 0
        if s.cpu:
            product = 2 * s.added_at_once
    forward = s.logits + softmax + product + accumulator + s.hidden
    return _Peaks(softmax, accumulator, forward, 2 * s.hidden + (accumulator or s.weight))


def _in_layout(loss: Loss, s: _Sizes, rows: int, layout: Layout, devices: int) -> LossBytes:
    """Return one device's bytes of a loss in a layout."""
    peaks = {"plain": _plain, "LossCompute": _engine, "linear_cross_entropy": _formula}[loss](s)
    weight = s.weight
    gathered = 0
    exchange = 0
    peak = max(peaks.forward, peaks.backward)
    # DDP's bucket exists from the start, so it adds to either peak
    if layout == "ddp" and devices > 1:
        exchange = s.weight
        peak += exchange
    if layout == "fsdp":
        weight = -(-s.weight // devices)
        # FSDP2 frees the all-gather's output only when the next unit is gathered; the weight is a copy of it
        gathered = 2 * s.weight
        exchange = s.weight
        # While gradients are reduced: the whole gradient, its copy for the exchange, the shard received, hidden's
        reduced = s.weight + exchange + weight + s.hidden
        peak = max(gathered + peaks.forward, s.weight + peaks.backward, s.weight + reduced)
    return LossBytes(
        loss=loss,
        chunk_rows=rows,
        logits=s.logits,
        beside_logits=peaks.beside_logits,
        weight=weight,
        gathered_weight=gathered,
        weight_gradient=s.weight,
        accumulator=peaks.accumulator,
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
    """Return a Markdown table with a row per layout and loss, in MiB per device.

    Example:
        >>> from seqpar.memory_plan import memory_plan, table
        >>> plan = memory_plan(tokens=16384, d=4096, vocab=256000, devices=8, layout="vocab")
        >>> print(table([plan]))
        | layout | loss | chunk rows | logits | ...
    """
    rows = []
    for plan in plans:
        for loss in plan.losses:
            chunk_rows, *sizes = [getattr(loss, field) for field in COLUMNS.values()]
            shown = [f"{size / 2**20:,.0f}" for size in sizes]
            rows.append([plan.layout, loss.loss, str(chunk_rows), *shown])
    return markdown_table(["layout", "loss", *COLUMNS], rows)


def advice(plans: Sequence[MemoryPlan]) -> str:
    """Return a line that names the simplest layout whose best loss needs at most a quarter more than the least.

    Example:
        >>> from seqpar.memory_plan import advice, memory_plan
        >>> plan = memory_plan(tokens=16384, d=4096, vocab=256000, devices=8, layout="vocab")
        >>> advice([plan])
        'Choose vocab with linear_cross_entropy: 1,256 MiB per device, 37% of the plain loss in that layout'
    """
    least = min(plan.best.total for plan in plans)
    near = [plan for plan in plans if plan.best.total <= 1.25 * least]
    chosen = min(near, key=lambda plan: SIMPLEST_FIRST.index(plan.layout))
    best = chosen.best
    plain = chosen.of("plain")
    return (
        f"Choose {chosen.layout} with {best.loss}: {best.total / 2**20:,.0f} MiB per device, "
        f"{best.total / plain.total:.0%} of the plain loss in that layout"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the advice."""
    parser = argparse.ArgumentParser(prog="python -m seqpar.memory_plan", description="Bytes of the loss per device.")
    for name, text in (
        ("tokens", "target tokens of a micro-batch, over all devices"),
        ("d", "width of the hidden states"),
        ("vocab", "classes of the whole vocabulary"),
    ):
        parser.add_argument(f"--{name}", type=int, required=True, help=text)
    parser.add_argument("--devices", type=int, default=1, help="ranks that the tokens or the classes are split over")
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

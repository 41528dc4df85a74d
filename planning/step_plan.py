"""Calculate the seconds of a training step in each layout, on one device or on thousands, before anything runs.

    python -m planning --parameters 8.03e9 --layers 32 --d 4096 --vocab 128256 --length 8192 --local-batch 2 \\
        --layout fsdp --tokens-per-second 5762 --measured-on 8 --devices 8 128 1024 4096

The device's rate is measured, never assumed. A decoder runs on R data x S vocabulary x Q pipeline ranks.

(1) flops = 6 (parameters - embedding) + 12 layers d length per token, forward and backward; 6 V d of them are the
    projection's. An embedding is looked up, not multiplied; a tied one is the projection.
(2) A collective takes start + hops + its bytes / bandwidth: `planning/links.py` has the equation and known links.
(3) step = (micro_batches + (Q - 1) / interleave) (compute + exchange) + exposed,
    for the slowest stage, the last one, which has the projection (Narayanan et al. 2021, 2.2). A third of compute is
    forward.
(4) exchange, for a split vocabulary, is never hidden: 4 all-reduces of hidden states in each layer, one for the
    projection and one for the embedding (Megatron-LM, section 3), an all-gather of 5 numbers per token in each chunk.
(5) DDP's all-reduce of a unit u (a layer, the embedding, the projection) starts when its gradient is ready and the
    previous one has ended, in the last micro-batch; with T_u the transfer and B_u the backward of the units up to u

        done_u = max(done_(u-1), B_u) + T_u,    exposed = done - B

(6) FSDP's gather of the next unit and reduce of the previous one hide behind this unit's computation, and no others do:

        exposed = gather_first + sum_u max(0, gather_(u+1) + reduce_(u-1) - compute_u) + reduce_last

    once in forward and once in backward of each micro-batch, with the reduce only in the last one. Layout "pipeline"
    shards the optimizer: (5) with a reduce-scatter, and (6) in forward for one gather per step. With overlap "none"
    nothing is hidden.

Left out: computation that concurrent communication slows down, ranks that wait for each other, a pipeline's messages,
and the optimizer, which the measured rate includes. docs/scaling.md compares plans with published trainings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from planning.links import LINKS, NCCL_START, Collective, Link, seconds_of
from seqpar.core.checks import check_choice, check_integer, check_number, check_size
from seqpar.core.chunks import rows_per_chunk

Layout = Literal["ddp", "fsdp", "hsdp", "data-vocab", "vocab", "pipeline"]
"""The simplest first. "hsdp" shards over the devices in a host; "vocab" splits matrices and vocabulary over all
devices, "data-vocab" over those in a host."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _help(words: str) -> dict[str, str]:
    """Return the metadata of a field, which is an option of the command."""
    return {"help": words}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, its batch, and the machines.

    Example:
        >>> from planning.step_plan import Training
        >>> training = Training(parameters=8_030_000_000, layers=32, d=4096, vocab=128256, length=8192, local_batch=2)
        >>> round(training.flops / 1e9, 2)
        57.91
    """

    parameters: int = field(metadata=_help("all parameters of the model"))
    layers: int = field(metadata=_help("layers of the model"))
    d: int = field(metadata=_help("width of the hidden states"))
    vocab: int = field(metadata=_help("classes of the whole vocabulary"))
    tied: bool = field(default=False, metadata=_help("the projection is the embedding"))
    length: int = field(metadata=_help("tokens of a sequence"))
    batch: int | None = field(default=None, metadata=_help("sequences of a step over all devices; or"))
    local_batch: int | None = field(default=None, metadata=_help("sequences of a step per device"))
    micro_batch: int = field(default=1, metadata=_help("sequences that a data rank computes at once"))
    dtype: str = field(default="bfloat16", metadata=_help("of weights and activations"))
    reduce_dtype: str = field(default="float32", metadata=_help("of the gradients that are reduced"))
    bucket: float = field(default=25.0, metadata=_help("MiB of weights whose gradients DDP reduces at once"))
    vocab_ranks: int | None = field(
        default=None, metadata=_help("S of data-vocab and pipeline; default: the devices of a host")
    )
    stages: int = field(default=1, metadata=_help("Q of pipeline"))
    interleave: int = field(default=1, metadata=_help("pieces of the model that a pipeline rank has, in turns"))
    host: int = field(default=8, metadata=_help("devices of a host"))
    within: Link = field(
        default=LINKS["nvlink4"], metadata=_help(f"link inside a host: {', '.join(LINKS)}, or microseconds:GB/s")
    )
    between: Link = field(
        default=LINKS["rdma400"],
        metadata=_help("link between hosts, in the same form, per device; several GB/s are those of 2,4,8,... hosts"),
    )
    start: float = field(default=NCCL_START, metadata=_help("microseconds of a collective before its first hop"))
    overlap: str = field(default="layers", metadata=_help("layers: as (5) and (6) say; none: nothing hides"))

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "d", "vocab", "length", "micro_batch", "stages", "interleave", "host"):
            check_integer(getattr(self, name), name, 1, wrong_kind=ValueError)
        for name in ("batch", "local_batch", "vocab_ranks"):
            check_size(getattr(self, name), name)
        if (self.batch is None) == (self.local_batch is None):
            given = "neither" if self.batch is None else "both"
            raise ValueError(
                f"{given} of batch (over all devices) and local_batch (per device) given; give one of them"
            )
        check_choice(self.dtype, "dtype", list(DTYPES))
        check_choice(self.reduce_dtype, "reduce_dtype", list(DTYPES))
        check_choice(self.overlap, "overlap", ["layers", "none"])
        check_number(self.bucket, "bucket", above=0)
        check_number(self.start, "start", at_least=0)
        if self.embeddings >= self.parameters:
            raise ValueError(
                f"parameters is {self.parameters}, but embedding and projection alone have {self.embeddings}; "
                "count all of the model's, and set tied if the projection is the embedding"
            )

    @property
    def embeddings(self) -> int:
        """Return the number of parameters in embedding and projection."""
        return self.vocab * self.d * (1 if self.tied else 2)

    @property
    def layer_flops(self) -> float:
        """Return the operations per token in a layer, by (1)."""
        return 6.0 * (self.parameters - self.embeddings) / self.layers + 12.0 * self.d * self.length

    @property
    def projection_flops(self) -> float:
        """Return the operations per token in the projection."""
        return 6.0 * self.vocab * self.d

    @property
    def flops(self) -> float:
        """Return the operations per token, by (1)."""
        return self.layers * self.layer_flops + self.projection_flops

    def collective(self, kind: Collective, size: float, ranks: int, on_host: int) -> float:
        """Return the seconds of a collective of `size` bytes over `ranks` ranks, `on_host` of them per host, by (2)."""
        return seconds_of(kind, size, ranks, on_host, self.within, self.between, self.start * 1e-6)


@dataclass(frozen=True)
class StepPlan:
    """A training step in one layout, on the slowest of its devices; times are in seconds.

    Example:
        >>> from planning.step_plan import Training, step_plan
        >>> training = Training(parameters=8_030_000_000, layers=32, d=4096, vocab=128256, length=8192, local_batch=2)
        >>> plan = step_plan(training, 335e12, 4096, "hsdp")
        >>> plan.ranks, round(plan.exposed, 3), round(plan.efficiency, 3)
        ((4096, 1, 1), 0.035, 0.988)
    """

    layout: Layout
    devices: int
    ranks: tuple[int, int, int]
    """R, S and Q."""
    micro_batches: int
    compute: float
    exchange: float
    """For the split vocabulary and matrices, (4)."""
    bubble: float
    """While the pipeline fills and drains."""
    exposed: float
    """The part of gathering weights and reducing gradients that computation does not hide, (5) and (6)."""
    hidden: float
    """The part that it does hide."""
    projection: float
    """Projection and loss, with their part of the exchange, as a share of the step."""
    tokens_per_second: float
    """Per device."""
    efficiency: float
    """Relative to the same device alone."""
    state: float
    """Bytes of weights, gradients, Adam's moments, and a float32 copy of narrow weights, per device."""

    @property
    def seconds(self) -> float:
        """Return the time of the step, by (3)."""
        return self.compute + self.exchange + self.bubble + self.exposed


def reduce_exposed(backward: Sequence[float], transfers: Sequence[float]) -> float:
    """Return the time by which transfers outlast the backward if each unit's is queued when its backward ends: (5).

    Example:
        >>> from planning.step_plan import reduce_exposed
        >>> reduce_exposed([1.0, 1.0], [0.5, 0.5])
        0.5
    """
    computed = done = 0.0
    for compute, transfer in zip(backward, transfers, strict=True):
        computed += compute
        done = max(done, computed) + transfer
    return done - computed


def gather_exposed(compute: Sequence[float], gathers: Sequence[float], reduces: Sequence[float]) -> float:
    """Return the exposed time if each unit hides the next one's gather and the previous one's reduce: (6).

    Example:
        >>> from planning.step_plan import gather_exposed
        >>> gather_exposed([1.0, 1.0], [0.5, 0.5], [0.25, 0.25])
        0.75
    """
    exposed = gathers[0] + reduces[-1]
    for here, gather, reduce in zip(compute, [*gathers[1:], 0.0], [0.0, *reduces[:-1]], strict=True):
        exposed += max(0.0, gather + reduce - here)
    return exposed


def _divide(whole: int, parts: int, name: str, by: str) -> int:
    """Return `whole` / `parts`; raise ValueError unless it is a whole number."""
    if whole % parts:
        raise ValueError(f"{name} is {whole}, which {by} = {parts} does not divide; change one of them")
    return whole // parts


def _ranks(training: Training, layout: Layout, devices: int) -> tuple[int, int, int, int]:
    """Return data, vocabulary and pipeline ranks, and micro-batches."""
    stages = 1
    split = 1
    if layout == "vocab":
        split = devices
    if layout in ("data-vocab", "pipeline"):
        split = training.vocab_ranks or min(training.host, devices)
    if layout == "pipeline":
        stages = training.stages
        _divide(training.layers, stages * training.interleave, "layers", "stages x interleave")
    data = _divide(devices, split * stages, "devices", "vocab_ranks x stages")
    if layout == "hsdp":
        _divide(data, min(training.host, data), "devices", "host")
    batch = training.batch or (training.local_batch or 1) * devices
    micro_batches = _divide(batch, data * training.micro_batch, "batch", "data ranks x micro_batch")
    if stages > 1 and training.interleave > 1:
        _divide(micro_batches, stages, "the number of micro-batches", "stages (with interleave)")
    return data, split, stages, micro_batches


def _data_parallel(
    training: Training,
    layout: Layout,
    data: int,
    split: int,
    weights: Sequence[float],
    forward: Sequence[float],
    micro_batches: int,
) -> tuple[float, float]:
    """Return the seconds of gathering and reducing the units' weights: the exposed ones, (5) and (6), and all."""
    width = DTYPES[training.dtype].itemsize
    reduced = DTYPES[training.reduce_dtype].itemsize
    # Ranks that split a vocabulary are neighbours: a host has this many ranks of a data group
    on_host = max(1, training.host // split)
    shard = min(training.host, data) if layout == "hsdp" else data

    def reduce(weight: float) -> float:
        if layout == "ddp" or "vocab" in layout:
            buckets = math.ceil(weight * width / (training.bucket * 2**20))
            return buckets * training.collective("all_reduce", weight * reduced / buckets, data, on_host)
        scattered = training.collective("reduce_scatter", weight * reduced, shard, on_host)
        replicas = max(1, on_host // shard)
        return scattered + training.collective("all_reduce", weight * reduced / shard, data // shard, replicas)

    # A tied projection has no weights of its own to send
    gathers = [training.collective("all_gather", each * width, shard, on_host) if each else 0.0 for each in weights]
    reduces = [reduce(each) if each else 0.0 for each in reversed(weights)]
    backward = [2 * seconds for seconds in reversed(forward)]
    nothing = [0.0] * len(weights)
    communicated = sum(reduces)
    if layout in ("fsdp", "hsdp"):
        communicated += 2 * micro_batches * sum(gathers)
        exposed = micro_batches * gather_exposed(forward, gathers, nothing)
        exposed += (micro_batches - 1) * gather_exposed(backward, gathers[::-1], nothing)
        exposed += gather_exposed(backward, gathers[::-1], reduces)
    else:
        exposed = reduce_exposed(backward, reduces)
    if layout == "pipeline":
        communicated += sum(gathers)
        exposed += gather_exposed(forward, gathers, nothing)
    return communicated if training.overlap == "none" else exposed, communicated


def step_plan(training: Training, rate: float, devices: int, layout: Layout) -> StepPlan:
    """Plan a step on `devices` devices, each of which computes `rate` operations per second, counted as in (1).

    Raises:
        ValueError: for a count below 1, or one that does not divide; an unknown layout; a rate that is not above 0.

    Example:
        >>> from planning.step_plan import Training, step_plan
        >>> training = Training(parameters=8_030_000_000, layers=32, d=4096, vocab=128256, length=8192, local_batch=2)
        >>> round(step_plan(training, 335e12, 4096, "hsdp").seconds, 3)
        2.867
    """
    check_integer(devices, "devices", 1, wrong_kind=ValueError)
    check_choice(layout, "layout", get_args(Layout))
    check_number(rate, "rate", above=0)
    data, split, stages, micro_batches = _ranks(training, layout, devices)
    tokens = training.micro_batch * training.length
    dtype = DTYPES[training.dtype]

    # Units in forward order: weights on this device, and seconds of a micro-batch's forward
    layers = training.layers // stages
    table = training.vocab * training.d / split
    weights = [(training.parameters - training.embeddings) / training.layers / split] * layers + [table]
    flops = [training.layer_flops] * layers + [training.projection_flops]
    if stages == 1:
        # A tied projection's gradient is complete when the embedding's is
        weights = [table, *weights[:-1], 0.0 if training.tied else table]
        flops = [0.0, *flops]
    forward = [each / 3 * tokens / (split * rate) for each in flops]
    compute = 3 * sum(forward)

    def over_vocab(kind: Collective, size: float) -> float:
        return training.collective(kind, size, split, training.host)

    hidden_states = over_vocab("all_reduce", tokens * training.d * dtype.itemsize)
    chunks = math.ceil(tokens / rows_per_chunk(math.ceil(training.vocab / split), dtype, "cuda", training.d))
    of_loss = hidden_states + chunks * over_vocab("all_gather", 20 * tokens / chunks * split)
    exchange = of_loss + (4 * layers + (stages == 1)) * hidden_states

    exposed, communicated = _data_parallel(training, layout, data, split, weights, forward, micro_batches)
    bubble = (stages - 1) / training.interleave * (compute + exchange)
    seconds = micro_batches * (compute + exchange) + bubble + exposed
    all_tokens = tokens * micro_batches * data
    sharing = {"fsdp": data, "hsdp": min(training.host, data)}.get(layout, 1)
    adam = (12 if dtype.itemsize < 4 else 8) / (data if layout == "pipeline" else 1)
    return StepPlan(
        layout=layout,
        devices=devices,
        ranks=(data, split, stages),
        micro_batches=micro_batches,
        compute=micro_batches * compute,
        exchange=micro_batches * exchange,
        bubble=bubble,
        exposed=exposed,
        hidden=communicated - exposed,
        projection=micro_batches * (3 * forward[-1] + of_loss) / seconds,
        tokens_per_second=all_tokens / seconds / devices,
        efficiency=all_tokens * training.flops / (devices * rate * seconds),
        state=sum(weights) * (dtype.itemsize + DTYPES[training.reduce_dtype].itemsize + adam) / sharing,
    )


def rate_of(training: Training, tokens_per_second: float, devices: int = 1, layout: Layout = "ddp") -> float:
    """Return the rate at which each of `devices` devices has this measured throughput.

    Raises:
        ValueError: if communication alone takes longer than what was measured; and as `step_plan` does.

    Example:
        >>> from planning.step_plan import Training, rate_of
        >>> training = Training(parameters=8_030_000_000, layers=32, d=4096, vocab=128256, length=8192, local_batch=2)
        >>> round(rate_of(training, 5762, devices=8, layout="fsdp") / 1e12)
        336
    """
    check_number(tokens_per_second, "tokens_per_second", above=0)
    # Communication only adds time, so this is a lower bound on the rate; no device is a million times as fast
    low = tokens_per_second * training.flops
    high = 1e6 * low
    fastest = step_plan(training, high, devices, layout).tokens_per_second
    if fastest < tokens_per_second:
        raise ValueError(
            f"tokens_per_second is {tokens_per_second:g} on {devices} devices, but communication alone allows "
            f"{fastest:g}: check the links, the layout and the batch"
        )
    for _ in range(100):
        middle = math.sqrt(low * high)
        if step_plan(training, middle, devices, layout).tokens_per_second < tokens_per_second:
            low = middle
        else:
            high = middle
    return high


def pays_from(rate: float, link: Link, *, prefetch: bool = False) -> float:
    """Return the number of tokens from which a second device in a process speeds up the loss, whatever D and V are.

    Each device does half of 6 N D V operations. A bfloat16 weight (2 D V bytes, unless `LossCompute.prefetch` sends it
    while the model computes) and its float32 gradient (4 D V) go between them:

        3 N D V / rate > 6 D V / bandwidth        or, with `prefetch`, > 4 D V / bandwidth

    Example:
        >>> from planning.links import LINKS
        >>> from planning.step_plan import pays_from
        >>> round(pays_from(700e12, LINKS["nvlink4"]))
        3776
    """
    exchanged = 4 if prefetch else 6
    return exchanged * rate / (3 * link.all_gather[0])

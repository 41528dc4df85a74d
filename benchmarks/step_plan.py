"""Hold `planning.step_plan` against published trainings and against steps of this machine, and draw what it says.

    python -m benchmarks.step_plan --published                      # the table in docs/scaling.md, no measurement
    python -m benchmarks.step_plan --ranks 2 4 --rounds 9           # real steps over gloo on this machine
    python -m benchmarks.step_plan --picture docs/scaling.svg       # efficiency against devices

Published: the rate comes from the smallest size of each training, the larger sizes are predicted. Here: measured are
the step of one rank without communication, while all other ranks do the same (they share the cores), and latency and
bandwidth of gloo's collectives between computations, which leave caches and threads as a step does; DDP, FSDP2 and a
split vocabulary are predicted from these, with `overlap="none"`: the cores that compute also carry gloo's bytes. The
rate of a split vocabulary is that of matrices of its size. Everything takes turns, round after round; figures are
medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from benchmarks.loss.plots import use_style
from benchmarks.loss.results import hardware
from models import DecoderOnlyConfig, make_decoder_only
from models.sharding import split_weights
from planning.links import LINKS, Link
from planning.step_plan import Layout, Training, rate_of, step_plan
from seqpar.markdown_table import markdown_table
from seqpar.testing.ranks import ranks

# Published trainings


class Published(NamedTuple):
    """Published throughputs of one training, by the number of devices; the smallest one calibrates."""

    name: str
    layout: Layout
    training: Training
    measured: dict[int, float]
    unit: str
    per_unit: float
    """Tokens per second and device of one unit."""


H100 = 989.4e12
"""Operations per second of an H100 in bfloat16, dense: NVIDIA's data sheet."""

LLAMA = Training(parameters=8_030_261_248, layers=32, d=4096, vocab=128_256, length=8192, local_batch=2, micro_batch=2)
GPT3 = Training(
    parameters=177_000_000_000,
    layers=96,
    d=12_288,
    vocab=131_072,
    length=4096,
    batch=1152,
    vocab_ranks=8,
    stages=6,
    interleave=8,
)
SMALL = Training(
    parameters=1_342_177_280,
    layers=16,
    d=2048,
    vocab=131_072,
    tied=True,
    length=4096,
    batch=256,
    between=LINKS["efa"],
)
PUBLISHED = (
    Published("torchtitan, Llama 3.1 8B", "fsdp", LLAMA, {8: 5762, 128: 5605}, "tokens/s/GPU", 1.0),
    Published(
        "Megatron-LM, GPT-3 177B", "pipeline", GPT3, {96: 47, 2304: 44, 4608: 42}, "% MFU", 0.01 * H100 / GPT3.flops
    ),
    Published(
        "nanotron, 1.34B",
        "ddp",
        SMALL,
        {8: 40149.94, 16: 37609.69, 32: 35367.61, 64: 31112.23, 128: 26446.44, 256: 15700.38},
        "tokens/s/GPU",
        1.0,
    ),
)
"""Sources are in docs/scaling.md."""


def rate(run: Published) -> float:
    """Return the rate of a device, from the smallest size alone."""
    smallest = min(run.measured)
    return rate_of(run.training, run.measured[smallest] * run.per_unit, smallest, run.layout)


def published_table() -> str:
    """Return the table of predicted against published figures."""
    rows = []
    for run in PUBLISHED:
        calibrated = rate(run)
        for devices, figure in run.measured.items():
            said = step_plan(run.training, calibrated, devices, run.layout).tokens_per_second / run.per_unit
            error = f"{said / figure - 1:+.1%}" if devices > min(run.measured) else "calibrates"
            rows.append([run.name, run.layout, str(devices), run.unit, f"{figure:,.0f}", f"{said:,.0f}", error])
    return markdown_table(["training", "layout", "GPUs", "unit", "published", "predicted", "error"], rows)


# Steps on this machine

SMALL_BYTES, LARGE_BYTES = 2**14, 2**24


class Sizes(NamedTuple):
    """A model whose gradients take long to reduce for what a step computes, and the sequences of a rank."""

    width: int = 256
    layers: int = 4
    vocab: int = 8192
    length: int = 128
    batch: int = 2


BUILT: dict[tuple[str, Sizes], Callable[[], object]] = {}
"""In a rank: what it runs, made once."""


def timed(rank: int, world: int, what: str, sizes: Sizes) -> float:
    """Return the seconds until all ranks have done one of these together: a step in a layout, or a collective."""
    if (what, sizes) not in BUILT:
        kind, number = what.split()
        size = int(number)
        communicates = kind in ("nothing", *KINDS)
        run = _collective(kind, size, world) if communicates else _step(kind, rank, world, size, sizes)
        # What is set up in the first steps is not timed
        run()
        run()
        BUILT[what, sizes] = run
    dist.barrier()
    start = time.perf_counter()
    BUILT[what, sizes]()
    dist.barrier()
    return time.perf_counter() - start


REPEATS = 4
"""Of a computation and a collective, in turn."""


def _collective(kind: str, size: int, world: int) -> Callable[[], object]:
    """Return collectives between computations, with the copies that FSDP2 makes of what it gathers and reduces."""
    x, weight = torch.randn(512, 256), torch.randn(256, 1024)
    whole = torch.ones(size // 4 // world * world)
    part = torch.ones(len(whole) // world)

    def all_gather() -> None:
        gathered = torch.empty_like(whole)
        dist.all_gather_single(gathered, part)
        torch.empty_like(whole).copy_(gathered)

    communicate: Callable[[], object] = {
        "nothing": lambda: None,
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": all_gather,
        "reduce_scatter": lambda: dist.reduce_scatter_single(torch.empty_like(part), whole.clone()),
    }[kind]

    def run() -> None:
        for _ in range(REPEATS):
            for _ in range(3):
                (x @ weight).relu_()
            communicate()

    return run


def _model(sizes: Sizes) -> Any:
    torch.manual_seed(1)
    width = sizes.width
    config = DecoderOnlyConfig(width, 4 * width, heads=8, decoder_layers=sizes.layers, dropout=0.0, tie="none")
    return make_decoder_only(config, sizes.vocab)


def _without_communication(model: nn.Module) -> None:
    """Let each rank compute its slices of a split model and take no sums, which gives no meaningful number."""
    for module in model.modules():
        own = vars(module)
        if "group" in own:
            own["group"] = None
        if "vocab" in own:
            own["vocab"] = replace(own["vocab"], group=None)


def _step(layout: str, rank: int, world: int, sequences: int, sizes: Sizes) -> Callable[[], object]:
    """Return forward and backward of this many sequences; those of a split vocabulary are the same in all ranks."""
    model = _model(sizes)
    torch.manual_seed(0 if layout in ("vocab", "part") else rank)
    tokens = torch.randint(1, sizes.vocab, (sequences, sizes.length + 1))
    src, tgt, target = tokens[:, :1], tokens[:, :-1], tokens[:, 1:]
    if layout in ("vocab", "part"):
        shard: seqpar.VocabShard | None = split_weights(model, dist.group.WORLD)
        if layout == "part":
            _without_communication(model)
            shard = None
            target = target % model.generator.out_features

        def split() -> None:
            generator = model.generator
            loss = seqpar.linear_cross_entropy(
                model(src, tgt), generator.weight, target, bias=generator.bias, vocab=shard
            )
            (loss.total / loss.tokens).backward()
            model.zero_grad()

        return split
    both: nn.Module = seqpar.ModelWithLoss(
        model, seqpar.LossCompute(model.generator, nn.CrossEntropyLoss(reduction="sum"))
    )
    if layout == "ddp":
        both = DistributedDataParallel(both)
    if layout == "fsdp":
        for layer in model.decoder.layers:
            fully_shard(layer)
        # As every unit in the plan, gathered again for backward
        fully_shard(both, reshard_after_forward=True)

    def step() -> None:
        loss = both(src, tgt, target=target)
        (loss.total / loss.tokens).backward()
        both.zero_grad()

    return step


KINDS = ("all_reduce", "all_gather", "reduce_scatter")
LAYOUTS: tuple[Layout, ...] = ("ddp", "fsdp", "vocab")


def measure(world: int, rounds: int, sizes: Sizes) -> dict[str, float]:
    """Return the median seconds of everything that is timed, one after another in each round."""
    # A split vocabulary has all ranks' sequences in each of them, so the rate is measured with as many, too
    steps = [f"{what} {sizes.batch}" for what in ("alone", "ddp", "fsdp")]
    steps += [f"{what} {sizes.batch * world}" for what in ("part", "vocab")]
    collectives = [f"{kind} {size}" for kind in KINDS for size in (SMALL_BYTES, LARGE_BYTES)]
    whats = [*steps, "nothing 0", *collectives]
    found: dict[str, list[float]] = {what: [] for what in whats}
    for _ in range(rounds):
        for what in whats:
            found[what].append(max(ranks(world, timed, what, sizes)))
    medians = {what: statistics.median(seconds) for what, seconds in found.items()}
    of_collectives = {what: (medians[what] - medians["nothing 0"]) / REPEATS for what in collectives}
    return medians | of_collectives


def links_of(seconds: dict[str, float], world: int) -> tuple[Link, dict[Layout, float]]:
    """Return the link from two sizes of each collective, and the microseconds of a start of those of each layout."""
    bandwidths = []
    for kind in KINDS:
        passes = 2 if kind == "all_reduce" else 1
        moved = passes * (LARGE_BYTES - SMALL_BYTES) * (world - 1) / world
        bandwidths.append((moved / (seconds[f"{kind} {LARGE_BYTES}"] - seconds[f"{kind} {SMALL_BYTES}"]),))
    reduce, gather, scatter = (1e6 * seconds[f"{kind} {SMALL_BYTES}"] for kind in KINDS)
    return Link(0.0, *bandwidths), {"ddp": reduce, "fsdp": (2 * gather + scatter) / 3, "vocab": reduce}


def here_table(worlds: list[int], rounds: int) -> str:
    """Return the table of predicted against measured steps of this machine."""
    rows = []
    sizes = Sizes()
    parameters = sum(each.numel() for each in _model(sizes).parameters())
    for world in worlds:
        seconds = measure(world, rounds, sizes)
        link, starts = links_of(seconds, world)
        speeds = " / ".join(f"{each[0] / 1e9:.2f}" for each in link[1:])
        print(f"{world} ranks: gloo {starts['ddp']:,.0f} us, {speeds} GB/s ({', '.join(KINDS)})")
        for layout in LAYOUTS:
            sequences = sizes.batch * world if layout == "vocab" else sizes.batch
            training = Training(
                parameters=parameters,
                layers=sizes.layers,
                d=sizes.width,
                vocab=sizes.vocab,
                length=sizes.length,
                local_batch=sizes.batch,
                micro_batch=sequences,
                dtype="float32",
                host=world,
                within=link,
                start=starts[layout],
                overlap="none",
            )
            alone = seconds[f"alone {sequences}"] if layout != "vocab" else world * seconds[f"part {sequences}"]
            said = step_plan(training, sequences * sizes.length * training.flops / alone, world, layout)
            real = seconds[f"{layout} {sequences}"]
            share = f"{(said.exchange + said.exposed) / said.seconds:.0%}"
            times = [f"{each:.3f}" for each in (alone, said.seconds, real)]
            rows.append([layout, str(world), times[0], times[1], share, times[2], f"{said.seconds / real - 1:+.1%}"])
    header = ["layout", "ranks", "one rank s", "predicted s", "of it communication", "measured s", "error"]
    return markdown_table(header, rows)


# The picture

COLOURS = ("#1f7ae0", "#d9822b", "#2f9e63")


def draw(file: Path) -> None:
    """Write efficiency against devices, up to 4,096, and the published figures, as an SVG."""
    use_style()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for run, colour in zip(PUBLISHED, COLOURS, strict=True):
        calibrated = rate(run)
        plans = [step_plan(run.training, calibrated, devices, run.layout) for devices in _sizes(run)]
        first = min(run.measured)
        efficiency = [100 * plan.tokens_per_second / (run.measured[first] * run.per_unit) for plan in plans]
        axes.plot([plan.devices for plan in plans], efficiency, color=colour, label=f"{run.name}, {run.layout}")
        dots = [100 * figure / run.measured[first] for figure in run.measured.values()]
        axes.plot(list(run.measured), dots, "o", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**power for power in range(3, 13)], [f"{2**power:,}" for power in range(3, 13)])
    axes.set_ylim(0, 105)
    axes.set_xlabel("devices")
    axes.set_ylabel("throughput per device, % of the smallest size")
    axes.legend(frameon=False, loc="lower left", title="lines: predicted; dots: published")
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})


def _sizes(run: Published) -> list[int]:
    """Return the smallest size times powers of two and what was measured, as far as there is a sequence for each."""
    first = min(run.measured)
    batch = run.training.batch
    most = batch * run.training.stages * (run.training.vocab_ranks or 1) if batch else 4096
    doubled = {first * 2**power for power in range(10)}
    return sorted(size for size in doubled | run.measured.keys() if size <= min(most, 4608))


def main() -> None:
    """Print the tables asked for, or write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", action="store_true", help="print the published trainings, and measure nothing")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of gloo ranks to measure")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of all measurements")
    parser.add_argument("--picture", type=Path, help="write efficiency against devices to this SVG file instead")
    options = parser.parse_args()
    if options.picture is not None:
        draw(options.picture)
    elif options.published:
        print(published_table())
    else:
        print(f"{date.today()}, torch {torch.__version__}, {hardware('cpu')}, load {os.getloadavg()[0]:.1f}\n")
        print(here_table(options.ranks, options.rounds))
        print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

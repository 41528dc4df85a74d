"""What a training will cost, found out without taking a step: the memory of each process, and the hours."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import inf, prod

import torch
from torch import Tensor

from recipes.translation.data.batches import Batch
from recipes.translation.data.corpus import Corpus
from recipes.translation.processes.ranks import Ranks
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.training.half_precision import AUTOCAST
from recipes.translation.training.layout import Layout
from recipes.translation.training.machine import forget_peak, peak_memory
from recipes.translation.training.parts import local_of
from recipes.translation.training.progress import in_words
from seqpar.distributed.collectives import gather_objects
from seqpar.memory_plan import Layout as PlannedLayout
from seqpar.memory_plan import memory_plan

PASSES = 3


def cost(
    layout: Layout, settings: TrainingConfig, corpus: Corpus, batches: Sequence[Batch], steps: int, ranks: Ranks
) -> str:
    """Return what `steps` steps need, measured by a forward and backward of the first step's batches.

    Every rank calls this. Weights, moments and files stay as they are. Of a few passes the fastest counts, since the
    first ones reserve memory.
    """
    layout.model.train()
    forget_peak(layout.devices)
    seconds = inf
    for _ in range(PASSES):
        start = _now(layout.device)
        loss = layout.accumulate(batches)
        seconds = min(seconds, _now(layout.device) - start)
        layout.model.zero_grad()
    trained = [each for each in layout.model.parameters() if each.requires_grad]
    gradients = _bytes(trained)
    on_cpu = layout.device.type == "cpu"
    peak = max(size for name, size in peak_memory(layout.devices).items() if (name == "cpu") == on_cpu)
    needs = {
        "weights": _bytes(chain(layout.model.parameters(), layout.model.buffers())),
        "gradients": gradients,
        "Adam's moments": 2 * gradients,
        "the loss (seqpar.memory_plan)": _loss_bytes(layout, settings, len(corpus.target)),
        "in all, measured with a forward and backward": peak + 2 * gradients,
    }
    return in_lines(gather_objects(needs, ranks.group), seconds, int(loss.tokens), steps)


def in_lines(everyone: Sequence[Mapping[str, int]], seconds: float, tokens: int, steps: int) -> str:
    """Return what a dry run reports, given the bytes of each process, and the time and target tokens of one step."""
    largest = {name: max(own[name] for own in everyone) for name in everyone[0]}
    lines = [
        f"memory of a process, MB: {', '.join(f'{name} {size / 1e6:,.1f}' for name, size in largest.items())}",
        f"a forward and backward of the first step took {seconds:.2f} s for {tokens:,} target tokens, "
        f"{tokens / seconds:,.0f} a second",
        f"{steps:,} steps will take about {in_words(steps * seconds)}, without updates, validations and saving",
        "nothing was trained; the subwords and ids are kept for the training",
    ]
    return "\n".join(f"[dry-run] {line}" for line in lines)


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.monotonic()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_of(each).numel() * each.itemsize for each in tensors)


def _loss_bytes(layout: Layout, settings: TrainingConfig, classes: int) -> int:
    """Return the bytes that a batch's loss needs besides weights and hidden states, if all its cells are tokens."""
    axes = layout.axes
    tokens = settings.batch_tokens
    if settings.accumulate < layout.data_ranks:  # no process has a whole batch
        tokens = -(-tokens // layout.data_ranks)
    tokens = -(-tokens // len(layout.devices))
    split: PlannedLayout = "ddp"
    devices = prod(axes) * len(layout.devices)
    if axes.vocab > 1:
        split, devices = "vocab", axes.vocab
    elif axes.shard > 1:
        split = "fsdp"
    plan = memory_plan(
        tokens=tokens if split == "vocab" else tokens * devices,
        d=layout.model.generator.weight.shape[1],
        vocab=classes,
        devices=devices,
        layout=split,
        dtype=AUTOCAST.get(settings.precision, settings.precision),
        chunk_tokens=settings.chunk_tokens,
        device="cpu" if layout.device.type == "cpu" else "cuda",
    )
    return plan.of("linear_cross_entropy").peak

"""What a training costs: by a dry run, the memory of each process and the hours; in each step, a share of the peak.

Model FLOPs utilisation is the share of the devices' published peak that the model's matrix products achieve. A matrix
of n weights costs 6 n operations for each token that it is applied to: 2 n in forward and 4 n in backward (Chowdhery et
al. 2022, PaLM, appendix B). Attention's own products, a few percent for sentences, are left out, and so is whatever an
objective computes twice: only work that the model needs counts, not all the work that is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import inf, prod

import torch
from torch import Tensor, nn

from models import EncoderDecoder
from models.decoder_only import DecoderOnly
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
        "in all, measured in a forward and backward pass": peak + 2 * gradients,
    }
    return in_lines(gather_objects(needs, ranks.group), seconds, int(loss.tokens), steps)


def in_lines(everyone: Sequence[Mapping[str, int]], seconds: float, tokens: int, steps: int) -> str:
    """Return what a dry run reports, given the bytes of each process, and the time and target tokens of one step."""
    largest = {name: max(own[name] for own in everyone) for name in everyone[0]}
    lines = [
        f"memory per process, MB: {', '.join(f'{name} {size / 1e6:,.1f}' for name, size in largest.items())}",
        f"a forward and backward pass of the first step took {seconds:.2f} s for {tokens:,} target tokens, "
        f"{tokens / seconds:,.0f} a second",
        f"{steps:,} steps will take about {in_words(steps * seconds)}, not counting updates, validations and saving",
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


PEAKS = {
    "NVIDIA A100": {"float32": 19.5e12, "bf16": 312e12, "fp16": 312e12},
    "NVIDIA H100 PCIe": {"float32": 51e12, "bf16": 756e12, "fp16": 756e12},
    "NVIDIA H100 80GB HBM3": {"float32": 67e12, "bf16": 989e12, "fp16": 989e12},
    "NVIDIA H200": {"float32": 67e12, "bf16": 989e12, "fp16": 989e12},
    "NVIDIA L4": {"float32": 30.3e12, "bf16": 121e12, "fp16": 121e12},
    "NVIDIA L40S": {"float32": 91.6e12, "bf16": 362e12, "fp16": 362e12},
    "Tesla T4": {"float32": 8.1e12, "fp16": 65e12},
    "Tesla V100-SXM2": {"float32": 15.7e12, "fp16": 125e12},
    "Tesla V100-PCIE": {"float32": 14e12, "fp16": 112e12},
}
"""Operations per second, by the start of a device's name and by `training.precision`, from NVIDIA's data sheets: dense
(half of those "with sparsity"). float32 is without TF32, which training does not use."""


def share_of_peak(
    model: EncoderDecoder, corpus: Corpus, precision: str, devices: Sequence[torch.device], processes: int
) -> float:
    """Return which share of all devices' peak one target token per second takes; 0 if the peak is unknown.

    `model` is whole. With frozen parts the result is also 0, as it is not known here how much of backward they save.
    """
    peak = peak_of(devices[0], precision)
    if not peak or not all(each.requires_grad for each in model.parameters()):
        return 0.0
    source = sum(int(valid.batches.source_lengths.sum()) for valid in corpus.valid)
    target = sum(int(valid.batches.target_lengths.sum()) for valid in corpus.valid)
    return flops_of_token(model, source / max(target, 1)) / (peak * len(devices) * processes)


def peak_of(device: torch.device, precision: str) -> float:
    """Return the published peak of a device, 0 for one that is not in the table."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    # The longest name that matches, so that an L40S is not taken for an L4
    for known in sorted(PEAKS, key=len, reverse=True):
        if name.startswith(known):
            return PEAKS[known].get(precision, 0.0)
    return 0.0


def flops_of_token(model: EncoderDecoder, sources: float) -> float:
    """Return the operations of a training step per target token, given `sources` source tokens per target token."""
    decoder = matrices(model.decoder)
    if isinstance(model, DecoderOnly):  # which reads the source as well
        return 6 * (decoder * (1 + sources) + matrices(model.generator))
    return 6 * (matrices(model.encoder) * sources + decoder + matrices(model.generator))


def matrices(part: nn.Module) -> int:
    """Return the number of weights in the matrices of a part that contains no embeddings."""
    return sum(each.numel() for each in part.parameters() if each.dim() > 1)

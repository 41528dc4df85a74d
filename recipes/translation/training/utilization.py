"""Model FLOPs utilisation: the share of the devices' published peak that the model's matrix products achieve.

A matrix of n weights costs 6 n operations for each token that it is applied to: 2 n in forward and 4 n in backward
(Chowdhery et al. 2022, PaLM, appendix B). Attention's own products, a few percent for sentences, are left out, and so
is whatever an objective computes twice: only work that the model needs counts, not all the work that is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from models import EncoderDecoder
from models.decoder_only import DecoderOnly
from recipes.translation.data.corpus import Corpus

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

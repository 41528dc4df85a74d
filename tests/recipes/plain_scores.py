"""What a model says of sentences, computed plainly: with all logits at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models import EncoderDecoder
from recipes.translation.data.batches import Batch, TokenBatches
from recipes.translation.text.subwords import ORDINARY, PAD, Symbols


@torch.no_grad()
def log_probability(
    model: EncoderDecoder, source: Sequence[int], target: Sequence[int], symbols: Symbols = ORDINARY
) -> float:
    """sum_t log p(y_t | y_<t, x) of one pair alone; the end symbol of y is part of it."""
    src = torch.tensor([symbols.source(source)])
    tgt = torch.tensor([[*symbols.start, *target[:-1]]])
    # The step that reads the last token of the start predicts the first subword
    hidden = model(src, tgt)[0, len(symbols.start) - 1 :]
    log_p = model.generator(hidden).double().log_softmax(-1)
    return float(log_p.gather(-1, torch.tensor(target)[:, None]).sum())


def plain_logits(model: Any, batch: Batch) -> Tensor:
    """The logits (N, V) of a batch's target cells."""
    logits: Tensor = model.generator(model(batch.src, batch.tgt_in)).flatten(0, 1)
    return logits


def plain_loss(model: Any, batch: Batch, smoothing: float = 0.1, reduction: str = "mean") -> Tensor:
    """The cross-entropy of a batch."""
    return F.cross_entropy(
        plain_logits(model, batch),
        batch.tgt_out.flatten(),
        ignore_index=PAD,
        label_smoothing=smoothing,
        reduction=reduction,
    )


@torch.no_grad()
def plain_sums(model: Any, batches: TokenBatches, smoothing: float = 0.1) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The sums over an epoch of the smoothed loss, the negative log-likelihood, the right tokens and all tokens."""
    sums = np.zeros(4)
    for indices in batches.epoch(0):
        batch = batches.batch(indices)
        target = batch.tgt_out.flatten()
        right = (plain_logits(model, batch).argmax(-1) == target) & (target != PAD)
        losses = [plain_loss(model, batch, each, "sum").item() for each in (smoothing, 0.0)]
        sums += [*losses, int(right.sum()), batch.tokens]
    return sums

"""What a model says of a given translation, computed plainly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models import EncoderDecoder
from recipes.translation.text.subwords import ORDINARY, Symbols


@torch.no_grad()
def log_probability(
    model: EncoderDecoder, source: Sequence[int], target: Sequence[int], symbols: Symbols = ORDINARY
) -> float:
    """sum_t log p(y_t | y_<t, x) of one pair alone, with all logits at once; the end symbol of y is part of it."""
    src = torch.tensor([symbols.source(source)])
    tgt = torch.tensor([[*symbols.start, *target[:-1]]])
    # The step that reads the last token of the start predicts the first subword
    hidden = model(src, tgt)[0, len(symbols.start) - 1 :]
    log_p = model.generator(hidden).double().log_softmax(-1)
    return float(log_p.gather(-1, torch.tensor(target)[:, None]).sum())

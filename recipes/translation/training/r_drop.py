"""R-Drop: the model's predictions under two draws of dropout are drawn towards each other (Wu et al. 2021, section 2).

With p and q the predictions of a token in two passes of the same sentences, and CE the usual loss, its loss is

    1/2 (CE(p) + CE(q))  +  alpha/4 (KL(p || q) + KL(q || p))

This is half of the paper's equation 4, so that without dropout it is the usual loss. Both p and q have a gradient. The
logits of both passes exist for one chunk of tokens at a time.

Shape suffixes: K rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TwoPasses(nn.Module):
    """Two passes of the same sentences: the hidden states of the first one, and as `other` those of the second."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, src: Tensor, tgt: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute both in one batch of twice the sentences, in which dropout is drawn for each row."""
        first, second = self.model(torch.cat([src, src]), torch.cat([tgt, tgt])).chunk(2)
        return first, {"other": second}


class BothLogits(nn.Module):
    """A generator of the logits of both passes, side by side."""

    def __init__(self, generator: nn.Module) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
        """Return (..., 2V) logits of hidden states (..., D) of both passes."""
        return torch.cat([self.generator(hidden), self.generator(other)], dim=-1)


class RDrop(nn.Module):
    """The summed loss of both passes, given a criterion for one of them."""

    def __init__(self, criterion: nn.Module, alpha: float, ignore_index: int) -> None:
        super().__init__()
        self.criterion = criterion
        self.alpha = alpha
        self.ignore_index = ignore_index

    def forward(self, logits_KW: Tensor, target_K: Tensor) -> Tensor:
        """Return the sum over the rows of logits (K, 2V) whose target is not ignored."""
        logits_KV, other_KV = logits_KW.chunk(2, dim=-1)
        total: Tensor = self.criterion(logits_KV, target_K) + self.criterion(other_KV, target_K)
        wide = torch.promote_types(logits_KW.dtype, torch.float32)
        log_p_KV = logits_KV.log_softmax(-1, dtype=wide)
        log_q_KV = other_KV.log_softmax(-1, dtype=wide)
        # KL(p || q) + KL(q || p) = sum (p - q) (log p - log q)
        apart_K = ((log_p_KV.exp() - log_q_KV.exp()) * (log_p_KV - log_q_KV)).sum(-1)
        apart = apart_K.masked_fill(target_K == self.ignore_index, 0.0).sum()
        return 0.5 * total + 0.25 * self.alpha * apart

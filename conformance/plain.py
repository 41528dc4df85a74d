"""The loss and token scores as they are usually written in PyTorch, with which every implementation is compared.

Shape suffixes: N rows, V vocabulary, J given classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.adapter import Options
from seqpar.linear.token_scores import TokenScores
from seqpar.testing.plain_reference import plain_logits


def plain_loss(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Return the loss of all logits, in the dtype of the tensors."""
    logits_NV = plain_logits(hidden, weight, bias, options.softcap)
    how = {"ignore_index": options.ignore_index, "label_smoothing": options.label_smoothing}
    return F.cross_entropy(logits_NV, target, reduction=options.reduction, **how)  # type: ignore[arg-type]


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Return the logits, divided by the temperature."""
    temperature: Any = options.temperature
    per_row: Any = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    return plain_logits(hidden, weight, bias, options.softcap, per_row)


def zero_ignored(score: Tensor, target: Tensor, options: Options) -> Tensor:
    """Return a score with 0 where the target is ignored."""
    ignored = target == options.ignore_index
    return score.masked_fill(ignored.view(-1, *[1] * (score.dim() - 1)), 0)


def usual_scores(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Return the scores of all logits: log_softmax, gather, and -sum(p log p)."""
    log_p_NV = torch.log_softmax(logits_of(hidden, weight, bias, options), -1)
    return _scores(log_p_NV, log_p_NV, log_p_NV.topk(options.top_k) if options.top_k else None, target, options)


def plain_scores(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Return the same, but with 0 log 0 = 0 for classes with a bias of -inf, and the lower class first in ties."""
    log_p_NV = torch.log_softmax(logits_of(hidden, weight, bias, options), -1)
    # exp(-1e4) is 0 in every dtype
    return _scores(
        log_p_NV, log_p_NV.clamp(min=-1e4), log_p_NV.sort(dim=-1, descending=True, stable=True), target, options
    )


def _scores(log_p_NV: Tensor, finite_NV: Tensor, top: object, target: Tensor, options: Options) -> TokenScores:
    """Return the requested scores, computed from log-probabilities."""
    picked = log_p_NV.gather(1, target.clamp(min=0)[:, None])[:, 0]
    entropy = values = classes = at_NJ = None
    if options.entropy:
        entropy = zero_ignored(-(log_p_NV.exp() * finite_NV).sum(-1), target, options)
    if options.top_k:
        values, classes = (t[:, : options.top_k] for t in top)  # type: ignore[attr-defined]
    if options.ids is not None:
        at_NJ = zero_ignored(log_p_NV.gather(1, options.ids), target, options)
    log_prob = zero_ignored(picked, target, options)
    return TokenScores(log_prob, entropy, log_probs_at=at_NJ, top_log_probs=values, top_ids=classes)

"""Objectives over references: dynamic fine-tuning, and minimum risk over sampled translations."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.core.checks import check_groups, check_mask, check_number, check_scores


def dft(log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return the loss of dynamic fine-tuning, one per token; 0 where `mask` is false.

        -stop_gradient(p) log p,   p = pi(y_t | y_<t, x)          Wu et al. 2025, section 3

    A token that the model considers impossible (p = 0) has loss 0, the limit, and gradient 0. A token's loss is a
    function of its own score, so it may be the loss of `seqpar.scored_loss`.

    Args:
        log_prob: as `token_scores` returns it.
        mask: bool, true for the tokens that count.

    Raises:
        TypeError: log-probabilities that are not floating, a mask that is not bool.
        ValueError: different shapes or devices.

    Example:
        >>> from seqpar.objectives import dft
        >>> log_prob = torch.tensor([0.5, 0.25, 0.125]).log()
        >>> dft(log_prob, mask=torch.tensor([True, True, True]))
        tensor([0.3466, 0.3466, 0.2599])
    """
    (log_prob,) = check_scores(log_prob=log_prob)
    check_mask(mask, "mask", log_prob=log_prob)
    log_prob = torch.where(mask, log_prob, 0)
    finite = log_prob.clamp(min=torch.finfo(log_prob.dtype).min)
    # Not the negative, which would make 0 a -0
    return 0 - log_prob.detach().exp() * finite


def minimum_risk(
    scores: Tensor, costs: Tensor, group_size: int, *, alpha: float, candidates: Tensor | None = None
) -> Tensor:
    """Return the expected cost of the sampled translations of each source sentence (groups,).

        loss = sum_i Q_i cost_i,   Q_i = P(y_i|x)^alpha / sum_j P(y_j|x)^alpha        Shen et al. 2016, section 3

    Args:
        scores: (groups x group_size,), log P(y|x) of each candidate, summed over its tokens (`sequence_sums`); one
            group after the other.
        costs: of the same shape; a constant, such as 1 - BLEU of the sentence.
        group_size: candidates per source sentence, at least 1.
        alpha: the sharpness of Q, above 0; 0.005 in the paper.
        candidates: bool, of the same shape; false for samples that do not belong to the set, such as the second of two
            equal ones; None means all belong. A group without candidates has the loss 0.

    Raises:
        TypeError: scores or costs that are not floating, candidates that are not bool, a group size that is not an int.
        ValueError: shapes or devices that differ, scores that are not a vector of whole groups, numbers out of range.

    Example:
        >>> from seqpar.objectives import minimum_risk
        >>> scores = torch.tensor([-2.0, -2.0, -1.0, -9.0])  # two sources with two translations each
        >>> costs = torch.tensor([0.2, 0.4, 0.1, 0.9])
        >>> minimum_risk(scores, costs, group_size=2, alpha=1.0)
        tensor([0.3000, 0.1003])
    """
    scores, costs = check_scores(scores=scores, costs=costs)
    check_groups(group_size, 1, scores=scores)
    check_number(alpha, "alpha", above=0)
    if candidates is None:
        candidates = torch.ones_like(scores, dtype=torch.bool)
    check_mask(candidates, "candidates", scores=scores)
    # The lowest finite number instead of -inf, so that the softmax of a group without candidates is not nan. A
    # candidate gets more than that, even if its log P is -inf, so that it is likelier than a non-candidate
    lowest = torch.finfo(scores.dtype).min
    exponents = torch.where(candidates, (alpha * scores).clamp(min=lowest / 2), lowest)
    probabilities = exponents.view(-1, group_size).softmax(1)
    costs = torch.where(candidates, costs.detach(), 0)
    return (probabilities * costs.view(-1, group_size)).sum(1)

"""Turn unreduced losses into sums with a named denominator, exact over any split into micro-batches and ranks.

Each function returns a `seqpar.TokenLoss`: `total` is the sum, and `tokens` is what to divide it by: the tokens,
sequences, pairs, or units of a constant in THIS micro-batch. Both are plain sums, so that `accumulate_gradients`
divides the whole step's loss by the whole step's count:

    seqpar.accumulate_gradients(
        micro_batches,
        lambda m: per_sequence(token_losses(m), m.segment_ids, m.sequences),
        tokens_of=lambda m: m.sequences,                 # the same denominator, counted before the first forward
    )

Micro-batches may cut a step anywhere except inside a sequence, pair or group. For one batch, `.mean` is the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.core.checks import check_integer, check_mask, check_scores, check_shapes
from seqpar.core.token_loss import TokenLoss
from seqpar.objectives.sequences import sequence_means


def per_token(losses: Tensor, mask: Tensor) -> TokenLoss:
    """Return the sum over the tokens that count, to be divided by their number.

    This is the denominator of DAPO (Yu et al. 2025), and of cross-entropy.

    Args:
        losses: one per token, (B, T) or (N,). Where `mask` is false they have no effect and get no gradient.
        mask: bool, true for the tokens that count. Given segment ids: `segment_ids >= 0`.

    Raises:
        TypeError: losses that are not floating, a mask that is not bool.
        ValueError: different shapes or devices.

    Example:
        >>> from seqpar.objectives import per_token
        >>> losses, mask = torch.randn(2, 3), torch.tensor([[True, True, False], [True, True, True]])
        >>> loss = per_token(losses, mask)
        >>> torch.allclose(loss.mean, losses[mask].mean())
        True
    """
    (losses,) = check_scores(losses=losses)
    check_mask(mask, "mask", losses=losses)
    return TokenLoss(torch.where(mask, losses, 0).sum(), mask.sum())


def per_sequence(losses: Tensor, segment_ids: Tensor, sequences: int) -> TokenLoss:
    """Return the sum over sequences of the mean over each one's tokens, to be divided by the number of sequences.

    This is the denominator of GRPO (Shao et al. 2024, eq. 3). A sequence without tokens adds 0 and is counted.

    Args:
        losses: one per token, (B, T) or (N,).
        segment_ids, sequences: as in `sequence_sums`.

    Raises:
        TypeError, ValueError, IndexError: as in `sequence_sums`.

    Example:
        >>> from seqpar.objectives import padded_segments, per_sequence
        >>> losses, mask = torch.randn(2, 3), torch.tensor([[True, True, False], [True, True, True]])
        >>> loss = per_sequence(losses, padded_segments(mask), sequences=2)
        >>> torch.allclose(loss.mean, ((losses * mask).sum(1) / mask.sum(1)).mean(), atol=1e-6)
        True
    """
    (losses,) = check_scores(losses=losses)
    total = sequence_means(losses, segment_ids, sequences).sum()
    return TokenLoss(total, torch.tensor(sequences, device=total.device))


def per_item(losses: Tensor, mask: Tensor | None = None) -> TokenLoss:
    """Return the sum over sequences, pairs or groups, to be divided by their number.

    This is the denominator of preferences, of sequence-level ratios (GSPO) and of minimum risk.

    Args:
        losses: (S,), one per item.
        mask: (S,) bool, true for the items that count; None means all of them.

    Raises:
        TypeError, ValueError: as in `per_token`; losses that are not a vector.

    Example:
        >>> from seqpar.objectives import dpo, per_item
        >>> losses = dpo(torch.tensor([0.5, -0.2]), torch.tensor([-0.3, 0.1]), beta=0.1)
        >>> loss = per_item(losses)
        >>> torch.allclose(loss.mean, losses.mean()), loss.tokens
        (True, tensor(2))
    """
    (losses,) = check_scores(losses=losses)
    check_shapes(losses.dim() == 1, "a vector, one loss per item", losses=losses)
    if mask is None:
        mask = torch.ones_like(losses, dtype=torch.bool)
    return per_token(losses, mask)


def per_constant(losses: Tensor, mask: Tensor, constant: int) -> TokenLoss:
    """Return the sum over the tokens that count, to be divided by a constant that does not depend on their number.

    This is the denominator of Dr. GRPO (Liu et al. 2025), whose constant is the maximum response length times the
    number of sequences.

    Args:
        losses, mask: as in `per_token`.
        constant: this micro-batch's part of the denominator; the parts of all micro-batches and ranks are added up.

    Raises:
        TypeError: as in `per_token`; a constant that is not an int.
        ValueError: as in `per_token`; a negative constant.

    Example:
        >>> from seqpar.objectives import per_constant
        >>> losses, mask = torch.randn(2, 3), torch.tensor([[True, True, False], [True, True, True]])
        >>> loss = per_constant(losses, mask, constant=2 * 3)  # two responses of at most three tokens
        >>> torch.allclose(loss.mean, losses[mask].sum() / 6)
        True
    """
    check_integer(constant, "constant", 0)
    total = per_token(losses, mask).total
    return TokenLoss(total, torch.tensor(constant, device=total.device))

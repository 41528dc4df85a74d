"""Go from tokens to sequences and back, in padded batches (B, T) and in packed ones (N,); shift targets for K heads.

Both layouts are described by `segment_ids`, an integer tensor of the tokens' shape: the number of the sequence that a
token belongs to, or a negative number if the token does not count (prompt, padding). They include the mask:

    padded:  segment_ids = padded_segments(mask)                                   # and sequences = len(mask)
    packed:  segment_ids = torch.arange(sequences).repeat_interleave(lengths).masked_fill(~mask, -1)

Shape suffixes: B batch, T time, N tokens in any layout, S sequences, K heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.core.checks import (
    check_integer,
    check_integer_target,
    check_mask,
    check_one_device,
    check_scores,
    check_segments,
    check_shapes,
)


def padded_segments(mask: Tensor) -> Tensor:
    """Return the segment ids (B, T) of a padded batch: the row's number where `mask` is true, else -1.

    Raises:
        TypeError: a mask that is not bool.
        ValueError: a mask that is not (B, T).

    Example:
        >>> from seqpar.objectives import padded_segments
        >>> padded_segments(torch.tensor([[True, True, False], [True, True, True]]))
        tensor([[ 0,  0, -1],
                [ 1,  1,  1]])
    """
    check_mask(mask, "mask", mask=mask)
    check_shapes(mask.dim() == 2, "(batch, time)", mask=mask)
    rows_B1 = torch.arange(len(mask), device=mask.device).unsqueeze(1)
    return torch.where(mask, rows_B1, -1)


def sequence_sums(values: Tensor, segment_ids: Tensor, sequences: int) -> Tensor:
    """Return the sum of each sequence's values (S,), differentiable, float32 or wider; 0 for a sequence without any.

    Plain equivalent for a padded batch: `values.masked_fill(~mask, 0).sum(1)`. For the log-probabilities of
    `token_scores` this is log P(y|x) of each response.

    Args:
        values: one number per token. Where the id is negative it has no effect, even if it is infinite or nan.
        segment_ids: the number of each token's sequence, of the shape of `values`; negative for a token that does not
            count. A sequence's tokens need not be adjacent.
        sequences: S, the number of sequences.

    Raises:
        TypeError: values that are not floating, ids that are not integers.
        ValueError: different shapes or devices, a negative number of sequences.
        IndexError: an id that is `sequences` or larger.

    Example:
        >>> from seqpar.objectives import padded_segments, sequence_sums
        >>> log_prob = torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -1.0, -2.0]])
        >>> mask = torch.tensor([[True, True, False], [True, True, True]])
        >>> sequence_sums(log_prob, padded_segments(mask), sequences=2)
        tensor([-3., -6.])
    """
    (values,) = check_scores(values=values)
    check_segments(segment_ids, sequences, values=values)
    return _sums(values, segment_ids, sequences)


def _sums(values: Tensor, segment_ids: Tensor, sequences: int) -> Tensor:
    """Add up the values by segment; the first slot, which takes those that do not count, even nan, is dropped."""
    sums = values.new_zeros(sequences + 1).index_add(0, _slots(segment_ids).flatten(), values.flatten())
    return sums[1:]


def _slots(segment_ids: Tensor) -> Tensor:
    """Return 1 + id, and 0 if the token does not count: an id that is too large stays too large."""
    return segment_ids.long().clamp(min=-1) + 1


def sequence_lengths(segment_ids: Tensor, sequences: int) -> Tensor:
    """Return how many tokens of each sequence count (S,), int64.

    Raises:
        TypeError, ValueError, IndexError: as in `sequence_sums`.

    Example:
        >>> from seqpar.objectives import sequence_lengths
        >>> sequence_lengths(torch.tensor([0, 0, -1, 1, 1, 1]), sequences=2)
        tensor([2, 3])
    """
    check_segments(segment_ids, sequences)
    return _sums(torch.ones_like(segment_ids, dtype=torch.int64), segment_ids, sequences)


def sequence_means(values: Tensor, segment_ids: Tensor, sequences: int) -> Tensor:
    """Return the mean of each sequence's values (S,), differentiable; 0, not nan, for a sequence without any.

    Plain equivalent for a padded batch: `values.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp(min=1)`.

    Args:
        values, segment_ids, sequences: as in `sequence_sums`.

    Raises:
        TypeError, ValueError, IndexError: as in `sequence_sums`.

    Example:
        >>> from seqpar.objectives import sequence_means
        >>> values, segment_ids = torch.tensor([1.0, 3.0, 9.0, 5.0]), torch.tensor([0, 0, -1, 1])
        >>> sequence_means(values, segment_ids, sequences=3)
        tensor([2., 5., 0.])
    """
    sums = sequence_sums(values, segment_ids, sequences)
    return sums / sequence_lengths(segment_ids, sequences).clamp(min=1)


def spread_to_tokens(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Return for each token its sequence's value, and 0 if the token does not count.

    Plain equivalent for a padded batch: `values.unsqueeze(1) * mask`. Use it to give a response's advantage to its
    tokens.

    Args:
        values: (S,), one number per sequence.
        segment_ids: as in `sequence_sums`.

    Returns:
        (the shape of segment_ids), differentiable, float32 or wider.

    Raises:
        TypeError, ValueError, IndexError: as in `sequence_sums`; values that are not a vector.

    Example:
        >>> from seqpar.objectives import spread_to_tokens
        >>> advantages, segment_ids = torch.tensor([0.5, -0.5]), torch.tensor([[0, 0, -1], [1, 1, 1]])
        >>> spread_to_tokens(advantages, segment_ids)
        tensor([[ 0.5000,  0.5000,  0.0000],
                [-0.5000, -0.5000, -0.5000]])
    """
    (values,) = check_scores(values=values)
    check_shapes(values.dim() == 1, "(sequences,), one number per sequence", values=values)
    check_segments(segment_ids, len(values))
    check_one_device(values=values, segment_ids=segment_ids)
    with_zero = torch.cat([values.new_zeros(1), values])
    return with_zero[_slots(segment_ids)]


def head_targets(target: Tensor, heads: int, *, ignore_index: int = -100, segment_ids: Tensor | None = None) -> Tensor:
    """Return the targets of several heads, K of target's shape: head k predicts k tokens further ahead than head 0.

        targets[k, ..., t] = target[..., t + k], and ignore_index beyond the end of the sequence

    Multi-token prediction: Gloeckle et al. 2024, section 2; DeepSeek-V3 (2024), section 2.2. All heads share one
    projection, so their stacked hidden states need only one call:

        hidden = torch.stack([head(trunk) for head in heads])                                     # (K, B, T, D)
        seqpar.linear_cross_entropy(hidden, weight, head_targets(target, len(heads)))

    Its `tokens` counts the targets of all heads; to weight heads, pass `token_weight`, of the targets' shape.

    Args:
        target: (B, T), or (N,) for a packed batch: head 0's targets, usually the next tokens; time is the last axis.
        heads: K, at least 1.
        ignore_index: marks targets that do not count; those of `target` stay ignored in every head.
        segment_ids: of target's shape, for a packed batch: the number of each position's sequence. A target from a
            different sequence is ignored, and so is the target of a position with a negative id.

    Returns:
        int64, on target's device.

    Raises:
        TypeError: targets that are not integers, heads or ignore_index not an int.
        ValueError: a target without dimensions, fewer than one head, segment ids of a different shape or device.

    Example:
        >>> from seqpar.objectives import head_targets
        >>> head_targets(torch.tensor([5, 6, 7, 8]), heads=3)
        tensor([[   5,    6,    7,    8],
                [   6,    7,    8, -100],
                [   7,    8, -100, -100]])
    """
    check_integer_target(target)
    check_integer(heads, "heads", 1)
    check_integer(ignore_index, "ignore_index")
    if not target.dim():
        raise ValueError("target has no dimensions; it must be (batch, time), or (tokens,) for a packed batch")
    if segment_ids is None:
        segment_ids = torch.zeros_like(target)
    check_segments(segment_ids, target=target)
    time = target.size(-1)
    targets = target.new_full((heads, *target.shape), ignore_index, dtype=torch.int64)
    for k in range(min(heads, time)):
        here = segment_ids[..., : time - k]
        same = (here == segment_ids[..., k:]) & (here >= 0)
        targets[k, ..., : time - k] = torch.where(same, target[..., k:].long(), ignore_index)
    return targets

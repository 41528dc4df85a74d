"""Create the targets of several prediction heads, so that one call projects the hidden states of all of them.

Shape suffixes: K heads, B batch, T time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.core.checks import check_integer, check_integer_target, check_segments


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

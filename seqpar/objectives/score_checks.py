"""Check scores, masks and segment ids; scores are widened to float32 before anything is computed with them."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.core.tensor_checks import CLASS_INDICES, check_dense, check_floating, check_integer
from seqpar.core.token_loss import wide


def checked_scores(**scores: Tensor) -> tuple[Tensor, ...]:
    """Return the scores in float32 or wider, in the order of their names.

    Raises:
        TypeError: one is not a dense floating tensor.
        ValueError: they differ in shape or device.
    """
    for name, score in scores.items():
        check_floating(score, name)
    first, *others = scores
    for name in others:
        _check_like(scores[name], name, scores[first], first)
    return tuple(score.to(wide(score.dtype)) for score in scores.values())


def check_mask(mask: Tensor, scores: Tensor, scores_name: str, *, name: str = "mask") -> None:
    """Raise TypeError unless `mask` is a bool tensor, ValueError unless it has the shape and device of `scores`."""
    check_dense(mask, name)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} has dtype {mask.dtype}; it must be bool, True where a score counts: use {name}.bool()")
    _check_like(mask, name, scores, scores_name)


def check_segments(segment_ids: Tensor, sequences: int, scores: Tensor, scores_name: str) -> None:
    """Raise unless `segment_ids` are integers below `sequences`, of the shape and device of `scores`.

    The range is checked on the CPU only: on other devices the check would wait for the device, and their indexing
    checks it.
    """
    check_segment_shape(segment_ids, scores, scores_name)
    check_count(sequences, "sequences")
    if segment_ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    outside = segment_ids.long() >= sequences
    if outside.any():
        position = tuple(outside.nonzero()[0].tolist())
        raise IndexError(
            f"segment_ids has {segment_ids[position].item()} at position {position} and there are {sequences} "
            "sequences; ids count from 0, and a negative one marks a token that does not count"
        )


def check_segment_shape(segment_ids: Tensor, scores: Tensor, scores_name: str) -> None:
    """Raise unless `segment_ids` are integers of the shape and device of `scores`."""
    check_dense(segment_ids, "segment_ids")
    if segment_ids.dtype not in CLASS_INDICES:
        raise TypeError(f"segment_ids has dtype {segment_ids.dtype}; it must be int64: use segment_ids.long()")
    _check_like(segment_ids, "segment_ids", scores, scores_name)


def check_count(value: object, name: str, *, at_least: int = 0) -> None:
    """Raise TypeError unless `value` is an int, ValueError unless it is at least `at_least`."""
    check_integer(value, name)
    assert isinstance(value, int)
    if value < at_least:
        raise ValueError(f"{name} is {value}; it must be at least {at_least}")


def check_groups(scores: Tensor, name: str, group_size: int, *, at_least: int) -> None:
    """Raise unless `scores` is a vector that `group_size` divides."""
    check_count(group_size, "group_size", at_least=at_least)
    if scores.dim() != 1 or len(scores) % group_size:
        raise ValueError(
            f"{name} has shape {tuple(scores.shape)} and group_size is {group_size}; it must be a vector of whole "
            f"groups, one group after the other: (groups x {group_size},)"
        )


def _check_like(tensor: Tensor, name: str, other: Tensor, other_name: str) -> None:
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and {other_name} {tuple(other.shape)}; they must be the same"
        )
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device} and {other_name} on {other.device}; move them to one device")

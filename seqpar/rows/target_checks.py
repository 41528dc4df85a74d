"""Check that targets are class indices inside the vocabulary, with the leading shape of hidden or the logits."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from seqpar.core.chunks import recording
from seqpar.core.tensor_checks import check_dense, check_floating, check_integer_target


def check_target(hidden: Tensor, target: Tensor) -> None:
    """Raise TypeError for targets that are no class indices, ValueError unless they have hidden's leading shape."""
    check_dense(hidden, "hidden")
    check_integer_target(target)
    if hidden.dim() < 2 or hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and target {tuple(target.shape)}; target must have hidden's "
            "leading shape: (N, D) with (N,), or (batch, time, D) with (batch, time)"
        )


def check_range(target: Tensor, counted: Tensor, vocab_size: int, above: int = 0) -> None:
    """Raise IndexError if a target that is not ignored is outside [0, vocab_size).

    Nothing is checked while a CUDA graph is recorded, because no target can be read then.

    Args:
        counted: the mask of the targets that are not ignored.
        above: how many rows of the batch come before these; the message counts positions in the whole batch.
    """
    if recording(target.device):
        return
    bad = counted & ((target < 0) | (target >= vocab_size))
    if bad.any():
        # Read only now that the caller is about to see the error
        first, *rest = bad.nonzero()[0].tolist()
        raise IndexError(
            f"target {target[(first, *rest)].item()} at position {(above + first, *rest)} is outside the vocabulary "
            f"[0, {vocab_size}) and is not the ignored one; check the vocabulary's size and ignore_index"
        )


def checked_target(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the targets (rows,) as int64, after checking them against the logits (rows, V).

    Raises:
        TypeError, ValueError, IndexError: as `LabelSmoothing`. The range is checked on the CPU only: on other devices
            the check would wait for the device in every chunk, and the engine has checked the whole batch.
    """
    check_floating(logits, "logits")
    check_integer_target(target)
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and target {tuple(target.shape)}; a criterion takes (rows, V) "
            "with (rows,): use logits.flatten(0, -2) and target.flatten()"
        )
    if target.device != logits.device:
        raise ValueError(f"logits are on {logits.device} and target on {target.device}; move them to one device")
    # Before the comparison with ignore_index, which a narrow dtype would wrap around
    target = target.long()
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        check_range(target, target != ignore_index, logits.size(1))
    return target


def check_ignore_index(value: object) -> None:
    """Raise TypeError unless it is a whole number, ValueError unless it fits in int64."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"ignore_index is {value!r}; it must be a whole number, such as -100")
    if not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"ignore_index is {value}; it must be an int64, such as -100")

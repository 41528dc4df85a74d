"""Call the generator and the criterion on some rows, and take what they return.

Shape suffixes: K rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from seqpar.core.checks import check_type
from seqpar.core.chunks import recording
from seqpar.core.token_loss import TokenLoss
from seqpar.engine.module_calls import extra_in_call
from seqpar.rows.criteria import ignored_target

Project = Callable[[tuple[int, ...], Sequence[Tensor]], Tensor]
"""(leading shape, rows of hidden and of each per-token tensor) -> the logits (K, V) of the rows in that shape."""


def project(generator: nn.Module, names: Sequence[str], shape: tuple[int, ...], rows: Sequence[Tensor]) -> Tensor:
    """Return the generator's logits (K, V) of some rows, given to it in the leading shape `shape`.

    Raises:
        ValueError: the generator does not return a (..., V) tensor.
    """
    # (K, ...) -> (*shape, ...), and back to (K, V) at the end
    hidden, *extra = (t.reshape(*shape, *t.shape[1:]) for t in rows)
    logits = generator(hidden, **dict(zip(names, extra, strict=True)))
    if not isinstance(logits, Tensor) or logits.shape[:-1] != hidden.shape[:-1]:
        returned = f"a {type(logits).__name__}"
        if isinstance(logits, Tensor):
            returned = f"shape {tuple(logits.shape)}"
        named = zip(("hidden", *names), (hidden, *extra), strict=True)
        given = ", ".join(f"{name} {tuple(t.shape)}" for name, t in named)
        raise ValueError(f"the generator returned {returned} for {given}; it must return (..., V) scores")
    return logits.flatten(0, -2)


def counts_itself(criterion: nn.Module) -> bool:
    """Return whether `token_loss` computes all that a call of the criterion does, and counts besides.

    It does not if a subclass has changed only `forward`, nor if a hook, or a forward set on the instance, may change
    the result.
    """
    if not hasattr(criterion, "token_loss") or extra_in_call(criterion):
        return False
    for owner in type(criterion).__mro__:
        if "token_loss" in vars(owner):
            return True
        if "forward" in vars(owner):
            return False
    return True  # an attribute of the instance


def criterion_loss(criterion: nn.Module, logits: Tensor, target: Tensor) -> TokenLoss:
    """Return the criterion's loss of logits (K, V) and targets (K,), with the counts that it computes.

    Raises:
        TypeError: it does not return a tensor, or its `token_loss` does not return a `TokenLoss`.
    """
    if counts_itself(criterion):
        return _checked_token_loss(criterion.token_loss(logits, target))  # type: ignore[operator]
    total = criterion(logits, target)
    check_type(total, "the criterion", Tensor, "a tensor, the summed loss", verb="returned")
    # Chunks contain ignored rows only while a CUDA graph is recorded
    ignored = None
    if recording(target.device):
        ignored = ignored_target(criterion)
    if ignored is None:
        return TokenLoss(total, torch.full((), len(target), device=target.device))
    return TokenLoss(total, (target != ignored).sum())


def _checked_token_loss(loss: object) -> TokenLoss:
    """Return what a criterion's `token_loss` returned; raise TypeError unless it is a TokenLoss of tensors."""
    check_type(loss, "the criterion's token_loss", TokenLoss, "a TokenLoss", verb="returned")
    assert isinstance(loss, TokenLoss)
    for name, value in loss._asdict().items():
        if not isinstance(value, Tensor) and (value is not None or name in ("total", "tokens")):
            kind = type(value).__name__
            raise TypeError(f"the criterion's token_loss returned a TokenLoss whose {name} is a {kind}, not a tensor")
    return loss

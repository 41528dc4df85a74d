"""Compute cross-entropy and label smoothing as summed losses; define what the engine requires of a criterion.

The engine accepts any criterion that meets these requirements:

- it is a module, called with `(logits, target)` of shapes `(rows, V)` and `(rows,)`;
- it returns the SUM over rows, one number (a mean cannot be added up over chunks and devices, nor can anything else
  that is not a sum of one term per row);
- further tensors with a row for each token, such as weights, are keywords of its `forward` (and its `token_loss`);
- its attribute `ignore_index` or `padding_idx` is the target that it ignores, so that those rows need no logits;
- if it has `token_loss(logits, target) -> TokenLoss`, which must agree with its `forward`, that is called instead,
  and `nll` and `correct` are taken from its result. It is not called if hooks or a subclass's own `forward` change
  what a call returns.

`torch.nn.CrossEntropyLoss(reduction="sum")`, the `LabelSmoothing` of 2018 and the two classes in this file meet them.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from seqpar.core.checks import (
    check_floating,
    check_integer,
    check_integer_target,
    check_one_device,
    check_range,
    check_shapes,
    refuse_second_backward,
    refuse_second_derivative,
    refuse_transforms,
)
from seqpar.core.device_facts import may_read
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.rows.conventions import Convention
from seqpar.rows.scores import RowFunction
from seqpar.rows.smoothing import CrossEntropyOfScores, SoftTarget, check_smoothing, class_weights, soft_target


def ignored_target(criterion: nn.Module) -> int | None:
    """Return the target value a criterion ignores: its `ignore_index`, else its `padding_idx`, else None.

    Raises:
        TypeError: the value is not a whole number.
    """
    for name in ("ignore_index", "padding_idx"):
        value = getattr(criterion, name, None)
        if value is not None:
            return _whole(value, f"the criterion's {name}")
    return None


def _whole(value: object, name: str) -> int:
    """Return `value` as an int; numpy's integers and tensors of one integer are accepted, too."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    check_integer(value, name)
    return int(value)  # type: ignore[call-overload, no-any-return]


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The sum of `CrossEntropyOfScores` over the rows that are not ignored.

    The softmax is its only tensor of the logits' size. Backward overwrites it with the gradient, so it can run only
    once.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, counted_N: Tensor, q: SoftTarget) -> tuple[Tensor, ...]:
        """Return the sums of loss, tokens, nll and correct predictions."""
        weights = class_weights(q, None)
        rows = RowFunction(weights=weights, correct=True)
        picked_N1 = target_N.unsqueeze(1)
        given_NV = logits_NV.to(wide(logits_NV.dtype))
        # The caller's logits must not be overwritten
        made, sums = rows.sums_(given_NV, picked_N1, out=None if given_NV is logits_NV else given_NV)
        scores = rows.scores(sums)
        losses = CrossEntropyOfScores(q, weights)(scores, (), wanted=True)
        # In an ignored row even a nan must count for nothing, and 0 x nan would be nan
        zero = scores.log_prob.new_zeros(())
        total = losses.loss_N.where(counted_N, zero).sum()
        tokens = counted_N.sum()
        nll = (-scores.log_prob).where(counted_N, zero).sum()
        assert sums.correct_N is not None
        correct = (sums.correct_N & counted_N).sum()
        ctx.mark_non_differentiable(tokens, nll, correct)
        # On ctx itself rather than by save_for_backward, so that backward can free and overwrite the softmax
        ctx.stored = (made, picked_N1, counted_N, sums, losses.upstream)
        ctx.rows = rows
        ctx.dtype = logits_NV.dtype
        return total, tokens, nll, correct

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        """Return upstream x the gradient, and 0 in the ignored rows."""
        refuse_second_backward(ctx.stored is None, "the criterion")
        refuse_transforms((upstream,))
        refuse_second_derivative("the criterion", "torch.nn.functional.cross_entropy")
        made, picked_N1, counted_N, sums, factors = ctx.stored
        ctx.stored = None
        # 0 in ignored rows, not 0 x upstream: with no tokens the caller may have divided by 0
        factors = factors.times(upstream, counted_N)
        grad_NV = ctx.rows.gradient_(made, picked_N1, sums, factors)
        return grad_NV.to(ctx.dtype), None, None, None


class LabelSmoothing(nn.Module):
    """Cross-entropy against a smoothed target, summed over the rows whose target is not `ignore_index`.

    Args:
        label_smoothing: eps in [0, 1), the probability taken from the target (Szegedy et al. 2016, section 7).
        smoothing_convention: which classes get eps. Three conventions are in use and give different numbers, so
            there is no default:
            "torch": eps/V to all V classes, the target included (the formula of Szegedy et al.);
            "fairseq": eps/(V-1) to all classes but the target (fairseq's label_smoothed_cross_entropy);
            "harvard": eps/(V-2) to all classes but the target and the padding class `ignore_index`, as KL
            divergence: the entropy of the smoothed target is subtracted, so a perfect prediction costs 0
            (The Annotated Transformer, 2018).
        ignore_index: the target whose rows are ignored; with "harvard" it must be a class, the padding.

    Logits (rows, V) may be unnormalised or log-probabilities; targets (rows,) are int64. The sum is in nats, in float32
    or wider.

    Raises:
        TypeError: logits that are not floating; targets that are not class indices; an `ignore_index` that is not an
            int.
        ValueError: label_smoothing outside [0, 1); an unknown convention; too few classes for the convention;
            a "harvard" padding class that is not a class; logits and targets of shapes other than the above.
        IndexError: on the CPU, a target outside [0, V) that is not ignored, with value and position.

    Example:
        >>> logits, target = torch.randn(4, 10), torch.tensor([3, 0, 1, 7])
        >>> criterion = seqpar.LabelSmoothing(0.1, "torch", ignore_index=0)
        >>> plain = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0, reduction="sum")
        >>> torch.allclose(criterion(logits, target), plain(logits, target))
        True
    """

    def __init__(self, label_smoothing: float, smoothing_convention: Convention, *, ignore_index: int = -100) -> None:
        super().__init__()
        check_smoothing(label_smoothing, smoothing_convention)
        self.label_smoothing = float(label_smoothing)
        self.smoothing_convention: Convention = smoothing_convention
        self.ignore_index = _whole(ignore_index, "ignore_index")

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the summed loss, a tensor without dimensions."""
        return self.token_loss(logits, target).total

    def token_loss(self, logits: Tensor, target: Tensor) -> TokenLoss:
        """Return the summed loss with its counts, from one pass over the logits."""
        check_floating(logits, "logits")
        check_integer_target(target, beside=logits)
        fits = logits.dim() == 2 and target.shape == logits.shape[:1]
        wanted = "(rows, V) with (rows,), as logits.flatten(0, -2) and target.flatten()"
        check_shapes(fits, wanted, logits=logits, target=target)
        check_one_device(logits=logits, target=target)
        # Before the comparison with ignore_index, which a narrow dtype would wrap around
        target = target.long()
        counted = target != self.ignore_index
        # On other devices this would wait in every chunk, and the engine has already checked the whole batch
        if may_read(target):
            check_range(target, counted, logits.size(1))
        q = soft_target(self.label_smoothing, self.smoothing_convention, self.ignore_index, logits.size(-1))
        # An ignored target need not be a class; class 0 stands in for it
        return TokenLoss(*_SmoothedCrossEntropy.apply(logits, target.where(counted, 0), counted, q))

    def extra_repr(self) -> str:
        """Return the settings for `print(module)`."""
        return (
            f"label_smoothing={self.label_smoothing}, smoothing_convention={self.smoothing_convention!r}, "
            f"ignore_index={self.ignore_index}"
        )


class CrossEntropy(LabelSmoothing):
    """Cross-entropy, summed over the rows whose target is not `ignore_index`.

    Example:
        >>> logits, target = torch.randn(4, 10), torch.tensor([3, 0, 1, 7])
        >>> loss = seqpar.CrossEntropy(ignore_index=0)(logits, target)
        >>> torch.allclose(loss, F.cross_entropy(logits, target, ignore_index=0, reduction="sum"))
        True
    """

    def __init__(self, *, ignore_index: int = -100) -> None:
        super().__init__(0.0, "torch", ignore_index=ignore_index)

    def extra_repr(self) -> str:
        """Return the settings for `print(module)`."""
        return f"ignore_index={self.ignore_index}"

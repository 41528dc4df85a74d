"""Cross-entropy and label smoothing as summed losses, and the contract a criterion keeps.

The contract, for any criterion given to the engine:

- it is a module, called with `(logits, target)` of shapes `(rows, V)` and `(rows,)`;
- it returns the SUM over rows, one number (a mean cannot be added up over chunks and devices);
- a target it ignores stands in its attribute `ignore_index` or `padding_idx`, so that those rows need no logits;
- if it has `token_loss(logits, target) -> TokenLoss`, `nll` and `correct` are taken from there.

`torch.nn.CrossEntropyLoss(reduction="sum")`, the 2018 `LabelSmoothing` and the two classes here all keep it.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.token_loss import TokenLoss, wide

Convention = Literal["torch", "fairseq", "harvard"]


def ignored_target(criterion: nn.Module) -> int | None:
    """The target value a criterion ignores: its `ignore_index`, else its `padding_idx`, else None."""
    for name in ("ignore_index", "padding_idx"):
        value = getattr(criterion, name, None)
        if isinstance(value, int):
            return value
    return None


class _Smoothed(NamedTuple):
    """A smoothed target distribution q: `gold` more on the target, `each` on every class but `excluded`."""

    gold: float
    each: float
    excluded: int | None
    constant: float
    """Added per row: minus the entropy of q in the KL form, else 0."""


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The sum over kept rows of -sum_k q_k log p_k + constant. p is the one V-sized tensor it makes.

    The gradient p - q is made in p's own place, so there is one backward.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, kept_N: Tensor, q: _Smoothed) -> tuple[Tensor, ...]:
        """Returns the sums of loss, tokens, nll and correct predictions."""
        p_NV = torch.softmax(logits_NV, -1, dtype=wide(logits_NV.dtype))
        p_best_N, best_N = p_NV.max(-1)
        # log sum exp(z) = z_k - log p_k for any k; the largest p is at least 1/V, so its log is exact
        gold_N = _take(logits_NV, target_N).to(p_NV.dtype)
        lse_N = _take(logits_NV, best_N).to(p_NV.dtype) - p_best_N.log()
        nll_N = lse_N - gold_N
        loss_N = nll_N if q.each == 0 else _smoothed(logits_NV, lse_N, gold_N, q)
        zero = nll_N.new_zeros(())
        counts = kept_N.sum(), nll_N.where(kept_N, zero).sum(), ((best_N == target_N) & kept_N).sum()
        ctx.mark_non_differentiable(*counts)
        ctx.stored = (p_NV, target_N, kept_N)
        ctx.q, ctx.dtype = q, logits_NV.dtype
        return loss_N.where(kept_N, zero).sum(), *counts

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        """upstream x (p - q) in the kept rows."""
        if ctx.stored is None:
            raise RuntimeError(
                "backward went through the criterion a second time, and its gradient took the place of what it had "
                "stored; call the criterion again, or add the losses up and call backward once"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the criterion was asked for a second derivative (create_graph=True), and it keeps only the first; "
                "use torch.nn.functional.cross_entropy where you need one"
            )
        (grad_NV, target_N, kept_N), q = ctx.stored, ctx.q
        ctx.stored = None
        if q.each:
            grad_NV -= q.each
            if q.excluded is not None:
                grad_NV[:, q.excluded] += q.each
        gold_N1 = grad_NV.new_full((1, 1), -q.gold).expand(len(target_N), 1)
        grad_NV.scatter_add_(1, target_N.unsqueeze(1), gold_N1)
        # Elsewhere than on the CPU, looking whether the factors are all 1 would wait for the device
        if upstream.device.type != "cpu" or upstream != 1 or not kept_N.all():
            grad_NV *= (upstream * kept_N).unsqueeze(1)
        return grad_NV.to(ctx.dtype), None, None, None


def _take(values_NV: Tensor, index_N: Tensor) -> Tensor:
    return values_NV.gather(1, index_N.unsqueeze(1)).squeeze(1)


def _smoothed(logits_NV: Tensor, lse_N: Tensor, gold_N: Tensor, q: _Smoothed) -> Tensor:
    sum_N = logits_NV.sum(-1, dtype=lse_N.dtype)
    if q.excluded is not None:
        sum_N = sum_N - logits_NV[:, q.excluded]
    return lse_N - q.gold * gold_N - q.each * sum_N + q.constant  # q sums to 1, so lse has the factor 1


class LabelSmoothing(nn.Module):
    """Cross-entropy against a smoothed target, summed over the rows whose target is not `ignore_index`.

    Plain equivalent of `convention="torch"`:
    `F.cross_entropy(logits, target, label_smoothing=smoothing, ignore_index=ignore_index, reduction="sum")`.

    Args:
        smoothing: eps in [0, 1), the probability taken from the target (Szegedy et al. 2016, section 7).
        convention: how eps is shared out; three are in use and give different numbers, so it is always spelled:
            "torch": eps/V to all V classes, the target included (the formula of Szegedy et al.);
            "fairseq": eps/(V-1) to all classes but the target (fairseq's label_smoothed_cross_entropy);
            "harvard": eps/(V-2) to all classes but the target and the padding class `ignore_index`, as KL
            divergence: the entropy of the smoothed target is subtracted, so a perfect prediction costs 0
            (The Annotated Transformer, 2018).
        ignore_index: the target that counts for nothing; with "harvard" it is a class, the padding.

    Logits (rows, V) may be unnormalised or log-probabilities; targets (rows,) are int64. The sum is in nats, kept in
    float32 or wider.

    Raises:
        ValueError: smoothing outside [0, 1); an unknown convention; too few classes to share eps out;
            a "harvard" padding class that is not a class.
    """

    def __init__(self, smoothing: float, convention: Convention, *, ignore_index: int = -100) -> None:
        super().__init__()
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing is {smoothing}; it must be at least 0 and below 1")
        if convention not in ("torch", "fairseq", "harvard"):
            raise ValueError(f"convention is {convention!r}; it must be 'torch', 'fairseq' or 'harvard'")
        self.smoothing = float(smoothing)
        self.convention: Convention = convention
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The summed loss, a tensor without dimensions."""
        return self.token_loss(logits, target).total

    def token_loss(self, logits: Tensor, target: Tensor) -> TokenLoss:
        """The summed loss with its counts, from the same pass."""
        q = self._distribution(logits.size(-1))
        kept = target != self.ignore_index
        return TokenLoss(*_SmoothedCrossEntropy.apply(logits, target.where(kept, 0), kept, q))

    def _distribution(self, vocab_size: int) -> _Smoothed:
        eps, V = self.smoothing, vocab_size
        if self.convention == "torch":
            return _Smoothed(1 - eps, eps / V, None, 0.0)
        others = V - 1 if self.convention == "fairseq" else V - 2
        if self.convention == "harvard" and not 0 <= self.ignore_index < V:
            raise ValueError(
                f"ignore_index is {self.ignore_index}; the 'harvard' convention leaves the padding class out, so it "
                f"must be one of the {V} classes"
            )
        if others < 1 and eps:
            raise ValueError(f"{V} classes are too few to share smoothing out by the {self.convention!r} convention")
        each = eps / others if eps else 0.0
        if self.convention == "fairseq":
            return _Smoothed(1 - eps - each, each, None, 0.0)
        entropy = -(1 - eps) * math.log(1 - eps) - (eps * math.log(each) if eps else 0.0)
        return _Smoothed(1 - eps - each, each, self.ignore_index, -entropy)

    def extra_repr(self) -> str:
        """What `print(module)` adds."""
        return f"smoothing={self.smoothing}, convention={self.convention!r}, ignore_index={self.ignore_index}"


class CrossEntropy(LabelSmoothing):
    """Cross-entropy, summed over the rows whose target is not `ignore_index`.

    Plain equivalent: `F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")`.
    """

    def __init__(self, *, ignore_index: int = -100) -> None:
        super().__init__(0.0, "torch", ignore_index=ignore_index)

    def extra_repr(self) -> str:
        """What `print(module)` adds."""
        return f"ignore_index={self.ignore_index}"

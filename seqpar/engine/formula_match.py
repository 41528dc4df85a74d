"""Which generators and criteria have their gradient by formula."""

from __future__ import annotations

from typing import Any

from torch import nn

from seqpar.losses.criteria import CrossEntropy, LabelSmoothing
from seqpar.losses.softmax_loss import Convention, SoftTarget, soft_target

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_no_formula(generator: nn.Module, criterion: nn.Module) -> str:
    """Why the gradient of this pair is left to autograd; empty where the formula speaks of it.

    It does by exact type: an `nn.Linear` (or a subclass with its `forward`), alone or before `nn.LogSoftmax(-1)`, and
    `seqpar.CrossEntropy`, `seqpar.LabelSmoothing` or `nn.CrossEntropyLoss`. A hook would not be called, so none may be
    there.
    """
    linear = linear_of(generator)
    if type(linear).forward is not nn.Linear.forward or "weight" not in linear._parameters:
        return f"the generator is a {type(generator).__name__}, not nn.Linear"
    if type(criterion) not in (CrossEntropy, LabelSmoothing, nn.CrossEntropyLoss):
        return f"the criterion is a {type(criterion).__name__}, whose formula is not known"
    for part in (*generator.modules(), *criterion.modules()):
        if any(getattr(part, hooks) for hooks in HOOKS):
            return f"{type(part).__name__} has hooks"
    return ""


def linear_of(generator: Any) -> Any:
    """The projection inside: of a generator, or of its replica."""
    if type(generator) is nn.Sequential and len(generator) == 2:
        last: Any = generator[1]
        if type(last) is nn.LogSoftmax and last.dim == -1:
            return generator[0]
    return generator


def settings_of(criterion: Any) -> tuple[int, float, Convention]:
    """Such a criterion's ignored target, share of smoothing and convention."""
    if isinstance(criterion, LabelSmoothing):
        return criterion.ignore_index, criterion.smoothing, criterion.convention
    return criterion.ignore_index, criterion.label_smoothing, "torch"


def check_class_weight(criterion: nn.Module, vocab_size: int) -> None:
    """Raises ValueError where the weights of `nn.CrossEntropyLoss` are not those of so many classes."""
    weight = criterion.weight if type(criterion) is nn.CrossEntropyLoss else None
    if weight is not None and weight.shape != (vocab_size,):
        raise ValueError(
            f"the criterion's weight has shape {tuple(weight.shape)} and the generator makes {vocab_size} scores; it "
            f"must be ({vocab_size},), one for each class"
        )


def soft_target_of(criterion: Any, vocab_size: int) -> SoftTarget:
    """What such a criterion holds the logits against."""
    ignored, share, convention = settings_of(criterion)
    return soft_target(share, convention, ignored, vocab_size)._replace(weight_V=getattr(criterion, "weight", None))

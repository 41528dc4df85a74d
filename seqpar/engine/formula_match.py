"""Find out which generators and criteria have a gradient in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.core.checks import check_shapes, has_own_functions, is_dtensor, kind_of
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.engine.module_calls import extra_in_call
from seqpar.engine.shards import Shard
from seqpar.linear.cross_entropy import linear_cross_entropy
from seqpar.linear.inputs import whole_soft_target
from seqpar.rows.conventions import Convention
from seqpar.rows.criteria import CrossEntropy, LabelSmoothing
from seqpar.rows.smoothing import SoftTarget


class FormulaMatch(NamedTuple):
    """A pair with a closed form: the projection, and the settings of the criterion."""

    projection: nn.Linear
    """The generator itself, or the linear layer before its log-softmax."""
    ignore_index: int
    label_smoothing: float
    smoothing_convention: Convention
    class_weight: Tensor | None

    @property
    def vocab_size(self) -> int:
        """Return the number of classes of the projection: its rows."""
        return int(self.projection.weight.size(0))

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return the projection's tensors that gradients flow into, in the order of `linear.projection.flatten`."""
        return self.projection.weight, self.projection.bias

    @property
    def soft_target(self) -> SoftTarget:
        """Return the target distribution of a row."""
        return whole_soft_target(self.label_smoothing, self.smoothing_convention, self.ignore_index, self.vocab_size)

    @property
    def options(self) -> tuple[object, ...]:
        """Return which options of a cross-entropy are used, without the smoothing's share, which may change."""
        smoothing = self.smoothing_convention if self.label_smoothing else None
        return smoothing, self.class_weight is None, self.ignore_index

    def of_replica(self, head: nn.ModuleDict) -> FormulaMatch:
        """Return the match with the tensors of a replica of the pair, or of the pair itself."""
        class_weight = getattr(head["criterion"], "weight", None)
        return self._replace(projection=_projection_of(head["generator"]), class_weight=class_weight)


class NoFormula(NamedTuple):
    """A pair whose gradient autograd computes."""

    reason: str


def match_formula(generator: nn.Module, criterion: nn.Module) -> FormulaMatch | NoFormula:
    """Return the closed form of a pair, or the reason why it has none.

    Types are compared exactly: an `nn.Linear` (or a subclass with its `forward`), alone or before `nn.LogSoftmax(-1)`,
    with `seqpar.CrossEntropy`, `seqpar.LabelSmoothing` or `nn.CrossEntropyLoss`. A closed form calls no hook and no
    forward set on an instance, so modules with either have none; nor have those whose weight is of a special class,
    which may multiply in its own way.
    """
    projection = _projection_of(generator)
    # A parametrised weight is not an entry of _parameters; its gradient needs autograd
    if type(projection).forward is not nn.Linear.forward or "weight" not in projection._parameters:
        return NoFormula(f"the generator is {kind_of(generator)}, not nn.Linear")
    for name, tensor in projection._parameters.items():
        if is_dtensor(tensor) or has_own_functions(tensor):
            return NoFormula(f"the generator's {name} is {kind_of(tensor)}, not a plain tensor")
    if type(projection).__call__ is not nn.Module.__call__:
        return NoFormula(f"{type(projection).__name__} has a __call__ of its own")
    # Subclasses may compute anything, so the type must be exactly one of these
    if type(criterion) not in (CrossEntropy, LabelSmoothing, nn.CrossEntropyLoss):
        return NoFormula(f"the criterion is {kind_of(criterion)}, whose formula is not known")
    if extra := extra_in_call(generator) or extra_in_call(criterion):
        return NoFormula(extra)
    # CrossEntropy is a LabelSmoothing with eps = 0
    if isinstance(criterion, LabelSmoothing):
        convention = criterion.smoothing_convention
        return FormulaMatch(projection, criterion.ignore_index, criterion.label_smoothing, convention, None)
    assert isinstance(criterion, nn.CrossEntropyLoss)
    # torch allows 1, the uniform distribution; the closed forms take eps in [0, 1)
    if criterion.label_smoothing == 1:
        return NoFormula("the criterion's label_smoothing is 1")
    return FormulaMatch(projection, criterion.ignore_index, criterion.label_smoothing, "torch", criterion.weight)


def match_inputs(head: nn.ModuleDict, shard: Shard) -> FormulaMatch | NoFormula:
    """Return the closed form for these inputs, or the reason why they have none."""
    if names := [*shard.per_token, *shard.of_criterion]:
        return NoFormula(f"the call has {', '.join(names)} for each token")
    match = match_formula(head["generator"], head["criterion"])
    if isinstance(match, NoFormula) or shard.hidden.dtype == match.projection.weight.dtype:
        return match
    # Only autocast casts both to one dtype; without it the generator's own error follows
    if torch.is_autocast_enabled(shard.hidden.device.type):
        return match
    return NoFormula("hidden and weight differ in dtype")


REPLACED = NoFormula("a call of the pair gives another loss than the formula: something that it calls was replaced")


def is_projection_replaced() -> bool:
    """Return whether something that a call of an `nn.Linear` runs is not torch's own."""
    methods = (nn.Linear.forward, nn.Module.__call__)
    return F.linear is not torch._C._nn.linear or any(m.__module__.partition(".")[0] != "torch" for m in methods)


def what_formulas_replace(criterion: nn.Module) -> tuple[object, ...]:
    """Return what a pair with a closed form would call, for comparison with another time: any of it may be replaced."""
    return (
        F.cross_entropy,
        F.linear,
        F.log_softmax,
        nn.Linear.forward,
        nn.Module.__call__,
        torch._C._len_torch_function_stack(),
        nn.LogSoftmax.forward,
        nn.CrossEntropyLoss.forward,
        type(criterion).forward,
        getattr(type(criterion), "token_loss", None),
    )


Asked = tuple[tuple[object, ...], tuple[object, ...], tuple[bool, ...]]
"""How a pair was compared with its closed form: what it called, with what (hidden's dtype and number of dimensions,
whether under autocast, and the criterion's options), and which gradients were compared, hidden's first."""


def was_replaced(criterion: nn.Module, formulas: Mapping[Asked, bool]) -> bool:
    """Return whether a pair, as it would be called now, has given a loss that is not its closed form's."""
    called = what_formulas_replace(criterion)
    return any(earlier == called and not same for (earlier, *_), same in formulas.items())


def match_split(head: nn.ModuleDict, per_token: Iterable[str] = ()) -> FormulaMatch:
    """Return the closed form of a pair whose vocabulary is split over ranks.

    Raises:
        TypeError: the pair has none, or the call has further tensors for each token.
    """
    match = match_formula(head["generator"], head["criterion"])
    if isinstance(match, NoFormula):
        raise TypeError(f"vocab is given, and a vocabulary can be split only by formula: {match.reason}")
    if names := list(per_token):
        raise TypeError(
            f"vocab is given, and {', '.join(names)} for each token, which no closed form takes; leave one out, or "
            "call engine.scored_loss"
        )
    return match


def linear_loss(
    match: FormulaMatch,
    hidden: Any,
    target: Any,
    loss_scale: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
    vocab: VocabShard | None = None,
) -> TokenLoss:
    """Return the loss of a pair by `linear_cross_entropy`: under `torch.compile`, of a split vocabulary, of a probe."""
    return linear_cross_entropy(
        hidden,
        match.projection.weight,
        target,
        bias=match.projection.bias,
        ignore_index=match.ignore_index,
        label_smoothing=match.label_smoothing,
        smoothing_convention=match.smoothing_convention,
        class_weight=match.class_weight,
        loss_scale=loss_scale,
        chunk_tokens=chunk_tokens,
        vocab=vocab,
    )


def check_class_weight(criterion: nn.Module, vocab_size: int) -> None:
    """Raise ValueError unless an `nn.CrossEntropyLoss` has no class weights, or as many as classes and all constant."""
    weight = criterion.weight if type(criterion) is nn.CrossEntropyLoss else None
    if weight is None:
        return
    wanted = f"({vocab_size},), one for each score that the generator makes"
    check_shapes(weight.shape == (vocab_size,), wanted, **{"the criterion's weight": weight})
    if weight.requires_grad:
        raise ValueError("the criterion's weight requires a gradient, which no cross-entropy gives it; detach it")


def _projection_of(generator: nn.Module) -> Any:
    """Return the generator without a final log-softmax, which changes neither the loss nor its gradient."""
    if type(generator) is nn.Sequential and len(generator) == 2:
        last = generator[1]
        if type(last) is nn.LogSoftmax and last.dim == -1:
            return generator[0]
    return generator

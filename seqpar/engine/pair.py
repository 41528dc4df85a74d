"""Call the generator and the criterion on some rows, with the per-token tensors that each names, and check the results.

Shape suffixes: K rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from seqpar.core.checks import check_type, kind_of
from seqpar.core.device_facts import is_capturing
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.torch_private import is_fsdp_unit
from seqpar.engine.module_calls import extra_in_call
from seqpar.rows.criteria import ignored_target

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


def takers_of(head: nn.ModuleDict, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return which keywords of a call the generator gets, and which the criterion gets.

    Each gets those that its `forward` names (for a criterion, its `token_loss` if that is called). What neither names
    goes to the one that takes any keyword, the generator first.

    Raises:
        TypeError: neither takes one of them.
    """
    if not names:
        return [], []
    generator, criterion = head["generator"], head["criterion"]
    called = criterion.token_loss if counts_itself(criterion) else criterion.forward
    # The class's forward, because `inside_unit` has replaced that of an FSDP2 unit. Keywords come after one argument
    # (hidden) in a generator, and after two (logits and target) in a criterion
    of_class = type(generator).forward.__get__(generator)
    named, any_in_generator = _keywords(of_class if is_fsdp_unit(generator) else generator.forward, 1)
    named_by_criterion, any_in_criterion = _keywords(called, 2)
    of_generator, of_criterion = [], []
    for name in names:
        if name in named_by_criterion:
            of_criterion.append(name)
        if name in named or (any_in_generator and name not in named_by_criterion):
            of_generator.append(name)
        elif name not in named_by_criterion and any_in_criterion:
            of_criterion.append(name)
        elif name not in named_by_criterion:
            raise TypeError(
                f"neither the generator ({type(generator).__name__}) nor the criterion ({type(criterion).__name__}) "
                f"takes {name}: name it in the forward that uses it, as forward(self, scores, target, {name}); for a "
                f"weight also engine.scored_loss(hidden, target, lambda s, {name}: -{name} * s.log_prob, {name}={name})"
            )
    return of_generator, of_criterion


_known_keywords: WeakKeyDictionary[Any, tuple[frozenset[str], bool]] = WeakKeyDictionary()


def _keywords(function: Any, after: int) -> tuple[frozenset[str], bool]:
    """Return the keywords that a method names after its first arguments, and whether it takes any other."""
    code = getattr(function, "__func__", function)
    with contextlib.suppress(KeyError, TypeError):
        return _known_keywords[code]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        # Nothing is known about compiled code
        return frozenset(), True
    takes = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    found = (
        frozenset(p.name for i, p in enumerate(parameters) if p.kind in takes and i >= after),
        any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
    )
    with contextlib.suppress(TypeError):
        _known_keywords[code] = found
    return found


def _note_call(error: Exception, role: str, module: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Add a note to an error of the caller's module that says what it was called with."""
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items())
    error.add_note(
        f"raised in the {role} ({type(module).__name__}), called with {shapes}: "
        "the engine calls it on a chunk of the batch at a time, without padding"
    )


def project(generator: nn.Module, names: Sequence[str], shape: tuple[int, ...], rows: Sequence[Tensor]) -> Tensor:
    """Return the generator's logits (K, V) of some rows, given to it in the leading shape `shape`.

    Raises:
        ValueError: the generator does not return a (..., V) tensor of a floating dtype.
    """
    if len(shape) > 1:
        # (K, ...) -> (*shape, ...), and back to (K, V) at the end
        rows = [t.reshape(*shape, *t.shape[1:]) for t in rows]
    hidden, *extra = rows
    keywords = dict(zip(names, extra, strict=True))
    try:
        logits = generator(hidden, **keywords)
    except Exception as error:
        _note_call(error, "generator", generator, {"hidden": hidden, **keywords})
        raise
    if isinstance(logits, Tensor):
        if logits.shape[:-1] == hidden.shape[:-1] and logits.is_floating_point():
            return logits.flatten(0, -2)
        returned = f"shape {tuple(logits.shape)} in {logits.dtype}"
    else:
        returned = kind_of(logits)
    given = ", ".join(f"{name} {tuple(t.shape)}" for name, t in {"hidden": hidden, **keywords}.items())
    raise ValueError(
        f"the generator returned {returned} for {given}; it must return (..., V) scores in a floating dtype"
    )


def counts_itself(criterion: nn.Module) -> bool:
    """Return whether `token_loss` computes everything that a call of the criterion does, and counts as well.

    It does not if a subclass has changed only `forward`, or if a hook or a forward set on the instance may change the
    result.
    """
    if not hasattr(criterion, "token_loss") or extra_in_call(criterion):
        return False
    for owner in type(criterion).__mro__:
        if "token_loss" in vars(owner):
            return True
        if "forward" in vars(owner):
            return False
    return True  # an attribute of the instance


def criterion_loss(
    criterion: nn.Module, logits: Tensor, target: Tensor, per_token: Mapping[str, Tensor] = NOTHING
) -> TokenLoss:
    """Return the criterion's loss of logits (K, V) and targets (K,), with the counts that it computes.

    Args:
        per_token: its keywords, with one row for each of the K.

    Raises:
        TypeError: it does not return a tensor of real numbers, or its `token_loss` does not return a `TokenLoss`.
    """
    counts = counts_itself(criterion)
    try:
        if counts:
            loss = criterion.token_loss(logits, target, **per_token)  # type: ignore[operator]
        else:
            total = criterion(logits, target, **per_token)
    except Exception as error:
        _note_call(error, "criterion", criterion, {"scores": logits, "target": target, **per_token})
        raise
    if counts:
        return _check_token_loss(loss)
    check_type(total, "the criterion", Tensor, "a tensor, the summed loss", verb="returned")
    if total.is_complex():
        raise TypeError(f"the criterion returned {total.dtype}; it must return one real number, the sum")
    # Chunks contain ignored rows only while a CUDA graph is captured
    ignored = None
    if is_capturing(target.device):
        ignored = ignored_target(criterion)
    if ignored is None:
        return TokenLoss(total, torch.full((), len(target), device=target.device))
    return TokenLoss(total, (target != ignored).sum())


def _check_token_loss(returned: object) -> TokenLoss:
    """Return what a criterion's `token_loss` returned; raise TypeError unless it is a TokenLoss of tensors."""
    loss = check_type(returned, "the criterion's token_loss", TokenLoss, "a TokenLoss", verb="returned")
    for name, value in loss._asdict().items():
        if not isinstance(value, Tensor) and (value is not None or name in ("total", "tokens")):
            returned_kind = f"returned a TokenLoss whose {name} is {kind_of(value)}, not a tensor"
            raise TypeError(f"the criterion's token_loss {returned_kind}")
    return loss

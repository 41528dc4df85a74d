"""Call generator and criterion on a few rows, forward and backward, without leaving a trace.

The caller's modules do not change: structural copies with parameters and buffers of their own are called, and what
these change in other attributes, and in random states, is restored.

Shape suffixes: K probed rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from copy import copy as shallow_copy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from seqpar.core.checks import refuse_reentrant
from seqpar.core.effects import Held
from seqpar.core.graphs import graph_of_its_own, has_custom_nodes, version_of
from seqpar.core.row_independence import Precision, largest_difference, precision_of
from seqpar.engine.pair import criterion_loss, project
from seqpar.engine.shards import Shard, rows_of
from seqpar.multi_device.replicas import bind

Module = TypeVar("Module", bound=nn.Module)

PROBE_ROWS = 4
"""Two sequences of two time steps."""


class Outcome(NamedTuple):
    """What a call of the pair gives."""

    total: Tensor
    gradients: dict[str, Tensor]
    """The gradients of the total times the factor, by name: of hidden and the per-token tensors, and, in short, of the
    parameters (`in_short`)."""
    precision: Precision
    written: list[str]
    """The tensors that backward has written into, besides its result."""

    def difference(self, other: Outcome) -> float:
        """Return the largest relative difference of loss and gradients; inf if the other call has other gradients."""
        if self.gradients.keys() != other.gradients.keys():
            return math.inf
        pairs = [(self.total, other.total), *((grad, other.gradients[name]) for name, grad in self.gradients.items())]
        return max(largest_difference(own, theirs) for own, theirs in pairs)

    def is_same(self, other: Outcome) -> bool:
        """Return whether another call gave the same loss and gradients, up to rounding."""
        return self.difference(other) <= self.precision.rounding


class Trial:
    """Some rows of a shard, on which copies of the pair are called.

    Args:
        heads: a replica of generator and criterion, and the original.
        index_K: which rows.
        wanted: whether gradients are wanted.
    """

    def __init__(self, heads: tuple[nn.ModuleDict, nn.ModuleDict], shard: Shard, index_K: Tensor, wanted: bool) -> None:
        # A method that was set on an instance, as torchmetrics does, changes the original
        self.head, self.original = heads
        self.held = Held(self.original)
        self.names = tuple(shard.per_token)
        rows = [t.detach()[index_K] for t in rows_of(shard)]
        self.rows = rows[: 1 + len(self.names)]
        self.of_criterion = dict(zip(shard.of_criterion, rows[1 + len(self.names) :], strict=True))
        self.target_K = shard.target.flatten()[index_K]
        self.target_shape = shard.target.shape
        # The generator expects this many leading dimensions
        self.lead = shard.target.dim()
        self.wanted = wanted
        # A gate that is 0 has no effect yet, but may have one after the first step of training
        with self.keep_state():
            self.gates = {id(p): _open(p) for p in self.head.parameters() if p.is_floating_point() and not p.any()}

    def copy(self, moved: Mapping[int, Tensor] | None = None) -> nn.ModuleDict:
        """Return a structural copy with its own buffers, as before any call, and with `moved` weights or open gates."""
        copies = {id(b): b.clone() for b in self.head.buffers()}
        for p in self.head.parameters():
            own = (moved or self.gates).get(id(p), p).detach().requires_grad_(self.wanted and p.requires_grad)
            # Attributes such as main_grad, into which a backward may write
            vars(own).update({k: v.clone() for k, v in vars(p).items() if isinstance(v, Tensor)})
            copies[id(p)] = own
        return bind(self.head, copies)

    def with_other_masks(self) -> Trial | None:
        """Return the trial with a different number in each mask that is the same in every row; None if there is none.

        A mask without padding, or a weight of 1, shows nothing, and other numbers in a later call start no new probe.
        Integers of 0 are left alone, because they may be the number of a class.
        """
        other = shallow_copy(self)
        other.rows = [self.rows[0], *map(_masked, self.rows[1:])]
        other.of_criterion = {name: _masked(t) for name, t in self.of_criterion.items()}
        pairs = zip((*other.rows, *other.of_criterion.values()), (*self.rows, *self.of_criterion.values()), strict=True)
        return None if all(mine is theirs for mine, theirs in pairs) else other

    def keep_state(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that restores what calls change; each block draws the same random numbers."""
        return self.held.keep_state(self.target_K.device)

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the leading shape of one sequence of `rows` time steps."""
        return (*(1,) * (self.lead - 1), rows)

    def scores(self, copy: Any, shape: tuple[int, ...], rows: Sequence[Tensor]) -> Tensor:
        """Return the scores (K, V) of some rows in a leading shape."""
        return project(copy["generator"], self.names, shape, rows)

    def _leaf(self, rows: Tensor) -> Tensor:
        """Return rows that require a gradient, if one is wanted and they can have one."""
        return rows.detach().requires_grad_(self.wanted and rows.is_floating_point())

    def outcome(self, copy: nn.ModuleDict, some: slice = slice(None), factor: float = 1.0) -> Outcome:
        """Return what `call` gives, and restore what it changes; always with the same random numbers."""
        with self.keep_state():
            return self.call(copy, some, factor)

    def call(self, copy: nn.ModuleDict, some: slice = slice(None), factor: float = 1.0) -> Outcome:
        """Return what the copy gives for some rows, with the gradients of the loss times `factor`."""
        columns = {"hidden": self.rows[0], **dict(zip(self.names, self.rows[1:], strict=True))}
        given = {name: self._leaf(t[some]) for name, t in columns.items()}
        of_criterion = {name: self._leaf(t[some]) for name, t in self.of_criterion.items()}
        with torch.set_grad_enabled(self.wanted), graph_of_its_own():
            # Copies, because a generator may change its input in place, and autograd forbids that for a leaf
            own = [t.clone() if t.requires_grad else t for t in given.values()]
            scores = self.scores(copy, self.shape(len(own[0])), own)
            total = criterion_loss(copy["criterion"], scores, self.target_K[some], of_criterion).total.sum()
            precision = precision_of(total, torch.bfloat16)
            if not total.requires_grad:
                return Outcome(total.detach(), {}, precision, [])
            refuse_reentrant(total)
            params = dict(copy.named_parameters())
            named = {**of_criterion, **given, **params}
            wanted = {name: t for name, t in named.items() if t.requires_grad}
            before = _write(params, has_custom_nodes(total))
            # Not as `grad_outputs`, for which torch imports sympy: a third of a second in a program's first call
            scaled = total if factor == 1 else total * factor
            grads = torch.autograd.grad(scaled, list(wanted.values()), allow_unused=True)
            found = dict(zip(wanted, grads, strict=True))
            del grads
        after = _write(params, False)
        written = [name for name, version in before.items() if after.get(name) != version]
        written += [name for name in after if name not in before]
        gradients = {}
        for name in wanted:
            if (grad := found.pop(name)) is not None:
                gradients[name] = in_short(grad) if name in params else grad
        return Outcome(total.detach(), gradients, precision, written)


def _masked(rows: Tensor) -> Tensor:
    """Return a mask that is all 1, False or 0.0 with a different number in its second row; anything else as it is."""
    may_be_0 = rows.dtype == torch.bool or rows.is_floating_point()
    if not rows.numel() or not ((rows == 1).all() or (may_be_0 and not rows.any())):
        return rows
    other = rows.clone()
    # Only the last position that the row attends to: if none were left, there would be no number to compare
    place = other[1].view(-1)[-1:]
    place.copy_(1 - place.long())
    return other


def _open(gate: Tensor) -> Tensor:
    """Return random numbers, as large as usual weights, in place of zeros."""
    width = max([1, *gate.shape[-1:]])
    return torch.rand_like(gate).add_(0.5).div_(width**0.5)


def in_short(grad: Tensor) -> Tensor:
    """Return one number for each row of a gradient, linear in it: several gradients of a projection take much memory.

    (V, D) -> (V,):  sum_d grad_vd r_d,  with r of length 1 and no two entries alike
    """
    if grad.is_sparse:
        grad = grad.to_dense()
    if grad.dim() < 2:
        return grad
    rows = grad.flatten(1)
    r = torch.arange(1, rows.size(1) + 1, dtype=torch.float32, device=rows.device).cos()
    short: Tensor = rows @ (r / r.norm()).to(rows)
    return short


def _write(params: Mapping[str, nn.Parameter], is_custom: bool) -> dict[str, tuple[int, int]]:
    """Return the tensors in attributes of parameters, each by its id and version.

    Args:
        is_custom: whether backward has code of the user's: then each parameter gets a gradient of zeros first, because
            that code may add to an existing gradient and return none.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, p in params.items():
        if is_custom and p.requires_grad:
            p.grad = torch.zeros_like(p)
        for attribute, value in {"grad": p.grad, **vars(p)}.items():
            if isinstance(value, Tensor):
                found[f"{name}.{attribute}"] = (id(value), version_of(value))
    return found


def in_float32(module: Module) -> Module:
    """Return a copy with parameters and buffers in float32 or wider; a tensor that is neither keeps its dtype."""
    tensors = [*module.parameters(), *module.buffers()]
    return bind(module, {id(t): widen(t).requires_grad_(t.requires_grad) for t in tensors})


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, in float32 or wider if it is a floating-point one."""
    tensor = tensor.detach()
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor

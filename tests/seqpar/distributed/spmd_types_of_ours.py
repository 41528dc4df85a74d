"""Say the types of seqpar's collectives and losses to the checker of `spmd_types` (github.com/meta-pytorch/spmd_types).

A training step runs under the checker on a fake group of any size. Its types say what a tensor is on one axis of a
mesh, and what its gradient will be: R is the same on every rank with a gradient still to be summed, I the same with one
that is complete, V differs between the ranks, P is to be summed.

| function | takes | returns |
|---|---|---|
| `copy_to_group` | I | R |
| `sum_from_group` | P | I |
| `join_from_group` | V | R |
| a loss, where the ranks have different tokens | hidden V, weight R | its sums P |
| a loss, where they have different classes (`vocab=`) | hidden I, weight V | its sums I |
| a loss, where they have the same of both | R and R, or I and I | R, or I |
| `token_scores` | as a loss | V, I, or R: a score belongs to one token |
| `accumulate_gradients` | losses P | R |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import spmd_types as spmd
from spmd_types import I, P, R, SpmdTypeError, V, rules
from torch import Tensor

from seqpar.core import chunked_gradient
from seqpar.core.stored_gradients import Gradients
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed import accumulate, collectives
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear import token_scores

OTHER_TOKENS, OTHER_CLASSES = (V, R), (R, V)
"""The types of (hidden, weight) at the node of a loss; with `vocab=` hidden has become R by `copy_to_group`."""
SAME = {(R, R): R, (I, I): I}
REMEDY = {
    (V, I): "each rank's gradient of it is that of its own tokens: copy_to_group(weight, group)",
    (I, V): "the ranks have other classes: pass vocab=VocabShard(...)",
}
"""What is wrong with the types of (hidden, weight), and what to do about it."""
SUM_OVER_RANKS = accumulate.sum_over_ranks
"""The untyped one."""


def apply_spmd_types() -> None:
    """Give seqpar's functions their types, for every later `spmd_types.checker.typecheck()`.

    A second call changes nothing. The inside of a loss is not checked: its node in autograd's graph has a type of its
    own, above.
    """
    nodes: dict[Any, Callable[..., Any]] = {
        collectives._CopyToGroup: _copied,
        collectives._SumFromGroup: _summed,
        collectives._JoinFromGroup: _joined,
        chunked_gradient.StoredGradient: _loss,
        token_scores._Scores: _scores,
    }
    for node, types in nodes.items():
        node.spmd_typecheck = staticmethod(types)
    accumulate.sum_over_ranks = _sum_over_ranks
    for unchecked in (chunked_gradient.sum_over_chunks, collectives.check_agreement, VocabShard.check):
        spmd.runtime.register_no_typecheck(unchecked)


def _copied(*, tensor: Tensor, group: Any) -> Any:
    return rules.convert(tensor, group, src=I, dst=R)


def _summed(*, tensor: Tensor, group: Any) -> Any:
    return rules.all_reduce(tensor, group, src=P, dst=I)


def _joined(output: Tensor, *, tensor: Tensor, group: Any) -> None:
    # Not `rules.all_gather`, which would stack the ranks' tensors: these are joined, and may have other sizes
    found = spmd.get_axis_local_type(tensor, group)
    if found is not V:
        raise SpmdTypeError(f"join_from_group got {found!r}; it joins slices that differ between the ranks, V")
    spmd.assert_type(output, {**spmd.get_local_type(tensor), spmd.normalize_axis(group): R})
    rules.ignore(tensor)


def _loss(outputs: Any, *, gradients: Gradients, loss: TokenLoss, leaves: Sequence[Tensor | None]) -> None:
    """Type the sums of a loss by its leaves: those with one row for each token come first."""
    count = len(gradients.per_token)
    rules.ignore(*(t for t in (*loss, *leaves) if t is not None))
    _stamp(outputs, leaves[:count], leaves[count:], P)


def _scores(outputs: Any, *, hidden_ND: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Type the scores of tokens by hidden states and weight."""
    given = [t for t in (hidden_ND, weight, bias) if t is not None]
    rules.ignore(*given)
    _stamp(outputs, given[:1], given[1:], V)


def _sum_over_ranks(loss: TokenLoss, group: Any) -> TokenLoss:
    """Return the sums over the group, R; raise SpmdTypeError unless they were still to be summed, P."""
    with spmd.no_typecheck():
        whole = SUM_OVER_RANKS(loss, group)
    if spmd.is_type_checking() and collectives.world_size(group) > 1:
        axis = spmd.normalize_axis(group)
        for own, summed in zip(loss, whole, strict=True):
            if own is not None and summed is not None:
                found = spmd.get_axis_local_type(own, axis)
                if found is not P:
                    raise SpmdTypeError(f"accumulate_gradients got losses that are {found!r} on axis {axis}; it sums P")
                spmd.assert_type(summed, {**spmd.get_local_type(own), axis: R})
    return whole


def _stamp(
    outputs: Sequence[Tensor | None], tokens: Sequence[Tensor | None], params: Sequence[Tensor | None], of_own: Any
) -> None:
    """Give every output its type; `of_own` is that of results from a rank's own tokens."""
    types = {axis: _type_on(axis, tokens, params, of_own) for axis in spmd.get_local_type(tokens[0])}
    for output in outputs:
        if output is not None:
            spmd.assert_type(output, types)


def _type_on(axis: Any, tokens: Sequence[Tensor | None], params: Sequence[Tensor | None], of_own: Any) -> Any:
    """Return the type of a loss on an axis; raise SpmdTypeError where its gradients would not be what the types say."""
    found = [_one_type(axis, tensors, what) for tensors, what in ((tokens, "hidden"), (params, "the weight"))]
    hidden, weight = found
    if weight is None or (hidden, weight) in SAME:
        return SAME.get((hidden, weight), of_own if hidden is V else hidden)
    if (hidden, weight) == OTHER_TOKENS:
        return of_own
    if (hidden, weight) == OTHER_CLASSES:
        return I
    why = REMEDY.get((hidden, weight), "both must be R, or both I, where the ranks have the same tokens and classes")
    raise SpmdTypeError(f"the loss has hidden {hidden!r} and a weight {weight!r} on axis {axis}: {why}")


def _one_type(axis: Any, tensors: Sequence[Tensor | None], what: str) -> Any:
    """Return the type that all of these tensors have on an axis; None without tensors."""
    types = {spmd.get_axis_local_type(t, axis) for t in tensors if t is not None}
    if len(types) > 1:
        raise SpmdTypeError(f"{what} and what belongs to it have the types {sorted(map(repr, types))} on axis {axis}")
    return next(iter(types), None)

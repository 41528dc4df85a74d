"""Compute any function's loss chunk by chunk, after asking on a few rows whether it treats each row alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from seqpar.core.checks import check_chunks, check_dense, check_function, check_loss_scale, check_shapes, check_type
from seqpar.core.chunked_gradient import (
    AutogradChunkLoss,
    Leaves,
    PerChunk,
    check_token_loss,
    differentiable_sum,
    leaf_copies,
    sum_over_chunks,
)
from seqpar.core.chunks import Chunk
from seqpar.core.device_facts import is_capturing, is_on_host
from seqpar.core.effects import keep_random_states
from seqpar.core.graphs import graph_of_its_own
from seqpar.core.row_independence import (
    CANCELLED,
    EIGHTH,
    Answer,
    OfRows,
    ask,
    ask_alone,
    change_in_company,
    difference,
    join_answers,
    largest_difference,
)
from seqpar.core.settings import settings_used_by
from seqpar.core.surroundings import (
    ONE_CHUNKS,
    Asked,
    Surroundings,
    ask_about_function,
    code_of,
    refuse_graphs_left,
    surroundings_of_function,
)
from seqpar.core.token_loss import TokenLoss


def chunked_gradient(
    per_chunk: PerChunk,
    chunks: Sequence[Chunk],
    per_token: Sequence[Tensor],
    params: Sequence[Tensor],
    empty: TokenLoss,
    loss_scale: float | Tensor = 1.0,
) -> TokenLoss:
    """Return the sum of `per_chunk` over the chunks, with its gradient, while one chunk's logits exist at a time.

    Plain equivalent: `sum((per_chunk(params, [t[c] for t in per_token], c) for c in chunks), start=empty)`, whose
    graph would hold every chunk's logits. Here each chunk's gradient is taken immediately, by `torch.autograd.grad`;
    nothing is written to `.grad` and no `.backward()` is called. The caller's one backward multiplies the stored
    gradients by the upstream factor and returns them to autograd as the gradients of `per_token` and `params`.

    Args:
        per_chunk: must compute only from its arguments: a pure function of `params` and the rows.
        chunks: the rows of each chunk, as slices or int64 indices. No row may be in two chunks; a row in no chunk has
            no loss, and its gradient is 0.
        per_token: tensors whose first dimension is the rows, hidden first.
        params: all other tensors that need a gradient. Their gradients are summed in float32 or wider.
        empty: the loss of no tokens, to which the chunks' losses are added.
        loss_scale: the factor that `total` will be multiplied by before backward. Gradients are stored multiplied by
            it and divided by it in backward, so that small ones do not underflow in float16. A number other than 0, or
            a tensor of one element.

    Returns:
        the sums; `total` can be differentiated once. Without chunks all gradients are 0, whatever the factor (never
        nan from 0/0). Without gradients (`torch.no_grad`, or nothing requires any) only the sums are computed.

    Raises:
        TypeError: an argument of the wrong type: not a tensor, a chunk, a `TokenLoss` or a number.
        ValueError: chunks that overlap; per-token tensors with different numbers of rows; a `loss_scale` of 0, nan or
            inf.
        ValueError: on the first call, a `per_chunk` whose loss of a few rows is not the sum of each row's own, whose
            loss of a chunk is not the sum of those of its halves, or whose loss depends on what its calls change; one
            with a gradient that does not add up over rows, or is not linear in the factor of the loss; or one that
            leaves a tensor with a graph elsewhere.
        RuntimeError: in backward, if it is the second one for one of the tensors (the first has freed its gradient), if
            `create_graph=True`, or if no chunk's loss required a gradient (torch's own backward raises then, too).
        RuntimeError: `per_chunk` used a tensor that needs a gradient but was not passed to it, so that its gradient
            would be lost.

    Example:
        >>> hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
        >>> target = torch.randint(50, (6,))
        >>> def per_chunk(params, rows, chunk):
        ...     total = F.cross_entropy(rows[0] @ params[0].T, target[chunk], reduction="sum")
        ...     return seqpar.TokenLoss(total, torch.tensor(len(target[chunk])))
        >>> empty = seqpar.TokenLoss(torch.zeros(()), torch.tensor(0))
        >>> loss = seqpar.chunked_gradient(per_chunk, [slice(0, 4), slice(4, 6)], [hidden], [weight], empty)
        >>> loss.total.backward()
        >>> torch.allclose(loss.mean, F.cross_entropy(hidden @ weight.T, target))
        True
    """
    _check_arguments(per_chunk, per_token, params, empty)
    check_loss_scale(loss_scale)
    check_chunks(chunks, len(per_token[0]), per_token[0].device)
    _refuse_joined_rows(per_chunk, chunks, per_token, params)
    walk = partial(sum_over_chunks, AutogradChunkLoss(per_chunk, leaf_copies(params)))
    return differentiable_sum(walk, chunks, Leaves(per_token, params, empty), loss_scale)


def _check_arguments(per_chunk: object, per_token: Sequence[Tensor], params: Sequence[Tensor], empty: object) -> None:
    """Raise TypeError or ValueError, as `chunked_gradient` says."""
    check_function(per_chunk, "per_chunk", "a function that returns a TokenLoss")
    check_type(empty, "empty", TokenLoss, "a TokenLoss, such as TokenLoss.zero(...)")
    for name, tensors in (("per_token", per_token), ("params", params)):
        check_type(tensors, name, (list, tuple), "a list or tuple of tensors")
        for i, tensor in enumerate(tensors):
            check_dense(tensor, f"{name}[{i}]")
    if not per_token:
        raise ValueError("per_token is empty; its first tensor is hidden, one row per token")
    for i, tensor in enumerate(per_token):
        fits = tensor.dim() > 0 and len(tensor) == len(per_token[0])
        check_shapes(fits, "of one row for each token", **{f"per_token[{i}]": tensor, "per_token[0]": per_token[0]})


ASKED_ROWS = 4
"""How many rows `per_chunk` is tested on, together and alone."""

_asked = Asked()


def _refuse_joined_rows(
    per_chunk: PerChunk, chunks: Sequence[Chunk], per_token: Sequence[Tensor], params: Sequence[Tensor]
) -> None:
    """Raise ValueError if the loss of a few rows is not the sum of each row's own; each function is tested once.

    It is tested again with other settings around it, other dtypes or dimensions, and other tensors to differentiate.
    The loss of the first and of the last chunk must also be the sum of those of its halves, because a few rows may have
    no padding; and it must not depend on what calls change. What the calls of this test change is restored.
    """
    grad_enabled = torch.is_grad_enabled()
    tensors = tuple([(t.dim(), t.dtype, grad_enabled and t.requires_grad) for t in (*per_token, *params)])
    asked = (code_of(per_chunk), tensors, *settings_used_by(per_chunk))
    every = range(len(per_token[0]))
    # A slice may end after the last row
    sizes = [len(every[chunk] if isinstance(chunk, slice) else chunk) for chunk in chunks]
    some = [chunk for chunk, size in zip(chunks, sizes, strict=True) if size]
    several = [chunk for chunk, size in zip(chunks, sizes, strict=True) if size > 1]
    if _asked.changes(asked) is not None or not some or is_capturing(per_token[0].device):
        return
    around = surroundings_of_function("per_chunk", per_chunk)
    try:
        # If each row is a chunk of its own, there is nothing to join it with
        _ask_about_rows(per_chunk, (several or some)[0], several, per_token, params, around)
    finally:
        around.put_back(keeps_made=True)
    _asked.add(asked, changes=False)


def _ask_about_rows(
    per_chunk: PerChunk,
    first: Chunk,
    several: Sequence[Chunk],
    per_token: Sequence[Tensor],
    params: Sequence[Tensor],
    around: Surroundings,
) -> None:
    """Raise ValueError as `_refuse_joined_rows` says; the calls may change what is around the function.

    Args:
        first: a chunk that is not empty.
        several: the chunks of more than one row.
    """
    every_N = torch.arange(len(per_token[0]), device=per_token[0].device)
    ends = tuple(p.detach() for p in params)

    def total(given: Sequence[Tensor], is_slice: bool, ends: tuple[Tensor, ...] = ends) -> Tensor:
        *rows, row_K = given
        some: Chunk = row_K
        # `ask_alone` may pass a row twice, and that is not a slice
        if is_slice and int(row_K[-1]) - int(row_K[0]) == len(row_K) - 1:
            some = slice(int(row_K[0]), int(row_K[-1]) + 1)
        return check_token_loss(per_chunk(ends, tuple(rows), some)).total

    def of_all(rows: Sequence[Tensor], factor: float = 1.0) -> Answer:
        """Return the loss of rows of the first chunk, with gradients that include those of the parameters."""

        def times_factor(given: Sequence[Tensor]) -> Tensor:
            return factor * total(given[: len(rows)], isinstance(first, slice), tuple(given[len(rows) :]))

        return ask(times_factor, [*rows, *params])

    def call() -> Answer:
        with keep_random_states(every_N.device, around.generators):
            return of_all(first_rows)

    first_rows = [t[first][:ASKED_ROWS] for t in (*per_token, every_N)]
    with keep_random_states(every_N.device, around.generators), graph_of_its_own():
        rounding = call().precision.rounding
        ask_about_function("per_chunk", call, difference, rounding, is_on_host(every_N), around)
        for chunk in (*several[:1], *several[1:][-1:]):
            own = partial(total, is_slice=isinstance(chunk, slice))
            rows = [t[chunk] for t in (*per_token, every_N)]
            few = [t[:ASKED_ROWS] for t in rows]
            _refuse_change(own, few, ask_alone(own, few))
            halves = zip(*(t.tensor_split(2) for t in rows), strict=True)
            _refuse_change(own, rows, join_answers([ask(own, half) for half in halves]))
        _refuse_other_gradients(of_all, first_rows, len(per_token))
        refuse_graphs_left(around, ONE_CHUNKS)


def _refuse_change(total: OfRows, rows: Sequence[Tensor], apart: Answer) -> None:
    """Raise ValueError if the loss of rows together is not that of the same rows apart."""
    together = ask(total, rows)
    change = change_in_company(together, apart)
    # Only if it repeats: a random loss cannot be compared
    if not change.is_rounding and change_in_company(together, ask(total, rows)).is_rounding:
        raise ValueError(
            f"per_chunk joins rows: {change}. It is called on some rows at a time, so its loss must be a sum of one "
            "term per row that depends on that row alone; add what joins rows to the loss afterwards"
        )


def _refuse_other_gradients(of_all: Callable[..., Answer], rows: Sequence[Tensor], arguments: int) -> None:
    """Raise ValueError unless gradients are linear in the factor of the loss, and those of parameters add up over rows.

    Args:
        of_all: returns an answer with the gradients of per-token tensors that require one, then of the parameters.
        arguments: how many per-token tensors there are.
    """
    whole = of_all(rows)
    wrong = ""
    for factor in (EIGHTH, -1.0):
        scaled = [grad / factor for grad in of_all(rows, factor).gradients]
        if by := _largest_change(scaled, whole):
            wrong = (
                f"backward through per_chunk is not linear: the gradient of {factor:g} x its loss is off by {by:.2g} "
                f"from {factor:g} x gradient. Gradients are taken for each chunk, before the factor of the loss is "
                "known: clip or normalise the gradient outside (a hook on hidden)"
            )
    if not wrong and len(rows[0]) > 1:
        of_rows = sum(t.requires_grad for t in rows[:arguments])
        halves = [of_all(half).gradients[of_rows:] for half in zip(*(t.tensor_split(2) for t in rows), strict=True)]
        own = whole._replace(gradients=whole.gradients[of_rows:])
        if by := _largest_change([torch.stack(both).sum(0) for both in zip(*halves, strict=True)], own):
            wrong = (
                f"per_chunk joins rows: the gradients of params from the halves of some rows are off by {by:.2g} from "
                "those of the whole. It is called on some rows at a time, so they must be sums of one term per row"
            )
    # Only if they repeat: those of a random loss cannot be compared
    if wrong and not _largest_change(of_all(rows).gradients, whole):
        raise ValueError(wrong)


def _largest_change(found: Sequence[Tensor], whole: Answer) -> float:
    """Return by how much gradients are off, relative to the largest number of each; 0.0 if that is rounding.

    What rounding leaves of terms that cancel counts as rounding, too.
    """
    largest = max((float(grad.abs().max()) for grad in whole.gradients if grad.numel()), default=0.0)
    left = CANCELLED * max(whole.precision.eps * largest, whole.precision.smallest / EIGHTH)
    changes = [0.0]
    for one, right in zip(found, whole.gradients, strict=True):
        by = largest_difference(one, right)
        is_left = by and float((one - right).abs().max()) <= left
        if by > whole.precision.rounding and not is_left:
            changes.append(by)
    return max(changes)

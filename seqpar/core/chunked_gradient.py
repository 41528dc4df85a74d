"""The core: one autograd node that walks chunks, keeps gradients instead of logits, and hands them to ONE backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpar.core.chunks import Chunk, check_chunks
from seqpar.core.tensor_checks import check_dense, check_number
from seqpar.core.token_loss import TokenLoss, wide

PerChunk = Callable[[tuple[Tensor, ...], tuple[Tensor, ...], Chunk], TokenLoss]
"""(params, this chunk's rows of each per-token tensor, the chunk) -> the chunk's summed loss."""

PRODUCT_ROWS = 2048
"""Rows of a low-precision weight gradient that the CPU multiplies, widens and adds at a time: they are added while they
are in a cache (5 ms instead of 22 for 32,000 x 512 on 2 cores), and need no memory of a gradient's size."""


class Gradients:
    """The gradients of a walk so far: rows of per-token tensors in their place, those of parameters added up.

    All of them are kept `scale` times as large as they are.
    """

    def __init__(
        self,
        per_token: Sequence[Tensor],
        params: Sequence[Tensor],
        wanted: Sequence[bool],
        chunks: int,
        scale: float | Tensor = 1.0,
    ) -> None:
        rows_wanted, self.wanted = wanted[: len(per_token)], list(wanted[len(per_token) :])
        self.rows = [torch.zeros_like(t) if w else None for t, w in zip(per_token, rows_wanted, strict=True)]
        self.params: list[Tensor | None] = [None] * len(params)
        self.chunks, self.scale = chunks, scale
        self.differentiated = False
        """Whether autograd has found a loss that needs a gradient; a formula always has one."""

    def write(self, index: int, chunk: Chunk, grad: Tensor | None) -> None:
        """The gradient of a chunk's rows of per-token tensor `index`."""
        rows = self.rows[index]
        if rows is not None and grad is not None:
            rows[chunk] = grad.to(rows.dtype)

    def write_product(self, index: int, chunk: Chunk, a: Tensor, b: Tensor) -> None:
        """The same, of the gradient a @ b, which is computed only where it is wanted."""
        rows = self.rows[index]
        if rows is None:
            return
        if isinstance(chunk, slice) and rows.dtype == a.dtype:
            torch.mm(a, b, out=rows[chunk])
        else:
            rows[chunk] = (a @ b).to(rows.dtype)

    def add(self, index: int, grad: Tensor | None) -> None:
        """To parameter `index`. Autograd may hand one tensor to two parameters, so the first one is copied."""
        so_far = self.params[index]
        if grad is None:
            return
        if so_far is not None:
            # In one call the CPU takes longer to add bfloat16 to float32 than the product took
            if grad.dim() < 2 or grad.dtype == so_far.dtype or grad.device.type != "cpu":
                so_far.add_(grad)
                return
            for sum_, part in zip(so_far.split(PRODUCT_ROWS), grad.split(PRODUCT_ROWS), strict=True):
                sum_.add_(part.to(sum_.dtype))
            return
        # A plain bias gradient is one careful reduction, not a running sum: vectors are cheap to keep in float64
        cheap = grad.dim() < 2 and grad.device.type != "mps"
        kept = torch.float64 if cheap else wide(grad.dtype)
        self.params[index] = grad if self.chunks == 1 else grad.to(kept, copy=True)

    def add_product(self, index: int, a: Tensor, b: Tensor) -> None:
        """a @ b to parameter `index`, where it is wanted."""
        if not self.wanted[index]:
            return
        so_far = self.params[index]
        sums = wide(a.dtype)
        if self.chunks == 1 or (so_far is None and sums == a.dtype):
            self.params[index] = torch.mm(a, b)
        elif so_far is not None and so_far.dtype == a.dtype:
            so_far.addmm_(a, b)
        elif _widening_products(a.device):
            if so_far is None:
                self.params[index] = torch.mm(a, b, out_dtype=sums)
            else:
                torch.addmm(so_far, a, b, out_dtype=sums, out=so_far)
        elif a.device.type != "cpu":
            self.add(index, torch.mm(a, b))
        else:
            if so_far is None:
                so_far = self.params[index] = a.new_zeros((a.size(0), b.size(1)), dtype=sums)
            for sum_, part in zip(so_far.split(PRODUCT_ROWS), a.split(PRODUCT_ROWS), strict=True):
                sum_.add_(torch.mm(part, b).to(sum_.dtype))


def _widening_products(device: torch.device) -> bool:
    """Whether products of bfloat16 or float16 there can be added up in float32 without being rounded between."""
    return device.type == "cuda" and torch.version.hip is None


@dataclass(frozen=True)
class ByFormula:
    """A per-chunk function that knows its gradient: no graph is made, and it leaves the gradient where it is kept.

    `function(this chunk's rows of each per-token tensor, the chunk, gradients)` returns the chunk's summed loss; it
    has written the gradient of that sum to `gradients`, unless that is None, when no gradient is wanted. Parameters
    it holds itself, detached; their order in `gradients` is that of the walk. What it writes is `gradients.scale`
    times the gradient.
    """

    function: Callable[[tuple[Tensor, ...], Chunk, Gradients | None], TokenLoss]


def chunked_gradient(
    per_chunk: PerChunk | ByFormula,
    chunks: Sequence[Chunk],
    per_token: Sequence[Tensor],
    params: Sequence[Tensor],
    empty: TokenLoss,
    loss_scale: float | Tensor = 1.0,
) -> TokenLoss:
    """The sum of `per_chunk` over the chunks, with its gradient, while one chunk's logits exist at a time.

    Plain equivalent: `sum((per_chunk(params, [t[c] for t in per_token], c) for c in chunks), start=empty)`, whose
    graph would keep every chunk's logits. Here each chunk's gradient is taken at once, by `torch.autograd.grad`;
    nothing is written to `.grad` and no `.backward()` is called. The caller's one backward multiplies what was
    stored by the upstream factor and hands it to autograd as the gradients of `per_token` and `params`.

    Args:
        per_chunk: must compute from what it is given alone: a pure function of `params` and the rows. Autograd
            differentiates it, unless it is `ByFormula`.
        chunks: which rows belong together, slices or int64 indices; a row in no chunk has no loss and the gradient 0,
            and no row may be in two.
        per_token: tensors whose first dimension is the rows, hidden first.
        params: what else gradients flow into. Their gradients are summed in float32 or wider.
        empty: the loss of no tokens, what the sum starts from.
        loss_scale: gradients are kept this many times as large, and backward divides by it: what `total` will be
            multiplied by, where small gradients would vanish in float16. A number other than 0, or a tensor of one.

    Returns:
        the sums; `total` is differentiable, once. Without chunks all gradients are 0, whatever the factor (never
        nan from 0/0). Without gradients (`torch.no_grad`, or nothing requires any) only sums are kept.

    Raises:
        TypeError: what should be a tensor, a chunk, a `TokenLoss` or a number is none.
        ValueError: chunks that overlap; per-token tensors of different numbers of rows; a `loss_scale` of 0 or nan.
        RuntimeError: in backward, the second time (the gradients were handed over) or with `create_graph=True`; where
            no chunk's loss needed a gradient (torch's own backward says so too).
        RuntimeError: `per_chunk` reached a tensor that needs a gradient and was not given to it, whose gradient
            would be lost.
    """
    _check_arguments(per_chunk, per_token, params, empty)
    check_loss_scale(loss_scale)
    loss_scale = loss_scale.reshape(()) if isinstance(loss_scale, Tensor) else loss_scale
    check_chunks(chunks, len(per_token[0]), per_token[0].device)
    tensors = (*per_token, *params)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        walk = (per_chunk, chunks, len(per_token), empty, loss_scale)
        return TokenLoss(*_ChunkedGradient.apply(*walk, *tensors))
    with torch.no_grad():
        return walk_chunks(per_chunk, chunks, per_token, params, empty, None)


def check_loss_scale(loss_scale: object) -> None:
    """Raises unless it is a number other than 0, or a floating tensor of one; on an accelerator that is not read."""
    if not isinstance(loss_scale, Tensor):
        check_number(loss_scale, "loss_scale")
        zero = loss_scale == 0
    else:
        check_dense(loss_scale, "loss_scale")
        if loss_scale.numel() != 1 or loss_scale.is_complex() or loss_scale.dtype == torch.bool:
            about = f"shape {tuple(loss_scale.shape)} and dtype {loss_scale.dtype}"
            raise TypeError(f"loss_scale has {about}; it must be a number, or a tensor of one")
        if loss_scale.device.type != "cpu" or torch.compiler.is_compiling():
            return
        check_number(loss_scale.item(), "loss_scale")
        zero = not loss_scale.item()
    if zero:
        raise ValueError(
            "loss_scale is 0; gradients are kept so many times as large and divided by it: pass 1 for none"
        )


def _check_arguments(per_chunk: object, per_token: Sequence[Tensor], params: Sequence[Tensor], empty: object) -> None:
    if not callable(per_chunk) and not isinstance(per_chunk, ByFormula):
        raise TypeError(f"per_chunk is a {type(per_chunk).__name__}; it must be a function that returns a TokenLoss")
    if not isinstance(empty, TokenLoss):
        raise TypeError(f"empty is a {type(empty).__name__}; it must be a TokenLoss, such as TokenLoss.zero(...)")
    for name, tensors in (("per_token", per_token), ("params", params)):
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"{name} is a {type(tensors).__name__}; it must be a list or tuple of tensors")
        for i, tensor in enumerate(tensors):
            check_dense(tensor, f"{name}[{i}]")
    if not per_token:
        raise ValueError("per_token is empty; its first tensor is hidden, one row per token")
    for i, tensor in enumerate(per_token):
        if not tensor.dim() or len(tensor) != len(per_token[0]):
            raise ValueError(
                f"per_token[{i}] has shape {tuple(tensor.shape)} and per_token[0] {tuple(per_token[0].shape)}; "
                "each needs one row per token"
            )


def walk_chunks(
    per_chunk: PerChunk | ByFormula,
    chunks: Sequence[Chunk],
    per_token: Sequence[Tensor],
    params: Sequence[Tensor],
    empty: TokenLoss,
    gradients: Gradients | None,
) -> TokenLoss:
    """The sum over the chunks, whose gradients are left in `gradients`, unless that is None; under `no_grad`."""
    parts = []
    for i, chunk in enumerate(chunks):
        rows = tuple(t.detach()[chunk] for t in per_token)
        if isinstance(per_chunk, ByFormula):
            part = per_chunk.function(rows, chunk, gradients)
        elif gradients is None:
            part = per_chunk(tuple(params), rows, chunk)
        else:
            part = _by_autograd(per_chunk, params, rows, chunk, gradients, i == 0)
        parts.append(_checked(part))
    return _sum(empty, parts)


class _ChunkedGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        per_chunk: PerChunk | ByFormula,
        chunks: Sequence[Chunk],
        split: int,
        empty: TokenLoss,
        loss_scale: float | Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor | None, ...]:
        per_token, params = tensors[:split], tensors[split:]
        gradients = Gradients(per_token, params, [t.requires_grad for t in tensors], len(chunks), loss_scale)
        if not isinstance(per_chunk, ByFormula):
            params = tuple(p.detach().requires_grad_(p.requires_grad) for p in params)
        loss = walk_chunks(per_chunk, chunks, per_token, params, empty, gradients)
        ctx.stored = (gradients.rows, gradients.params, bool(chunks))
        no_graph = bool(chunks) and not gradients.differentiated and not isinstance(per_chunk, ByFormula)
        ctx.detached = no_graph and bool(loss.total != 0)  # a criterion may say 0 where it has nothing to add up
        ctx.scale = loss_scale
        ctx.shared = len(chunks) == 1 and not isinstance(per_chunk, ByFormula)
        ctx.inputs = [(t.dtype, t.shape, t.device) if t.requires_grad else None for t in tensors]
        ctx.mark_non_differentiable(*(t for t in loss[1:] if t is not None))
        ctx.set_materialize_grads(False)
        return tuple(loss)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the chunked loss was asked for a second derivative (create_graph=True), and it keeps no graph of its "
                "chunks; use the plain, un-chunked loss where you need one"
            )
        if ctx.stored is None:
            raise RuntimeError(
                "backward went through the chunked loss a second time, and its gradients were handed over the first "
                "time; call the loss again, or add the losses up and call backward once"
            )
        if ctx.detached and upstream is not None:
            raise RuntimeError(
                "the loss does not require grad, though hidden or a parameter does: the criterion returned a detached "
                "number (.detach(), torch.tensor(...)), or the generator ran under torch.no_grad()"
            )
        row_grads, sums, any_chunks = ctx.stored
        ctx.stored = None
        if upstream is not None and isinstance(ctx.scale, Tensor):
            upstream = upstream / ctx.scale.to(upstream.device)
        elif upstream is not None and ctx.scale != 1:
            upstream = upstream / ctx.scale
        grads: list[Tensor | None] = []
        while row_grads or sums:  # each stored gradient is let go as soon as its product exists
            grad = (row_grads or sums).pop(0)
            about = ctx.inputs[len(grads)]
            if about is None or upstream is None:
                grads.append(None)
            elif not any_chunks:
                dtype, shape, device = about
                grads.append(torch.zeros(shape, dtype=dtype, device=device))
            else:
                grads.append(None if grad is None else narrowed(_times(grad, upstream, ctx.shared), about[0]))
        return (None, None, None, None, None, *grads)


def _times(grad: Tensor, upstream: Tensor, shared: bool) -> Tensor:
    """In place, unless autograd may have handed out the same tensor twice."""
    factor = upstream.to(grad.device)
    return grad * factor if shared else grad.mul_(factor)


def narrowed(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad.to(dtype)`; a matrix whose numbers become half as long is written over itself, front to back, so that
    its float32 sum and its gradient never exist side by side."""
    if grad.dim() < 2 or not grad.is_contiguous() or grad.dtype.itemsize != 2 * dtype.itemsize:
        return grad.to(dtype)
    wide_N, narrow_N = grad.flatten(), grad.view(dtype).flatten()[: grad.numel()]
    done = min(grad.size(-1), grad.numel())
    narrow_N[:done] = wide_N[:done].to(dtype)
    while done < len(wide_N):  # what is read lies behind what is written
        narrow_N[done : 2 * done].copy_(wide_N[done : 2 * done])
        done *= 2
    return narrow_N.view(grad.shape)


def _by_autograd(
    per_chunk: PerChunk,
    leaves: Sequence[Tensor],
    rows: Sequence[Tensor],
    chunk: Chunk,
    gradients: Gradients,
    first: bool,
) -> TokenLoss:
    """One chunk's loss, its gradient taken by autograd at once, its graph let go."""
    rows = tuple(t.requires_grad_(kept is not None) for t, kept in zip(rows, gradients.rows, strict=True))
    with torch.enable_grad():
        part = _checked(per_chunk(tuple(leaves), rows, chunk))
    if first:
        _refuse_strangers(part.total, {id(t) for t in (*rows, *leaves)})
    gradients.differentiated |= part.total.requires_grad
    grads = _gradients(part.total, (*rows, *leaves), gradients.scale)
    for i, grad in enumerate(grads[: len(rows)]):
        gradients.write(i, chunk, grad)
    for i, grad in enumerate(grads[len(rows) :]):
        gradients.add(i, grad)
    return part.detach()


def _checked(loss: TokenLoss) -> TokenLoss:
    if not isinstance(loss, TokenLoss):
        raise TypeError(f"per_chunk returned a {type(loss).__name__}; it must return a TokenLoss of sums")
    total = loss.total
    if total.numel() != 1:
        raise ValueError(f"the criterion returned shape {tuple(total.shape)}; it must return one number, the sum")
    return loss._replace(total=total.reshape(()).to(wide(total.dtype)))


def _sum(empty: TokenLoss, parts: Sequence[TokenLoss]) -> TokenLoss:
    """Field by field and all at once: a running float32 sum would lose a digit over a thousand chunks."""
    columns = [[t for t in column if t is not None] for column in zip(empty, *parts, strict=True)]
    whole = (torch.stack(c).sum() if len(c) == len(parts) + 1 else None for c in columns)
    return TokenLoss(*whole)  # type: ignore[arg-type]


def _gradients(total: Tensor, inputs: tuple[Tensor, ...], scale: float | Tensor) -> list[Tensor | None]:
    wanted = [t for t in inputs if t.requires_grad]
    if not total.requires_grad:
        return [None] * len(inputs)
    upstream = torch.ones_like(total) * scale
    found = iter(torch.autograd.grad(total, wanted, upstream, allow_unused=True))
    return [next(found) if t.requires_grad else None for t in inputs]


def _refuse_strangers(total: Tensor, known: set[int]) -> None:
    """Follows the first chunk's graph to its leaves: one we were not given would lose its gradient in silence."""
    todo, seen = [total.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(parent for parent, _ in node.next_functions)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise RuntimeError(
                f"the generator or criterion used a tensor of shape {tuple(leaf.shape)} that needs a gradient and is "
                "neither a registered parameter nor a per-token argument; register it, or pass it as a keyword"
            )

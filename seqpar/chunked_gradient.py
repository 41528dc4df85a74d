"""The core: one autograd node that walks chunks, keeps gradients instead of logits, and hands them to ONE backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpar.chunks import Chunk
from seqpar.token_loss import TokenLoss, wide

PerChunk = Callable[[tuple[Tensor, ...], tuple[Tensor, ...], Chunk], TokenLoss]
"""(params, this chunk's rows of each per-token tensor, the chunk) -> the chunk's summed loss."""

ADDED_AT_ONCE = 256
"""Rows of a low-precision product that are widened and added at a time: few enough to stay in a cache."""


class Gradients:
    """The gradients of a walk so far: rows of per-token tensors in their place, those of parameters added up."""

    def __init__(self, per_token: Sequence[Tensor], params: Sequence[Tensor], chunks: int) -> None:
        self.rows = [torch.zeros_like(t) if t.requires_grad else None for t in per_token]
        self.wanted = [p.requires_grad for p in params]
        self.params: list[Tensor | None] = [None] * len(params)
        self.chunks = chunks
        self._products: dict[int, Tensor] = {}

    def write(self, index: int, chunk: Chunk, grad: Tensor | None) -> None:
        """The gradient of a chunk's rows of per-token tensor `index`."""
        rows = self.rows[index]
        if rows is not None and grad is not None:
            rows[chunk] = grad

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
            _add_to(so_far, grad)
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
        if so_far is None:
            product = torch.mm(a, b)
            self.params[index] = product if self.chunks == 1 else product.to(wide(a.dtype))
        elif so_far.dtype == a.dtype:
            so_far.addmm_(a, b)
        else:
            product = self._products.setdefault(index, torch.empty((), dtype=a.dtype, device=a.device))
            torch.mm(a, b, out=product.resize_(so_far.shape))
            _add_to(so_far, product)


def _add_to(so_far: Tensor, grad: Tensor) -> None:
    if so_far.dtype == grad.dtype or grad.dim() < 2 or grad.device.type != "cpu":
        so_far.add_(grad)
        return
    # Blocks: adding bfloat16 to float32 in one call takes the CPU longer than the product did
    for sum_, block in zip(so_far.split(ADDED_AT_ONCE), grad.split(ADDED_AT_ONCE), strict=True):
        sum_.add_(block.to(sum_.dtype))


@dataclass(frozen=True)
class ByFormula:
    """A per-chunk function that knows its gradient: no graph is made, and it leaves the gradient where it is kept.

    `function(this chunk's rows of each per-token tensor, the chunk, gradients)` returns the chunk's summed loss; it
    has written the gradient of that sum to `gradients`, unless that is None, when no gradient is wanted. Parameters
    it holds itself, detached; their order in `gradients` is that of the walk.
    """

    function: Callable[[tuple[Tensor, ...], Chunk, Gradients | None], TokenLoss]


def chunked_gradient(
    per_chunk: PerChunk | ByFormula,
    chunks: Sequence[Chunk],
    per_token: Sequence[Tensor],
    params: Sequence[Tensor],
    empty: TokenLoss,
) -> TokenLoss:
    """The sum of `per_chunk` over the chunks, with its gradient, while one chunk's logits exist at a time.

    Plain equivalent: `sum((per_chunk(params, [t[c] for t in per_token], c) for c in chunks), start=empty)`, whose
    graph would keep every chunk's logits. Here each chunk's gradient is taken at once, by `torch.autograd.grad`;
    nothing is written to `.grad` and no `.backward()` is called. The caller's one backward multiplies what was
    stored by the upstream factor and hands it to autograd as the gradients of `per_token` and `params`.

    Args:
        per_chunk: must compute from what it is given alone: a pure function of `params` and the rows. Autograd
            differentiates it, unless it is `ByFormula`.
        chunks: which rows belong together; a row in no chunk has no loss and the gradient 0.
        per_token: tensors whose first dimension is the rows, hidden first.
        params: what else gradients flow into. Their gradients are summed in float32 or wider.
        empty: the loss of no tokens, what the sum starts from.

    Returns:
        the sums; `total` is differentiable, once. Without chunks all gradients are 0, whatever the factor (never
        nan from 0/0). Without gradients (`torch.no_grad`, or nothing requires any) only sums are kept.

    Raises:
        RuntimeError: in backward, the second time (the gradients were handed over) or with `create_graph=True`.
        RuntimeError: `per_chunk` reached a tensor that needs a gradient and was not given to it, whose gradient
            would be lost.
    """
    tensors = (*per_token, *params)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return TokenLoss(*_ChunkedGradient.apply(per_chunk, chunks, len(per_token), empty, *tensors))
    with torch.no_grad():
        parts = []
        for chunk in chunks:
            rows = tuple(t[chunk] for t in per_token)
            if isinstance(per_chunk, ByFormula):
                parts.append(_checked(per_chunk.function(rows, chunk, None)))
            else:
                parts.append(_checked(per_chunk(tuple(params), rows, chunk)))
    return _sum(empty, parts)


class _ChunkedGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        per_chunk: PerChunk | ByFormula,
        chunks: Sequence[Chunk],
        split: int,
        empty: TokenLoss,
        *tensors: Tensor,
    ) -> tuple[Tensor | None, ...]:
        per_token, params = tensors[:split], tensors[split:]
        gradients = Gradients(per_token, params, len(chunks))
        if isinstance(per_chunk, ByFormula):
            rows = (tuple(t.detach()[chunk] for t in per_token) for chunk in chunks)
            parts = [_checked(per_chunk.function(r, c, gradients)) for r, c in zip(rows, chunks, strict=True)]
        else:
            leaves = tuple(p.detach().requires_grad_(p.requires_grad) for p in params)
            parts = [_by_autograd(per_chunk, leaves, per_token, c, gradients, i == 0) for i, c in enumerate(chunks)]
        loss = _sum(empty, parts)
        ctx.stored = (gradients.rows, gradients.params, bool(chunks))
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
        row_grads, sums, any_chunks = ctx.stored
        ctx.stored = None
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
                grads.append(None if grad is None else _times(grad, upstream, ctx.shared).to(about[0]))
        return (None, None, None, None, *grads)


def _times(grad: Tensor, upstream: Tensor, shared: bool) -> Tensor:
    """In place, unless autograd may have handed out the same tensor twice."""
    factor = upstream.to(grad.device)
    return grad * factor if shared else grad.mul_(factor)


def _by_autograd(
    per_chunk: PerChunk,
    leaves: tuple[Tensor, ...],
    per_token: Sequence[Tensor],
    chunk: Chunk,
    gradients: Gradients,
    first: bool,
) -> TokenLoss:
    """One chunk's loss, its gradient taken by autograd at once, its graph let go."""
    rows = tuple(t.detach()[chunk].requires_grad_(t.requires_grad) for t in per_token)
    with torch.enable_grad():
        part = _checked(per_chunk(leaves, rows, chunk))
    if first:
        _refuse_strangers(part.total, {id(t) for t in (*rows, *leaves)})
    grads = _gradients(part.total, (*rows, *leaves))
    for i, grad in enumerate(grads[: len(rows)]):
        gradients.write(i, chunk, grad)
    for i, grad in enumerate(grads[len(rows) :]):
        gradients.add(i, grad)
    return part.detach()


def _checked(loss: TokenLoss) -> TokenLoss:
    total = loss.total
    if total.numel() != 1:
        raise ValueError(f"the criterion returned shape {tuple(total.shape)}; it must return one number, the sum")
    return loss._replace(total=total.reshape(()).to(wide(total.dtype)))


def _sum(empty: TokenLoss, parts: Sequence[TokenLoss]) -> TokenLoss:
    """Field by field and all at once: a running float32 sum would lose a digit over a thousand chunks."""
    columns = [[t for t in column if t is not None] for column in zip(empty, *parts, strict=True)]
    whole = (torch.stack(c).sum() if len(c) == len(parts) + 1 else None for c in columns)
    return TokenLoss(*whole)  # type: ignore[arg-type]


def _gradients(total: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    wanted = [t for t in inputs if t.requires_grad]
    if not total.requires_grad:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
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

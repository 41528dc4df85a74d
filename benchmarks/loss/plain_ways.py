"""Compute the loss in plain torch, and by a published pattern rewritten from its description.

Each function takes the inputs and returns a step. The step returns the mean loss over the tokens that are not padding,
ready for the one `backward()`; where a pattern's loss has no graph to go back through, the step has already done it.

Shape suffixes: B batch, T time, N rows, K rows of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.loss.problems import Inputs

Step = Callable[[], Tensor | None]
"""Returns the loss, or None where it has gone back itself."""
CHUNK_ROWS = 512
TITAN_CHUNKS = 8


def _summed(hidden_KD: Tensor, weight: Tensor, bias: Tensor, target_K: Tensor, smoothing: float) -> Tensor:
    logits_KV = F.linear(hidden_KD, weight, bias)
    return F.cross_entropy(logits_KV, target_K, label_smoothing=smoothing, reduction="sum")


def plain(x: Inputs) -> Step:
    """Use all logits at once: the loss as it is usually written."""
    return lambda: _summed(x.hidden, x.weight, x.bias, x.target, x.problem.smoothing) / x.tokens


def compiled(x: Inputs) -> Step:
    """Use `torch.compile` of the plain loss."""
    summed = torch.compile(_summed, dynamic=False)
    return lambda: summed(x.hidden, x.weight, x.bias, x.target, x.problem.smoothing) / x.tokens


def checkpointed(x: Inputs) -> Step:
    """Use 512 rows at a time, whose logits are computed again in the backward, and sum in float32."""

    def step() -> Tensor:
        total = x.hidden.new_zeros((), dtype=torch.promote_types(x.hidden.dtype, torch.float32))
        for hidden_KD, target_K in zip(x.hidden.split(CHUNK_ROWS), x.target.split(CHUNK_ROWS), strict=True):
            arguments = (hidden_KD, x.weight, x.bias, target_K, x.problem.smoothing)
            total = total + checkpoint(_summed, *arguments, use_reentrant=False, preserve_rng_state=False)
        return total / x.tokens

    return step


class _Delivered(torch.autograd.Function):
    """Return a loss whose backward hands out the hidden gradient that is already there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0], None, None  # the pattern leaves upstream out


def titan_style(x: Inputs) -> Step:
    """Use torchtitan's chunked wrapper as it is described.

    It takes 8 chunks over time, float32 logits, and a backward per chunk into detached hidden states and the
    parameters' `.grad`. The returned loss hands on the gradient of hidden, whatever upstream factor arrives.
    """

    def step() -> Tensor:
        hidden_BTD, target_BT = x.sentences()
        losses = []
        gradients = []
        for hidden, target in zip(hidden_BTD.chunk(TITAN_CHUNKS, 1), target_BT.chunk(TITAN_CHUNKS, 1), strict=True):
            leaf = hidden.detach().requires_grad_()
            logits_KV = F.linear(leaf, x.weight, x.bias).flatten(0, 1)
            logits_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32))
            smoothing = x.problem.smoothing
            loss = F.cross_entropy(logits_KV, target.flatten(), label_smoothing=smoothing, reduction="sum") / x.tokens
            loss.backward()
            losses.append(loss.detach())
            gradients.append(leaf.grad)
        return _Delivered.apply(hidden_BTD, torch.stack(losses).sum(), torch.cat(gradients, 1))

    return step

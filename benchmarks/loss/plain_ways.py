"""The loss as it is written in plain torch, and two published patterns rewritten from their descriptions.

Each function takes the inputs and returns a step; the step returns the mean loss over the tokens that are not padding,
ready for the one `backward()`, or, where the pattern has no loss to go back through, with its backward already done.

Shape suffixes: B batch, T time, N rows, K rows of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.loss.problems import IGNORED, Inputs

Step = Callable[[], Tensor]
CHUNK_ROWS = 512
TITAN_CHUNKS = 8
STEPS_2018 = 5


def _summed(hidden_KD: Tensor, weight: Tensor, bias: Tensor, target_K: Tensor, smoothing: float) -> Tensor:
    logits_KV = F.linear(hidden_KD, weight, bias)
    return F.cross_entropy(logits_KV, target_K, label_smoothing=smoothing, reduction="sum")


def plain(x: Inputs) -> Step:
    """The loss as it is usually written."""
    return lambda: _summed(x.hidden, x.weight, x.bias, x.target, x.problem.smoothing) / x.tokens


def compiled(x: Inputs) -> Step:
    """`torch.compile` of it."""
    summed = torch.compile(_summed, dynamic=False)
    return lambda: summed(x.hidden, x.weight, x.bias, x.target, x.problem.smoothing) / x.tokens


def checkpointed(x: Inputs) -> Step:
    """512 rows at a time, whose logits are computed again in the backward; the sum in float32."""

    def step() -> Tensor:
        total = x.hidden.new_zeros((), dtype=torch.promote_types(x.hidden.dtype, torch.float32))
        for hidden_KD, target_K in zip(x.hidden.split(CHUNK_ROWS), x.target.split(CHUNK_ROWS), strict=True):
            arguments = (hidden_KD, x.weight, x.bias, target_K, x.problem.smoothing)
            total = total + checkpoint(_summed, *arguments, use_reentrant=False, preserve_rng_state=False)
        return total / x.tokens

    return step


class _Delivered(torch.autograd.Function):
    """A loss whose backward hands out the hidden gradient that is already there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0], None, None  # that upstream is left out is the pattern's


def titan_style(x: Inputs) -> Step:
    """torchtitan's chunked wrapper as it is described.

    8 chunks over time, float32 logits, a backward per chunk into detached hidden states and the parameters' `.grad`;
    the gradient of hidden is handed on by the loss that is returned, whatever factor comes from above.
    """

    def step() -> Tensor:
        hidden_BTD, target_BT = x.sentences()
        losses, gradients = [], []
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


def loop_2018(x: Inputs) -> Step:
    """The loop of The Annotated Transformer (2018) on one device.

    Generator (with its log-softmax) and criterion (KL to a dense smoothed distribution) on detached slices of 5 time
    steps, a backward for each, then one through the model. Its loss is a number: no factor from above can reach it.
    """

    def criterion(log_probs_KV: Tensor, target_K: Tensor) -> Tensor:
        smoothing, vocab_size = x.problem.smoothing, log_probs_KV.size(1)
        share = smoothing / vocab_size
        ignored_K = target_K == IGNORED
        wanted_KV = torch.full_like(log_probs_KV, share)
        wanted_KV.scatter_(1, target_K.masked_fill(ignored_K, 0)[:, None], 1 - smoothing + share)
        wanted_KV.masked_fill_(ignored_K[:, None], 0)
        return F.kl_div(log_probs_KV, wanted_KV, reduction="sum")

    def step() -> Tensor:
        hidden_BTD, target_BT = x.sentences()
        total, gradients = 0.0, []
        for hidden, target in zip(hidden_BTD.split(STEPS_2018, 1), target_BT.split(STEPS_2018, 1), strict=True):
            leaf = hidden.detach().requires_grad_()
            log_probs = F.log_softmax(F.linear(leaf, x.weight, x.bias), dim=-1)
            loss = criterion(log_probs.flatten(0, 1), target.flatten()) / x.tokens
            total += loss.item()
            loss.backward()
            gradients.append(leaf.grad)
        hidden_BTD.backward(torch.cat(gradients, 1))
        return torch.tensor(total + smoothed_entropy(x.problem.smoothing, x.problem.vocab_size), dtype=torch.float64)

    return step


def smoothed_entropy(smoothing: float, vocab_size: int) -> float:
    """What a KL divergence to the smoothed distribution leaves out of the cross-entropy of a token."""
    share = smoothing / vocab_size
    probabilities = [(1 - smoothing + share, 1), (share, vocab_size - 1)]
    return -sum(count * p * math.log(p) for p, count in probabilities if p)

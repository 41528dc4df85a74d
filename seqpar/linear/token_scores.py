"""Compute the log-probability of each target under a projection in chunks, and the logits again in backward.

Shape suffixes: N rows (batch x time), D hidden, V vocabulary (this rank's classes, if it is split).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.core.chunks import Chunk
from seqpar.core.token_loss import wide
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.formula import LinearFormula
from seqpar.linear.inputs import Inputs, Settings, checked, local_tensors, plan
from seqpar.linear.leaves import LinearLeaves, LinearWanted, loss_and_gradients


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    vocab: VocabShard | None = None,
) -> Tensor:
    """Return log p(target) of every token, while one chunk's logits exist at a time.

    Plain equivalent:

        logits = F.linear(hidden, weight, bias) / temperature
        logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)  # and 0 where target is ignore_index

    For losses that are not a sum over tokens: ratios of policies (PPO, GRPO), preferences (DPO), scores of sequences.
    Backward computes the logits again, because the factor of each token is known only there: five matrix products
    instead of three. If the factors are known in forward, `linear_cross_entropy(..., token_weight=...)` is cheaper.

    Args:
        hidden, weight, target, bias, ignore_index, softcap, temperature, chunk_tokens, vocab: as
            `linear_cross_entropy`.

    Returns:
        (target's shape), in nats, at most 0, float32 or wider. Backward may be called again (`retain_graph=True`).

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as `linear_cross_entropy`.
        RuntimeError: in backward with `create_graph=True`.
    """
    settings = Settings(ignore_index=ignore_index, softcap=softcap, temperature=temperature, chunk_tokens=chunk_tokens)
    inputs, vocab = local_tensors(Inputs(hidden, weight, target, bias), vocab)
    shard, q = checked(inputs, settings, vocab)
    leaves, chunks, formula = plan(inputs, settings, shard, q)
    scores_N: Tensor = _TokenScores.apply(formula, chunks, leaves.hidden, leaves.weight, leaves.bias)
    return scores_N.reshape(inputs.target.shape)


class _TokenScores(torch.autograd.Function):
    """The node: it saves no logits and computes them again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        formula: LinearFormula,
        chunks: Sequence[Chunk],
        hidden_ND: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.formula = formula
        ctx.chunks = chunks
        ctx.save_for_backward(hidden_ND, weight, bias)
        scores_N = hidden_ND.new_zeros(len(hidden_ND), dtype=wide(formula.projection.weight_VD.dtype))
        for chunk in chunks:
            scores_N[chunk] = formula.scores(hidden_ND.detach()[chunk], chunk)
        # The formula is needed until backward, its buffers are not
        formula.projection.buffers.clear()
        return scores_N

    @staticmethod
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of sum_i upstream_i log p_i: that of the cross-entropy with token weights -upstream."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "token_scores was asked for a second derivative (create_graph=True), and it stores no graph of its "
                "chunks; use log_softmax on the plain logits where you need one"
            )
        hidden_ND, weight, bias = ctx.saved_tensors
        # log p_y = -loss, so sum_i u_i log p_i = sum_i (-u_i) loss_i: the closed form with token weights -u
        leaves = LinearLeaves(hidden_ND, weight, bias, token_weight=-upstream_N)
        # The first two arguments are no tensors
        _, _, *needs_gradient = ctx.needs_input_grad
        wanted = LinearWanted(*needs_gradient)
        _, gradients = loss_and_gradients(ctx.formula, ctx.chunks, leaves, wanted)
        ctx.formula.projection.buffers.clear()
        return None, None, gradients.hidden, gradients.weight, gradients.bias

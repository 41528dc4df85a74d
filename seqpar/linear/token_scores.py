"""The log-probability of each target under a projection, in chunks, with the logits computed again in backward.

Shape suffixes: N rows (batch x time), D hidden, V vocabulary (this rank's part of it, where it is split).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import ByFormula, Gradients, walk_chunks
from seqpar.core.chunks import Chunk
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.formula import LinearFormula
from seqpar.linear.inputs import Inputs, Settings, checked, local_parts, plan


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
    """log p(target) of every token, while one chunk's logits exist at a time.

    Plain equivalent:

        logits = F.linear(hidden, weight, bias) / temperature
        logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)  # and 0 where target is ignore_index

    For losses that are not a sum over tokens: ratios of policies (PPO, GRPO), preferences (DPO), scores of sequences.
    Backward computes the logits again, since the factor of each token is known only there: five matrix products
    instead of three. Where the factors are known in forward, `linear_cross_entropy(..., token_weight=...)` is cheaper.

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
    inputs, vocab = local_parts(Inputs(hidden, weight, target, bias), vocab)
    shard, q = checked(inputs, settings, vocab)
    hidden_ND, chunks, formula = plan(inputs, settings, shard, q)
    params = [p for p in (inputs.weight, inputs.bias) if p is not None]
    scores_N: Tensor = _TokenScores.apply(formula, chunks, hidden_ND, *params)
    return scores_N.reshape(inputs.target.shape)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, formula: LinearFormula, chunks: Sequence[Chunk], hidden_ND: Tensor, *params: Tensor
    ) -> Tensor:
        ctx.walk = formula, chunks
        ctx.save_for_backward(hidden_ND, *params)
        scores_N = hidden_ND.new_zeros(len(hidden_ND), dtype=wide(formula.projection.weight_VD.dtype))
        for chunk in chunks:
            scores_N[chunk] = formula.scores(hidden_ND.detach()[chunk], chunk)
        formula.projection.buffers.clear()
        return scores_N

    @staticmethod
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of sum_i upstream_i log p_i: that of the cross-entropy whose token weights are -upstream."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "token_scores was asked for a second derivative (create_graph=True), and it keeps no graph of its "
                "chunks; use log_softmax on the plain logits where you need one"
            )
        formula, chunks = ctx.walk
        hidden_ND, *params = ctx.saved_tensors
        per_token = [hidden_ND, -upstream_N]
        wanted = [ctx.needs_input_grad[2], False, *ctx.needs_input_grad[3:]]
        gradients = Gradients(per_token, params, wanted, len(chunks))
        empty = TokenLoss.zero(hidden_ND.dtype, hidden_ND.device, tells=True)
        walk_chunks(ByFormula(formula), chunks, per_token, params, empty, gradients)
        formula.projection.buffers.clear()
        found = zip((gradients.rows[0], *gradients.params), ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        grads = (None if not w else torch.zeros_like(t) if g is None else g.to(t.dtype) for g, t, w in found)
        return None, None, *grads

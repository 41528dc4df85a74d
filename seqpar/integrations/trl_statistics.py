"""Compute the two statistics of each token's logits that TRL logs or weights with, and that no gradient goes through.

Shape suffixes: N rows, K rows of one chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from seqpar.core.chunks import rows_per_chunk
from seqpar.core.token_loss import wide


class LogitStatistics:
    """Statistics of logits = cap(sum of rows @ weight.T + bias) / temperature, cap(x) = softcap tanh(x / softcap).

    Args:
        parts: pairs of rows (N, D) and weight (V, D): the hidden states with the output embeddings, and the low-rank
            rows with the B of an adapter.
        chunk_tokens: the most rows whose logits exist at once; None chooses by bytes.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        bias: Tensor | None,
        softcap: float | None,
        temperature: float,
        chunk_tokens: int | None = None,
    ) -> None:
        self.parts = parts
        self.bias = bias
        self.softcap = softcap
        self.temperature = temperature
        self.dtype = wide(parts[0][0].dtype)
        self.chunk_tokens = chunk_tokens

    def mean_logits(self) -> Tensor:
        """Return the mean logit of each row (N,)."""
        if self.softcap is not None:
            return self._by_chunks(lambda logits_KV: logits_KV.mean(-1))
        # The mean of hidden @ weight.T over classes is hidden @ (the mean row of weight)
        means = [rows.to(self.dtype) @ weight.mean(0, dtype=self.dtype) for rows, weight in self.parts]
        mean_N = torch.stack(means).sum(0)
        if self.bias is not None:
            mean_N = mean_N + self.bias.mean(dtype=self.dtype)
        return mean_N / self.temperature

    def log_sum_sq_probs(self) -> Tensor:
        """Return log sum_v p_v^2 of each row (N,): lse(2 z) - 2 lse(z)."""
        return self._by_chunks(lambda logits_KV: (2 * logits_KV).logsumexp(-1) - 2 * logits_KV.logsumexp(-1))

    def _by_chunks(self, statistic: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a statistic of each row's logits, of which one chunk's exist at a time."""
        rows, weight = self.parts[0]
        size = self.chunk_tokens or rows_per_chunk(len(weight), self.dtype, rows.device.type)
        chunks = [statistic(self._logits(slice(start, start + size))) for start in range(0, len(rows), size)]
        return torch.cat([rows.new_zeros(0, dtype=self.dtype), *chunks])

    def _logits(self, chunk: slice) -> Tensor:
        """Return the logits of some rows."""
        hidden, weight = self.parts[0]
        logits_KV = (hidden[chunk] @ weight.t().to(hidden.dtype)).to(self.dtype)
        for rows, factor in self.parts[1:]:
            logits_KV += rows[chunk] @ factor.t().to(rows.dtype)
        if self.bias is not None:
            logits_KV += self.bias
        if self.softcap is not None:
            logits_KV = self.softcap * torch.tanh(logits_KV / self.softcap)
        return logits_KV / self.temperature

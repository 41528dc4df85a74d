"""Compute the two statistics of each token's logits that TRL logs or weights with, neither of which needs a gradient.

Shape suffixes: N rows, K rows of one chunk, D their width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqpar.core.chunks import rows_per_chunk
from seqpar.core.token_loss import wide


class LogitStatistics:
    """Statistics of logits = cap(rows @ weight.T + bias) / temperature, cap(x) = softcap tanh(x / softcap).

    `chunk_tokens` is the maximum number of rows whose logits exist at once; None chooses it by size in bytes.
    """

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None,
        softcap: float | None,
        temperature: float,
        chunk_tokens: int | None = None,
    ) -> None:
        self.rows, self.weight, self.bias = rows, weight, bias
        self.softcap, self.temperature = softcap, temperature
        self.dtype = wide(rows.dtype)
        self.chunk_tokens = chunk_tokens or rows_per_chunk(len(weight), self.dtype, rows.device.type)

    def mean_logits(self) -> Tensor:
        """Return the mean logit of each row (N,)."""
        if self.softcap is not None:
            return self._by_chunks(lambda logits_KV: logits_KV.mean(-1))
        # The mean of hidden @ weight.T over classes is hidden @ (the mean row of weight)
        mean_N = self.rows.to(self.dtype) @ self.weight.mean(0, dtype=self.dtype)
        if self.bias is not None:
            mean_N = mean_N + self.bias.mean(dtype=self.dtype)
        return mean_N / self.temperature

    def log_sum_sq_probs(self) -> Tensor:
        """Return log sum_v p_v^2 of each row (N,): lse(2 z) - 2 lse(z)."""
        return self._by_chunks(lambda logits_KV: (2 * logits_KV).logsumexp(-1) - 2 * logits_KV.logsumexp(-1))

    def _by_chunks(self, statistic: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a statistic of each row's logits, with one chunk's logits in memory at a time."""
        chunks = [statistic(self._logits(rows_KD)) for rows_KD in self.rows.split(self.chunk_tokens)]
        return torch.cat(chunks)

    def _logits(self, rows_KD: Tensor) -> Tensor:
        """Return the logits of some rows."""
        logits_KV = (rows_KD @ self.weight.t().to(rows_KD.dtype)).to(self.dtype)
        if self.bias is not None:
            logits_KV += self.bias
        if self.softcap is not None:
            logits_KV = self.softcap * torch.tanh(logits_KV / self.softcap)
        return logits_KV / self.temperature

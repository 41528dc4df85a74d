"""Call the Triton kernels of token scores, which replace a dozen torch operations, on devices that have them.

Shape suffixes: K rows of one chunk, V classes here, P picked classes of each row (its target, then its given ones).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqpar.core.token_loss import wide
from seqpar.kernels import row_kernel
from seqpar.rows.score_rows import ScoreSums, Upstream


class ScoreKernel:
    """The kernels for one projection.

    Args:
        bias_V, softcap, temperature: those of the projection. The kernels add the bias, in float32, so that the sum is
            not rounded to the product's dtype.
    """

    def __init__(self, bias_V: Tensor | None, softcap: float | None, temperature: float) -> None:
        from seqpar.kernels import triton_scores

        self.kernels: Any = triton_scores
        self.bias_V = bias_V
        self.settings = {"softcap": softcap, "temperature": float(temperature)}

    def sums(
        self, product_KV: Tensor, index_KP: Tensor, temperature_K: Tensor | None, *, entropy: bool, top: bool
    ) -> ScoreSums:
        """Return the sums of each row over this rank's classes, and its largest logit if `top`.

        A picked class outside [0, V) has a logit of nan.
        """
        picked_KP = index_KP.new_empty(index_KP.shape, dtype=wide(product_KV.dtype))
        out_4K = picked_KP.new_empty((4, len(product_KV)))
        arguments = (index_KP.contiguous(), self.bias_V, _adjacent(temperature_K), picked_KP, out_4K, out_4K.stride(0))
        flags = {"PICKS": index_KP.size(1), "ENTROPY": entropy, "ARGBEST": top}
        row_kernel.launch(self.kernels._score_sums, product_KV, *arguments, **flags, **self.settings)
        best_K, log_sum_K, mean_K, argbest_K = out_4K
        return ScoreSums(
            best_N=best_K,
            log_sum_N=log_sum_K,
            mean_N=mean_K if entropy else None,
            share_N=None,
            picked_NP=picked_KP,
            top_NT=best_K.unsqueeze(1)[:, : int(top)],
            top_ids_NT=argbest_K.long().unsqueeze(1)[:, : int(top)],
        )

    def gradient_(
        self,
        product_KV: Tensor,
        index_KP: Tensor,
        temperature_K: Tensor | None,
        sums: ScoreSums,
        upstream: Upstream,
        out_KV: Tensor | None = None,
    ) -> None:
        """Overwrite the products by the gradient of all scores with respect to them, or `out_KV`, of the same strides.

        Args:
            index_KP: picked classes outside [0, V) get no gradient.
            sums: over the whole vocabulary.
        """
        if out_KV is None:
            out_KV = product_KV
        assert out_KV.stride() == product_KV.stride()
        factor_KP = upstream.of_picked().contiguous()
        picks = factor_KP.size(1)
        arguments = (
            index_KP[:, :picks].contiguous(),
            factor_KP,
            self.bias_V,
            _adjacent(temperature_K),
            sums.best_N.contiguous(),
            sums.log_sum_N.contiguous(),
            upstream.of_all_log_probs().contiguous(),
            _adjacent(None if upstream.entropy_N is None else sums.mean_N),
            _adjacent(upstream.entropy_N),
            out_KV,
        )
        row_kernel.launch(self.kernels._score_gradient, product_KV, *arguments, PICKS=picks, **self.settings)


def _adjacent(numbers_K: Tensor | None) -> Tensor | None:
    """Return the numbers side by side in memory: autograd's may be one number that stands for all rows."""
    if numbers_K is None:
        return None
    return numbers_K.contiguous()

"""An estimate of the cross-entropy over a very large vocabulary, from a sample of its classes.

Shape suffixes: N rows (batch x time), D hidden, V vocabulary, S sampled classes, K rows of one chunk.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.chunked_gradient import chunked_gradient
from seqpar.chunks import Chunk, cut_rows, rows_per_chunk
from seqpar.linear_inputs import Inputs, Settings, checked
from seqpar.token_loss import TokenLoss, wide


def sampled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    classes: Tensor,
    bias: Tensor | None = None,
    proposal: Tensor | None = None,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
) -> TokenLoss:
    """AN ESTIMATE of `linear_cross_entropy`, by importance sampling (Bengio and Senecal 2003, section 4).

    The sum over the vocabulary in `log sum_k exp z_k` is taken over the target and the classes drawn,

        exp z_y + sum over drawn k != y of exp z_k / (S proposal_k)

    whose expectation is the true sum; the loss, its logarithm, is too small by an amount that falls with S. For
    training where V is so large that three products with all of the weight do not fit the time; never for reporting
    a perplexity. The gradient is the exact one of this estimate.

    Args:
        hidden, weight, target, bias, ignore_index, chunk_tokens: as `linear_cross_entropy`.
        classes: (S,) int64, the classes drawn, independently and with replacement, the same for all tokens:
            `torch.randint(V, (S,))`, or `torch.multinomial(proposal, S, replacement=True)`. Another draw every step.
        proposal: (V,) the probability of each class in the draw (the unigram distribution, say); None is 1/V.

    Returns:
        `TokenLoss` without `nll` and `correct`, which a sample cannot tell. `total` in float32 or wider.

    Raises:
        TypeError, ValueError, IndexError: as `linear_cross_entropy`; classes or proposal of another shape or range.
    """
    settings = Settings(ignore_index=ignore_index, chunk_tokens=chunk_tokens)
    checked(Inputs(hidden, weight, target, bias), settings, None)
    log_expected_S = _log_expected(classes, proposal, len(weight)).to(hidden.device)
    target_N = target.flatten().long()
    kept_N = target_N != ignore_index
    index_N = target_N.where(kept_N, 0)
    # Rows of the weight leave it here, once, so that its gradient is one sparse sum at the end and none in a chunk
    per_token = [hidden.flatten(0, -2), F.embedding(index_N, weight)]
    params = [F.embedding(classes, weight)]
    if bias is not None:
        per_token.append(bias[index_N])
        params.append(bias[classes])

    def per_chunk(params: tuple[Tensor, ...], rows: tuple[Tensor, ...], chunk: Chunk) -> TokenLoss:
        drawn_KS = F.linear(rows[0], *params).to(dtype) - log_expected_S.to(dtype)
        drawn_KS = drawn_KS.masked_fill(classes == target_N[chunk].unsqueeze(1), -math.inf)
        gold_K = (rows[0].to(dtype) * rows[1].to(dtype)).sum(-1)
        gold_K = gold_K if bias is None else gold_K + rows[2]
        lse_K = torch.cat([gold_K.unsqueeze(1), drawn_KS], 1).logsumexp(-1)
        return TokenLoss((lse_K - gold_K).sum(), torch.full((), len(gold_K), device=gold_K.device))

    dtype = wide(hidden.dtype)
    most = chunk_tokens or rows_per_chunk(len(classes), hidden.dtype, hidden.device.type)
    empty = TokenLoss.zero(hidden.dtype, hidden.device, tells=False)
    return chunked_gradient(per_chunk, cut_rows(kept_N, most), per_token, params, empty)


def _log_expected(classes: Tensor, proposal: Tensor | None, vocab_size: int) -> Tensor:
    """log of how often each class drawn was to be expected."""
    if classes.dim() != 1 or not len(classes) or classes.is_floating_point():
        raise ValueError(f"classes is {classes.dtype} {tuple(classes.shape)}; it must be one int64 class or more, (S,)")
    if int(classes.min()) < 0 or int(classes.max()) >= vocab_size:
        raise IndexError(
            f"classes lie in [{int(classes.min())}, {int(classes.max())}]; they must be in [0, {vocab_size})"
        )
    if proposal is None:
        return torch.full((len(classes),), math.log(len(classes) / vocab_size), dtype=torch.float64)
    if proposal.shape != (vocab_size,):
        raise ValueError(f"proposal has shape {tuple(proposal.shape)}; it must be ({vocab_size},), one for each class")
    if not bool((proposal[classes] > 0).all()):
        raise ValueError("proposal gives a class that was drawn the probability 0; it must be what classes come from")
    return (proposal[classes].double() / proposal.double().sum()).log() + math.log(len(classes))

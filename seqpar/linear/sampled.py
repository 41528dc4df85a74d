"""An estimate of the cross-entropy over a very large vocabulary, from a sample of its classes.

Shape suffixes: N rows (batch x time), D hidden, V vocabulary, S sampled classes, K rows of one chunk.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.core.chunked_gradient import chunked_gradient
from seqpar.core.chunks import Chunk, cut_rows, recording, rows_per_chunk
from seqpar.core.tensor_checks import CLASS_INDICES, FLOATING, check_dense, check_integer_target
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.linear.inputs import Inputs, Settings, checked


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
        proposal: (V,) the probability of each class in the draw, or any multiple of it (how often each class was seen,
            say); None is 1/V. Not differentiated.

    Returns:
        `TokenLoss` without `nll` and `correct`, which a sample cannot tell. `total` in float32 or wider.

    Raises:
        TypeError, ValueError, IndexError: as `linear_cross_entropy`; classes or proposal of another shape or range.
    """
    settings = Settings(ignore_index=ignore_index, chunk_tokens=chunk_tokens)
    checked(Inputs(hidden, weight, target, bias), settings, None)
    _check_draw(classes, proposal, hidden, len(weight))
    classes = classes.long()
    log_expected_S = _log_expected(classes, proposal, len(weight))
    target_N = target.flatten().long()
    kept_N = target_N != ignore_index
    index_N = target_N.where(kept_N, 0)
    whole = recording(hidden.device)
    hidden_ND = hidden.flatten(0, -2)
    if whole:  # chunks have the ignored rows, too; whatever is there, a gradient of 0 times it must be 0
        hidden_ND = hidden_ND.masked_fill(~kept_N.unsqueeze(1), 0)
    # Rows of the weight leave it here, once, so that its gradient is one sparse sum at the end and none in a chunk
    per_token = [hidden_ND, F.embedding(index_N, weight)]
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
        kept_K = kept_N[chunk]
        loss_K = lse_K - gold_K
        if whole:
            loss_K = loss_K.where(kept_K, torch.zeros_like(loss_K))
        return TokenLoss(loss_K.sum(), kept_K.sum())

    dtype = wide(hidden.dtype)
    most = chunk_tokens or rows_per_chunk(len(classes), hidden.dtype, hidden.device.type)
    empty = TokenLoss.zero(hidden.dtype, hidden.device, tells=False)
    return chunked_gradient(per_chunk, cut_rows(kept_N, most), per_token, params, empty)


def _check_draw(classes: Tensor, proposal: Tensor | None, hidden: Tensor, vocab_size: int) -> None:
    """Raise unless the classes lie in the vocabulary and the proposal is one that they can have been drawn from."""
    check_integer_target(classes, "classes")
    if classes.dim() != 1 or not len(classes):
        raise ValueError(f"classes has shape {tuple(classes.shape)}; it must be one class or more, (S,)")
    if proposal is not None:
        check_dense(proposal, "proposal")
        if not (proposal.dtype in FLOATING or proposal.dtype in CLASS_INDICES):
            raise TypeError(
                f"proposal has dtype {proposal.dtype}; it must hold probabilities, or how often each was seen"
            )
        if proposal.shape != (vocab_size,):
            raise ValueError(
                f"proposal has shape {tuple(proposal.shape)}; it must be ({vocab_size},), one for each class"
            )
    for name, tensor in (("classes", classes), ("proposal", proposal)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"hidden is on {hidden.device} and {name} on {tensor.device}; move them to one device")
    if not recording(hidden.device):
        _check_numbers(classes, proposal, vocab_size)


def _check_numbers(classes: Tensor, proposal: Tensor | None, vocab_size: int) -> None:
    if int(classes.min()) < 0 or int(classes.max()) >= vocab_size:
        raise IndexError(
            f"classes lie in [{int(classes.min())}, {int(classes.max())}]; they must be in [0, {vocab_size})"
        )
    if proposal is None:
        return
    bad = ~(proposal.isfinite() & (proposal >= 0))
    if bad.any():
        at = int(bad.nonzero()[0])
        raise ValueError(f"proposal is {float(proposal[at])} for class {at}; it must be a finite number of at least 0")
    if not bool((proposal[classes.long()] > 0).all()):
        raise ValueError("proposal gives a class that was drawn the probability 0; it must be what classes come from")


def _log_expected(classes: Tensor, proposal: Tensor | None, vocab_size: int) -> Tensor:
    """log of how often each class drawn was to be expected."""
    if proposal is None:
        shape, value = classes.shape, math.log(len(classes) / vocab_size)
        return torch.full(shape, value, dtype=torch.float64, device=classes.device)
    return (proposal[classes].double() / proposal.double().sum()).log() + math.log(len(classes))

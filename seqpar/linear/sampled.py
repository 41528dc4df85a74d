"""Estimate the cross-entropy over a very large vocabulary from a sample of its classes.

Shape suffixes: N rows (batch x time), D hidden, V vocabulary, S sampled classes, K rows of one chunk.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.core.chunked_gradient import AutogradChunkLoss, differentiable_sum
from seqpar.core.chunks import Chunk, cut_rows, recording, rows_per_chunk
from seqpar.core.graphs import outside_graphs
from seqpar.core.tensor_checks import CLASS_INDICES, FLOATING, check_dense, check_integer_target
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.linear.formula import zero_rows
from seqpar.linear.inputs import Inputs, Settings, checked


@outside_graphs
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
    """Return AN ESTIMATE of `linear_cross_entropy`, by importance sampling (Bengio and Senecal 2003, section 4).

    The sum over the vocabulary in `log sum_k exp z_k` is replaced by a sum over the target and the drawn classes,

        exp z_y + sum over drawn k != y of exp z_k / (S proposal_k)

    whose expectation is the true sum; the expected loss, with its logarithm, is too small by an amount that falls with
    S. Use it for training if V is so large that three products with the whole weight take too long, never to report a
    perplexity. The gradient is the exact one of this estimate.

    Args:
        hidden, weight, target, bias, ignore_index, chunk_tokens: as `linear_cross_entropy`.
        classes: (S,) int64, classes drawn independently and with replacement, the same for all tokens:
            `torch.randint(V, (S,))`, or `torch.multinomial(proposal, S, replacement=True)`. Draw anew in every step.
        proposal: (V,) the probability of each class in the draw, or any multiple of it (such as the number of times
            each class occurs in the data); None is 1/V. It gets no gradient.

    Returns:
        `TokenLoss` without `nll` and `correct`, which a sample does not determine. `total` in float32 or wider.

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
    # Only while a CUDA graph is recorded do chunks contain ignored rows
    with_ignored_rows = recording(hidden.device)
    hidden_ND = hidden.flatten(0, -2)
    if with_ignored_rows:
        hidden_ND = zero_rows(hidden_ND, ~kept_N)
    # Only these rows of the weight are used. Selecting them here, outside the chunks, makes the weight's gradient one
    # scatter at the end instead of one (V, D) gradient per chunk
    per_token = [hidden_ND, F.embedding(index_N, weight)]
    params = [F.embedding(classes, weight)]
    if bias is not None:
        per_token.append(bias[index_N])
        params.append(bias[classes])

    def per_chunk(params: tuple[Tensor, ...], rows: tuple[Tensor, ...], chunk: Chunk) -> TokenLoss:
        hidden_KD, gold_weight_KD, *gold_bias_K = rows
        # exp z_k / (S proposal_k) = exp(z_k - log(S proposal_k)); a draw of the target itself does not count
        drawn_KS = F.linear(hidden_KD, *params).to(dtype) - log_expected_S.to(dtype)
        drawn_KS = drawn_KS.masked_fill(classes == target_N[chunk].unsqueeze(1), -math.inf)
        gold_K = (hidden_KD.to(dtype) * gold_weight_KD.to(dtype)).sum(-1)
        for bias_K in gold_bias_K:
            gold_K = gold_K + bias_K
        lse_K = torch.cat([gold_K.unsqueeze(1), drawn_KS], 1).logsumexp(-1)
        kept_K = kept_N[chunk]
        loss_K = lse_K - gold_K
        if with_ignored_rows:
            loss_K = loss_K.where(kept_K, torch.zeros_like(loss_K))
        return TokenLoss(loss_K.sum(), kept_K.sum())

    dtype = wide(hidden.dtype)
    most = chunk_tokens or rows_per_chunk(len(classes), hidden.dtype, hidden.device.type)
    empty = TokenLoss.zero(hidden.dtype, hidden.device, tells=False)
    return differentiable_sum(AutogradChunkLoss(per_chunk, params), cut_rows(kept_N, most), per_token, params, empty)


def _check_draw(classes: Tensor, proposal: Tensor | None, hidden: Tensor, vocab_size: int) -> None:
    """Raise unless the classes are in the vocabulary and can have been drawn from the proposal."""
    check_integer_target(classes, "classes")
    if classes.dim() != 1 or not len(classes):
        raise ValueError(f"classes has shape {tuple(classes.shape)}; it must be (S,), with one class or more")
    if proposal is not None:
        check_dense(proposal, "proposal")
        if not (proposal.dtype in FLOATING or proposal.dtype in CLASS_INDICES):
            raise TypeError(f"proposal has dtype {proposal.dtype}; it must have probabilities or counts as its numbers")
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
    """Raise IndexError for a class outside the vocabulary, ValueError for a proposal that cannot have been used."""
    if int(classes.min()) < 0 or int(classes.max()) >= vocab_size:
        raise IndexError(
            f"classes are in [{int(classes.min())}, {int(classes.max())}]; they must be in [0, {vocab_size})"
        )
    if proposal is None:
        return
    bad = ~(proposal.isfinite() & (proposal >= 0))
    if bad.any():
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"proposal is {float(proposal[first])} for class {first}; it must be a finite number of at least 0"
        )
    if not bool((proposal[classes.long()] > 0).all()):
        raise ValueError("proposal is 0 for a drawn class; it must be the distribution that classes were drawn from")


def _log_expected(classes: Tensor, proposal: Tensor | None, vocab_size: int) -> Tensor:
    """Return log(S proposal_k) of each drawn class, the logarithm of its expected count."""
    if proposal is None:
        value = math.log(len(classes) / vocab_size)
        return torch.full(classes.shape, value, dtype=torch.float64, device=classes.device)
    # A learned one may need a gradient, and the estimate has none for it
    proposal = proposal.detach().double()
    return (proposal[classes] / proposal.sum()).log() + math.log(len(classes))

"""The best extensions of a beam, without sorting the whole vocabulary.

Only a few hundred logits of each sentence are sorted: those in the blocks of the vocabulary with the best maxima.

Shapes: B sentences, K live beams, R = B x K rows, T target time so far, C candidates, W blocks of the vocabulary, M
logits of the chosen blocks, F forbidden symbols, S source time, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.decoding_rules import Forbidden
from models.ensemble import Batch, check_finite, logits_of


class Beams(NamedTuple):
    """The live hypotheses of each sentence, best first; a beam without a hypothesis has score -inf."""

    prefixes: Tensor
    """(B, K, T) ids, the start symbol first."""
    scores: Tensor
    """(B, K) summed log-probabilities."""

    @classmethod
    def first(cls, memory_BSD: Tensor, bos: int) -> Beams:
        """Return one live hypothesis for each sentence, the start symbol: the first step needs one beam only."""
        sentences = memory_BSD.size(0)
        dtype = torch.promote_types(memory_BSD.dtype, torch.float32)
        prefixes_BKT = torch.full((sentences, 1, 1), bos, device=memory_BSD.device)
        return cls(prefixes_BKT, torch.zeros(sentences, 1, device=memory_BSD.device, dtype=dtype))


class Candidates(NamedTuple):
    """Extensions of live hypotheses by one token, best first, each (B, C)."""

    scores: Tensor
    """Summed log-probability, including the token's."""
    beams: Tensor
    """Which live hypothesis is extended."""
    tokens: Tensor


LOGITS_BYTES = 24 * 2**20
"""Bytes of logits that exist at a time, unless those of a single sentence are more. The C library returns blocks of
more than 32 MiB to the system after each step, and allocating them anew takes a fifth of the product's time."""


class LogitsBlock(NamedTuple):
    """The logits of a few sentences, all beams of each."""

    logits: Tensor
    """(R, V)."""
    scores: Tensor
    """(B, K) of these sentences' live hypotheses."""
    prefixes: Tensor
    """(R, T) of the same."""
    sentences: list[int]
    """The row of each in the caller's batch."""


def logits_blocks(batch: Batch, beams: Beams, hiddens: Sequence[Tensor]) -> Iterator[LogitsBlock]:
    """Yield the logits of the next token, a few sentences at a time."""
    live = beams.scores.size(1)
    vocab = batch.models[0].generator.out_features
    sentences = max(1, LOGITS_BYTES // (live * vocab * beams.scores.element_size()))
    for start in range(0, len(batch.sentences), sentences):
        block = slice(start, start + sentences)
        rows = slice(start * live, (start + sentences) * live)
        logits_RV = logits_of(batch.models, [hidden[rows] for hidden in hiddens])
        yield LogitsBlock(logits_RV, beams.scores[block], beams.prefixes[block].flatten(0, 1), batch.sentences[block])


def extend(batch: Batch, beams: Beams, hiddens: Sequence[Tensor], forbidden: Forbidden, beam: int) -> Candidates:
    """Return the 2 x `beam` best extensions of each sentence's live hypotheses.

    Each of the at most `beam` live hypotheses has one extension that ends, so at least `beam` of them do not end.
    """
    found = [candidates_of(block, forbidden, 2 * beam) for block in logits_blocks(batch, beams, hiddens)]
    return Candidates(*(torch.cat(column) for column in zip(*found, strict=True)))


def candidates_of(block: LogitsBlock, forbidden: Forbidden, count: int) -> Candidates:
    """Return the `count` best extensions of each sentence; log-probabilities are computed for these alone.

    The logits of forbidden tokens become -inf, but count in the softmax's sum.
    """
    logits_RV, scores_BK, prefixes_RT, sentences = block
    # log sum over all classes = logaddexp(log sum over the others, log sum over the forbidden ones)
    symbols_RF = logits_RV[:, forbidden.symbols]
    logits_RV[:, forbidden.symbols] = -math.inf
    maxima_RW, total_R = maxima_and_totals(logits_RV)
    total_R = total_R.logaddexp(symbols_RF.logsumexp(-1))
    check_finite(total_R, sentences)
    total_BK = total_R.view_as(scores_BK)
    if forbidden.rules:
        forbidden.mask_by_rules(logits_RV, prefixes_RT, sentences)
        maxima_RW = block_maxima(logits_RV)
    scores_BC, index_BC = best_tokens(scores_BK, total_BK, logits_RV, maxima_RW, count)
    vocab = logits_RV.size(1)
    return Candidates(scores_BC, index_BC // vocab, index_BC % vocab)


BLOCK = 64
"""Tokens whose largest logit represents them until the best blocks are chosen."""


def block_maxima(logits_RV: Tensor) -> Tensor:
    """Return the largest logit of each whole block of the vocabulary, (R, W)."""
    whole = logits_RV.size(1) // BLOCK * BLOCK
    return logits_RV[:, :whole].reshape(len(logits_RV), -1, BLOCK).amax(-1)


def maxima_and_totals(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each whole block of the vocabulary, (R, W), and `logits_RV.logsumexp(-1)`, (R,).

    log sum exp(z) = z_k - log p_k for any k; with the largest z_k, p_k is at least 1/V, so that its logarithm is exact.
    It is computed this way because torch's softmax takes a third of the time of its logsumexp. A few rows at a time fit
    into a cache, and their probabilities into memory that is allocated once.
    """
    whole = logits_RV.size(1) // BLOCK * BLOCK
    held_RV = torch.empty_like(logits_RV[:64])
    found = []
    for rows_RV in logits_RV.split(64):
        maxima_RW = block_maxima(rows_RV)
        largest_R = torch.cat((maxima_RW, rows_RV[:, whole:]), 1).amax(-1)
        probabilities_RV = torch.softmax(rows_RV, -1, out=held_RV[: len(rows_RV)])
        found.append((maxima_RW, largest_R - probabilities_RV.amax(-1).log()))
    maxima, totals = zip(*found, strict=True)
    return torch.cat(maxima), torch.cat(totals)


def best_tokens(
    scores_BK: Tensor, total_BK: Tensor, logits_RV: Tensor, maxima_RW: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Compute `(scores_BK[..., None] + (logits_BKV - total_BK[..., None])).flatten(1).topk(count)`: two (B, C).

    The `count` best are in the `count` blocks of the vocabulary with the largest maxima, or after the last whole block:
    any other block has `count` blocks ahead of it, each with a better token. So only a few hundred logits of a sentence
    are sorted.
    """
    batch, live = scores_BK.shape
    vocab = logits_RV.size(1)
    device = logits_RV.device
    blocks = maxima_RW.size(1)
    maxima_BW = (scores_BK.reshape(-1, 1) + (maxima_RW - total_BK.reshape(-1, 1))).reshape(batch, -1)
    picked_BC = maxima_BW.topk(min(count, maxima_BW.size(1)), sorted=False).indices
    # A block's number counts over the beams of a sentence, each of which has V tokens
    start_BC = picked_BC // max(1, blocks) * vocab + picked_BC % max(1, blocks) * BLOCK
    inside_BM = (start_BC[:, :, None] + torch.arange(BLOCK, device=device)).flatten(1)
    row_K1 = torch.arange(live, device=device)[:, None]
    # The classes after the last whole block are always candidates: (K, V mod BLOCK) -> (M,)
    rest_M = (row_K1 * vocab + torch.arange(blocks * BLOCK, vocab, device=device)).flatten()
    index_BM = torch.cat((inside_BM, rest_M.expand(batch, -1)), 1)
    logits_BM = logits_RV.reshape(batch, -1).gather(1, index_BM)
    row_BM = index_BM // vocab
    # log p(prefix, token) = log p(prefix) + z_token - log sum exp z
    scores_BM = scores_BK.gather(1, row_BM) + (logits_BM - total_BK.gather(1, row_BM))
    best_BC, at_BC = scores_BM.topk(min(count, scores_BM.size(1)))
    return best_BC, index_BM.gather(1, at_BC)

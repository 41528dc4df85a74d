"""The best extensions of a beam.

Shapes: B sentences, K live beams, R = B x K rows, T target time so far, C candidates, M candidates of all of a
sentence's beams, S source time, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.decoding_rules import Forbidden
from models.ensemble import Batch, check_finite, logits_of


class Beams(NamedTuple):
    """The live hypotheses of each sentence, best first; a beam without a hypothesis has the score -inf."""

    prefixes: Tensor
    """(B, K, T) ids, the start symbol first."""
    scores: Tensor
    """(B, K) summed log-probabilities."""

    @classmethod
    def first(cls, memory_BSD: Tensor, bos: int) -> Beams:
        """Return one live hypothesis for each sentence, the start symbol: the first step needs only one beam."""
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
"""Bytes of logits that exist at a time, unless a single sentence needs more. The C library returns blocks of more than
32 MiB to the system after each step, and allocating them again takes a fifth of the product's time."""


ROWS_AT_ONCE = 32
"""Rows whose log-sum-exp the CPU computes at a time: for 320 rows it then takes 4.5 instead of 5.3 ms with 10,000
classes, and 18 instead of 44 ms with 32,000 (two cores)."""


class LogitsBlock(NamedTuple):
    """The logits of a few sentences, all beams of each."""

    logits: Tensor
    """(R, V)."""
    scores: Tensor
    """(B, K), of these sentences' live hypotheses."""
    prefixes: Tensor
    """(R, T), of the same hypotheses."""
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

    Each of the at most `beam` live hypotheses has one extension that ends, so at least `beam` extensions do not end.
    """
    found = [candidates_of(block, forbidden, 2 * beam) for block in logits_blocks(batch, beams, hiddens)]
    return Candidates(*(torch.cat(column) for column in zip(*found, strict=True)))


def candidates_of(block: LogitsBlock, forbidden: Forbidden, count: int) -> Candidates:
    """Return the `count` best extensions of each sentence's live hypotheses.

    The logits of forbidden tokens become -inf, but still count in the softmax's sum.
    """
    logits_RV, scores_BK, prefixes_RT, sentences = block
    # On the CPU a few rows at a time, so that the memory of their temporaries is reused
    rows = ROWS_AT_ONCE if logits_RV.device.type == "cpu" else max(1, len(logits_RV))
    total_R = torch.cat([rows_RV.logsumexp(-1) for rows_RV in logits_RV.split(rows)])
    check_finite(total_R, sentences)
    forbidden.mask(logits_RV, prefixes_RT, sentences)
    # The best of a sentence are among the best of each of its hypotheses
    best_RC, tokens_RC = logits_RV.topk(min(count, logits_RV.size(1)))
    # log p(prefix, token) = log p(prefix) + z_token - log sum exp z
    scores_BM = (scores_BK.reshape(-1, 1) + (best_RC - total_R[:, None])).view(len(scores_BK), -1)
    best_BC, at_BC = scores_BM.topk(min(count, scores_BM.size(1)))
    tokens_BC = tokens_RC.view(len(scores_BK), -1).gather(1, at_BC)
    return Candidates(best_BC, at_BC // best_RC.size(1), tokens_BC)

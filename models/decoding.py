"""Translation with a trained model: greedy and beam search, batched, with cached keys and values.

A sentence's translation does not depend on the other sentences of its batch, and a sentence that is done
leaves the batch.

Shapes: B sentences still decoding, K beams, R = B x K rows, T target time so far, C = 2 K candidates,
S source time, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.attention import DecoderCache, padding_mask
from models.transformer import EncoderDecoder, check_tokens


class Hypothesis(NamedTuple):
    """A translation and its score: its log-probability, end symbol included, over `length_normaliser`."""

    tokens: list[int]
    """Token ids, without start and end symbol."""
    score: float


class Source(NamedTuple):
    """The encoded sentences that are still being translated."""

    memory: Tensor
    """(B, S, D)."""
    mask: Tensor
    """(B, 1, 1, S), True = a real token."""
    sentences: list[int]
    """Which row of the caller's batch each is."""
    limits: list[int]
    """Most decoding steps of each."""

    def keep(self, rows: list[int]) -> Source:
        """The same with these rows only."""
        return Source(
            self.memory[rows],
            self.mask[rows],
            [self.sentences[row] for row in rows],
            [self.limits[row] for row in rows],
        )


class Beams(NamedTuple):
    """The live hypotheses of each sentence, best first; a beam without one has score -inf."""

    prefixes: Tensor
    """(B, K, T) ids, the start symbol first."""
    scores: Tensor
    """(B, K) summed log-probabilities."""


class Candidates(NamedTuple):
    """Hypotheses longer by one token, best first, each (B, C)."""

    scores: Tensor
    """Summed log-probability, the token's included."""
    beams: Tensor
    """Which live hypothesis is extended."""
    tokens: Tensor


def length_normaliser(length: int, alpha: float) -> float:
    """((5 + length) / 6)^alpha, the GNMT length penalty that log-probabilities are divided by.

    Wu et al. 2016, equation 14. `length` counts the end symbol. With alpha 0 it is 1; a larger alpha favours
    longer translations.
    """
    return float(((5 + length) / 6) ** alpha)


def greedy(model: EncoderDecoder, src: Tensor, *, bos: int, eos: int, max_length: int | None = None) -> list[list[int]]:
    """The most probable next token, again and again: src (B, S) ids -> a list of ids for each sentence.

    Decoding ends at `eos` or after `max_length` steps (default: twice the sentence's length plus 10), and
    never outputs padding or `bos`. Start and end symbol are not returned. The model is run in eval mode,
    without gradients, and left as it was. Raises ValueError for a `max_length` below 1.
    """
    translations: list[list[int]] = [[] for _ in range(src.size(0))]
    with evaluating(model):
        source, cache = encode_source(model, src, max_length), model.decoder.empty_cache()
        forbidden = sorted({model.pad, bos} - {eos})
        tokens_B = torch.full((src.size(0),), bos, device=src.device)
        while source.sentences:
            logits_BV = next_logits(model, source, tokens_B, cache)
            logits_BV[:, forbidden] = -math.inf
            tokens_B = logits_BV.argmax(-1)
            going = []
            for row, token in enumerate(tokens_B.tolist()):
                if token != eos:
                    translations[source.sentences[row]].append(token)
                    if cache.length < source.limits[row]:
                        going.append(row)
            if len(going) < len(source.sentences):
                source, tokens_B = source.keep(going), tokens_B[going]
                rows = torch.tensor(going, device=src.device, dtype=torch.long)
                cache.keep_sentences(rows)
                cache.reorder(rows)
    return translations


def beam_search(
    model: EncoderDecoder,
    src: Tensor,
    *,
    bos: int,
    eos: int,
    beam: int = 4,
    length_penalty: float = 0.6,
    n_best: int = 1,
    max_length: int | None = None,
) -> list[list[Hypothesis]]:
    """The best translations a search of width `beam` finds: src (B, S) ids -> up to `n_best` a sentence.

    At each step, of all extensions by one token, those that end and are among the `beam` best are finished;
    the `beam` best that do not end live on. A sentence is done when `beam` hypotheses are finished, when no
    live one can enter the `n_best` any more, or after `max_length` steps (default: twice its length plus 10).
    Scores are log-probabilities over `length_normaliser(length, length_penalty)`; the best come first.

    Where the limit leaves fewer than `n_best` finished, unfinished hypotheses follow the finished ones.
    Fewer than `n_best` are returned only where the limit allows no more. Padding and `bos` are never output;
    `beam=1` is `greedy`. The model is run in eval mode, without gradients, and left as it was.

    Raises ValueError for a beam, n_best or max_length below 1, n_best above beam, a negative length_penalty.
    """
    check_search(beam, n_best, length_penalty)
    finished: list[list[Hypothesis]] = [[] for _ in range(src.size(0))]
    unfinished: list[list[Hypothesis]] = [[] for _ in range(src.size(0))]
    with evaluating(model):
        source, cache = encode_source(model, src, max_length), model.decoder.empty_cache()
        forbidden = sorted({model.pad, bos} - {eos})
        beams = first_beams(source, beam, bos)
        while source.sentences:
            logits_RV = next_logits(model, source, beams.prefixes[:, :, -1].flatten(), cache)
            step, candidates = cache.length, extend(beams.scores, logits_RV, forbidden)
            norm = length_normaliser(step, length_penalty)
            for row, hypothesis in ended(beams, candidates, eos, norm):
                finished[source.sentences[row]].append(hypothesis)
            beams, parents_BK = survive(beams, candidates, eos)

            going = []
            for row, best in enumerate(beams.scores[:, 0].tolist()):
                sentence, limit = source.sentences[row], source.limits[row]
                if step == limit:
                    unfinished[sentence] = live_hypotheses(beams, row, norm)
                elif not is_done(finished[sentence], best / length_normaliser(limit, length_penalty), beam, n_best):
                    going.append(row)
            if len(going) < len(source.sentences):
                source, beams = source.keep(going), Beams(beams.prefixes[going], beams.scores[going])
                parents_BK = parents_BK[going]
                cache.keep_sentences(torch.tensor(going, device=src.device, dtype=torch.long))
            cache.reorder(parents_BK.flatten())
    return [(best_first(done) + rest)[:n_best] for done, rest in zip(finished, unfinished, strict=True)]


def check_search(beam: int, n_best: int, length_penalty: float) -> None:
    """Raise ValueError for settings that no search can follow."""
    if beam < 1:
        raise ValueError(f"beam is {beam}, below 1: beam=1 is greedy search")
    if not 1 <= n_best <= beam:
        raise ValueError(f"n_best is {n_best}, outside [1, beam {beam}]: widen the beam or ask for fewer")
    if length_penalty < 0:
        raise ValueError(f"length_penalty is {length_penalty}, below 0: 0 has no penalty")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards every submodule has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def encode_source(model: EncoderDecoder, src: Tensor, max_length: int | None) -> Source:
    """Encode the batch and fix each sentence's limit, from its own length so that company changes nothing."""
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length is {max_length}, below 1: allow at least one step")
    check_tokens("src", src)
    lengths = (src != model.pad).sum(1).tolist()
    limits = [2 * length + 10 if max_length is None else max_length for length in lengths]
    mask = padding_mask(src, model.pad)
    return Source(model.encode(src, mask), mask, list(range(src.size(0))), limits)


def next_logits(model: EncoderDecoder, source: Source, tokens_R: Tensor, cache: DecoderCache) -> Tensor:
    """One cached step: each row's latest token -> logits of the one after it, (R, V), in float32 or wider."""
    hidden_R1D = model.decode(source.memory, source.mask, tokens_R[:, None], cache=cache)
    logits_RV: Tensor = model.generator(hidden_R1D[:, 0])
    return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))


def first_beams(source: Source, beam: int, bos: int) -> Beams:
    """One live hypothesis a sentence, the start symbol; the other beams are still empty."""
    device, dtype = source.memory.device, torch.promote_types(source.memory.dtype, torch.float32)
    scores_BK = torch.full((len(source.sentences), beam), -math.inf, device=device, dtype=dtype)
    scores_BK[:, 0] = 0
    return Beams(torch.full((len(source.sentences), beam, 1), bos, device=device), scores_BK)


def extend(scores_BK: Tensor, logits_RV: Tensor, forbidden: list[int]) -> Candidates:
    """The 2 K best extensions of each sentence's K live hypotheses: at least K of them do not end.

    Each row's best tokens are picked from its logits, so log-probabilities exist for those alone.
    """
    batch, beam = scores_BK.shape
    total_R = log_totals(logits_RV)
    logits_RV[:, forbidden] = -math.inf
    logits_RC, tokens_RC = best_tokens(logits_RV, min(2 * beam, logits_RV.size(-1)))
    extended_RC = scores_BK.reshape(-1, 1) + (logits_RC - total_R[:, None])
    width = extended_RC.size(-1)
    scores_BC, index_BC = extended_RC.reshape(batch, beam * width).topk(min(2 * beam, beam * width))
    tokens_BC = tokens_RC.reshape(batch, beam * width).gather(1, index_BC)
    return Candidates(scores_BC, index_BC // width, tokens_BC)


def log_totals(logits_RV: Tensor) -> Tensor:
    """`logits_RV.logsumexp(-1)`, (R,): the largest logit minus the logarithm of its probability, at least 1 / V.

    torch's softmax takes a third of the time of its logsumexp, and a few rows of it fit into a cache.
    """
    return torch.cat([rows.amax(-1) - rows.softmax(-1).amax(-1).log() for rows in logits_RV.split(64)])


def best_tokens(logits_RV: Tensor, count: int, block: int = 64) -> tuple[Tensor, Tensor]:
    """`logits_RV.topk(count)`: values and tokens, (R, count).

    The `count` best tokens are among the `count` blocks of the vocabulary with the best maxima (and the rest that
    fills no block), so that a large vocabulary is read once and only a few hundred logits are sorted.
    """
    rows, vocab = logits_RV.shape
    whole = vocab // block * block
    if whole <= 2 * count * block:
        logits_RC, tokens_RC = logits_RV.topk(count)
        return logits_RC, tokens_RC
    blocks_RNW, within_W = logits_RV[:, :whole].unflatten(1, (-1, block)), torch.arange(block, device=logits_RV.device)
    chosen_RC1 = blocks_RNW.amax(-1).topk(count, sorted=False).indices[:, :, None]
    rest = torch.arange(whole, vocab, device=logits_RV.device).expand(rows, -1)
    candidates = torch.cat((blocks_RNW.gather(1, chosen_RC1.expand(-1, -1, block)).flatten(1), logits_RV[:, whole:]), 1)
    logits_RC, index_RC = candidates.topk(count)
    return logits_RC, torch.cat(((chosen_RC1 * block + within_W).flatten(1), rest), 1).gather(1, index_RC)


def ended(beams: Beams, candidates: Candidates, eos: int, norm: float) -> Iterator[tuple[int, Hypothesis]]:
    """(row, hypothesis) for each candidate among the K best that ends."""
    beam = beams.scores.size(1)
    scores_BK = candidates.scores[:, :beam]
    ends_BK = (candidates.tokens[:, :beam] == eos) & (scores_BK > -math.inf)
    for row, rank in ends_BK.nonzero().tolist():
        tokens_T = beams.prefixes[row, candidates.beams[row, rank]]
        yield row, Hypothesis(tokens_T[1:].tolist(), scores_BK[row, rank].item() / norm)


def survive(beams: Beams, candidates: Candidates, eos: int) -> tuple[Beams, Tensor]:
    """The K best candidates that do not end, and the row each one's keys and values are in, (B, K)."""
    batch, beam = beams.scores.shape
    scores_BK, chosen_BK = candidates.scores.masked_fill(candidates.tokens == eos, -math.inf).topk(beam)
    parents_BK = candidates.beams.gather(1, chosen_BK)
    tokens_BK = candidates.tokens.gather(1, chosen_BK)
    first_row_B1 = torch.arange(0, batch * beam, beam, device=parents_BK.device)[:, None]
    parents_BK = parents_BK + first_row_B1
    prefixes_BKT = beams.prefixes.flatten(0, 1)[parents_BK]
    return Beams(torch.cat((prefixes_BKT, tokens_BK[:, :, None]), dim=2), scores_BK), parents_BK


def live_hypotheses(beams: Beams, row: int, norm: float) -> list[Hypothesis]:
    """A sentence's unfinished hypotheses, best first."""
    pairs = zip(beams.prefixes[row, :, 1:].tolist(), beams.scores[row].tolist(), strict=True)
    return [Hypothesis(tokens, score / norm) for tokens, score in pairs if score > -math.inf]


def best_first(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Sorted by score."""
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


def is_done(finished: list[Hypothesis], bound: float, beam: int, n_best: int) -> bool:
    """Whether going on cannot change the n_best, or the beam's worth of hypotheses is there.

    `bound` is the best live log-probability over the normaliser of the longest translation allowed: further
    tokens only lower the one and raise the other, so no live hypothesis can score above it.
    """
    if bound == -math.inf or len(finished) >= beam:
        return True
    return len(finished) >= n_best and best_first(finished)[n_best - 1].score >= bound

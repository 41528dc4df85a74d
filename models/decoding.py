"""Translation with a trained model: greedy and beam search in batches, with cached keys and values.

A sentence's translation does not depend on the other sentences of its batch, and a finished sentence leaves the batch.

Shapes: B sentences still decoding, K live beams (1 at the first step), R = B x K rows, T target time so far,
C candidates, S source time, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from models.attention import padding_mask
from models.cache import DecoderCache
from models.candidates import Candidates, extend, logits_of
from models.grouped_encoding import encode
from models.packed import packed
from models.transformer import EncoderDecoder, check_tokens


class Hypothesis(NamedTuple):
    """A translation and its score: its log-probability, including the end symbol's, over `length_normaliser`."""

    tokens: list[int]
    """Token ids without start and end symbol."""
    score: float


class Source(NamedTuple):
    """The encoded sentences that are still being translated."""

    memory: Tensor
    """(B, S, D)."""
    mask: Tensor
    """(B, 1, 1, S), True = a real token."""
    sentences: list[int]
    """The row of each in the caller's batch."""
    limits: list[int]
    """The largest number of decoding steps of each."""

    def keep(self, rows: list[int]) -> Source:
        """Return these rows only."""
        return Source(
            self.memory[rows],
            self.mask[rows],
            [self.sentences[row] for row in rows],
            [self.limits[row] for row in rows],
        )


class Beams(NamedTuple):
    """The live hypotheses of each sentence, best first; a beam without a hypothesis has score -inf."""

    prefixes: Tensor
    """(B, K, T) ids, the start symbol first."""
    scores: Tensor
    """(B, K) summed log-probabilities."""


LengthNorm = Literal["gnmt", "length"]
"""What is raised to the power of the length penalty."""


def length_normaliser(length: int, alpha: float, norm: LengthNorm = "gnmt") -> float:
    """Compute the number by which the log-probability of a hypothesis is divided.

    gnmt: ((5 + length) / 6)^alpha, the length penalty of Wu et al. 2016, equation 14.
    length: length^alpha, as in fairseq's generator; with alpha 1 the score is the mean log-probability of a token.

    `length` includes the end symbol. With alpha 0 the number is 1; a larger alpha favours longer translations.
    """
    if norm == "length":
        return float(length**alpha)
    return float(((5 + length) / 6) ** alpha)


def default_limit(length: int) -> int:
    """Return the default number of decoding steps for a source of `length` tokens, including the end symbol."""
    return 2 * length + 10


def greedy(
    model: EncoderDecoder, src: Tensor, *, bos: int, eos: int, max_length: int | Sequence[int] | None = None
) -> list[list[int]]:
    """Append the most probable next token until the end: src (B, S) ids -> a list of ids for each sentence.

    Decoding ends at `eos` or after `max_length` steps, one number for all sentences or one for each (default:
    `default_limit` of each), and never outputs padding or `bos`. Start and end symbol are not returned. The model runs
    in eval mode without gradients, and its modes are restored afterwards. Raises ValueError for a `max_length` below 1
    or with another number of entries than `src` has sentences.
    """
    translations: list[list[int]] = [[] for _ in range(src.size(0))]
    with evaluating(model):
        source = encode_source(model, src, max_length)
        cache = model.decoder.empty_cache()
        forbidden = sorted({model.pad, bos} - {eos})
        tokens_B = torch.full((src.size(0),), bos, device=src.device)
        while source.sentences:
            logits_BV = logits_of(model, next_hidden(model, source, tokens_B, cache))
            # The most probable token has the largest logit: no softmax is needed
            logits_BV[:, forbidden] = -math.inf
            tokens_B = logits_BV.argmax(-1)
            going = []
            for row, token in enumerate(tokens_B.tolist()):
                if token != eos:
                    translations[source.sentences[row]].append(token)
                    if cache.length < source.limits[row]:
                        going.append(row)
            if len(going) < len(source.sentences):
                source = source.keep(going)
                tokens_B = tokens_B[going]
                cache.keep_sentences(torch.tensor(going, device=src.device, dtype=torch.long))
    return translations


def beam_search(
    model: EncoderDecoder,
    src: Tensor,
    *,
    bos: int,
    eos: int,
    beam: int = 4,
    length_penalty: float = 0.6,
    length_norm: LengthNorm = "gnmt",
    n_best: int = 1,
    max_length: int | Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Find the best translations by a search of width `beam`: src (B, S) ids -> up to `n_best` for each sentence.

    Each step extends every live hypothesis by one token. Extensions that end and are among the `beam` best are finished
    hypotheses; the `beam` best that do not end are the next live hypotheses. A sentence is done when `beam` hypotheses
    are finished, when no live one can enter the `n_best` any more, or after `max_length` steps, as for `greedy`. Scores
    are log-probabilities over `length_normaliser(length, length_penalty, length_norm)`; the best come first.

    Where fewer than `n_best` are finished after `max_length` steps, unfinished hypotheses follow the finished ones;
    where there are not enough of these either, fewer than `n_best` are returned. Padding and `bos` are never output;
    `beam=1` is `greedy`. The model runs in eval mode without gradients, and its modes are restored afterwards.

    Raises ValueError for a beam, n_best or max_length below 1, n_best above beam, a negative length_penalty, an
    unknown length_norm, and max_lengths of another number than the sentences.
    """
    check_search(beam, n_best, length_penalty, length_norm)
    finished: list[list[Hypothesis]] = [[] for _ in range(src.size(0))]
    unfinished: list[list[Hypothesis]] = [[] for _ in range(src.size(0))]
    with evaluating(model):
        source = encode_source(model, src, max_length)
        cache = model.decoder.empty_cache()
        forbidden = sorted({model.pad, bos} - {eos})
        beams = first_beams(source, bos)
        while source.sentences:
            hidden_RD = next_hidden(model, source, beams.prefixes[:, :, -1].flatten(), cache)
            step = cache.length
            candidates = extend(model, beams.scores, hidden_RD, forbidden, beam)
            norm = length_normaliser(step, length_penalty, length_norm)
            for row, hypothesis in ended(beams, candidates, eos, norm, beam):
                finished[source.sentences[row]].append(hypothesis)
            beams, parents_BK = survive(beams, candidates, eos, beam)

            # Live hypotheses of a sentence all have `step` tokens, so their log-probabilities compare without penalty
            going = []
            for row, best in enumerate(beams.scores[:, 0].tolist()):
                sentence = source.sentences[row]
                limit = source.limits[row]
                if step == limit:
                    unfinished[sentence] = live_hypotheses(beams, row, norm)
                    continue
                bound = best / length_normaliser(limit, length_penalty, length_norm)
                if not is_done(finished[sentence], bound, beam, n_best):
                    going.append(row)
            if len(going) < len(source.sentences):
                source = source.keep(going)
                beams = Beams(beams.prefixes[going], beams.scores[going])
                parents_BK = parents_BK[going]
                cache.keep_sentences(torch.tensor(going, device=src.device, dtype=torch.long))
            # After the finished sentences have left, since `parents_BK` has a row for each one that goes on
            cache.reorder(parents_BK)
    return [(best_first(done) + rest)[:n_best] for done, rest in zip(finished, unfinished, strict=True)]


def check_search(beam: int, n_best: int, length_penalty: float, length_norm: str) -> None:
    """Raise ValueError for invalid settings of a search."""
    if beam < 1:
        raise ValueError(f"beam is {beam}, below 1: beam=1 is greedy search")
    if not 1 <= n_best <= beam:
        raise ValueError(f"n_best is {n_best}, outside [1, beam {beam}]: widen the beam or ask for fewer")
    if length_penalty < 0:
        raise ValueError(f"length_penalty is {length_penalty}, below 0: 0 has no penalty")
    if length_norm not in get_args(LengthNorm):
        raise ValueError(f"length_norm is {length_norm!r}: it must be gnmt or length")


@contextmanager
def evaluating(model: EncoderDecoder) -> Iterator[None]:
    """Within the block, set eval mode, disable gradients and pack the weights; restore every module's mode afterwards.

    `greedy` and `beam_search` do this themselves; a block around many calls does it once for all of them. The weights
    must not change within the block.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), packed([model]):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def encode_source(model: EncoderDecoder, src: Tensor, max_length: int | Sequence[int] | None) -> Source:
    """Encode the batch, and set each sentence's limit."""
    check_tokens("src", src)
    limits = limits_of(model, src, max_length)
    return Source(encode(model, src), padding_mask(src, model.pad), list(range(src.size(0))), limits)


def limits_of(model: EncoderDecoder, src: Tensor, max_length: int | Sequence[int] | None) -> list[int]:
    """Return the largest number of decoding steps of each sentence."""
    if max_length is None:
        # From each sentence's own length, so that the other sentences of the batch change nothing
        return [default_limit(length) for length in (src != model.pad).sum(1).tolist()]
    if not isinstance(max_length, Sequence):
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}, below 1: allow at least one step")
        return [max_length] * src.size(0)
    if len(max_length) != src.size(0):
        raise ValueError(f"max_length has {len(max_length)} entries for {src.size(0)} sentences: give one for each")
    for sentence, limit in enumerate(max_length):
        if limit < 1:
            raise ValueError(f"max_length[{sentence}] is {limit}, below 1: allow at least one step")
    return list(max_length)


def next_hidden(model: EncoderDecoder, source: Source, tokens_R: Tensor, cache: DecoderCache) -> Tensor:
    """Decode each row's latest token: (R,) -> the hidden state that predicts the next one, (R, D)."""
    return model.decode(source.memory, source.mask, tokens_R[:, None], cache=cache)[:, 0]


def first_beams(source: Source, bos: int) -> Beams:
    """Return one live hypothesis for each sentence, the start symbol: the first step needs one beam only."""
    device = source.memory.device
    dtype = torch.promote_types(source.memory.dtype, torch.float32)
    prefixes_BKT = torch.full((len(source.sentences), 1, 1), bos, device=device)
    return Beams(prefixes_BKT, torch.zeros(len(source.sentences), 1, device=device, dtype=dtype))


def ended(beams: Beams, candidates: Candidates, eos: int, norm: float, beam: int) -> Iterator[tuple[int, Hypothesis]]:
    """Yield (row, hypothesis) for each of the `beam` best candidates that ends."""
    scores_BK = candidates.scores[:, :beam]
    # Only the `beam` best: an ending below them would not have survived as a hypothesis either
    ends_BK = (candidates.tokens[:, :beam] == eos) & (scores_BK > -math.inf)
    for row, rank in ends_BK.nonzero().tolist():
        tokens_T = beams.prefixes[row, candidates.beams[row, rank]]
        yield row, Hypothesis(tokens_T[1:].tolist(), scores_BK[row, rank].item() / norm)


def survive(beams: Beams, candidates: Candidates, eos: int, beam: int) -> tuple[Beams, Tensor]:
    """Return the `beam` best candidates that do not end, and which live hypothesis each one extends, (B, K)."""
    # Among 2 x beam candidates at most `beam` end, one for each live hypothesis, so at least `beam` remain
    scores_BC = candidates.scores.masked_fill(candidates.tokens == eos, -math.inf)
    scores_BK, chosen_BK = scores_BC.topk(min(beam, scores_BC.size(1)))
    parents_BK = candidates.beams.gather(1, chosen_BK)
    tokens_BK = candidates.tokens.gather(1, chosen_BK)
    prefixes_BKT = beams.prefixes.gather(1, parents_BK[:, :, None].expand(-1, -1, beams.prefixes.size(2)))
    return Beams(torch.cat((prefixes_BKT, tokens_BK[:, :, None]), dim=2), scores_BK), parents_BK


def live_hypotheses(beams: Beams, row: int, norm: float) -> list[Hypothesis]:
    """Return a sentence's unfinished hypotheses, best first."""
    pairs = zip(beams.prefixes[row, :, 1:].tolist(), beams.scores[row].tolist(), strict=True)
    return [Hypothesis(tokens, score / norm) for tokens, score in pairs if score > -math.inf]


def best_first(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Sort hypotheses by score."""
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


def is_done(finished: list[Hypothesis], bound: float, beam: int, n_best: int) -> bool:
    """Return whether `beam` hypotheses are finished, or further steps cannot change the n_best.

    `bound` is the best live log-probability over the normaliser of the longest translation allowed. Further tokens only
    lower the (negative) log-probability, and no normaliser is larger, so no live hypothesis can score above `bound`.
    """
    # A best score of -inf means that no live hypothesis is left
    if bound == -math.inf or len(finished) >= beam:
        return True
    return len(finished) >= n_best and best_first(finished)[n_best - 1].score >= bound

"""Translation with a trained model or an ensemble: greedy and beam search in batches, with cached keys and values.

A sentence's translation does not depend on the other sentences of its batch, and a finished sentence leaves the batch.

Shapes: B sentences still decoding, K live beams (1 at the first step), R = B x K rows, T target time so far,
C candidates, S source time, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import get_args

import torch
from torch import Tensor

from models.candidates import Beams, Candidates, extend
from models.decoding_rules import DeadEndError, Rule, Task
from models.ensemble import Batch, Models, Start, check_finite, evaluating, logits_of, members
from models.hypotheses import Hypothesis, LengthNorm, best_first, length_normaliser


def greedy(
    model: Models,
    src: Tensor,
    *,
    bos: Start,
    eos: int,
    rules: Sequence[Rule] = (),
    max_length: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """Append the most probable next token until the end: src (B, S) ids -> a list of ids for each sentence.

    `model` is an EncoderDecoder or, for an ensemble, a list of them. Decoding ends at `eos` or after `max_length`
    steps, one number for all sentences or one for each (default: `default_limit` of each), and never outputs padding,
    `bos`, or what `rules` forbid (`models.decoding_rules`). `bos` may be several tokens that every translation starts
    with; the one that is never output is then the last. Start and end symbols are not returned. The model runs in eval
    mode without gradients, and its modes are restored afterwards.

    Raises ValueError for a `max_length` below 1 or with a different number of entries than `src` has sentences, for
    rules that no translation can satisfy, and for models that do not belong together; DeadEndError, a ValueError, if
    the rules forbid every next token; FloatingPointError if the model's logits are nan or inf.
    """
    translations: list[list[int]] = [[] for _ in range(src.size(0))]
    models = members(model)
    with evaluating(models):
        batch = Batch.encode(models, src, max_length, bos)
        forbidden = Task.of(batch, eos).forbidden(rules)
        prefixes_BT = torch.full((src.size(0), 1), batch.bos, device=src.device)
        while batch.sentences:
            logits_BV = logits_of(models, batch.next_hidden(prefixes_BT[:, -1]))
            # The most probable token has the largest logit: no softmax is needed
            forbidden.mask(logits_BV, prefixes_BT, batch.sentences)
            tokens_B = logits_BV.argmax(-1)
            best_B = logits_BV.gather(1, tokens_B[:, None])[:, 0]
            check_finite(best_B, batch.sentences)
            check_alive(best_B, batch.sentences)
            prefixes_BT = torch.cat((prefixes_BT, tokens_B[:, None]), dim=1)
            going = []
            for row, token in enumerate(tokens_B.tolist()):
                if token == eos:
                    translations[batch.sentences[row]] = prefixes_BT[row, 1:-1].tolist()
                elif batch.step == batch.limits[row]:
                    translations[batch.sentences[row]] = prefixes_BT[row, 1:].tolist()
                else:
                    going.append(row)
            if len(going) < len(batch.sentences):
                batch.keep(going)
                prefixes_BT = prefixes_BT[going]
    return translations


def check_alive(best_B: Tensor, sentences: list[int]) -> None:
    """Raise DeadEndError if every token of some row is forbidden; `best_B` is each row's largest logit."""
    for row, best in enumerate(best_B.tolist()):
        if best == -math.inf:
            raise DeadEndError(sentences[row])


def beam_search(
    model: Models,
    src: Tensor,
    *,
    bos: Start,
    eos: int,
    beam: int = 4,
    length_penalty: float = 0.6,
    length_norm: LengthNorm = "gnmt",
    n_best: int = 1,
    rules: Sequence[Rule] = (),
    max_length: int | Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Find the best translations by a search of width `beam`: src (B, S) ids -> up to `n_best` for each sentence.

    `model` is an EncoderDecoder or, for an ensemble, a list of them. Each step extends every live hypothesis by one
    token that `rules` (`models.decoding_rules`) do not forbid. Extensions that end and are among the `beam` best are
    finished hypotheses; the `beam` best that do not end are the next live hypotheses. A sentence is done when `beam`
    hypotheses are finished, when no live one can enter the `n_best` any more, or after `max_length` steps, as for
    `greedy`. Scores are log-probabilities over `length_normaliser(length, length_penalty, length_norm)`; the best come
    first.

    If fewer than `n_best` are finished after `max_length` steps, unfinished hypotheses follow the finished ones; if
    there are not enough of these either, fewer than `n_best` are returned. A hypothesis after which the rules forbid
    every token is dropped. Padding and `bos` are never output; `beam=1` is `greedy`. The model runs in eval mode
    without gradients, and its modes are restored afterwards.

    Raises ValueError for a beam, n_best or max_length below 1, n_best above beam, a negative length_penalty, an
    unknown length_norm, a max_length whose number of entries is not that of the sentences, rules that no translation
    can satisfy, and models that do not belong together; DeadEndError, a ValueError, if the rules leave a sentence no
    hypothesis; FloatingPointError if the model's logits are nan or inf.
    """
    check_search(beam, n_best, length_penalty, length_norm)
    finished: list[list[Hypothesis]] = [[] for _ in range(src.size(0))]
    unfinished: list[list[Hypothesis]] = [[] for _ in range(src.size(0))]
    models = members(model)
    with evaluating(models):
        batch = Batch.encode(models, src, max_length, bos)
        forbidden = Task.of(batch, eos).forbidden(rules)
        beams = Beams.first(batch.memories[0], batch.bos)
        while batch.sentences:
            hiddens = batch.next_hidden(beams.prefixes[:, :, -1].flatten())
            candidates = extend(batch, beams, hiddens, forbidden, beam)
            norm = length_normaliser(batch.step, length_penalty, length_norm)
            for row, hypothesis in endings(beams, candidates, eos, norm, beam):
                finished[batch.sentences[row]].append(hypothesis)
            beams, parents_BK = survive(beams, candidates, eos, beam)

            # A sentence's live hypotheses are all equally long, so their log-probabilities compare without a penalty
            going = []
            for row, best in enumerate(beams.scores[:, 0].tolist()):
                sentence = batch.sentences[row]
                limit = batch.limits[row]
                if batch.step == limit:
                    unfinished[sentence] = live_hypotheses(beams, row, norm)
                    continue
                bound = best / length_normaliser(limit, length_penalty, length_norm)
                if not is_done(finished[sentence], bound, beam, n_best):
                    going.append(row)
            if len(going) < len(batch.sentences):
                batch.keep(going)
                beams = Beams(beams.prefixes[going], beams.scores[going])
                parents_BK = parents_BK[going]
            # After the finished sentences have left, since `parents_BK` has a row for each one that continues
            batch.reorder(parents_BK)
    return n_best_of(n_best, finished, unfinished)


def check_search(beam: int, n_best: int, length_penalty: float, length_norm: str) -> None:
    """Raise ValueError for invalid settings of a search."""
    if beam < 1:
        raise ValueError(f"beam is {beam}, below 1: beam=1 is greedy search")
    if not 1 <= n_best <= beam:
        raise ValueError(f"n_best is {n_best}, outside [1, beam {beam}]: widen the beam or ask for fewer")
    if length_penalty < 0:
        raise ValueError(f"length_penalty is {length_penalty}, below 0: 0 means no penalty")
    if length_norm not in get_args(LengthNorm):
        raise ValueError(f"length_norm is {length_norm!r}: it must be gnmt or length")


def endings(beams: Beams, candidates: Candidates, eos: int, norm: float, beam: int) -> Iterator[tuple[int, Hypothesis]]:
    """Yield (row, hypothesis) for each of the `beam` best candidates that ends."""
    scores_BK = candidates.scores[:, :beam]
    # Only the `beam` best: an ending below them would not have survived as a hypothesis either
    ends_BK = (candidates.tokens[:, :beam] == eos) & (scores_BK > -math.inf)
    for row, rank in ends_BK.nonzero().tolist():
        tokens_T = beams.prefixes[row, candidates.beams[row, rank]]
        score = scores_BK[row, rank].item()
        yield row, Hypothesis(tokens_T[1:].tolist(), score / norm, score)


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
    return [Hypothesis(tokens, score / norm, score) for tokens, score in pairs if score > -math.inf]


def is_done(finished: list[Hypothesis], bound: float, beam: int, n_best: int) -> bool:
    """Return whether `beam` hypotheses are finished, or further steps cannot change the n_best.

    `bound` is the best live log-probability over the normaliser of the longest translation allowed. Further tokens only
    lower the (negative) log-probability, and no normaliser is larger, so no live hypothesis can score above `bound`.
    """
    # A best score of -inf means that no live hypothesis is left
    if bound == -math.inf or len(finished) >= beam:
        return True
    return len(finished) >= n_best and best_first(finished)[n_best - 1].score >= bound


def n_best_of(
    n_best: int, finished: list[list[Hypothesis]], unfinished: list[list[Hypothesis]]
) -> list[list[Hypothesis]]:
    """Return each sentence's best finished hypotheses, then unfinished ones; raise DeadEndError if it has neither."""
    found = [(best_first(done) + rest)[:n_best] for done, rest in zip(finished, unfinished, strict=True)]
    if [] in found:
        raise DeadEndError(found.index([]))
    return found

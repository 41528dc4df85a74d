"""Random segmentations of a word into subwords, from the caller's random numbers.

sentencepiece can sample as well, but its random numbers differ in every process, whatever the seed: no run could be
resumed, and no two processes would draw the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

from recipes.translation.settings.data import KINDS
from recipes.translation.text.sentencepiece_file import model_of

BLANK = "\u2581"
"""What sentencepiece writes for a blank; words start with it."""

REMEMBERED = 20_000
"""Number of words whose `last_pieces` are kept, those drawn most recently: 50 MB, at 2.6 KB for a word of 9 characters.
The commonest words make up most of a text, so a larger corpus does not need more."""


class Sampler:
    """Draws subwords from a sentencepiece model, word by word.

    Args:
        processor: sentencepiece's own.
        kind: one of KINDS that can be sampled.
    """

    def __init__(self, processor: Any, kind: str) -> None:
        self._processor = processor
        self._kind = kind
        # Control pieces, bytes and the user's own symbols are never divided, nor is another piece divided into them
        self._pieces = [
            piece.piece if piece.type == piece.NORMAL else ""
            for piece in model_of(processor.serialized_model_proto()).pieces
        ]
        self._ids = {piece: each for each, piece in enumerate(self._pieces) if piece}
        self._scores = {piece: processor.get_score(each) for piece, each in self._ids.items()}
        scores = self._scores
        self._last_pieces = lru_cache(REMEMBERED)(lambda word, exponent: last_pieces(word, scores, exponent))

    def __reduce__(self) -> tuple[type[Sampler], tuple[Any, str]]:
        """Pickle only the model, from which the other process makes its own sampler."""
        return Sampler, (self._processor, self._kind)

    def draw(self, ids: Sequence[int], seed: int, amount: float) -> list[int]:
        """Draw the subwords of a sentence, given the unsampled ones."""
        random = Random(seed)
        found: list[int] = []
        for text, piece in self._words(ids):
            if text:
                found += [self._ids[each] for each in self._segmentation(text, random, amount)]
            else:
                found.append(piece)
        return found

    def _words(self, ids: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Yield each word, with the mark of the blank before it, and each byte or symbol; no subword spans two."""
        word = ""
        for each in ids:
            piece = self._pieces[each]
            if word and (not piece or piece.startswith(BLANK)):
                yield word, 0
                word = ""
            if piece:
                word += piece
            else:
                yield "", each
        if word:
            yield word, 0

    def _segmentation(self, word: str, random: Random, amount: float) -> list[str]:
        if KINDS[self._kind].merges:
            return with_dropout(word, self._scores, amount, random)
        return draw_segmentation(word, self._last_pieces(word, amount), random)


def with_dropout(word: str, scores: Mapping[str, float], dropout: float, random: Random) -> list[str]:
    """Merge the characters of a word, skipping each merge with probability `dropout`.

    This is BPE-dropout (Provilkov et al. 2020) as sentencepiece draws it: the pair with the best score comes first, in
    a tie the left one, and a skipped pair comes up again only when one of its neighbours has changed. Algorithm 1 in
    the paper draws again for all pairs after each merge, and so skips fewer at the same probability.
    """
    end_of = {start: start + 1 for start in range(len(word))}
    start_of = {start + 1: start for start in range(len(word))}
    pairs: list[tuple[float, int, int, int]] = []

    def add(start: int, middle: int, end: int) -> None:
        score = scores.get(word[start:end])
        if score is not None:
            heappush(pairs, (-score, start, middle, end))

    for start in range(len(word) - 1):
        add(start, start + 1, start + 2)
    while pairs:
        _, start, middle, end = heappop(pairs)
        is_there = end_of.get(start) == middle and end_of.get(middle) == end
        if not is_there or random.random() < dropout:
            continue
        del end_of[middle]
        end_of[start] = end
        start_of[end] = start
        if start > 0:
            add(start_of[start], start, end)
        if end < len(word):
            add(start, end, end_of[end])
    return [word[start:end] for start, end in sorted(end_of.items())]


class LastPieces(NamedTuple):
    """The pieces that a prefix of a word can end with."""

    starts: list[int]
    cumulative: list[float]
    """Their cumulative weights, in proportion to their probabilities."""


def last_pieces(word: str, scores: Mapping[str, float], exponent: float) -> list[LastPieces]:
    """Return, for each prefix of a word, how probable each of its last pieces is.

    A segmentation has probability P(x)^a / sum P(x)^a, where log P(x) is the sum of its pieces' scores (Kudo 2018,
    section 3.3). With f(0) = 0 and f(end) = log sum over start of exp(f(start) + a score(start, end)), the last piece
    of the prefix up to `end` starts at `start` with probability exp(f(start) + a score(start, end) - f(end)).
    """
    forward = [0.0]
    found = []
    for end in range(1, len(word) + 1):
        starts = [at for at in range(end) if word[at:end] in scores and forward[at] > -math.inf]
        terms = [forward[at] + exponent * scores[word[at:end]] for at in starts]
        largest = max(terms, default=-math.inf)
        weights = [math.exp(term - largest) for term in terms]
        forward.append(largest + math.log(sum(weights) or 1.0))
        found.append(LastPieces(starts, list(accumulate(weights))))
    return found


def draw_segmentation(word: str, pieces: list[LastPieces], random: Random) -> list[str]:
    """Draw a segmentation from the end of a word to its start, given the `last_pieces` of the word."""
    segmentation = []
    end = len(word)
    while end:
        starts, cumulative = pieces[end - 1]
        (start,) = random.choices(starts, cum_weights=cumulative)
        segmentation.append(word[start:end])
        end = start
    segmentation.reverse()
    return segmentation

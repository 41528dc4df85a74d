"""The choice among several translations: the one most like the others, or the one that another program scores best.

The former is minimum Bayes risk, by chrF, by sentence-BLEU or by another program's metric.

Shapes: N candidates, G n-grams that occur in any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, Literal, get_args

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.helpers import extract_all_char_ngrams, extract_all_word_ngrams

from recipes.translation.scores.scores import Array, scores_of_sums
from recipes.translation.settings.config import DataConfig
from recipes.translation.text.bleu_tokenizers import tokenizer_for
from recipes.translation.text.metric_command import command_scores

Scored = tuple[str, str, str | None]
"""A source, a translation and, if there is one, a reference."""
Utility = Literal["chrf", "bleu"]
"""How similarity is measured: by chrF2, or by sentence-BLEU as sacreBLEU computes it."""
CHARACTER_ORDERS = 6


def choose_by_mbr(texts: Sequence[Sequence[str]], utility: Utility, data: DataConfig) -> list[str]:
    """Return, for each sentence, the translation with the largest mean utility, using the settings' tokeniser.

    Raises ConfigError for a tokeniser that is not installed.
    """
    tokenize = tokenizer_for(data.tokenize, data.target)
    return [row[best_by_mbr(row, utility, tokenize)] for row in texts]


def choose_by_command(sources: Sequence[str], texts: Sequence[Sequence[str]], command: str) -> list[str]:
    """Return, for each sentence, the translation that a command gives the largest number.

    In a tie the first is chosen. Raises ConfigError as `command_scores` does.
    """
    rows = [[(source, text, None) for text in row] for source, row in zip(sources, texts, strict=True)]
    scores = _scores_by_row(rows, command)
    return [row[int(np.argmax(found))] for row, found in zip(texts, scores, strict=True)]


def choose_by_mbr_of_command(sources: Sequence[str], texts: Sequence[Sequence[str]], command: str) -> list[str]:
    """Return, for each sentence, the translation with the largest mean score against the others, by a command.

    The command scores each distinct translation with each other one as its reference, and with itself if it occurs
    several times. Raises ConfigError as `command_scores` does.
    """
    asked = [_others(row) for row in texts]
    pairs = [
        [(source, different[text], different[other]) for text, other in np.argwhere(others_NN)]
        for source, (different, others_NN) in zip(sources, asked, strict=True)
    ]
    chosen = []
    for row, (_, others_NN), scores in zip(texts, asked, _scores_by_row(pairs, command), strict=True):
        utilities_NN = np.zeros_like(others_NN)
        utilities_NN[others_NN > 0] = scores  # in the order of `argwhere`
        chosen.append(row[_best(_means(row, utilities_NN))])
    return chosen


def _scores_by_row(rows: Sequence[Sequence[Scored]], command: str) -> list[list[float]]:
    """Return a command's scores for sources, translations and references, row by row; the command runs once."""
    flat = list(chain.from_iterable(rows))
    references = [reference for _, _, reference in flat if reference is not None] or None
    scores = iter(
        command_scores(command, [row[0] for row in flat], [row[1] for row in flat], references) if flat else ()
    )
    return [list(islice(scores, len(row))) for row in rows]


def best_by_mbr(candidates: Sequence[str], utility: Utility, tokenize: str = "13a") -> int:
    """Return the index of the candidate with the largest mean utility, with the others as its references.

    argmax_h 1 / (N - 1) sum_{r != h} u(h, r): Eikema and Aziz 2020; Freitag et al. 2022. Identical candidates count as
    often as they occur, as samples must. In a tie the first is chosen, so that an n-best list keeps its best.
    `tokenize` is sacreBLEU's tokeniser, for BLEU. Raises ValueError for no candidates, and for an unknown utility.
    """
    if not candidates:
        raise ValueError("there are no candidates to choose from")
    return _best(mean_utilities(candidates, utility, tokenize))


def _best(means_N: Array) -> int:
    """Return the first that is within rounding of the best: sums in a different order may differ in the last place."""
    return int(np.argmax(means_N >= means_N.max() - 1e-9))


def mean_utilities(candidates: Sequence[str], utility: Utility, tokenize: str = "13a") -> Array:
    """Return the mean utility of each candidate against the others, in percent, (N,); 0 for a single one."""
    if utility not in get_args(Utility):
        raise ValueError(f"utility is {utility!r}: it must be chrf or bleu")
    different = list(dict.fromkeys(candidates))
    if utility == "chrf":
        utilities_NN = pairwise_chrf(different)
    else:
        tokenizer = BLEU(tokenize=tokenize, force=True).tokenizer
        utilities_NN = pairwise_bleu([tokenizer(text.rstrip()) for text in different])
    return _means(candidates, utilities_NN)


def _others(candidates: Sequence[str]) -> tuple[list[str], Array]:
    """Return the distinct candidates, and how often each of them (column) is a reference for each (row), (N, N)."""
    times = Counter(candidates)
    # A candidate is not a reference for itself, but its repetitions are
    return list(times), np.array(list(times.values())) - np.eye(len(times))


def _means(candidates: Sequence[str], utilities_NN: Array) -> Array:
    """Return the mean utility of each candidate against the others; `utilities_NN` are those of distinct ones."""
    different, others_NN = _others(candidates)
    means = dict(zip(different, (utilities_NN * others_NN).sum(1) / max(1, len(candidates) - 1), strict=True))
    return np.array([means[text] for text in candidates])


def pairwise_chrf(texts: Sequence[str]) -> Array:
    """Compute sacreBLEU's sentence-level chrF2 of each text, with every text as the reference: (N, N)."""
    ngrams = [extract_all_char_ngrams(text, CHARACTER_ORDERS, False) for text in texts]
    columns = []
    for order in range(CHARACTER_ORDERS):
        counts_NG = _counts([found[order] for found in ngrams])
        matches_NN = _matches(counts_NG)
        columns += [*_totals(counts_NG), matches_NN]
    return _of_pairs(columns, CHRF())


def pairwise_bleu(texts: Sequence[str]) -> Array:
    """Compute sacreBLEU's sentence-BLEU of each tokenised text, with every text as the reference: (N, N)."""
    ngrams = [extract_all_word_ngrams(text, 1, 4)[0] for text in texts]
    by_order = [
        [Counter({g: n for g, n in found.items() if len(g) == order}) for found in ngrams] for order in (1, 2, 3, 4)
    ]
    counts = [_counts(found) for found in by_order]
    length_NN, reference_NN = _totals(counts[0])
    matches = [_matches(counts_NG) for counts_NG in counts]
    totals = [_totals(counts_NG)[0] for counts_NG in counts]
    return _of_pairs([length_NN, reference_NN, *matches, *totals], BLEU(effective_order=True))


def _counts(ngrams: Sequence[Counter[object]]) -> Array:
    """Return how often each text has each n-gram that occurs in any: (N, G)."""
    column = {ngram: number for number, ngram in enumerate(dict.fromkeys(ngram for found in ngrams for ngram in found))}
    counts_NG = np.zeros((len(ngrams), len(column)))
    for row, found in enumerate(ngrams):
        counts_NG[row, [column[ngram] for ngram in found]] = list(found.values())
    return counts_NG


def _matches(counts_NG: Array) -> Array:
    """Return how many n-grams two texts share, counting each as often as the text that has fewer of it: (N, N)."""
    return np.stack([np.minimum(row_G, counts_NG).sum(1) for row_G in counts_NG])


def _totals(counts_NG: Array) -> tuple[Array, Array]:
    """Return the number of n-grams in the hypothesis (row) and in the reference (column) of each pair: two (N, N)."""
    total_N = counts_NG.sum(1)
    square = (len(total_N), len(total_N))
    return np.broadcast_to(total_N[:, None], square), np.broadcast_to(total_N, square)


def _of_pairs(columns: Sequence[Array], metric: Any) -> Array:
    """Apply a metric to the statistics of all pairs: columns of (N, N) -> (N, N)."""
    statistics_NNK = np.stack(columns, axis=-1)
    scores = scores_of_sums(metric, statistics_NNK.reshape(-1, len(columns)))
    return scores.reshape(statistics_NNK.shape[:2])

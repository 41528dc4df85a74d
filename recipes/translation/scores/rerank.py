"""Minimum Bayes risk: of several candidates, choose the translation that is most like the others; N candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from recipes.translation.scores.statistics import Array, measured
from recipes.translation.settings.config import DataConfig
from recipes.translation.text.bleu_tokenizers import tokenizer_for

Utility = Literal["chrf", "bleu"]
"""What likeness is measured by: chrF2, or sentence-BLEU as sacreBLEU computes it."""


def chosen_by_mbr(texts: Sequence[Sequence[str]], utility: Utility, data: DataConfig) -> list[str]:
    """Return the one of each sentence's translations with the largest mean utility, by the tokeniser of the settings.

    Raises ConfigError for a tokeniser that is not installed.
    """
    tokenize = tokenizer_for(data.tokenize, data.target)
    return [row[best_by_mbr(row, utility, tokenize)] for row in texts]


def best_by_mbr(candidates: Sequence[str], utility: Utility, tokenize: str = "13a") -> int:
    """Return the number of the candidate with the largest mean utility, the others taken as its references.

    argmax_h 1 / (N - 1) sum_{r != h} u(h, r): Eikema and Aziz 2020; Freitag et al. 2022. Candidates that are alike
    count as often as they occur, as samples must. Of equally good ones the first is chosen, so that an n-best list
    keeps its best. `tokenize` is sacreBLEU's tokeniser, for BLEU. Raises ValueError for no candidates, and for an
    unknown utility.
    """
    if not candidates:
        raise ValueError("there are no candidates to choose from")
    means_N = mean_utilities(candidates, utility, tokenize)
    # The first within rounding of the best: sums of the same terms in another order may differ in the last place
    return int(np.argmax(means_N >= means_N.max() - 1e-9))


def mean_utilities(candidates: Sequence[str], utility: Utility, tokenize: str = "13a") -> Array:
    """Return the mean utility of each candidate against the others, in percent, (N,); 0 for a single one."""
    if utility not in get_args(Utility):
        raise ValueError(f"utility is {utility!r}: it must be chrf or bleu")
    times = Counter(candidates)
    different = list(times)
    metric = CHRF() if utility == "chrf" else BLEU(tokenize=tokenize, effective_order=True, force=True)
    utilities_NN = pairwise(metric, different)
    # A candidate is not a reference for itself, but its repetitions are
    others_NN = np.array(list(times.values())) - np.eye(len(different))
    means = dict(zip(different, (utilities_NN * others_NN).sum(1) / max(1, len(candidates) - 1), strict=True))
    return np.array([means[text] for text in candidates])


def pairwise(metric: Any, texts: Sequence[str]) -> Array:
    """Compute sacreBLEU's sentence-level score of each text, given each other one as the reference: (N, N)."""
    rows = (measured("", metric, [text] * len(texts), texts) for text in texts)
    return np.array([row.of_sums(row.statistics) for row in rows])

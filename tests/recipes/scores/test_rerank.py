"""Minimum Bayes risk chooses as a comparison of all pairs by sacreBLEU does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from recipes.translation.scores.rerank import Utility, best_by_mbr, mean_utilities

WORDS = st.lists(st.sampled_from(["a", "ab", "Ba", "c,", "d.", "ü"]), max_size=7).map(" ".join)
UTILITIES: list[Utility] = ["chrf", "bleu"]


def brute_force(candidates: Sequence[str], utility: Utility) -> list[float]:
    """The mean utility of each candidate, all pairs compared by sacreBLEU."""
    metric = CHRF() if utility == "chrf" else BLEU(effective_order=True)
    found = []
    for row, candidate in enumerate(candidates):
        others = [other for column, other in enumerate(candidates) if column != row]
        scores = [metric.sentence_score(candidate, [other]).score for other in others]
        found.append(sum(scores) / max(1, len(scores)))
    return found


@pytest.mark.parametrize("utility", UTILITIES)
@given(candidates=st.lists(WORDS, min_size=1, max_size=6))
def test_the_choice_is_that_of_brute_force(utility: Utility, candidates: list[str]) -> None:
    expected = brute_force(candidates, utility)
    assert mean_utilities(candidates, utility) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    best = [row for row, mean in enumerate(expected) if mean >= max(expected) - 1e-9]
    assert best_by_mbr(candidates, utility) == best[0]


def test_what_most_candidates_say_wins_over_the_first() -> None:
    candidates = ["ein Hund schläft", "zwei Katzen spielen heute", "zwei Katzen spielen", "zwei Katzen spielten heute"]
    assert all(best_by_mbr(candidates, utility) > 0 for utility in UTILITIES)


def test_repeated_candidates_count_as_often_as_they_occur() -> None:
    assert best_by_mbr(["a b c d", "x y z w", "x y z w"], "bleu") == 1


def test_of_equally_good_candidates_the_first_is_chosen() -> None:
    assert best_by_mbr(["a b", "c d", "a b", "c d"], "chrf") == 0


def test_the_tokeniser_is_that_of_the_language() -> None:
    candidates = ["甲乙丙丁", "甲乙丙戊", "己庚辛壬"]
    assert mean_utilities(candidates, "bleu", "zh").max() > mean_utilities(candidates, "bleu", "13a").max()


def test_no_candidates_and_unknown_utilities_are_refused() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        best_by_mbr([], "chrf")
    with pytest.raises(ValueError, match="utility is 'ter': it must be chrf or bleu"):
        best_by_mbr(["a"], "ter")

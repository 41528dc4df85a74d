"""Scores from sums are sacreBLEU's, and so are the intervals; several test sets have one table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import _bootstrap_resample

from recipes.translation.scores import scores as scores_module
from recipes.translation.scores.scores import (
    Array,
    compute_metric,
    interval,
    intervals,
    mean_of,
    measure,
    metrics,
    resampled_scores,
    scores_of_sets,
)
from tests.recipes.scores.examples import damaged, references

REFERENCES = references(40)
HYPOTHESES = damaged(REFERENCES, 0.3, seed=1)
METRICS: dict[str, tuple[Any, Any]] = {
    name: (theirs, compute_metric(name, metrics()[name], HYPOTHESES, REFERENCES))
    for name, theirs in {"bleu": BLEU(force=True), "chrf": CHRF(), "ter": TER()}.items()
}


@pytest.mark.parametrize("name", METRICS)
def test_resamples_are_those_of_sacrebleu(name: str) -> None:
    theirs, ours = METRICS[name]
    statistics = theirs._extract_corpus_statistics(HYPOTHESES, [REFERENCES])
    _, expected = _bootstrap_resample(statistics, theirs, 300)
    (found,) = resampled_scores([ours], 300)
    assert found == pytest.approx([one.score for one in expected], rel=1e-6)  # sacreBLEU adds up in float32


@pytest.mark.parametrize("name", METRICS)
def test_an_interval_is_as_wide_as_sacrebleus(name: str) -> None:
    theirs, ours = METRICS[name]
    found = intervals([ours])[0]
    expected = theirs.corpus_score(HYPOTHESES, [REFERENCES], n_bootstrap=1000)
    assert (found.high - found.low) / 2 == pytest.approx(expected._ci, rel=1e-6)
    assert found.low < ours.score < found.high


def test_metrics_share_their_resamples() -> None:
    together = resampled_scores([ours for _, ours in METRICS.values()], 50)
    for scores, (_, ours) in zip(together, METRICS.values(), strict=True):
        assert np.array_equal(scores, resampled_scores([ours], 50)[0])


def test_the_resamples_do_not_depend_on_the_memory_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = METRICS["bleu"]
    whole = resampled_scores([ours], 50)[0]
    monkeypatch.setattr(scores_module, "COUNTS", 3 * len(REFERENCES))
    assert np.array_equal(whole, resampled_scores([ours], 50)[0])


def test_the_seed_decides_and_another_one_draws_others() -> None:
    _, ours = METRICS["chrf"]
    assert np.array_equal(resampled_scores([ours], 20)[0], resampled_scores([ours], 20)[0])
    assert not np.array_equal(resampled_scores([ours], 20)[0], resampled_scores([ours], 20, seed=1)[0])


@given(st.permutations(range(1, 81)))
def test_an_interval_leaves_out_a_fortieth_on_either_side(scores: list[int]) -> None:
    assert interval(np.array(scores, dtype=float)) == (3, 78)


def test_the_interval_of_a_mean_is_the_normal_distributions() -> None:
    draw = np.random.default_rng(1)
    values = draw.normal(50, 10, 900)
    (found,) = intervals([mean_of("mean", "", values.tolist())])
    error = values.std() / 900**0.5
    assert found == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.15 * error)


def test_the_interval_covers_the_truth_in_19_of_20_test_sets() -> None:
    draw = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        (found,) = intervals([mean_of("mean", "", draw.normal(50, 10, 100).tolist())], resamples=200)
        covered += found.low <= 50 <= found.high
    assert 178 <= covered <= 199


def test_multi_bleu_of_sums_has_no_smoothing() -> None:
    found = compute_metric("multi_bleu_lowercase", metrics()["multi_bleu_lowercase"], ["a b c x"], ["a b c d"])
    assert found.of_sums(found.statistics)[0] == found.score == 0


def test_every_score_is_that_of_its_own_sums() -> None:
    def of_all(statistics: Array) -> Array:
        return statistics.sum(0, keepdims=True)

    for one in measure(HYPOTHESES, REFERENCES, tokenize="none"):
        assert one.of_sums(of_all(one.statistics))[0] == pytest.approx(one.score, rel=1e-12)


def test_several_test_sets_have_a_line_each_and_one_for_the_mean_of_their_scores() -> None:
    references = ["the dog runs home now", "a small cat sleeps here", "the train leaves at six"]
    near = ["the dog runs home", "a small cat sleeps here", "the train leaves at seven"]
    far = ["a dog ran home now", "cat sleeps", "trains leave at six or so"]
    one = measure(near, references)
    two = measure(far[:2], references[:2])
    table = scores_of_sets({"first": one, "second": two})
    alone = [scores_of_sets({"one": one}), scores_of_sets({"two": two})]
    assert [(row.name, row.sentences) for row in table.rows] == [("first", 3), ("second", 2), ("mean", 5)]
    assert [table.rows[0], table.rows[1]] == [
        replace(found.rows[0], name=name) for name, found in zip(("first", "second"), alone, strict=True)
    ]
    expected = [sum(scores) / 2 for scores in zip(table.rows[0].scores, table.rows[1].scores, strict=True)]
    assert table.rows[2].scores == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) == len(expected)
    assert alone[0].rows[1].scores == alone[0].rows[0].scores
    assert alone[0].rows[1].intervals == alone[0].rows[0].intervals
    first, second, mean = (row.intervals for row in table.rows)
    for bounds, lower, upper in zip(mean, first, second, strict=True):
        assert min(lower.low, upper.low) <= bounds.low <= bounds.high <= max(lower.high, upper.high)
    assert str(table).splitlines()[3].split()[:2] == ["mean", "5"]


@pytest.mark.parametrize(("sentences", "warned"), [(99, True), (100, False)])
def test_a_test_set_of_few_sentences_says_that_it_says_little(sentences: int, warned: bool) -> None:
    texts = [f"the dog runs home at {number}" for number in range(sentences)]
    table = str(scores_of_sets({"few": measure(texts, texts)}))
    assert ("a test set of fewer than 100 sentences says little" in table) == warned

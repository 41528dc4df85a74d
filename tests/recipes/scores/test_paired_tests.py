"""p-values are those of the papers and of sacreBLEU, and a system does not differ from itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from recipes.translation.scores import compare as compare_module
from recipes.translation.scores.compare import compare_metrics, p_value, shuffled_differences
from recipes.translation.scores.scores import Measured, mean_of, measure, resampled_scores
from tests.recipes.scores.examples import damaged, references

REFERENCES = references(30)
BETTER = damaged(REFERENCES, 0.25, seed=1)
WORSE = damaged(REFERENCES, 0.3, seed=2)


def measured(texts: list[str]) -> list[Measured]:
    return [one for one in measure(texts, REFERENCES) if one.name in ("bleu", "chrf", "ter")]


def test_resamples_and_trials_are_sacrebleus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "RESAMPLES", 400)
    monkeypatch.setattr(compare_module, "TRIALS", 600)
    systems = measured(BETTER), measured(WORSE)
    ours = compare_metrics(*systems)
    metrics = {"BLEU": BLEU(force=True), "chrF": CHRF(), "TER": TER()}
    named = [("better", BETTER), ("worse", WORSE)]
    _, bootstrap = PairedTest(named, metrics, [REFERENCES], "bs", n_samples=400)()
    _, randomisation = PairedTest(named, metrics, [REFERENCES], "ar", n_samples=600)()
    drawn = resampled_scores([*systems[0], *systems[1]], 400)
    for index, name in enumerate(("BLEU", "chrF2", "TER")):
        found = ours[index]
        differences = np.abs(drawn[3 + index] - drawn[index])
        # sacreBLEU drops the sign before it subtracts the mean
        assert p_value(differences - differences.mean(), found.difference) == bootstrap[name][1].p_value
        if name != "TER":  # whose edits are whole numbers, so that trials may equal the difference observed
            assert found.p_randomisation == randomisation[name][1].p_value
        assert found.score == bootstrap[name][1].score
        assert found.difference == found.score - bootstrap[name][0].score
        low, high = found.interval
        assert (high - low) / 2 == pytest.approx(bootstrap[name][1].ci, rel=1e-5)
    assert len({found.p_randomisation for found in ours}) == 3


def test_trials_that_equal_the_difference_count_and_without_them_it_is_sacrebleus() -> None:
    one, other = measured(BETTER)[2], measured(WORSE)[2]
    (trials,) = shuffled_differences([one], [other], 600)
    difference = other.score - one.score
    equal = np.sum(np.abs(trials - abs(difference)) < 1e-9)
    test = PairedTest([("better", BETTER), ("worse", WORSE)], {"TER": TER()}, [REFERENCES], "ar", n_samples=600)
    assert equal > 0
    assert p_value(trials, difference) == pytest.approx(test()[1]["TER"][1].p_value + equal / 601, rel=1e-12)


def test_randomisation_approximates_the_test_over_all_exchanges() -> None:
    one = np.array([1.0, 3.0, 2.0, 5.0, 4.0, 2.5, 7.0, 1.5])
    other = np.array([2.0, 3.5, 2.1, 5.9, 4.2, 3.9, 6.8, 2.6])
    (found,) = compare_metrics([mean_of("m", "", one.tolist())], [mean_of("m", "", other.tolist())])
    signs = np.array(list(itertools.product([-1, 1], repeat=8)))
    exact = np.mean(np.abs(signs @ (other - one)) >= abs((other - one).sum()) - 1e-9)
    assert 0.01 < exact < 0.2
    assert found.p_randomisation == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 10_000) ** 0.5)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_a_system_does_not_differ_from_itself(values: list[float]) -> None:
    system = [mean_of("m", "", values)]
    found = compare_metrics(system, system)[0]
    assert found.p_bootstrap == found.p_randomisation == 1
    assert found.difference_interval == (0, 0)


def test_a_large_difference_is_significant_and_a_small_one_is_not() -> None:
    draw = np.random.default_rng(1)
    baseline = draw.normal(50, 10, 200)
    for shift, significant in ((5.0, True), (0.05, False)):
        better = baseline + shift + draw.normal(0, 5, 200)
        (found,) = compare_metrics([mean_of("m", "", baseline.tolist())], [mean_of("m", "", better.tolist())])
        assert (found.p_bootstrap < 0.05) == (found.p_randomisation < 0.05) == significant
        low, high = found.difference_interval
        assert (low > 0) == significant
        assert high - low < found.interval.high - found.interval.low  # the sentences' own difficulty drops out


def test_of_equal_systems_one_in_twenty_seems_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "RESAMPLES", 200)
    monkeypatch.setattr(compare_module, "TRIALS", 200)
    draw = np.random.default_rng(3)
    found = []
    for _ in range(300):
        one, other = draw.normal(50, 10, (2, 60))
        found += compare_metrics([mean_of("m", "", one.tolist())], [mean_of("m", "", other.tolist())])
    # 15 are expected, with a standard deviation of 3.8; sacreBLEU's bootstrap would find about 37
    for rejected in ([one.p_bootstrap < 0.05 for one in found], [one.p_randomisation < 0.05 for one in found]):
        assert 4 <= sum(rejected) <= 27


def test_both_tests_agree_on_large_test_sets() -> None:
    draw = np.random.default_rng(4)
    for shift in (0.0, 0.3, 0.6):
        one = draw.normal(50, 10, 1_000)
        other = one + shift + draw.normal(0, 10, 1_000)
        (found,) = compare_metrics([mean_of("m", "", one.tolist())], [mean_of("m", "", other.tolist())])
        assert found.p_bootstrap == pytest.approx(found.p_randomisation, abs=0.06)


def test_trials_do_not_depend_on_the_memory_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    systems = measured(BETTER), measured(WORSE)
    whole = shuffled_differences(*systems, trials=50)
    monkeypatch.setattr(compare_module, "CELLS", 7 * len(REFERENCES))
    for one, other in zip(whole, shuffled_differences(*systems, trials=50), strict=True):
        assert np.array_equal(one, other)

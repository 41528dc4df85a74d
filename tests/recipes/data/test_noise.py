"""Noise: what was asked for, as often as was asked for, and a function of seed, epoch and sentence alone."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data.batches import Steps
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.drawn_batches import DrawnBatches
from recipes.translation.data.noise import noisy
from recipes.translation.settings.data import NoiseConfig
from tests.recipes.tiny import tiny

sentences = st.text(st.sampled_from("abÄ ß.1<x>"), max_size=30)
probabilities = st.sampled_from([0.0, 0.1, 0.3])
settings = st.builds(NoiseConfig, probabilities, probabilities, probabilities, probabilities, probabilities)
TEXT = "Seven small dogs cross the road at night"


def drawn(noise: NoiseConfig, text: str = TEXT, kept: tuple[str, ...] = ()) -> list[str]:
    return [noisy(text, noise, str(seed), kept) for seed in range(2_000)]


@given(sentences, st.text(max_size=5))
def test_no_noise_leaves_a_sentence_as_it_is(sentence: str, seed: str) -> None:
    assert noisy(sentence, NoiseConfig(), seed, ("<x>",)) == sentence


@given(sentences, settings, st.integers(0, 9))
def test_noise_depends_on_sentence_and_seed_alone_and_keeps_symbols(
    sentence: str, noise: NoiseConfig, seed: int
) -> None:
    random.seed(5)
    state = random.getstate()
    found = noisy(sentence, noise, str(seed), ("<x>",))
    assert random.getstate() == state
    assert noisy(sentence, noise, str(seed), ("<x>",)) == found
    if not noise.drop_words:  # a word in which a symbol stands may be dropped
        assert found.count("<x>") >= sentence.count("<x>")


def test_half_of_the_changes_of_case_are_capitals() -> None:
    found = Counter(drawn(NoiseConfig(case=0.4)))
    assert set(found) == {TEXT, TEXT.upper(), TEXT.lower()}
    assert found[TEXT.upper()] == pytest.approx(400, abs=60)
    assert found[TEXT.lower()] == pytest.approx(400, abs=60)


@pytest.mark.parametrize("name", ["swap", "drop", "double"])
def test_letters_are_changed_as_often_as_the_probability_says(name: str) -> None:
    letters = [character for character in TEXT if character != " "]
    changed = 0
    for text in drawn(NoiseConfig(**{name: 0.05})):
        if name == "swap":
            assert sorted(text) == sorted(TEXT)
            changed += sum(a != b for a, b in zip(text, TEXT, strict=True)) / 2
        else:
            assert [len(word) > 0 or name == "drop" for word in text.split(" ")].count(True) == 8
            changed += abs(len(text) - len(TEXT))
    expected = 0.05 * 2_000 * len(letters)
    if name == "swap":
        expected = 0.05 * 2_000 * 23 * (1 - 0.05 / 2)  # 33 letters, 8 of which end a word and 2 come before their like
    assert changed == pytest.approx(expected, rel=0.06)


def test_words_are_dropped_as_often_as_the_probability_says_and_one_stays() -> None:
    words = TEXT.split()
    kept = 0
    for text in drawn(NoiseConfig(drop_words=0.25)):
        rest = iter(words)
        assert all(word in rest for word in text.split(" "))
        kept += len(text.split(" "))
    assert kept == pytest.approx(0.75 * 2_000 * 8, rel=0.03)
    assert all(len(text.split()) >= 1 for text in drawn(NoiseConfig(drop_words=0.9)))


def test_tags_and_symbols_have_no_noise() -> None:
    noise = NoiseConfig(case=0.5, swap=0.2, drop=0.2, double=0.2, drop_words=0.5)
    found = drawn(noise, "<2de> See <url>, please <bt>", ("<2de>", "<url>", "<bt>"))
    assert {text.split()[0] for text in found} == {"<2de>"}
    assert {text.split()[-1] for text in found} == {"<bt>"}
    assert all("<url>" in text or "<" not in text[5:-4] for text in found)
    assert len(set(found)) > 500


@pytest.mark.parametrize("kept", list(itertools.permutations(["<a>", "<a>b", "<a>bc"])))
def test_a_symbol_that_begins_with_another_has_no_noise_either(kept: tuple[str, ...]) -> None:
    for symbol in kept:
        found = drawn(NoiseConfig(double=0.9), f"see {symbol}", kept)
        assert {text.split(" ")[1] for text in found} == {symbol}


NOISE: dict[str, Any] = {
    "noise.swap": 0.1,
    "noise.drop_words": 0.1,
    "data.builtin_pairs": 100,
    "subwords.symbols": ["<x>"],
}


def test_every_epoch_has_other_noise_and_the_same_pairs(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", NOISE)
    corpus = load_corpus(config)
    batches = corpus.train
    assert isinstance(batches, DrawnBatches)
    plain = batches.plain
    texts: dict[int, list[str]] = {}
    for epoch in (0, 1):
        rows: dict[int, str] = {}
        for indices in batches.epoch(epoch):
            made = batches.batch(indices)
            for index, source, target in zip(indices, made.src, made.tgt_out, strict=True):
                assert index // 100 == epoch
                (clean,) = corpus.source.decode([list(plain.sources[index % 100])])
                expected = noisy(clean, config.noise, f"1 {epoch} {index % 100}", ["<x>"])
                rows[index % 100] = corpus.source.decode([source.tolist()])[0]
                assert rows[index % 100] == expected
                assert target[target > 3].tolist() == list(plain.targets[index % 100])
        assert sorted(rows) == list(range(100))
        texts[epoch] = [rows[pair] for pair in range(100)]
    assert texts[0] != texts[1] != corpus.source.decode([list(ids) for ids in plain.sources])
    assert load_corpus(replace(config, noise=NoiseConfig())).fingerprint == corpus.fingerprint


def test_a_noisy_source_above_max_length_stays_without_noise(tmp_path: Path) -> None:
    batches = load_corpus(tiny(tmp_path / "run", {**NOISE, "noise.double": 0.5, "training.max_length": 20})).train
    made = [batches.batch(indices) for indices in batches.epoch(0)]
    assert max(batch.src.size(1) for batch in made) == 21


def test_noise_is_the_same_when_an_epoch_is_resumed(tmp_path: Path) -> None:
    def steps(epoch: int, done: int, count: int) -> list[object]:
        batches = load_corpus(tiny(tmp_path / "run", NOISE)).train
        after = Steps(batches, 2, 0, 1, torch.device("cpu")).after(epoch, done)
        found = (next(after) for _ in range(count))
        return [(position, [batch.src.tolist() for batch in made]) for position, made in found]

    whole = steps(0, 0, 12)
    epoch, done = whole[4][0]  # type: ignore[index]
    assert steps(epoch, done, 7) == whole[5:]

"""Odd requests to a model: each has the answer of its plain parts, or one line says why it has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.hypotheses import LengthNorm, length_normaliser
from recipes.translation.commands import main
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import load_config
from recipes.translation.translating.alignments import align
from recipes.translation.translating.demands import phrases_of
from recipes.translation.translating.loaded import LoadedTranslator
from recipes.translation.translating.translate import Sampling, SearchOptions, alternatives, translate
from tests.recipes.command_line import refusal
from tests.recipes.random_translator import random_translator, subwords_in, translator_of
from tests.recipes.tiny import tiny

SENTENCES = [pair.source for pair in pairs(4, 5, "test")]
INVISIBLE = "\x07"
"""What is no blank, and of which sentencepiece leaves nothing."""


@pytest.fixture
def translator(tmp_path: Path) -> Translator:
    return random_translator(tmp_path)


def tagged(folder: Path) -> Translator:
    """One with language tags, which translates any other sentence into something."""
    config = tiny(folder / "run", {"data.language_tags": True, "subwords.vocab_size": 360})
    known = replace(config, subwords=replace(config.subwords, symbols=("<2de>",)))
    subwords = subwords_in(folder, known)
    return translator_of(config, subwords, subwords, 2.0, -50.0)


def test_what_is_cut_off_a_sentence_has_no_links(translator: Translator) -> None:
    config = translator.config
    training, decoding = (replace(section, max_length=8) for section in (config.training, config.decoding))
    short = replace(translator, config=replace(config, training=training, decoding=decoding))
    long = " ".join(SENTENCES * 3)
    read = short.source.encode([long])[0][:8]
    (found,) = align(short.with_decoding(decoding), [long], ["Der Zug hat acht Wagen"])
    (alone,) = align(translator.with_decoding(config.decoding), short.source.decode([read]), ["Der Zug hat acht Wagen"])
    assert found == alone


@pytest.mark.parametrize("make", [iter, lambda some: (one for one in some), lambda some: map(str, some)])
def test_an_iterator_is_refused_and_a_list_or_tuple_translated(
    translator: Translator, make: Callable[[Iterable[str]], Any]
) -> None:
    loaded = LoadedTranslator(translator)
    assert loaded.translate(tuple(SENTENCES)) == loaded.translate(SENTENCES)
    with pytest.raises(TypeError, match=r"give a list of sentences, list\(sentences\)"):
        loaded.translate(make(SENTENCES))
    with pytest.raises(TypeError, match=r"give a list of sentences, list\(sentences\)"):
        loaded.n_best(make(SENTENCES), 1)


@pytest.mark.parametrize("name", ["test", "valid", "test.first", "valid.second", "test.ensemble"])
def test_results_never_replace_those_of_the_runs_own_data(
    translator: Translator, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = tiny(tmp_path / "run", {"corpora": {"first": {}, "second": {"tag": "<b>"}}})
    save_model(tmp_path / "run" / "best", replace(translator, config=config), {"step": 1})
    for file in (name, f"{name}.en"):
        (tmp_path / file).write_text("The train.\n")
    (tmp_path / "r").write_text("Der Zug.\n")
    words = ["--run", str(tmp_path / "run"), "--references", str(tmp_path / "r"), "--sources"]
    told = refusal(capsys, "evaluate", *words, str(tmp_path / name))
    assert f"would replace {name}.scores.json, the scores of the run's own data: rename the file" in told
    assert not list((tmp_path / "run").glob("*.scores.json"))
    assert main(["evaluate", *words, str(tmp_path / f"{name}.en")]) == 0


def test_a_line_without_subwords_stays_empty_in_a_model_with_tags(tmp_path: Path) -> None:
    model = tagged(tmp_path)
    lines = [SENTENCES[0], INVISIBLE, "<2de>", "", SENTENCES[1]]
    found = translate(model, lines)
    assert [bool(text) for text in found] == [True, False, False, False, True]
    assert found[::4] == translate(model, lines[::4])
    assert align(model, lines[:2], ["Der Zug"] * 2)[1] == []


@pytest.mark.parametrize("option", ["prefixes", "constraints"])
def test_a_demand_on_a_line_without_subwords_is_refused(translator: Translator, option: str) -> None:
    demands: Any = ["", "Der"]
    if option == "constraints":
        demands = [[], ["Der"]]
    options = SearchOptions(**{option: demands})
    wide = translator.with_decoding(replace(translator.config.decoding, beam=2))
    with pytest.raises(DataError, match=f"--{option}: line 2 is not empty, but sentence 2 has no subwords"):
        alternatives(wide, [SENTENCES[0], INVISIBLE], options)


@pytest.mark.parametrize(("text", "whole"), [("Café", True), ("m\u00b2", True), ("(a)", False), ("\u4e2d", False)])
def test_a_phrase_ends_a_word_where_its_last_letter_or_digit_does(
    translator: Translator, text: str, whole: bool
) -> None:
    ((phrase,),) = phrases_of(translator, [[text]])
    assert phrase.whole == whole


@pytest.mark.parametrize("temperature", [1e-300, 1e38, 1e39, 1e300])
@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.5}])
def test_no_temperature_is_too_high_or_too_low(
    translator: Translator, temperature: float, limits: dict[str, Any]
) -> None:
    options = SearchOptions(sampling=Sampling(3, seed=1, temperature=temperature, **limits))
    short = translator.with_decoding(replace(translator.config.decoding, max_length=6))
    found = alternatives(short, SENTENCES, options)
    assert [len(row) for row in found] == [3] * len(SENTENCES)


@pytest.mark.parametrize("option", ["file", "prefixes", "constraints"])
def test_alignments_never_replace_what_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    (tmp_path / "own.en").write_text("six\n")
    monkeypatch.chdir(tmp_path)
    words = [f"--{option}", "own.en", "--alignments", str(tmp_path / "own.en")]
    if option != "file":
        words += ["--file", "other.en"]
    told = refusal(capsys, "translate", *words)
    assert told == f"error: --alignments: {tmp_path / 'own.en'} is an input, and would be replaced: choose another name"
    assert (tmp_path / "own.en").read_text() == "six\n"


@pytest.mark.parametrize("norm", ["gnmt", "length"])
def test_a_length_penalty_that_would_overflow_is_refused(norm: LengthNorm) -> None:
    assert length_normaliser(100_000, 49.9, norm) < math.inf
    with pytest.raises(ConfigError, match=r"decoding\.length_penalty .* from 0 to below 50"):
        load_config(None, {"decoding.length_penalty": "50"})

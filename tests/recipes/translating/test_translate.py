"""A sentence's translation is its own: whatever stands beside it, one line in, one line out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import beam_search
from models.hypotheses import Hypothesis
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import DataError
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.text.subwords import BOS, EOS, PAD
from recipes.translation.translating import translate as translating
from recipes.translation.translating.sentences import refusals
from recipes.translation.translating.translate import SearchOptions, in_words, tasks_of, translate

WORDS = "The number is six."


@pytest.fixture
def endless(translator: Translator) -> Iterator[Translator]:
    """The same, but that a translation ends at its limit alone."""
    bias = translator.model.generator.bias
    before = bias.detach().clone()
    with torch.no_grad():
        bias[EOS] = -1e4
    yield translator
    with torch.no_grad():
        bias.copy_(before)


def searched(monkeypatch: pytest.MonkeyPatch, name: str, answer: Any) -> list[dict[str, Any]]:
    """Put `answer` in the place of a search; the settings of each call."""
    calls: list[dict[str, Any]] = []

    def search(model: object, src: torch.Tensor, **settings: Any) -> Any:
        calls.append(settings)
        return [answer for _ in range(len(src))]

    monkeypatch.setattr(translating, name, search)
    return calls


@pytest.mark.parametrize("beam", [1, 2])
def test_the_limit_of_a_translation_does_not_depend_on_its_company(endless: Translator, beam: int) -> None:
    decoding = DecodingConfig(beam=beam, max_length=60)
    short, long = WORDS, " ".join([WORDS] * 9)
    (alone,) = translate(endless.with_decoding(decoding), [short])
    assert translate(endless.with_decoding(decoding), [short, long])[0] == alone


def test_no_translation_has_more_steps_than_twice_its_source_plus_10_or_max_length(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = searched(monkeypatch, "greedy", [])
    sentences = ["six", WORDS, " ".join([WORDS] * 9)]
    translate(translator.with_decoding(DecodingConfig(beam=1, max_length=100)), sentences)
    lengths = sorted((len(ids) + 1 for ids in translator.source.encode(sentences)), reverse=True)
    assert [call["max_length"] for call in calls] == [[min(100, 2 * length + 10) for length in lengths]]
    assert len(set(calls[0]["max_length"])) == 3


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 3.0])
def test_beam_and_length_penalty_reach_the_search(translator: Translator, length_penalty: float) -> None:
    decoding = DecodingConfig(beam=3, length_penalty=length_penalty, max_length=12)
    sentences = [pair.source for pair in pairs(12, 5, "test")]
    found = translate(translator.with_decoding(decoding), sentences)
    for sentence, translation in zip(sentences, found, strict=True):
        src = torch.tensor([[*translator.source.encode([sentence])[0], EOS]])
        expected = beam_search(
            translator.model, src, bos=BOS, eos=EOS, beam=3, length_penalty=length_penalty, max_length=12
        )
        assert translation == one_line(translator.target.decode([expected[0][0].tokens])[0])


def test_the_length_penalty_changes_translations(translator: Translator) -> None:
    sentences = [pair.source for pair in pairs(12, 5, "test")]
    found = [
        translate(translator.with_decoding(DecodingConfig(beam=3, length_penalty=alpha, max_length=12)), sentences)
        for alpha in (0.0, 0.6, 3.0)
    ]
    assert found[0] != found[1] != found[2]


def one_line(text: str) -> str:
    return " ".join(text.splitlines())


BREAKS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("broken", BREAKS, ids=ascii)
def test_a_translation_is_one_line_whatever_the_model_says(
    translator: Translator, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = translator.target.pieces().index
    spelled = [piece(f"<0x{byte:02X}>") for byte in broken.encode()]
    word = translator.target.encode(["six"])[0]
    searched(monkeypatch, "greedy", [*spelled, *word, *spelled, *word, *spelled])
    (found,) = translate(translator.with_decoding(DecodingConfig(beam=1)), [WORDS])
    assert found.split() == ["six", "six"]
    assert len(found.splitlines()) == 1


def test_text_that_is_not_unicode_is_refused_with_its_number(translator: Translator) -> None:
    bytes_of_an_argument = b"caf\xe9".decode("utf-8", "surrogateescape")
    with pytest.raises(DataError, match=r"^sentence 2 is not UTF-8 text: 'caf\\udce9'"):
        translate(translator, [WORDS, bytes_of_an_argument])


def lengths_of(translator: Translator, monkeypatch: pytest.MonkeyPatch, sentences: Sequence[str]) -> list[int]:
    """The subwords of each sentence that the model is given, longest first."""
    seen: list[int] = []

    def search(model: object, src: torch.Tensor, **settings: Any) -> list[list[int]]:
        seen.extend(((src != PAD) & (src != EOS)).sum(1).tolist())
        return [[] for _ in range(len(src))]

    monkeypatch.setattr(translating, "greedy", search)
    translate(translator.with_decoding(replace(translator.config.decoding, beam=1)), sentences)
    return seen


def test_a_source_is_cut_at_the_longest_length_of_the_settings_and_it_is_said(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert translator.config.training.max_length == 256
    long = " ".join([WORDS] * 400)
    subwords = len(translator.source.encode([long])[0])
    assert lengths_of(translator, monkeypatch, ["", WORDS, long, long])[:2] == [256, 256]
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "2 sentences are cut to 256 subwords" in error
    assert f"sentence 3 has {subwords:,}" in error
    assert "decoding.max_length" in error


def test_a_longer_max_length_of_translations_allows_longer_sources(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = translator.config
    long = " ".join([WORDS] * 25)
    (subwords,) = map(len, translator.source.encode([long]))
    assert subwords > 256
    for longest, said in ((subwords, ""), (subwords - 1, f"[translate] 1 sentence is cut to {subwords - 1} subwords")):
        decoding = replace(config.decoding, max_length=longest)
        patient = replace(translator, config=replace(config, decoding=decoding))
        assert lengths_of(patient, monkeypatch, [long]) == [longest]
        error = capsys.readouterr().err
        assert error.startswith(said)
        assert bool(error) == bool(said)
        assert bool(refusals(patient.source, patient.text, [long])) == bool(said)


def test_a_beginning_leaves_a_step_for_the_end(translator: Translator) -> None:
    (subwords,) = map(len, translator.target.encode([WORDS]))
    options = SearchOptions(prefixes=[WORDS])
    decoding = translator.config.decoding
    tight, patient = (translator.with_decoding(replace(decoding, max_length=subwords + more)) for more in (0, 1))
    with pytest.raises(
        DataError, match=f"line 1 has {subwords} subwords, but a translation has at most {subwords} steps"
    ):
        tasks_of(tight, [WORDS], options)
    assert len(tasks_of(patient, [WORDS], options)) == 1


def test_a_translation_of_the_most_steps_has_not_ended(translator: Translator) -> None:
    (tokens,) = translator.target.encode(["six"])
    rows = [[Hypothesis(tokens, -1.0, -2.0)]] * 2
    found = in_words(rows, translator.target, [len(tokens), len(tokens) + 1])
    assert [row[0].finished for row in found] == [False, True]


def test_ten_megabytes_in_one_line_are_one_translation(
    translator: Translator, capsys: pytest.CaptureFixture[str]
) -> None:
    found = translate(translator.with_decoding(DecodingConfig(beam=1, max_length=8)), [WORDS, "six " * 2_500_000])
    assert len(found) == 2
    assert "sentence 2 has" in capsys.readouterr().err

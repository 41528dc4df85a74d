"""What a model reads and writes is the same text for every use of it: lower case and language tags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.translation.commands.searching import check_same_subwords
from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.text.subwords import BLANK, Subwords, train_subwords
from recipes.translation.translating import alignments
from recipes.translation.translating.demands import phrases_of
from recipes.translation.translating.sentences import source_ids
from recipes.translation.translating.translate import SearchOptions, alternatives, tasks_of
from tests.recipes.random_translator import translator_of
from tests.recipes.tiny import tiny

SETTINGS: dict[str, Any] = {
    "subwords.lowercase": True,
    "data.language_tags": True,
    "corpora": {"a": {}, "b": {"target": "zh-Hant", "source": "de"}},
    "subwords.vocab_size": 283,
}
SENTENCE = "See HTTPS://X.org/7, Page 12"
DECODING = DecodingConfig(beam=3, max_length=25)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    folder = tmp_path_factory.mktemp("text")
    config = tiny(folder / "run", SETTINGS)
    text = ["see this page", "siehe diese seite, two of them"] * 20
    train_subwords(text, folder / "joint", config.subwords, ["<2de>", "<2zh-Hant>"])
    subwords = Subwords.load(folder / "joint.model")
    return translator_of(config, subwords, subwords, 2.0, 5.0, seed=3)


def pieces(subwords: Subwords, ids: list[int]) -> list[str]:
    return [subwords.pieces()[each] for each in ids]


def test_a_sentence_has_lower_case_and_a_tag_unless_it_has_one(translator: Translator) -> None:
    text = translator.text
    assert text.source(SENTENCE) == "<2de> see https://x.org/7, page 12"
    assert text.source("<2zh-Hant> See 12") == "<2zh-Hant> see 12"
    assert text.source(" ") == " "
    assert text.target("Siehe HTTPS://X.org/7") == "siehe https://x.org/7"
    (ids,) = source_ids(translator.source, text, [SENTENCE])
    assert pieces(translator.source, ids)[0] == BLANK + "<2de>"


def test_beginnings_and_phrases_are_of_text_in_lower_case(translator: Translator) -> None:
    wide = translator.with_decoding(replace(DECODING, max_length=60))
    (task,) = tasks_of(wide, [SENTENCE], SearchOptions(prefixes=["Siehe HTTPS://X.org/7"]))
    assert translator.target.decode([list(task.prefix)]) == ["siehe https://x.org/7"]
    assert task.prefix == translator.target.encode(["siehe https://x.org/7"])[0]
    ((phrase,), _) = phrases_of(translator, [["Diese 12"], []])
    assert translator.target.decode([list(phrase.tokens)]) == ["diese 12"]
    assert phrase.whole  # 12 must not be the beginning of 123
    demands = SearchOptions(n_best=2, prefixes=["Siehe HTTPS://X.org/7"], constraints=[["12"]])
    (found,) = alternatives(wide, [SENTENCE], demands)
    assert all(one.text.startswith("siehe https://x.org/7") for one in found)
    assert "12" in found[0].text.split("/7")[1]


def test_alignments_count_the_words_of_the_sentence_and_never_link_the_tag(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []

    def to_the_tag(_: object, src_BS: Tensor, tgt_BT: Tensor) -> Tensor:
        read.append(src_BS[0].tolist())
        weights = torch.zeros(1, tgt_BT.size(1), src_BS.size(1))
        weights[:, :, 0] = 1.0  # where the tag is
        weights[:, :, -2] = 0.5  # the last word
        return weights

    monkeypatch.setattr(alignments, "attention_weights", to_the_tag)
    for sentence, last in ((SENTENCE, 3), ("<2zh-Hant> " + SENTENCE, 0)):
        found = alignments.align(translator.with_decoding(DECODING), [sentence], ["Siehe 12 Seiten"])
        assert found == [[(last, 0), (last, 1), (last, 2)]]
        assert read[-1][:-1] == source_ids(translator.source, translator.text, [sentence])[0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data.language_tags": False}, "language tags"),
        ({"data.target": "fr"}, "language tags"),
    ],
)
def test_models_that_read_the_same_sentence_otherwise_are_no_ensemble(
    translator: Translator, changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    other = replace(translator, config=tiny(tmp_path, {**SETTINGS, **changes}))
    check_same_subwords("a", translator, "b", translator)
    with pytest.raises(CheckpointError, match=rf"^--ensemble b differs from a in its {what}"):
        check_same_subwords("a", translator, "b", other)


def test_a_symbol_that_lower_case_would_hide_is_refused(tmp_path: Path) -> None:
    symbols = {"subwords.symbols": ["[NAME]", "<x>"]}
    assert tiny(tmp_path, symbols).subwords.symbols == ("[NAME]", "<x>")
    with pytest.raises(ConfigError, match=r"^subwords\.symbols contains \[NAME\], but subwords\.lowercase is true"):
        tiny(tmp_path, {**symbols, "subwords.lowercase": True})

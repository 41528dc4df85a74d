# ruff: noqa: RUF001
"""Normalisation: what a model writes is what it was taught, by its rule, and what the rule changes is said."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.commands import main
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.prepare import prepare
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.export import huggingface_model
from recipes.translation.run_folder.checkpoint import load_saved, load_translator, save_model
from recipes.translation.run_folder.other_model import run_subwords
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import RunConfig, SubwordConfig
from recipes.translation.settings.data import NORMALIZATIONS
from recipes.translation.text.model_text import OtherForm
from recipes.translation.text.sentencepiece_file import SENTENCEPIECE, normalize, rules_of
from recipes.translation.text.subwords import Subwords, train_subwords
from recipes.translation.train import train
from recipes.translation.translating.translate import SearchOptions, alternatives
from tests.recipes.random_translator import translator_of
from tests.recipes.tiny import tiny

REAL = {
    "zh": "你好，世界！（是）“好”：一百％",
    "fa": "می\u200cروم و کتاب\u200cها",
    "th": "น้ำ",
    "km": "ខ្ញុំ\u200bទៅ",
    "de": "10 m² Fläche, ½ Liter, 5 km… weit, 3\u00a0€, №7",
    "es": "1.º piso",
    "ja": "ｶﾀｶﾅ　全角",
}
"""What sentencepiece's own rules change, by language."""
MORE = [pair.target for pair in pairs(40, 1)]
text = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters="\u2581"), max_size=12)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subwords]:
    """A model by each rule."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name in NORMALIZATIONS:
        size = SubwordConfig(vocab_size=400, normalization=name)
        train_subwords([*REAL.values(), *MORE], folder / name, size)
        found[name] = Subwords.load(folder / f"{name}.model")
    return found


def test_each_rule_has_its_counterpart() -> None:
    assert NORMALIZATIONS.keys() == SENTENCEPIECE.keys()


@pytest.mark.parametrize("language", REAL)
@pytest.mark.parametrize("rule", ["nfc", "none"])
def test_real_text_comes_back_character_by_character(language: str, rule: str, models: dict[str, Subwords]) -> None:
    assert models[rule].respell([REAL[language]]) == [REAL[language]]
    assert models["nfkc"].respell([REAL[language]]) != [REAL[language]]


@given(text)
def test_nfc_is_that_of_unicode(some: str) -> None:
    expected = " ".join(filter(None, unicodedata.normalize("NFC", some).split(" ")))
    assert normalize(some, "nfc") == expected


@given(some=text)
def test_what_is_counted_as_changed_is_what_comes_back_changed(some: str, models: dict[str, Subwords]) -> None:
    for subwords in models.values():
        assert subwords.normalize(some) == subwords.respell([some])[0].strip(" ")


@given(some=st.lists(text | st.sampled_from(["ein Haus", "Café", "q\u0307\u0323"]), max_size=40))
def test_sentences_together_are_what_each_is_alone(some: list[str], models: dict[str, Subwords]) -> None:
    for subwords in models.values():
        assert subwords.encode(some) == [ids for sentence in some for ids in subwords.encode([sentence])]
        form = OtherForm(subwords)
        form.add(some)
        each = OtherForm(subwords)
        for sentence in some:
            each.add([sentence])
        assert form.lines("data", "sentences") == each.lines("data", "sentences")


@given(text)
def test_a_second_normalisation_changes_nothing(some: str) -> None:
    for name in NORMALIZATIONS:
        once = normalize(some, name)
        assert normalize(once, name) == once


@given(st.integers(0xA0, 0x30FF) | st.integers(0xAC00, 0xD7A3) | st.integers(0xF900, 0xFAFF))
def test_other_programs_that_read_the_file_compose_letters_too(number: int) -> None:
    character = chr(number)
    plain = sentencepiece.SentencePieceNormalizer(normalizer_spec=rules_of("nfc"))
    if character not in "\u2028\u2029\u2581":
        apart = "x" + unicodedata.normalize("NFD", character)
        assert plain.normalize(apart).strip("\u2581") == unicodedata.normalize("NFC", apart)


def test_nfc_removes_control_characters_and_makes_blanks_of_line_ends(models: dict[str, Subwords]) -> None:
    assert models["nfc"].respell(["a\x07b\tc\x85d\u2028e\x7ff"]) == ["ab c d ef"]
    assert models["none"].respell(["a\x07b\tc"]) == ["a\x07b\tc"]


def test_a_rule_of_its_own_on_each_side_of_one_vocabulary(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", {"subwords.normalization": ["nfkc", "nfc"], "subwords.joint": True})
    source, target = prepare(Corpora(config))
    assert source.pieces() == target.pieces()
    assert (source.normalization, target.normalization) == ("nfkc", "nfc")
    assert source.respell(["½ m²"]) == ["1⁄2 m2"]
    assert target.respell(["½ m²"]) == ["½ m²"]
    save_model(tmp_path / "saved", translator_of(config, source, target), {"step": 1})
    saved = load_saved(tmp_path / "saved")
    assert (saved.source.normalization, saved.target.normalization) == ("nfkc", "nfc")
    huggingface_model.write(saved, tmp_path / "hf")
    exported = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "hf" / "source.spm"))
    assert exported.encode("½") == source.encode(["½"])[0]


def files(folder: Path, targets: list[str]) -> dict[str, object]:
    targets = [*targets, *MORE]
    (folder / "a.en").write_text("".join(f"word {number}\n" for number in range(len(targets))))
    (folder / "a.de").write_text("".join(f"{target}\n" for target in targets))
    names = (str(folder / "a.en"), str(folder / "a.de"))
    return {"data.format": "text", "data.train": names, "data.valid": names}


@pytest.mark.parametrize("cache", [False, True])
def test_the_log_says_how_many_targets_the_rule_changes(
    cache: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = files(tmp_path, ["½ Liter", "ein Haus", "5 m²"])
    if cache:
        given["data.cache"] = str(tmp_path / "cache")
    load_corpus(tiny(tmp_path / "run", {**given, "subwords.vocab_size": 330, "subwords.normalization": "nfkc"}))
    said = capsys.readouterr().err
    assert "2 of 43 target sentences are learned in another form, by subwords.normalization nfkc" in said
    assert "'½ Liter' as '1⁄2 Liter'" in said
    load_corpus(tiny(tmp_path / "nfc", {**given, "subwords.vocab_size": 330}))
    assert "another form" not in capsys.readouterr().err


def test_prepare_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = files(tmp_path, ["½ Liter", "ein Haus"])["data.train"]
    words = ["prepare", "--run", str(tmp_path / "run"), "--data.train", *names, "--subwords.vocab_size", "330"]
    assert main([*words, "--subwords.normalization", "nfkc"]) == 0
    assert "1 of 42 target sentences" in capsys.readouterr().err


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    folder = tmp_path_factory.mktemp("translator")
    config = tiny(folder / "run", {"subwords.normalization": "nfkc", "decoding.beam": 4})
    return translator_of(config, *prepare(Corpora(config)))


@pytest.mark.parametrize("option", ["prefixes", "constraints"])
def test_a_demand_is_kept_to_the_letter_or_refused(translator: Translator, option: str) -> None:
    for demand, refused in (("5 m²", True), ("5 m2", False), ("Cafe\u0301", True), ("Café ", False)):
        asked: object = [demand] if option == "prefixes" else [[demand]]
        options = SearchOptions(**{option: asked})
        if not refused:
            alternatives(translator, ["Two trains."], options)
            continue
        with pytest.raises(DataError, match=rf"--{option}: '{demand}' .*writes '.*'; demand that"):
            alternatives(translator, ["Two trains."], options)


def test_references_that_the_model_cannot_write_are_counted(
    translator: Translator, capsys: pytest.CaptureFixture[str]
) -> None:
    form = OtherForm(translator.target)
    form.add(["5 m²", "5 m2", "cafe\u0301"])
    form.note("evaluate", "references of test can be written only")
    assert "[evaluate] 2 of 3 references of test can be written only in another form" in capsys.readouterr().err


def old(config: RunConfig) -> RunConfig:
    """The run with subwords as versions without the setting made them: in the file, and not in its settings."""
    subwords = prepare(Corpora(replace(config, subwords=replace(config.subwords, normalization="nfkc"))))
    save_model(Path(config.run) / "best", translator_of(config, *subwords), {"step": 1})
    return config


def test_a_model_of_another_run_keeps_its_rule_and_other_settings_are_refused(tmp_path: Path) -> None:
    before = old(tiny(tmp_path / "old"))
    config = tiny(tmp_path / "new", {"training.start_from": before.run})
    assert run_subwords(Corpora(config))[1].normalization == "nfkc"
    asked = tiny(tmp_path / "new", {"training.start_from": before.run, "subwords.normalization": "nfc"})
    with pytest.raises(ConfigError, match=r"subwords.normalization is nfc nfc .* keep its nfkc nfkc: leave it out"):
        run_subwords(Corpora(asked))


def test_a_model_that_starts_from_two_rules_is_saved_with_both(tmp_path: Path) -> None:
    """The new run's settings name neither rule, and one file could have only one of them."""
    train(tiny(tmp_path / "general", {"subwords.normalization": "[nfc, nfkc]", "training.steps": 1}))
    tuned = {"training.start_from": str(tmp_path / "general"), "training.steps": 1}
    train(tiny(tmp_path / "tuned", tuned))
    taught = {"training.teacher": str(tmp_path / "general"), "training.teacher_weight": 0.5, "training.steps": 1}
    train(tiny(tmp_path / "taught", taught))
    for run, changes in (("general", {}), ("tuned", tuned), ("taught", taught)):
        found = load_translator(tmp_path / run / "best")
        assert (found.source.normalization, found.target.normalization) == ("nfc", "nfkc"), run
        assert found.source.pieces() == found.target.pieces()
        if changes:
            train(tiny(tmp_path / run, {**changes, "training.steps": 2}))


def test_one_list_of_words_has_two_rules(tmp_path: Path) -> None:
    words = sorted({word for pair in pairs(250, 0) for side in pair for word in side.split()})
    (tmp_path / "dict.txt").write_text("".join(f"{word} 1\n" for word in words[:900]))
    given = {"subwords.kind": "none", "subwords.model": str(tmp_path / "dict.txt")}
    for rules in (("none", "nfkc"), ("nfkc", "none"), ("nfkc", "nfkc")):
        changes = {**given, "subwords.normalization": f"[{', '.join(rules)}]"}
        config = tiny(tmp_path / "-".join(rules), {**changes, "subwords.vocab_size": SubwordConfig.vocab_size})
        found = prepare(Corpora(config))
        assert tuple(each.normalization for each in found) == rules

# ruff: noqa: RUF001 (Chinese punctuation is meant)
"""BLEU's tokeniser follows the target language, so that writing without spaces is not one word a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
from sacrebleu.tokenizers import tokenizer_ja_mecab, tokenizer_ko_mecab, tokenizer_spm

from recipes.translation.commands import main
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import Corpus, load_corpus
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.translator import Translator
from recipes.translation.scores import evaluate as evaluate_module
from recipes.translation.scores.compare import compare
from recipes.translation.scores.evaluate import evaluate, evaluate_each, evaluate_files
from recipes.translation.settings.config import SCHEMA, RunConfig, load_config
from recipes.translation.text.bleu_tokenizers import tokenizer_for, tokenizer_of, tokenizer_of_text
from recipes.translation.training import validation as validation_module
from recipes.translation.training.validation import Validation, nothing, validate
from recipes.translation.translating.translate import Translation, translate
from tests.recipes.random_translator import translator_of
from tests.recipes.scores.scored import score
from tests.recipes.tiny import tiny

CHINESE = ["今天是星期一，天气很好。", "火车七点半开往维也纳。", "这张红色的桌子要五十欧元。"]
NEARLY = ["今天是星期二，天气很好。", "火车七点半开往柏林。", "这张蓝色的桌子要五十欧元。"]
JAPANESE = ["今日は月曜日で、天気がとても良いです。", "列車は七時半にウィーンへ出発します。"]
THAI = ["วันนี้เป็นวันจันทร์และอากาศดีมาก", "รถไฟไปเวียนนาออกเจ็ดโมงครึ่ง"]
KOREAN = ["오늘은 월요일이고 날씨가 좋습니다."]
GERMAN = ["Der Zug nach Wien fährt um halb acht ab."]


@pytest.mark.parametrize(
    ("language", "name"),
    [
        ("zh", "zh"),
        ("zh-CN", "zh"),
        ("zho_Hans", "zh"),
        ("yue_Hant", "zh"),
        ("ja", "ja-mecab"),
        ("jpn_Jpan", "ja-mecab"),
        ("ko", "ko-mecab"),
        ("th", "char"),
        ("lo", "char"),
        ("khm_Khmr", "char"),
        ("my", "char"),
        ("bo", "char"),
        ("de", "13a"),
        ("en", "13a"),
        ("tgt", "13a"),
        ("gan-Hans", "zh"),
        ("hsn_Hant", "zh"),
        ("shn_Mymr", "char"),
        ("ryu-Jpan", "ja-mecab"),
        ("zh-Latn", "13a"),
        ("ja-Latn", "13a"),
    ],
)
def test_auto_follows_the_language(language: str, name: str) -> None:
    assert tokenizer_of(language) == name


@pytest.mark.parametrize(
    ("references", "name"),
    [
        (CHINESE, "zh"),
        (JAPANESE, "ja-mecab"),
        (THAI, "char"),
        (["ភាសាខ្មែរ"], "char"),
        (["မြန်မာဘာသာ"], "char"),
        (["ພາສາລາວ"], "char"),
        (["བོད་སྐད"], "char"),
        (KOREAN, "13a"),  # written with spaces
        ([*GERMAN, "Er heißt 李明."], "13a"),
        ([*CHINESE, "Windows 11"], "zh"),
        (["李明ab"], "13a"),  # not more than half
        (["李明王a"], "zh"),
        (["李明" * 19 + "のか"], "zh"),  # a twentieth is hardly any
        (["李明" * 18 + "のか"], "ja-mecab"),
        (["ภาxy"], "13a"),
        (["ภาษy"], "char"),
    ],
)
def test_of_files_alone_the_script_decides(references: list[str], name: str) -> None:
    assert tokenizer_of_text("".join(references)) == name


@pytest.mark.parametrize("name", ["13a", "intl", "char", "none", "zh"])
def test_a_tokeniser_that_is_given_wins(name: str) -> None:
    assert tokenizer_for(name, "ja") == name


@pytest.mark.parametrize(
    ("references", "hypotheses", "tokenize"),
    [(CHINESE, NEARLY, "zh"), (THAI, [THAI[0].replace("ดี", "ดู"), THAI[1]], "char")],
)
def test_bleu_without_spaces_is_sacrebleus_with_that_tokeniser_and_not_0(
    references: list[str], hypotheses: list[str], tokenize: str
) -> None:
    found = score(hypotheses, references, tokenize=tokenize)
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenize)
    assert found["bleu"] == expected.score > 40
    assert found["bleu_lowercase"] > 40
    assert f"|tok:{tokenize}|" in found["bleu_signature"]
    assert f"|tok:{tokenize}|" in found["bleu_lowercase_signature"]


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("ja-mecab", tokenizer_ja_mecab, "ja"), ("ko-mecab", tokenizer_ko_mecab, "ko")]
)
def test_a_tokeniser_without_its_package_is_refused_in_one_line(
    name: str, module: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MeCab", None)
    with pytest.raises(ConfigError) as caught:
        tokenizer_for(name, "")
    answer = str(caught.value)
    assert f"pip install 'sacrebleu[{extra}]'" in answer
    assert "data.tokenize" in answer
    assert "\n" not in answer


@pytest.mark.parametrize("name", ["spm", "flores101", "flores200", "spBLEU-1K"])
def test_a_tokeniser_is_never_downloaded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tokenizer_spm, sacrebleu.utils):
        monkeypatch.setattr(module, "SACREBLEU_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizer_spm, "download_file", None)
    with pytest.raises(ConfigError) as caught:
        tokenizer_for(name, "")
    file = tokenizer_spm.SPM_MODELS[name]["url"].rpartition("/")[2]
    assert str(tmp_path / "models" / file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokeniser_that_is_on_disk_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = load_corpus(tiny(tmp_path / "run"))
    (tmp_path / "models").mkdir()
    corpus.target.save(tmp_path / "models" / "flores200sacrebleuspm")
    for module in (tokenizer_spm, sacrebleu.utils):
        monkeypatch.setattr(module, "SACREBLEU_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizer_spm, "download_file", None)
    tokenizer_for("flores200", "")
    assert "|tok:flores200|" in score(GERMAN, GERMAN, tokenize="flores200")["bleu_signature"]


def test_every_tokeniser_of_sacrebleu_can_be_set() -> None:
    assert {"auto", *sacrebleu.BLEU.TOKENIZERS} == set(SCHEMA.settings["data.tokenize"].choices)


def chinese(folder: Path, **changes: Any) -> RunConfig:
    """A run on sentences whose target side is Chinese."""
    for name in ("a", "v", "t"):
        (folder / f"{name}.en").write_text("".join(f"line {number} is here\n" for number in range(40)))
        (folder / f"{name}.zh").write_text("".join(f"{CHINESE[number % 3]}\n" for number in range(40)))
    splits = {f"data.{split}": [f"{split[0]}.en", f"{split[0]}.zh"] for split in ("valid", "test")}
    given = {"data.path": str(folder), "data.train": ["a.en", "a.zh"], "subwords.vocab_size": 312, **splits}
    return tiny(folder / "run", {**given, "data.target": "zh", "training.validate_bleu": 10, **changes})


def validated(
    config: RunConfig, corpus: Corpus, translations: list[str], monkeypatch: pytest.MonkeyPatch
) -> Validation:
    """A validation whose model says `translations`."""
    translator = translator_of(config, corpus.source, corpus.target)
    said = iter([translations])
    monkeypatch.setattr(validation_module, "translate", lambda *_: next(said))
    one_token = nothing(translator.model)._replace(tokens=torch.tensor(1))  # no loss is wanted here
    return validate(translator, corpus.valid, lambda _: one_token, 1)


def test_validation_in_training_uses_the_tokeniser_of_the_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = chinese(tmp_path)
    corpus = load_corpus(config)
    assert "BLEU by sacreBLEU's tokeniser zh" in capsys.readouterr().out
    references = [pair.target for pair in corpus.valid[0].pairs[:10]]
    said = [*references[:9], references[9][1:]]
    found = validated(config, corpus, said, monkeypatch)
    expected = sacrebleu.corpus_bleu(said, [references], tokenize="zh").score
    assert found["bleu"] == expected
    assert 50 < expected < 100


@pytest.mark.parametrize("lowercase", [False, True])
def test_validation_scores_what_the_model_says_against_the_references(
    lowercase: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path / "run", {"training.validate_bleu": 3, "subwords.lowercase": lowercase})
    corpus = load_corpus(config)
    references = [pair.target for pair in corpus.valid[0].pairs[:3]]
    assert any(text != text.lower() for text in references) != lowercase
    said = [f"{references[0].upper()} und noch etwas mehr als das", *references[1:]]
    found = validated(config, corpus, said, monkeypatch)
    expected = sacrebleu.corpus_bleu(said, [references], lowercase=lowercase).score
    assert found["bleu"] == expected
    assert expected != sacrebleu.corpus_bleu(references, [said], lowercase=lowercase).score
    assert expected != sacrebleu.corpus_bleu(said, [references], lowercase=not lowercase).score


def test_a_tokeniser_without_its_package_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
    config = chinese(tmp_path, **{"data.target": "ja"})
    with pytest.raises(ConfigError, match="ja-mecab"):
        load_corpus(config)
    assert not (tmp_path / "run").exists()
    load_corpus(replace(config, data=replace(config.data, tokenize="char")))
    load_corpus(replace(config, training=replace(config.training, validate_bleu=0)))


def test_evaluation_uses_the_tokeniser_of_the_settings_unless_another_is_asked_for(tmp_path: Path) -> None:
    config = chinese(tmp_path)
    corpus = load_corpus(config)
    translator = translator_of(config, corpus.source, corpus.target)
    assert "|tok:zh|" in evaluate(translator, "test").scores["bleu_signature"]
    (asked,) = evaluate_each(translator, Corpora(config).held_out("test"), "char")
    assert "|tok:char|" in asked.scores["bleu_signature"]
    set_char = replace(translator, config=replace(config, data=replace(config.data, tokenize="char")))
    found = evaluate(set_char, "test")
    assert "|tok:char|" in found.scores["bleu_signature"]
    assert list(found.translations) == translate(translator, [pair.source for pair in found.pairs])


@pytest.mark.parametrize("lowercase", [False, True])
def test_evaluation_scores_what_the_model_says_against_the_references(
    lowercase: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.tsv").write_text(
        "en\tde\nThe train.\tDer rote Zug nach Wien.\nA dog.\tEin kleiner Hund bellt laut.\n"
    )
    config = tiny(tmp_path / "run", {"subwords.lowercase": lowercase})
    config = replace(config, data=replace(config.data, format="tsv", path=str(tmp_path), test=("t.tsv",)))
    said = ["Der rote Zug nach Prag und dann weiter.", "ein kleiner Hund bellt laut."]
    target = load_corpus(tiny(tmp_path / "other")).target
    monkeypatch.setattr(evaluate_module, "best", lambda *_: [Translation(text, 0.0, 0.0) for text in said])
    found = evaluate(Translator(config, None, target, target), "test")
    references = ["Der rote Zug nach Wien.", "Ein kleiner Hund bellt laut."]
    if lowercase:
        references = [text.lower() for text in references]
    assert [pair.target for pair in found.pairs] == references
    assert found.scores == score(said, references, lowercase=lowercase)
    assert found.scores["bleu"] == sacrebleu.corpus_bleu(said, [references], lowercase=lowercase).score
    assert found.scores["bleu"] != score(references, said, lowercase=lowercase)["bleu"]
    assert f"|case:{'lc' if lowercase else 'mixed'}|" in found.scores["bleu_signature"]


def test_files_are_scored_by_their_script_or_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lines in (("h", NEARLY), ("r", CHINESE)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    words = ["evaluate", "--hypotheses", str(tmp_path / "h"), "--references", str(tmp_path / "r")]
    for more, tokenize in (([], "zh"), (["--tokenize", "char"], "char")):
        assert main([*words, *more]) == 0
        assert f"|tok:{tokenize}|" in capsys.readouterr().out
    (found,) = [one for one in evaluate_files(tmp_path / "h", tmp_path / "r").measured if one.name == "bleu"]
    assert found.score > 40  # and not one word a sentence
    assert "tok:zh" in str(compare([str(tmp_path / "h")] * 2, tmp_path / "r"))


def test_the_tokeniser_is_a_setting_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {tokenize: intl}")
    assert load_config(tmp_path / "run.yaml").data.tokenize == "intl"
    with pytest.raises(ConfigError, match=r"data\.tokenize .* expects one of auto, .*did you mean ja-mecab"):
        load_config(None, {"data.tokenize": "ja_mecab"})

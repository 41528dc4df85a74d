"""Any language pair by configuration alone: right-to-left scripts, and scripts that write no blanks between words."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.data.corpus import load_corpus
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.scores.evaluate import evaluate
from recipes.translation.train import train
from recipes.translation.translating.translate import translate
from tests.recipes.tiny import tiny

WORDS = {
    "ar": ("كلب قطة بيت شجرة طريق ماء", " "),
    "he": ("כלב חתול בית עץ דרך מים", " "),
    "hi": ("कुत्ता बिल्ली घर पेड़ सड़क पानी", " "),
    "th": ("หมา แมว บ้าน ไม้ ถนน ดิน", ""),
    "zh": ("狗 猫 房子 树 路 水", ""),
}


def sentences(language: str) -> list[str]:
    """Sixty sentences of three different words."""
    words, blank = WORDS[language]
    return [blank.join(three) + "?!."[n % 3] for n, three in enumerate(itertools.permutations(words.split(), 3))][:60]


@pytest.mark.parametrize(
    ("source", "target", "tokenize"), [("he", "zh", "zh"), ("th", "ar", "13a"), ("zh", "th", "char")]
)
def test_a_pair_of_languages_needs_nothing_but_its_names_and_files(
    source: str, target: str, tokenize: str, tmp_path: Path
) -> None:
    for language in (source, target):
        (tmp_path / f"a.{language}").write_text("\n".join(sentences(language)) + "\n", encoding="utf-8")
    files: dict[str, Any] = {f"data.{split}": [f"a.{source}", f"a.{target}"] for split in ("train", "valid", "test")}
    config = tiny(
        tmp_path / "run",
        {
            **files,
            "data.path": str(tmp_path),
            "data.source": source,
            "data.target": target,
            "data.language_tags": True,
            "cleaning.script": True,
            "subwords.sampling": 0.1,
            "subwords.vocab_size": 300,
            "training.steps": 1,
            "training.validate_bleu": 2,
        },
    )
    corpus = load_corpus(config)
    assert corpus.valid[0].held_out.tokenizer == tokenize
    assert len(corpus.train.plain.sources) == 60  # the script is the language's
    assert corpus.source.decode([list(ids[1:]) for ids in corpus.train.plain.sources]) == sentences(source)
    assert corpus.target.decode(corpus.train.plain.targets) == sentences(target)
    train(config, insist=True)
    translator = load_translator(tmp_path / "run" / "last")
    assert len(translate(translator, sentences(source)[:3])) == 3
    assert evaluate(translator, "test").scores["sentences"] == 60


@pytest.mark.parametrize("language", WORDS)
def test_swapped_languages_are_removed_by_their_script(language: str, tmp_path: Path) -> None:
    both = sentences(language)[:20] + [f"a sentence in English, number {n}" for n in range(20)]
    (tmp_path / "a.tsv").write_text(
        "\n".join([f"en\t{language}", *(f"english {n}\t{text}" for n, text in enumerate(both))])
    )
    files = {"data.train": "a.tsv", "data.valid": "a.tsv", "data.path": str(tmp_path)}
    config = tiny(
        tmp_path / "run",
        {
            **files,
            "data.target": language,
            "cleaning.script": True,
            "subwords.vocab_size": 292 if language == "zh" else 298,
        },
    )
    assert len(load_corpus(config).train.sources) == 20

"""The data of a run, in any language: what is trained on is cut by the settings, what it is held against is whole."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from models import PRESETS
from recipes.translation.data.builtin_corpus import pairs as builtin_pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import check_positions, load_corpus, most_subwords
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.scores.evaluate import evaluate
from recipes.translation.text.subwords import Symbols
from recipes.translation.train import train
from recipes.translation.translating.translate import translate
from tests.recipes.tiny import tiny


def test_training_pairs_above_max_length_are_left_out_and_validation_keeps_every_pair(tmp_path: Path) -> None:
    whole = load_corpus(tiny(tmp_path / "run"))
    corpus = load_corpus(tiny(tmp_path / "run", {"training.max_length": 20}))
    sides = zip(corpus.train.sources, corpus.train.targets, strict=True)
    short = [index for index, (source, target) in enumerate(sides) if max(len(source), len(target)) <= 20]
    assert 0 < len(short) < len(corpus.train.sources)
    assert sorted(index for batch in corpus.train.epoch(0) for index in batch) == short
    assert corpus.train.dropped == len(corpus.train.sources) - len(short)
    assert whole.train.dropped == corpus.valid[0].batches.dropped == 0
    assert max(map(len, corpus.valid[0].batches.sources)) > 20
    assert len(corpus.valid[0].batches.sources) == len(corpus.valid[0].pairs) == 25


def test_a_max_length_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train pair is within training\.max_length 1"):
        load_corpus(tiny(tmp_path / "run", {"training.max_length": 1}))


@pytest.mark.parametrize("lowercase", [False, True])
def test_both_splits_are_lower_cased_or_neither(lowercase: bool, tmp_path: Path) -> None:
    corpus = load_corpus(tiny(tmp_path / "run", {"subwords.lowercase": lowercase}))
    for batches, side in ((corpus.train, corpus.source), (corpus.valid[0].batches, corpus.source)):
        texts = side.decode([list(ids) for ids in batches.sources[:50]])
        assert any(text != text.lower() for text in texts) != lowercase
    assert any(text != text.lower() for pair in corpus.valid[0].pairs for text in pair) != lowercase


def test_corpora_of_weight_0_do_not_count_as_data(tmp_path: Path) -> None:
    (tmp_path / "long").write_text(" ".join(pair.source for pair in builtin_pairs(200, 1)) + "\n")
    (tmp_path / "short").write_text("a cat\n")
    corpora = {"a": {"train": ["long", "long"]}, "s": {"train": ["short", "short"], "weight": 0}}
    changes = {"data.path": str(tmp_path), "corpora": corpora, "data.valid": ["short", "short"]}
    with pytest.raises(DataError, match=r"no train pair is within training\.max_length 30"):
        load_corpus(tiny(tmp_path / "run", {**changes, "training.max_length": 30}))


@pytest.mark.parametrize(("format", "file"), [("tsv", "a.tsv"), ("jsonl", "a.jsonl")])
def test_one_column_for_both_languages_is_refused(format: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("en\tde\na cat\teine Katze\n")
    (tmp_path / "a.jsonl").write_text('{"en": "a cat", "de": "eine Katze"}\n')
    files = {"data.path": str(tmp_path), "data.format": format, "data.train": [file], "data.valid": [file]}
    with pytest.raises(
        DataError, match=rf"data\.source and data\.target are both en, and in format {format} they name"
    ):
        load_corpus(tiny(tmp_path / "run", {**files, "data.source": "en", "data.target": "en"}))


@pytest.mark.parametrize("target", ["fr", "es"])
def test_a_target_language_that_no_tag_was_trained_for_is_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    corpora = {"c": {"train": ["a", "a"], "source": "fr", "target": "es"}}
    changes = {"data.path": str(tmp_path), "corpora": corpora, "data.valid": ["a", "a"], "data.target": target}
    config = tiny(tmp_path / "run", {**changes, "data.language_tags": True})
    if target == "es":
        Corpora(config).check()
        return
    with pytest.raises(
        ConfigError,
        match=r"data\.target is fr, the language that translate translates into, "
        "but no corpus has it as its target: set it to es",
    ):
        Corpora(config).check()


@pytest.mark.parametrize(
    ("symbols", "most"),
    [
        (Symbols(), 9),  # the end of a source; the start of what the decoder reads
        (Symbols(prefix=(7,)), 8),
        (Symbols(suffix=(), start=(2, 7, 8)), 7),
    ],
)
def test_a_sentence_has_the_positions_that_its_symbols_leave_on_the_longer_side(symbols: Symbols, most: int) -> None:
    assert most_subwords(replace(PRESETS["mbart"], max_positions=10), symbols) == most
    assert most_subwords(PRESETS["tiny"], symbols) is None


def test_a_sentence_may_have_all_positions_and_no_more() -> None:
    sizes = replace(PRESETS["mbart"], max_positions=10)

    def corpus(*lengths: int) -> Any:
        batches = SimpleNamespace(source_lengths=numpy.array([3, 3]), target_lengths=numpy.array(lengths))
        valid = SimpleNamespace(batches=batches, held_out=SimpleNamespace(setting="data.valid"))
        return SimpleNamespace(source=SimpleNamespace(symbols=Symbols()), valid=[valid])

    check_positions({"decoding.max_length": 9}, sizes, corpus(4, 9))
    with pytest.raises(ConfigError, match=r"decoding\.max_length is 10, but .* positions for 9 subwords"):
        check_positions({"decoding.max_length": 10}, sizes, corpus(4, 9))
    with pytest.raises(DataError, match=r"data\.valid: the target of pair 2 has 10 subwords, .* positions for 9:"):
        check_positions({"decoding.max_length": 9}, sizes, corpus(4, 10))


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

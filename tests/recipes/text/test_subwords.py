"""Subword models: exact round trips, the same bytes every time, clear errors; `prepare` trains them once."""

import dataclasses
import os
import re
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data import prepare as prepare_module
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.prepare import prepare
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.settings.config import DataConfig, RunConfig, SubwordConfig
from recipes.translation.text.subwords import BOS, EOS, PAD, Subwords, train_subwords

SENTENCES = [side for pair in pairs(1_500, 1) for side in pair]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("subwords") / "joint.v1"
    train_subwords(SENTENCES, prefix, SubwordConfig(vocab_size=600))
    return prefix.with_name("joint.v1.model")


@pytest.fixture(scope="module")
def subwords(model_file: Path) -> Subwords:
    return Subwords.load(model_file)


def run_config(folder: Path, **subwords: object) -> RunConfig:
    settings = dataclasses.replace(SubwordConfig(vocab_size=450), **subwords)
    return RunConfig(run=str(folder), data=DataConfig(builtin_pairs=400), subwords=settings)


def test_special_ids_come_first_and_the_size_is_the_one_asked_for(subwords: Subwords) -> None:
    assert (subwords.pad, subwords.unk, subwords.bos, subwords.eos, len(subwords)) == (0, 1, 2, 3, 600)


def test_sentences_come_back_exactly(subwords: Subwords) -> None:
    assert subwords.decode(subwords.encode(SENTENCES)) == SENTENCES


@given(st.lists(st.text("abcäß漢😀 ", min_size=1, max_size=12).map(lambda text: " ".join(text.split())), max_size=3))
def test_characters_never_seen_come_back_too(subwords: Subwords, texts: list[str]) -> None:
    ids = subwords.encode(texts)
    assert subwords.decode(ids) == texts
    assert all(subwords.unk not in row for row in ids)


def test_encoding_adds_neither_start_nor_end(subwords: Subwords) -> None:
    assert not {PAD, BOS, EOS} & {each for row in subwords.encode([*SENTENCES, "</s> <pad>"]) for each in row}


def test_padding_start_and_end_leave_no_trace(subwords: Subwords) -> None:
    (ids,) = subwords.encode(["Die Zahl ist elf."])
    assert subwords.decode([[BOS, *ids, EOS, PAD, PAD], []]) == ["Die Zahl ist elf.", ""]


def test_an_empty_list_is_an_empty_list(subwords: Subwords) -> None:
    assert subwords.encode([]) == subwords.decode([]) == []
    assert subwords.encode([""]) == [[]]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_the_same_sentences_give_the_same_bytes(kind: str, tmp_path: Path) -> None:
    for name in "ab":
        train_subwords(iter(SENTENCES[:600]), tmp_path / name, SubwordConfig(vocab_size=400, kind=kind))
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.model", "b.model"]


def test_a_saved_model_is_the_model(subwords: Subwords, model_file: Path, tmp_path: Path) -> None:
    subwords.save(tmp_path / "copy.model")
    assert (tmp_path / "copy.model").read_bytes() == model_file.read_bytes()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_vocabulary_too_large_is_answered_with_the_largest_that_fits(kind: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"subwords\.vocab_size 90,000 is too large .* possible is [\d,]+: set it to that, or less$"
    ) as caught:
        train_subwords(SENTENCES[:200], tmp_path / "a", SubwordConfig(vocab_size=90_000, kind=kind))
    (found,) = re.findall(r"possible is ([\d,]+):", str(caught.value))
    largest = int(found.replace(",", ""))
    train_subwords(SENTENCES[:200], tmp_path / "a", SubwordConfig(vocab_size=largest, kind=kind))
    assert len(Subwords.load(tmp_path / "a.model")) == largest


def test_a_vocabulary_too_small_is_answered_with_the_smallest_possible(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"subwords\.vocab_size 262 is too small: .* are \d+: set it to that, or more$"
    ):
        train_subwords(SENTENCES[:200], tmp_path / "a", SubwordConfig(vocab_size=262))
    assert not list(tmp_path.iterdir())


def test_training_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no training text .* data\.train"):
        train_subwords(iter(()), tmp_path / "a", SubwordConfig())


def test_missing_damaged_and_foreign_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no subword model .*none\.model"):
        Subwords.load(tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match=r"bad\.model is not a sentencepiece model"):
        Subwords.load(tmp_path / "bad.model")


@pytest.mark.parametrize(("joint", "files"), [(True, {"joint.model"}), (False, {"source.model", "target.model"})])
def test_prepare_writes_one_model_or_two(joint: bool, files: set[str], tmp_path: Path) -> None:
    source, target = prepare(Corpora(run_config(tmp_path, joint=joint)))
    assert (source is target) == joint
    assert {path.name for path in (tmp_path / "subwords").glob("*.model")} == files
    assert len(source) == len(target) == 450
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "subwords"]


def test_prepare_reuses_what_the_same_settings_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(tmp_path)
    first, _ = prepare(Corpora(config))
    monkeypatch.setattr(prepare_module, "train_subwords", None)
    monkeypatch.setattr(Corpora, "each_corpus", None)
    again, _ = prepare(Corpora(config))
    assert again.encode(SENTENCES[:50]) == first.encode(SENTENCES[:50])
    assert "reused" in capsys.readouterr().out


def test_prepare_trains_anew_for_other_settings_and_for_damaged_files(tmp_path: Path) -> None:
    prepare(Corpora(run_config(tmp_path)))
    model = tmp_path / "subwords" / "joint.model"
    made = model.read_bytes()
    assert len(prepare(Corpora(run_config(tmp_path, vocab_size=440)))[0]) == 440
    prepare(Corpora(run_config(tmp_path)))
    assert model.read_bytes() == made
    model.write_bytes(made[:-1] + bytes([made[-1] ^ 1]))
    prepare(Corpora(run_config(tmp_path)))
    assert model.read_bytes() == made
    (tmp_path / "subwords" / "settings.json").write_text("{")
    prepare(Corpora(run_config(tmp_path)))
    assert model.read_bytes() == made


def text_config(run: Path, *names: str) -> RunConfig:
    """A run on text files beside it."""
    data = DataConfig(format="text", path=str(run.parent), train=names, valid=names)
    return RunConfig(run=str(run), data=data, subwords=SubwordConfig(vocab_size=330))


def write_sides(folder: Path, *names: str, start: int = 0) -> None:
    for name in names:
        (folder / name).write_text("".join(f"{line}\n" for line in SENTENCES[start : start + 200]))


def test_a_training_file_rewritten_in_place_makes_new_subwords(tmp_path: Path) -> None:
    config = text_config(tmp_path / "run", "a.en", "a.de")
    write_sides(tmp_path, "a.en", "a.de")
    times = [(tmp_path / name).stat() for name in ("a.en", "a.de")]
    prepare(Corpora(config))
    model = tmp_path / "run" / "subwords" / "joint.model"
    before = model.read_bytes()
    for name, old in zip(("a.en", "a.de"), times, strict=True):  # of the same size and age, as some tools leave it
        path = tmp_path / name
        path.write_text(path.read_text().swapcase())
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
        assert path.stat().st_size == old.st_size
    prepare(Corpora(config))
    assert model.read_bytes() != before


@pytest.mark.parametrize("names", [("b.en", "b.de"), ("a.en", "b.de"), ("b.en", "a.de")])
def test_other_training_files_make_new_subwords(names: tuple[str, str], tmp_path: Path) -> None:
    write_sides(tmp_path, "a.en", "a.de")
    write_sides(tmp_path, "b.en", "b.de", start=700)
    prepare(Corpora(text_config(tmp_path / "run", "a.en", "a.de")))
    model = tmp_path / "run" / "subwords" / "joint.model"
    before = model.read_bytes()
    prepare(Corpora(text_config(tmp_path / "run", *names)))
    assert model.read_bytes() != before


@pytest.mark.parametrize("joint", [True, False])
def test_sides_that_change_places_make_new_subwords_for_either(joint: bool, tmp_path: Path) -> None:
    write_sides(tmp_path, "a.en")
    write_sides(tmp_path, "a.de", start=700)
    config = text_config(tmp_path / "run", "a.en", "a.de")
    config = dataclasses.replace(config, subwords=dataclasses.replace(config.subwords, joint=joint))
    turned = dataclasses.replace(config, data=dataclasses.replace(config.data, train=("a.de", "a.en")))
    first, second = prepare(Corpora(config)), prepare(Corpora(turned))
    assert (first[0].encode(SENTENCES[:200]) == second[0].encode(SENTENCES[:200])) == joint


def test_the_same_files_in_another_place_are_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sides(tmp_path, "a.en", "a.de")
    prepare(Corpora(text_config(tmp_path / "run", "a.en", "a.de")))
    (tmp_path / "b").mkdir()
    for name in ("a.en", "a.de", "run"):
        (tmp_path / name).rename(tmp_path / "b" / name)
    monkeypatch.setattr(prepare_module, "train_subwords", None)
    prepare(Corpora(text_config(tmp_path / "b" / "run", "a.en", "a.de")))
    assert "reused" in capsys.readouterr().out


def test_data_on_the_hub_is_known_by_its_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"en": SENTENCES[:200], "de": SENTENCES[:200]}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict(rows))
    data = DataConfig(format="hub", path="a/b", train=("train",))
    config = RunConfig(run=str(tmp_path), data=data, subwords=SubwordConfig(vocab_size=330))
    prepare(Corpora(config))
    before = (tmp_path / "subwords" / "joint.model").read_bytes()
    rows |= {"en": SENTENCES[700:900], "de": SENTENCES[700:900]}
    prepare(Corpora(config))
    assert (tmp_path / "subwords" / "joint.model").read_bytes() != before


LONG = " ".join(["Ein langer Satz über Qualität."] * 400)


def test_long_sentences_are_learned_from_too(tmp_path: Path) -> None:
    long = LONG[:4_000] + "ጸሐይ" * 40 + LONG[:4_000]  # sentencepiece itself leaves out what is above 4,192 bytes
    train_subwords([*SENTENCES[:200], long], tmp_path / "a", SubwordConfig(vocab_size=420))
    (ids,) = Subwords.load(tmp_path / "a.model").encode(["ጸሐይ"])
    assert len(ids) <= 4, "spelled in bytes: three for each character"


def test_a_sentence_that_is_left_out_of_the_subwords_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = "a " * 32_768
    train_subwords([*SENTENCES[:200], longest, f"{longest}a"], tmp_path / "a", SubwordConfig(vocab_size=330))
    assert "longer than 65,536 bytes, left out of the subwords' text: 1" in capsys.readouterr().err


def test_a_failed_preparation_leaves_the_old_models(tmp_path: Path) -> None:
    prepare(Corpora(run_config(tmp_path)))
    made = (tmp_path / "subwords" / "joint.model").read_bytes()
    with pytest.raises(ConfigError, match="too large"):
        prepare(Corpora(run_config(tmp_path, vocab_size=50_000)))
    assert (tmp_path / "subwords" / "joint.model").read_bytes() == made


def test_lower_case_is_applied_before_training(tmp_path: Path) -> None:
    subwords, _ = prepare(Corpora(run_config(tmp_path, lowercase=True)))
    lower, upper = subwords.encode(["die zahl", "DIE ZAHL"])
    assert len(lower) < len(upper)
    pieces = [subwords.pieces()[id] for id in range(4 + 256, len(subwords))]
    assert pieces == [piece.lower() for piece in pieces]


SYMBOLS = ("<url>", "[NAME]", "\u00df\u00df", "\ufb01")


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("symbol", SYMBOLS)
@pytest.mark.parametrize("text", ["{}", "See {}.", "a{}b{}{} c", "({}) {}"])
def test_a_symbol_is_one_subword_wherever_it_stands_and_comes_back_as_it_is(
    kind: str, symbol: str, text: str, symbols_of: dict[str, Subwords]
) -> None:
    subwords = symbols_of[kind]
    sentence = text.format(*[symbol] * 3)
    (ids,) = subwords.encode([sentence])
    assert [subwords.pieces()[each] for each in ids].count(symbol) == sentence.count(symbol)
    assert subwords.decode([ids]) == [sentence]


@pytest.fixture(scope="module")
def symbols_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subwords]:
    folder = tmp_path_factory.mktemp("symbols")
    for kind in ("unigram", "bpe"):
        train_subwords(SENTENCES[:300], folder / kind, SubwordConfig(vocab_size=380, kind=kind, symbols=SYMBOLS))
    return {kind: Subwords.load(folder / f"{kind}.model") for kind in ("unigram", "bpe")}


def test_a_tag_is_one_subword_with_the_blank_before_it(tmp_path: Path) -> None:
    train_subwords(SENTENCES[:300], tmp_path / "a", SubwordConfig(vocab_size=380), ["<2de>", "<bt>"])
    subwords = Subwords.load(tmp_path / "a.model")
    tagged, plain = subwords.encode(["<2de> <bt> One dog.", "One dog."])
    assert [subwords.pieces()[each] for each in tagged[:2]] == ["\u2581<2de>", "\u2581<bt>"]
    assert tagged[2:] == plain
    assert subwords.decode([tagged]) == ["<2de> <bt> One dog."]

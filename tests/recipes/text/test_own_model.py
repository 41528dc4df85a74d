"""Subwords that the user brings: whoever made them divides a text as the run does, and so does an export."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers

from recipes.translation.commands import main
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.prepare import prepare, train_pairs
from recipes.translation.errors import CheckpointError, ConfigError, DataError
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.text.own_model import SPECIAL, own_model
from recipes.translation.text.segmentations import BLANK
from recipes.translation.text.sentencepiece_file import model_of, rules_of
from recipes.translation.text.subwords import BOS, EOS, PAD, UNK, Subwords
from recipes.translation.train import train
from recipes.translation.translating.demands import word_boundaries
from recipes.translation.translating.translate import SearchOptions, alternatives, translate
from tests.recipes.tiny import LEARNS, tiny
from tests.recipes.trained_elsewhere import OUR_IDS, trained_elsewhere

SENTENCES = [pair.source for pair in pairs(60, 4)]
TEXT = [side for pair in pairs(300, 1) for side in pair]


def spm(kind: str, **options: Any) -> bytes:
    """A model as sentencepiece's own trainer makes it, with its own special ids: no padding, unknown first."""
    return trained_elsewhere(TEXT, **{"vocab_size": 150, "model_type": kind, "hard_vocab_limit": False, **options})


def of_sentencepiece(kind: str, **options: Any) -> Callable[[Path], tuple[Path, Callable[[str], list[str]]]]:
    def written(folder: Path) -> tuple[Path, Callable[[str], list[str]]]:
        content = spm(kind, **options)
        (folder / "own.model").write_bytes(content)
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        return folder / "own.model", lambda text: processor.encode(text, out_type=str)

    return written


def of_tokenizer_json(folder: Path) -> tuple[Path, Callable[[str], list[str]]]:
    """A tokenizer as transformers saves NLLB's."""
    from tests.recipes.importing import published

    path = published.nllb(folder / "nllb") / "tokenizer.json"
    theirs = tokenizers.Tokenizer.from_file(str(path))
    return path, lambda text: theirs.encode(text, add_special_tokens=False).tokens


def of_words(folder: Path) -> tuple[Path, Callable[[str], list[str]]]:
    """A dictionary as fairseq writes it: a word and its count."""
    words = sorted({word for text in TEXT for word in text.split()})[:120]
    (folder / "dict.txt").write_text("<pad> 1\n" + "".join(f"{word} {9}\n" for word in words))
    return folder / "dict.txt", lambda text: [BLANK + word for word in text.split()]


def of_marian(folder: Path) -> tuple[Path, Callable[[str], list[str]]]:
    """A vocabulary as marian-vocab writes it: most frequent first, the end first of all."""
    words = sorted({word for text in TEXT for word in text.split()})[:120]
    lines = ["</s>: 0", "<unk>: 1", *(f'"{word}": {number}' for number, word in enumerate(words, start=2))]
    (folder / "vocab.yml").write_text("\n".join(lines))
    return folder / "vocab.yml", lambda text: [BLANK + word for word in text.split()]


FOREIGN = {
    "bpe": of_sentencepiece("bpe", unk_id=2, bos_id=0, eos_id=1, unk_piece="[UNK]"),
    "unigram": of_sentencepiece("unigram", bos_id=-1, eos_id=3, pad_id=2, unk_id=0, normalization_rule_name="nfkc_cf"),
    "char": of_sentencepiece("char"),
    "tokenizer.json": of_tokenizer_json,
    "words": of_words,
    "vocab.yml": of_marian,
}


WORDS = ("words", "vocab.yml")
"""Those of kind none."""
BYTES = {"bytes": of_sentencepiece("bpe", byte_fallback=True, vocab_size=420)}


def settings(name: str, path: Path) -> dict[str, Any]:
    found = {"subwords.model": [str(path)], "subwords.vocab_size": 1000, "data.language_tags": True}
    return {**found, "subwords.symbols": ["<url>"], **({"subwords.kind": "none"} if name in WORDS else {})}


def _joined(pieces: list[str], unknown: str) -> list[str]:
    """Unknown pieces that follow each other are one."""
    return [piece for piece, before in zip(pieces, ["", *pieces], strict=False) if {piece, before} != {unknown}]


@pytest.mark.formats
@pytest.mark.parametrize("name", FOREIGN | BYTES)
def test_a_text_is_divided_as_by_the_program_the_model_came_from(name: str, tmp_path: Path) -> None:
    path, theirs = (FOREIGN | BYTES)[name](tmp_path)
    source, target = prepare(Corpora(tiny(tmp_path / "run", settings(name, path))))
    assert source is target
    pieces = source.pieces()
    known = set(pieces)
    for text in SENTENCES:
        (ids,) = source.encode([text])
        expected = [piece if piece in known else pieces[UNK] for piece in theirs(text)]
        assert [pieces[each] for each in ids] == _joined(expected, pieces[UNK])
    tagged = source.encode(["<2de> a <url>"])[0]
    assert [pieces[tagged[0]], pieces[tagged[-1]]] == [BLANK + "<2de>", BLANK + "<url>" if name in WORDS else "<url>"]
    processor = sentencepiece.SentencePieceProcessor(model_proto=source.model_bytes())
    special = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
    assert special == (PAD, UNK, BOS, EOS)


@pytest.mark.formats
@pytest.mark.parametrize("name", FOREIGN)
def test_a_model_trained_on_it_translates_the_same_in_ctranslate2(name: str, tmp_path: Path) -> None:
    from recipes.translation.translating import ctranslate2_engine

    path, _ = FOREIGN[name](tmp_path)
    learns = {**LEARNS, "decoding.max_length": 20}
    config = tiny(tmp_path / "run", {**settings(name, path), **learns})
    train(config)
    path.unlink()  # the run has a copy
    train(tiny(tmp_path / "run", {**settings(name, path), **learns, "training.steps": 61}))
    folder = tmp_path / "exported"
    assert main(["export", "--run", str(tmp_path / "run"), "--to", "ctranslate2", "--out", str(folder)]) == 0
    ours = translate(load_translator(tmp_path / "run" / "best"), SENTENCES[:20])
    assert ctranslate2_engine.translate(ctranslate2_engine.load(folder), SENTENCES[:20]) == ours
    assert any(ours)


def test_each_side_may_have_a_model_of_its_own(tmp_path: Path) -> None:
    for name, kind in (("en", "bpe"), ("de", "char")):
        (tmp_path / name).write_bytes(spm(kind))
    files = [str(tmp_path / "en"), str(tmp_path / "de")]
    given = {"subwords.model": files, "subwords.joint": False, "subwords.vocab_size": 1000}
    source, target = prepare(Corpora(tiny(tmp_path / "run", given)))
    assert (source.kind, target.kind) == ("bpe", "char")


def test_another_file_is_copied_again_and_the_same_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.model"
    said = []
    for content in (spm("bpe"), spm("bpe"), spm("char")):
        path.write_bytes(content)
        prepare(Corpora(tiny(tmp_path / "run", {"subwords.model": [str(path)], "subwords.vocab_size": 1000})))
        said.append("reused" in capsys.readouterr().out)
    assert said == [False, True, False]


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"not a model", "unigram", "is not a sentencepiece model"),
        (b"", "unigram", "is not a sentencepiece model: it has no pieces"),
        (b"two words 3\n", "none", "is not a list of words, .*: its line 'two words' has several words"),
        (b"<pad>\n", "none", "is not a list of words, .*: it has no pieces"),
    ],
)
def test_a_file_that_has_no_subwords_is_refused(content: bytes, kind: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(content)
    with pytest.raises(DataError, match=f"^subwords.model: {tmp_path / 'own'} {message}"):
        own_model(tmp_path / "own", kind, "nfc", ())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "it has no word with an id"),
        ("a: 0\nb: c\n", "'b' has no whole number as its id"),
        ("a: 0\nb: [1]\n", "'b' has no whole number as its id"),
        ("a: 0\nb: 0\n", "the id '0' occurs twice"),
        ("a: 0\na: 1\n", "the word 'a' occurs twice"),
        ("a: 0\n\tb: 1: 2\n", "while scanning"),
        ("</s>: 0\n<unk>: 1\n", "it has no pieces"),
        ('a: 0\n"b c": 1\n', "its line 'b c' has several words"),
    ],
)
def test_a_vocabulary_of_ids_that_is_none_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.yml").write_text(content)
    with pytest.raises(
        DataError, match=f"is not a list of words, as subwords.kind none expects it: .*{message}"
    ) as caught:
        own_model(tmp_path / "vocab.yml", "none", "nfc", ())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["vocab.yml", "vocab.json"])
def test_words_that_yaml_would_read_as_something_else_come_by_their_ids(name: str, tmp_path: Path) -> None:
    words = ["1", "no", "null", "1e3", "~", ":", "ü", '"']
    ids = {word: number for number, word in enumerate(reversed(words), start=2)}
    lines = [f"{json.dumps(word, ensure_ascii=False)}: {number}" for word, number in ids.items()]
    (tmp_path / name).write_text(f"{{{', '.join(lines)}}}" if name.endswith("json") else "\n".join(lines))
    model = Subwords(sentencepiece.SentencePieceProcessor(model_proto=own_model(tmp_path / name, "none", "nfc", ())))
    assert model.pieces()[4:] == [BLANK + word for word in reversed(words)]


def test_a_tokenizer_json_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": None, "model": {"type": "WordPiece"}}))
    with pytest.raises(DataError, match=r"is not a tokenizer\.json of pieces: there is none, and the tokenizer has no"):
        own_model(tmp_path / "tokenizer.json", "unigram", "nfc", ())


@pytest.mark.parametrize(("name", "given"), [("add_dummy_prefix", False), ("treat_whitespace_as_suffix", True)])
def test_a_model_whose_words_do_not_begin_with_the_blank_before_them_is_refused(
    name: str, given: bool, tmp_path: Path
) -> None:
    (tmp_path / "own").write_bytes(spm("bpe", **{name: given}))
    said = f"^subwords.model: {tmp_path / 'own'} has {name} {str(given).lower()}, so its words do not begin with"
    with pytest.raises(DataError, match=f"{said} .: make it with {name} {str(not given).lower()}, or leave subwords"):
        own_model(tmp_path / "own", "unigram", "nfc", ())


CHARSMAP = base64.b64encode(rules_of("nfkc").precompiled_charsmap).decode()
RULES = {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}
KEEPING = {
    "type": "Precompiled",
    "precompiled_charsmap": base64.b64encode(rules_of("nfc").precompiled_charsmap).decode(),
}
MARK = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": "always", "split": True}
ONE_BLANK = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
AT_BLANKS = {"type": "WhitespaceSplit"}


def as_json(normalizers: list[Any], dividers: list[Any], model: Any = None) -> str:
    """A tokenizer.json, of unigram pieces unless it has another model."""
    pieces = [[piece.piece, piece.score] for piece in model_of(spm("unigram")).pieces]
    found = {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": dividers},
        "model": model or {"type": "Unigram", "unk_id": 0, "vocab": pieces},
    }
    for part, steps in (("normalizer", normalizers), ("pre_tokenizer", dividers)):
        if len(steps) == 1:
            found[part] = steps[0]
    return json.dumps(found)


@pytest.mark.parametrize(
    ("normalizers", "dividers"),
    [
        ([RULES, ONE_BLANK], [MARK]),
        ([RULES, ONE_BLANK], [{**MARK, "prepend_scheme": "first", "split": False}]),
        ([RULES, ONE_BLANK], [{"type": "Metaspace", "replacement": BLANK, "add_prefix_space": True}]),
        ([RULES], [AT_BLANKS, MARK]),
        ([RULES, {"type": "Strip", "strip_left": False, "strip_right": True}, {**ONE_BLANK, "content": BLANK}], [MARK]),
    ],
)
def test_a_tokenizer_json_of_each_version_divides_a_text_as_tokenizers_does(
    normalizers: list[Any], dividers: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(as_json(normalizers, dividers))
    model = Subwords(sentencepiece.SentencePieceProcessor(model_proto=own_model(path, "unigram", "nfc", ())))
    theirs = tokenizers.Tokenizer.from_file(str(path))
    pieces = model.pieces()
    for text in [*SENTENCES, "the  old\xa0train", "\uff34he trains"]:
        expected = [piece if piece in pieces else pieces[UNK] for piece in theirs.encode(text).tokens]
        assert [pieces[each] for each in model.encode([text])[0]] == expected


@pytest.mark.parametrize(
    ("normalizers", "dividers", "message"),
    [
        ([RULES, {"type": "Lowercase"}], [MARK], "it has the step Lowercase, which no sentencepiece model supports"),
        ([RULES, {**ONE_BLANK, "pattern": {"String": "a"}}], [MARK], "it has the step Replace"),
        ([RULES], [{"type": "Digits", "individual_digits": True}, MARK], "it has the step Digits"),
        ([KEEPING], [AT_BLANKS, MARK], "it has the step WhitespaceSplit"),
        ([RULES], [{**MARK, "prepend_scheme": "never"}], f"it does not mark the first word with {BLANK}"),
        ([RULES], [{**MARK, "replacement": "_"}], f"it does not mark the first word with {BLANK}"),
        ([RULES], [{"type": "Metaspace", "replacement": BLANK, "add_prefix_space": False}], "it does not mark"),
        ([RULES], [AT_BLANKS], "it does not mark"),
        ([RULES, {"type": "Replace", "pattern": "a", "content": " "}], [MARK], "it has the step Replace"),
    ],
)
def test_a_tokenizer_json_that_divides_a_text_as_no_sentencepiece_model_does_is_refused(
    normalizers: list[Any], dividers: list[Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(as_json(normalizers, dividers))
    with pytest.raises(DataError, match=f"is not a tokenizer.json of pieces: {message}.*: use a file"):
        own_model(tmp_path / "tokenizer.json", "unigram", "nfc", ())


def test_a_tokenizer_json_with_damaged_rules_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(as_json([{**RULES, "precompiled_charsmap": "AAAA"}], [MARK]))
    with pytest.raises(DataError, match=r"its compiled rules of normalisation are damaged .*: restore it"):
        own_model(tmp_path / "tokenizer.json", "unigram", "nfc", ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.1}, "it has dropout"),
        ({"end_of_word_suffix": "</w>"}, "it has end_of_word_suffix"),
        ({"vocab": {"a": 4, BLANK: 5, f"a{BLANK}": 6}, "merges": [["a", BLANK]]}, f"but has the piece 'a{BLANK}'"),
    ],
)
def test_a_tokenizer_json_that_merges_as_no_sentencepiece_model_does_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = {"type": "BPE", "vocab": {BLANK: 4, "a": 5, f"{BLANK}a": 6}, "merges": [[BLANK, "a"]]}
    path = tmp_path / "tokenizer.json"
    path.write_text(as_json([RULES], [MARK], model))
    own_model(path, "bpe", "nfc", ())
    path.write_text(as_json([RULES], [MARK], {**model, **changes}))
    with pytest.raises(DataError, match=f"is not a tokenizer.json of pieces: .*{message}"):
        own_model(path, "bpe", "nfc", ())


@pytest.mark.parametrize("symbols", [["two words"], [" "], [""], ["<s>"], [f"a{BLANK}b"], ["<a>", "<a>"], ["<2de>"]])
def test_symbols_that_cannot_be_one_subword_are_refused_with_own_subwords_too(
    symbols: list[str], tmp_path: Path
) -> None:
    (tmp_path / "own.model").write_bytes(spm("bpe"))
    given = settings("bpe", tmp_path / "own.model") | {"subwords.symbols": symbols}
    with pytest.raises(ConfigError, match=r"choose other words for subwords\.symbols"):
        prepare(Corpora(tiny(tmp_path / "run", given)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"subwords.vocab_size": 999}, r"subwords\.vocab_size is 999, but .*own\.model has 151 subwords"),
        ({"subwords.kind": "bpe"}, r"subwords\.kind is bpe, but subwords\.model is .*own\.model, which brings its own"),
        ({"subwords.normalization": "nfkc"}, r"subwords\.normalization is nfkc, but subwords\.model"),
        ({"subwords.train_pairs": 9}, r"subwords\.train_pairs is 9, but subwords\.model"),
        ({"subwords.sampling": 1.5}, r"for subwords\.kind bpe \(.*own\.model\) it is the probability .* below 1"),
        ({"training.teacher": "other"}, "there is no trained model"),
    ],
)
def test_settings_that_contradict_the_file_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "own.model").write_bytes(spm("bpe"))
    given = {"subwords.model": [str(tmp_path / "own.model")], "subwords.vocab_size": 1000, **changes}
    with pytest.raises((ConfigError, CheckpointError), match=message):
        train(tiny(tmp_path / "run", given))


def test_words_that_blanks_divide_are_subwords_and_rare_ones_are_unknown_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["the cat sat@@ s", "the dog sat@@ s", "the the rare"] * 3 + ["seldom"]
    for side in ("en", "de"):
        (tmp_path / f"a.{side}").write_text("\n".join(lines) + "\n")
    files = {"data.path": str(tmp_path), "data.train": ["a.en", "a.de"], "data.valid": ["a.en", "a.de"]}
    files |= {"subwords.symbols": ["<url>"]}
    config = tiny(tmp_path / "run", {**files, "subwords.kind": "none", "subwords.vocab_size": 11})
    corpus = load_corpus(config)
    said = capsys.readouterr()
    pieces = corpus.source.pieces()
    assert set(pieces[4:]) == {BLANK + word for word in ("<url>", "the", "sat@@", "s", "cat", "dog", "rare")}
    assert corpus.source.decode(corpus.source.encode(["the <url> sat@@ s"])) == ["the <url> sat@@ s"]
    assert "1 of 34 source subwords are unknown" in said.err


def test_fewer_subwords_than_asked_for_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = prepare(Corpora(tiny(tmp_path / "run", {"subwords.kind": "char"})))
    assert len(source) < 360
    said = f"joint: {len(source)} subwords, fewer than subwords.vocab_size 360: the text yields no more"
    assert said in capsys.readouterr().out


def test_subwords_are_made_from_ten_million_bytes_of_a_larger_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recipes.translation.data.prepare.TRAIN_BYTES", 10_000)
    config = tiny(tmp_path / "run")
    corpora = Corpora(config)
    prepare(corpora)
    text = corpora.text
    count = train_pairs(text, None)
    assert 0 < count < len(text) == 250
    size = len(text.sources.values) + len(text.targets.values)
    assert abs(count * size / 250 - 10_000) < size / 250
    assert f"from {count:,} of 250 pairs" in capsys.readouterr().out
    assert train_pairs(text, 0) == 0


def test_every_special_piece_has_a_name() -> None:
    assert list(SPECIAL) == ["pad", "unk", "bos", "eos"]
    assert Subwords.pad == PAD


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("alphabet", [TEXT, [*TEXT, "< u r l > " * 9]])
def test_sampling_splits_no_symbol_of_the_users_own_model(kind: str, alphabet: list[str], tmp_path: Path) -> None:
    """With the letters of the symbol it could be spelled, and without them nothing could."""
    usual = {"vocab_size": 250, "model_type": kind, "hard_vocab_limit": False, **OUR_IDS}
    (tmp_path / "own.model").write_bytes(trained_elsewhere(alphabet, user_defined_symbols=["<url>"], **usual))
    subwords = Subwords.load(tmp_path / "own.model")
    symbol = subwords.pieces().index("<url>")
    plain = subwords.encode(["See <url>.", "<url>", "a<url>b <url>"] * 20)
    drawn = subwords.sample(plain, range(60), 0.3)
    assert [row.count(symbol) for row in drawn] == [row.count(symbol) for row in plain]
    assert drawn != plain
    assert subwords.decode(drawn) == subwords.decode(plain)


def test_special_pieces_by_any_name_bound_no_word(tmp_path: Path) -> None:
    """[PAD] begins with a sign, as a word may not, and is no text."""
    names = {"pad_piece": "[PAD]", "unk_piece": "[UNK]", "bos_piece": "[BOS]", "eos_piece": "[EOS]"}
    (tmp_path / "own.model").write_bytes(spm("bpe", byte_fallback=True, vocab_size=450, **names, **OUR_IDS))
    train(tiny(tmp_path / "run", {"subwords.model": str(tmp_path / "own.model"), "subwords.vocab_size": 450}))
    translator = load_translator(tmp_path / "run" / "best")
    found = word_boundaries(translator)
    assert not {PAD, UNK, BOS, EOS} & set(found)
    pieces = translator.target.pieces()
    assert {pieces[each] for each in found} >= {BLANK, "."}
    assert not any(re.fullmatch("<0x..>", pieces[each]) for each in found)
    (row,) = alternatives(translator, ["A train leaves."], SearchOptions(constraints=[["Zug"]]))
    assert "Zug" in row[0].text

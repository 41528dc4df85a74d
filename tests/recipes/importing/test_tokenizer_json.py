"""Folders with tokenizer.json alone: the subwords are those of the sentencepiece model, and of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.translation.errors import CheckpointError
from recipes.translation.importing.published_model import read_model
from recipes.translation.importing.tokenizer import SPM
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.sentencepiece_file import kind_of_model, model_of
from recipes.translation.text.subwords import UNK
from tests.recipes.importing import published
from tests.recipes.trained_elsewhere import trained_elsewhere

pytestmark = pytest.mark.formats

LATIN, GREEK, CYRILLIC = "abcdefghijklmnopqrstuvwxyzäöüßéñ", "αβγδεζηθικλμν", "абвгдежзийклмн"
CHINESE, ARABIC, HINDI = "".join(map(chr, range(0x4E00, 0x4E0C))), "".join(map(chr, range(0x627, 0x632))), "हिन्दीभाषा"
SCRIPTS = (LATIN, GREEK, CYRILLIC, CHINESE, ARABIC, HINDI)
"""Letters of the pieces; combining signs and letters that join among them."""
OTHERS = "\ufb01\uff21\uff42\u2460\xbd\u2026\u201c\u201d\u0149\u01c5\U0001f642" + "0123456789.,!?-"
"""What normalisation changes, or no piece has."""
BLANKS = "\u3000\u200b\xa0\u2581\x00\u0301"
"""What becomes a blank or nothing, and a combining mark. At the ends of a text transformers has a piece for a blank,
and it leaves out a mark behind a character that normalisation changes."""


@cache
def spm(side: int, kind: str = "unigram") -> bytes:
    """A sentencepiece model of made-up words in several scripts."""
    draw = Random(side)
    words = ["".join(draw.choices(letters, k=draw.randint(1, 5))) for letters in SCRIPTS for _ in range(150)]
    sentences = (" ".join(draw.choices(words, k=5)) + "." for _ in range(600))
    return trained_elsewhere(sentences, vocab_size=420, model_type=kind, character_coverage=1.0)


class Case(NamedTuple):
    """A folder with all files, and one without the sentencepiece model."""

    whole: Path
    alone: Path
    languages: tuple[str, str]


MADE: dict[str, tuple[Callable[[Path], Path], tuple[str, str]]] = {
    "nllb": (published.nllb, ("eng_Latn", "deu_Latn")),
    "mbart-50": (published.mbart, ("en_XX", "de_DE")),
}


@pytest.fixture(scope="module", params=MADE)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    make, languages = MADE[request.param]
    folder = tmp_path_factory.mktemp("json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "spm", spm)
        whole = make(folder / "whole")
    alone = shutil.copytree(whole, folder / "alone")
    (alone / SPM).unlink()
    return Case(whole, alone, languages)


@pytest.fixture(scope="module")
def ours(case: Case) -> Translator:
    return read_model(case.alone, Path("run"), *case.languages).translator


@pytest.fixture(scope="module")
def theirs(case: Case) -> Any:
    return published.tokenizer_of(case.alone, *case.languages)


def test_pieces_scores_and_rules_are_those_of_the_sentencepiece_model(case: Case, ours: Translator) -> None:
    found, expected = (model_of(each.source.model_bytes()) for each in (ours, read_whole(case)))
    own = model_of((case.whole / SPM).read_bytes())
    pieces = [(each.piece, each.score, each.type) for each in found.pieces]
    assert pieces == [(each.piece, each.score, each.type) for each in expected.pieces]
    assert {(each.piece, each.score, each.type) for each in own.pieces[3:]} < set(pieces)
    assert kind_of_model(found) == kind_of_model(own)
    assert found.normalizer_spec.precompiled_charsmap == own.normalizer_spec.precompiled_charsmap
    for name in ("add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces"):
        assert getattr(found.normalizer_spec, name) == getattr(own.normalizer_spec, name)


def texts(*letters: str) -> st.SearchStrategy[str]:
    """Sentences of words with letters of one of these, between single blanks."""
    word = st.one_of(*(st.text(each, max_size=6) for each in letters))
    return st.lists(word, max_size=6).map(lambda words: " ".join(" ".join(words).split()))


@settings(deadline=None, max_examples=200)
@given(sentence=texts(*SCRIPTS, OTHERS, BLANKS, HINDI + OTHERS + BLANKS))
def test_subwords_are_those_of_the_sentencepiece_model(case: Case, ours: Translator, sentence: str) -> None:
    found, expected = (each.source.encode([sentence]) for each in (ours, read_whole(case)))
    assert found == expected, sentence


@settings(deadline=None, max_examples=200)
@given(sentence=texts(*SCRIPTS, OTHERS))
def test_subwords_are_those_of_transformers(ours: Translator, theirs: Any, sentence: str) -> None:
    pieces = ours.source.pieces()
    (found,) = ours.source.encode([sentence])
    names = theirs.convert_ids_to_tokens(theirs(sentence).input_ids[1:-1])
    assert ["<unk>" if each == UNK else pieces[each] for each in found] == names, sentence


@cache
def read_whole(case: Case) -> Translator:
    return read_model(case.whole, Path("run"), *case.languages).translator


def changed(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        for path, value in changes.items():
            *outer, last = path.split("__")
            inner = found
            for name in outer:
                inner = inner[name]
            inner[last] = value

    return change


def swap_merges(found: dict[str, Any]) -> None:
    merges = found["model"].get("merges") or []
    merges[:2] = merges[1::-1]


def swap_first(found: dict[str, Any]) -> None:
    vocab = found["model"]["vocab"]
    if isinstance(vocab, dict):
        vocab |= {"<s>": 1, "<pad>": 0}
    else:
        vocab[:2] = vocab[1::-1]


def drop_merge(found: dict[str, Any]) -> None:
    del found["model"]["merges"][-1]


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "another normalizer": ("both", changed(normalizer={"type": "NFKC"}), "has no compiled rules of normalisation"),
    "no normalizer": ("both", changed(normalizer=None), "has no compiled rules of normalisation"),
    "another kind": ("both", changed(model__type="WordPiece"), "the tokenizer in .*folder cannot be read"),
    "no model": ("both", lambda found: found.pop("model"), "the tokenizer in .*folder cannot be read"),
    "special subwords elsewhere": ("both", swap_first, "pad_token_id is 1, and in .*folder <pad> is 0"),
    "rules that are none": (
        "both",
        lambda found: found["normalizer"]["normalizers"][0].update(precompiled_charsmap="?"),
        "the tokenizer in .*folder cannot be read",
    ),
    "merges in another order": ("nllb", swap_merges, r"merges are not in the order of its pieces, or not all"),
    "a merge less": ("nllb", drop_merge, r"merges are not in the order of its pieces, or not all"),
}
LEFT_ASIDE: dict[str, Callable[[dict[str, Any]], None]] = {
    "another step of the normalizer": lambda found: found["normalizer"]["normalizers"].append({"type": "Lowercase"}),
    "another mark": changed(pre_tokenizer__replacement="_"),
    "bytes": changed(model__byte_fallback=True),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_sentencepiece_model_is_refused(name: str, case: Case, tmp_path: Path) -> None:
    kind, change, message = BAD[name]
    if kind not in ("both", next(each for each, (_, languages) in MADE.items() if languages == case.languages)):
        return
    with pytest.raises(CheckpointError, match=message):
        read_model(folder_with(change, case, tmp_path), Path("run"), *case.languages)


@pytest.mark.parametrize("name", LEFT_ASIDE)
def test_what_transformers_leaves_aside_changes_nothing(
    name: str, case: Case, ours: Translator, tmp_path: Path
) -> None:
    folder = folder_with(LEFT_ASIDE[name], case, tmp_path)
    found = read_model(folder, Path("run"), *case.languages).translator.source
    assert found.model_bytes() == ours.source.model_bytes()
    sentence = "AB abc \u2460 \u03b1\u03b2\u03b3 \ufb01 \u0430\u0431"
    assert published.tokenizer_of(folder)(sentence).input_ids == published.tokenizer_of(case.alone)(sentence).input_ids


def folder_with(change: Callable[[dict[str, Any]], None], case: Case, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(case.alone, tmp_path / "folder"))
    found = json.loads((folder / "tokenizer.json").read_text())
    change(found)
    (folder / "tokenizer.json").write_text(json.dumps(found))
    return folder


def test_a_folder_with_neither_file_is_refused(case: Case, tmp_path: Path) -> None:
    folder = shutil.copytree(case.alone, tmp_path / "folder")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"the sentencepiece model in .* there is none"):
        read_model(folder, Path("run"), *case.languages)


def test_a_folder_without_tokenizer_json_has_the_subwords_of_its_sentencepiece_model(
    case: Case, tmp_path: Path
) -> None:
    folder = shutil.copytree(case.whole, tmp_path / "folder")
    (folder / "tokenizer.json").unlink()
    found = read_model(folder, Path("run"), *case.languages).translator.source
    assert found.model_bytes() == read_whole(case).source.model_bytes()

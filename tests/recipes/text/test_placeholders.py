"""Placeholders: addresses and numbers go into a translation and come out of it as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.model_text import finished
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.settings.config import load_config
from recipes.translation.text.pair import Pair
from recipes.translation.text.placeholders import masked, masked_pair, placeholder_symbols, restored
from recipes.translation.train import train
from recipes.translation.translating.forced_decoding import score_pairs
from recipes.translation.translating.sentences import source_ids
from tests.recipes.tiny import tiny

ALL = ("url", "email", "number")
words = st.lists(
    st.sampled_from(
        ["a", "https://x.org/1", "www.b.de,", "(http://c)", "me@x.org.", "12", "3.5%", "x@", "1,000.", "<url1>"]
    )
)


@given(words.map(" ".join), st.lists(st.sampled_from(ALL), unique=True))
def test_what_is_masked_comes_back(sentence: str, kinds: list[str]) -> None:
    found, originals = masked(sentence, kinds)
    if "<url1>" not in sentence:
        assert restored(found, originals) == sentence
    assert set(originals) <= set(placeholder_symbols(kinds))


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("See https://x.org/a?b=1, or www.y.de.", "See <url1>, or <url2>."),
        ("(http://x.org) http://x.org", "(<url1>) <url1>"),
        ("Write to me.too+1@x-y.co.uk.", "Write to <email1>."),
        ("3 of 1,000.50, or 12.", "<number1> of <number2>, or <number3>."),
        (" ".join(map(str, range(10, 21))), "<number1> <number2> <number3> <number4> <number5> <number6> <number7> "
         "<number8> <number9> 19 20"),
        ("no@where www.", "no@where www."),
    ],
)  # fmt: skip
def test_addresses_and_numbers_end_where_a_reader_would_end_them(sentence: str, expected: str) -> None:
    assert masked(sentence, ALL)[0] == expected


def test_a_pair_keeps_what_only_one_side_has() -> None:
    pair = Pair("12 dogs and 3 cats at http://x", "3 Katzen und zwölf Hunde auf http://x, 7")
    assert masked_pair(pair, ALL) == (
        "12 dogs and <number2> cats at <url1>",
        "<number2> Katzen und zwölf Hunde auf <url1>, 7",
    )
    assert masked_pair(pair, ("url",)) == ("12 dogs and 3 cats at <url1>", "3 Katzen und zwölf Hunde auf <url1>, 7")
    assert masked_pair(pair, ()) == pair


def test_a_placeholder_that_the_sentence_did_not_have_stays_visible() -> None:
    assert restored("<url1> <url2> <url1>", {"<url1>": "http://x\\1"}) == "http://x\\1 <url2> http://x\\1"


def test_training_validation_and_translation_see_single_subwords(tmp_path: Path) -> None:
    lines = [f"word{n} at https://x.org/{n} now" for n in range(40)]
    for name in ("a.en", "a.de"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    files: dict[str, Any] = dict.fromkeys(("data.train", "data.valid", "data.test"), ("a.en", "a.de"))
    config = tiny(
        tmp_path / "run",
        {
            **files,
            "data.path": str(tmp_path),
            "subwords.vocab_size": 288,
            "subwords.placeholders": "url",
            "training.steps": 1,
        },
    )
    corpus = load_corpus(config)
    number = corpus.source.pieces().index("<url1>")
    for batches in (corpus.train, corpus.valid[0].batches):
        for ids in (*batches.sources, *batches.targets):
            assert list(ids).count(number) == 1
    train(config, insist=True)
    translator = load_translator(tmp_path / "run" / "last")
    sentences = ["At HTTPS://X.org now", "at https://y.org/1 now"]
    assert all(number in ids for ids in source_ids(translator.source, translator.config, sentences, config.decoding))
    pairs = [(f"at {address} now", f"see {address}") for address in ("https://y.org/1", "www.other.com")]
    first, second = score_pairs(translator, *zip(*pairs, strict=True), config.decoding)
    assert first == second  # the model sees <url1> on both sides of both
    assert finished(["<url1>!", "oh\n<url1> <url1>"], sentences, config)[1] == "oh https://y.org/1 https://y.org/1"


def test_an_unknown_kind_is_answered_with_the_kinds_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"expects a list, each one of url, email, number; got 'emial': did you mean email"
    ):
        load_config(None, {"subwords.placeholders": "emial"})
    with pytest.raises(ConfigError, match=r"expects a list, each one of url, email, number; got 'date'$"):
        load_config(None, {"subwords.placeholders": ["url", "date"]})
    assert load_config(None, {"subwords.placeholders": ["url", "number"]}).subwords.placeholders == ("url", "number")

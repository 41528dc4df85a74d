"""A vocabulary of whole words: those that a count of the text says, and one `<unk>` for each of the others."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.prepare import prepare
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.run_folder.checkpoint import Translator, load_translator
from recipes.translation.settings.config import DecodingConfig, SubwordConfig
from recipes.translation.text.subwords import EOS, UNK, Subwords, train_subwords
from recipes.translation.train import train
from recipes.translation.training.progress import read_metrics
from recipes.translation.translating.alignments import align
from recipes.translation.translating.demands import phrases_of, prefix_ids, word_boundaries
from recipes.translation.translating.forced_decoding import score_pairs
from recipes.translation.translating.translate import translate
from tests.recipes.tiny import few_held_out, tiny

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
SIDES = ("source", "target")
DOCUMENT = Path(__file__).parents[3] / "docs/export.md"
DECODING = DecodingConfig(beam=1, max_length=8)
SENTENCES = [side for pair in pairs(60, 1) for side in pair]
WORDS: dict[str, Any] = {
    "subwords.kind": "word",
    "subwords.min_count": 2,
    "subwords.joint": False,
    "model.tie": "none",
    "data.builtin_pairs": 60,
}
texts = st.lists(st.sampled_from(["a", "b", "ab", "ß", "<unk>", "<s>", "a,", "▅", "Öl", "9"]), max_size=9).map(" ".join)


def trained(folder: Path, sentences: Sequence[str], tags: Sequence[str] = (), **settings: Any) -> Subwords:
    config = SubwordConfig(kind="word", **{"vocab_size": 10_000, **settings})
    train_subwords(sentences, folder / "words", config, tags)
    return Subwords.load(folder / "words.model")


def expected(sentences: Sequence[str], min_count: int = 1, most: int = 10_000) -> list[str]:
    """The words of a vocabulary, by another count."""
    counts = Counter(word for sentence in sentences for word in sentence.split())
    often = [word for word, count in counts.items() if count >= min_count]
    return sorted(often, key=lambda word: (-counts[word], word))[: most - len(SPECIAL)]


def words_of(subwords: Subwords) -> list[str]:
    pieces = subwords.pieces()
    assert pieces[:4] == SPECIAL
    return [piece.removeprefix("▁") for piece in pieces[4:]]


@pytest.mark.parametrize(("min_count", "most"), [(1, 10_000), (2, 10_000), (3, 10_000), (2, 270)])
def test_the_vocabulary_is_the_words_that_occur_min_count_times(tmp_path: Path, min_count: int, most: int) -> None:
    sentences = [*SENTENCES, *(f"word{number} word{number} rare{number}" for number in range(300))]
    found = words_of(trained(tmp_path, sentences, min_count=min_count, vocab_size=most))
    assert sorted(found) == sorted(expected(sentences, min_count, most))
    assert len(found) == len(set(found))


def test_the_same_sentences_in_another_order_give_the_same_words(tmp_path: Path) -> None:
    sentences = [*SENTENCES, *(f"word{number}" for number in range(300))]
    one = trained(tmp_path / "one", sentences, vocab_size=261)
    other = trained(tmp_path / "other", sentences[::-1], vocab_size=261)
    assert one.serialized() == other.serialized()


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Subwords:
    return trained(
        tmp_path_factory.mktemp("words"), ["a a b b ab ab ß ß a, 9 <unk> <unk> ▅ ▅ ▅a ▅a <s> <s>"], min_count=2
    )


@given(texts)
def test_a_sentence_has_one_id_for_each_word_and_comes_back_with_its_known_ones(subwords: Subwords, text: str) -> None:
    known = {"a", "b", "ab", "ß"}
    (ids,) = subwords.encode([text])
    assert [number == UNK for number in ids] == [word not in known for word in text.split()]
    (back,) = subwords.decode([ids])
    assert back == " ".join(word if word in known else "<unk>" for word in text.split())
    assert subwords.encode([back]) == [ids]


@given(text=texts)
def test_the_words_that_the_manual_gives_to_exported_models_are_those_of_the_recipe(
    subwords: Subwords, text: str
) -> None:
    (code,) = re.findall(r"```\n(def words.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    processor = sentencepiece.SentencePieceProcessor(model_proto=subwords.serialized())
    ids = processor.piece_to_id(names["words"](processor, text))
    assert [ids] == subwords.encode([text])
    assert processor.decode(ids).strip() == subwords.decode([ids])[0]


def test_padding_start_and_end_leave_no_trace_beside_an_unknown_word(subwords: Subwords) -> None:
    (word,) = subwords.encode(["a"])[0]
    assert subwords.decode([[2, UNK, UNK, word, 3, 0], [word, UNK], [], [0]]) == ["<unk> <unk> a", "a <unk>", "", ""]


def test_a_symbol_or_tag_is_a_word_however_rare_it_is(tmp_path: Path) -> None:
    subwords = trained(tmp_path, ["b b <url> c", "bb bb"], ["<2de>"], min_count=2, symbols=("<url>", "b", "<no>"))
    assert sorted(words_of(subwords)) == ["<2de>", "<no>", "<url>", "b", "bb"]
    assert subwords.decode(subwords.encode(["<2de> bb <no> <url> b c"])) == ["<2de> bb <no> <url> b <unk>"]


@pytest.mark.parametrize(
    ("sentences", "error", "message"),
    [
        (["a b", "b c"], ConfigError, "subwords.min_count 3 .* leave none of the 3 words .* occurs 2 times"),
        (["", " "], DataError, "every sentence is empty"),
    ],
)
def test_a_text_that_leaves_no_word_is_refused(
    tmp_path: Path, sentences: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        trained(tmp_path, sentences, min_count=3)
    assert "\n" not in str(raised.value)


def test_words_with_a_name_that_sentencepiece_keeps_take_no_place_of_the_vocabulary(tmp_path: Path) -> None:
    reserved = [f"{name}{number}" for name in ("<unk>", "<s>", "</s>", "<pad>", "▅") for number in range(200)]
    subwords = trained(tmp_path, [" ".join(reserved * 2), *(f"word{number}" for number in range(300))], vocab_size=261)
    assert len(words_of(subwords)) == 257
    assert {each for row in subwords.encode(reserved) for each in row} == {UNK}


@pytest.mark.parametrize("joint", [True, False])
def test_the_log_says_once_how_many_running_words_are_unknown(
    tmp_path: Path, joint: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path, {**WORDS, "subwords.joint": joint, "subwords.min_count": 5})
    prepare(config)
    prepare(config)
    output = capsys.readouterr().out
    sides = {side: [getattr(pair, side).split() for pair in load_pairs(config.data, "train")] for side in SIDES}
    counts = {side: Counter(word for words in sides[side] for word in words) for side in SIDES}
    if joint:
        counts = dict.fromkeys(SIDES, counts["source"] + counts["target"])
    for side in SIDES:
        running = [counts[side][word] for words in sides[side] for word in words]
        unknown = sum(count < 5 for count in running)
        share = f"({100 * unknown / len(running):.2f} %)"
        assert unknown > 0
        size = 4 + sum(count >= 5 for count in counts[side].values())
        said = f"{side}: {size:,} words, special ones included; {unknown:,} of {len(running):,} running words {share}"
        assert output.count(said) == 1


def test_models_are_made_again_for_another_min_count_and_not_for_an_older_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path, WORDS)
    sizes = [len(each) for each in prepare(config)]
    fewer = [len(each) for each in prepare(tiny(tmp_path, {**WORDS, "subwords.min_count": 4}))]
    assert fewer[0] < sizes[0]
    assert fewer[1] < sizes[1]
    prepare(tiny(tmp_path, {"data.builtin_pairs": 60}))
    made_with = json.loads((tmp_path / "subwords" / "settings.json").read_text())
    assert made_with["subwords"] == {"vocab_size": 360, "joint": True, "kind": "unigram", "lowercase": False}
    assert "reused" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with few_held_out():
        train(tiny(folder, {**WORDS, "training.validate_bleu": 4, "training.label_smoothing": 0.1}))
    return folder


@pytest.fixture(scope="module")
def translator(run: Path) -> Translator:
    return load_translator(run / "last")


def test_validation_perplexity_is_that_of_words_with_unknown_ones_and_ends(run: Path, translator: Translator) -> None:
    """Plain PyTorch, sentence by sentence, over the words as a count and `str.split` make them."""
    with few_held_out():
        held_out = load_pairs(translator.config.data, "valid")
    ids = {}
    known = load_pairs(translator.config.data, "train")
    for side in SIDES:
        pieces = getattr(translator, side).pieces()
        ids[side] = {word: pieces.index(f"▁{word}") for word in expected([getattr(pair, side) for pair in known], 2)}
        assert len(pieces) == 4 + len(ids[side])
    losses = []
    unknown = 0
    for pair in held_out:
        src = [ids["source"].get(word, 1) for word in pair.source.split()]
        tgt = [ids["target"].get(word, 1) for word in pair.target.split()]
        unknown += tgt.count(1)
        with torch.no_grad():
            hidden = translator.model(torch.tensor([[*src, 3]]), torch.tensor([[2, *tgt]]))
            logits = translator.model.generator(hidden)[0]
        losses.append(F.cross_entropy(logits, torch.tensor([*tgt, 3]), reduction="none"))
    assert unknown > 5
    words = sum(len(pair.target.split()) + 1 for pair in held_out)
    loss = torch.cat(losses)
    assert len(loss) == words
    found = [line["valid_perplexity"] for line in read_metrics(run / "metrics.jsonl") if "valid_perplexity" in line]
    assert found == [pytest.approx(math.exp(loss.double().mean().item()), rel=1e-5)]


def test_given_translations_are_scored_with_unknown_words_as_unk(translator: Translator) -> None:
    source, target = (" ".join(words_of(side)[:3]) for side in (translator.source, translator.target))
    one, other, less = score_pairs(
        translator, [source] * 3, [f"{target} qqq zzz", f"{target} <unk> xyz", target], translator.config.decoding
    )
    assert one == other
    assert (one.tokens, less.tokens) == (6, 4)


def test_an_alignment_counts_unknown_words_that_follow_each_other(translator: Translator) -> None:
    (links,) = align(translator, ["qqq zzz xxx"], ["yyy ooo qqq rrr"], translator.config.decoding)
    assert [target for _, target in sorted(links, key=lambda link: link[1])] == [0, 1, 2, 3]


def test_what_a_translation_must_have_cannot_be_an_unknown_word(translator: Translator) -> None:
    word = words_of(translator.target)[5]
    (ids,) = prefix_ids(translator, [word], ["x"])
    assert ids == translator.target.encode([word])[0]
    with pytest.raises(DataError, match="the beginning 'qqq' of sentence 2 has a word outside the vocabulary"):
        prefix_ids(translator, [word, "qqq"], ["x", "x"])
    with pytest.raises(DataError, match=f"--constraints: '{word} qqq' of sentence 1 has a word outside"):
        phrases_of(translator, [[f"{word} qqq"]], ["x"])


def test_a_phrase_may_be_followed_by_an_unknown_word(translator: Translator) -> None:
    boundaries = set(word_boundaries(translator))
    assert {UNK, 4} <= boundaries
    assert EOS not in boundaries  # the end of the sentence always ends a word, and the rules refuse its number


@pytest.mark.formats
def test_transformers_tokenizer_is_refused_for_words(translator: Translator, tmp_path: Path) -> None:
    from recipes.translation.export import huggingface_model

    with pytest.raises(ConfigError, match="transformers' tokenizer reads unknown words that follow each other"):
        huggingface_model.write(translator, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.formats
def test_ctranslate2_translates_unknown_words_alike(translator: Translator, tmp_path: Path) -> None:
    from recipes.translation.export import ctranslate2_engine, ctranslate2_model

    with torch.no_grad():
        translator.model.generator.bias[UNK] += 8.0  # so that some are written
    ctranslate2_model.write(translator, tmp_path / "ct2", None)
    sentences = [f"qqq zzz {sentence}" for sentence in SENTENCES[:6]]
    found = ctranslate2_engine.translate(ctranslate2_engine.load(tmp_path / "ct2"), sentences, DECODING)
    assert found == translate(translator, sentences, DECODING)
    assert any("<unk> <unk>" in text for text in found)

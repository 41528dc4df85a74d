"""The search reports the model's own probabilities and alignments, for all pairs on every rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models import beam_search, length_normaliser
from models.alignment import attention_weights
from models.decoding import LengthNorm
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import DataError
from recipes.translation.processes.ranks import join_ranks
from recipes.translation.run_folder.checkpoint import load_translator, save_model
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.subwords import BOS, EOS, Subwords
from recipes.translation.translating import alignments
from recipes.translation.translating.alignments import align, links, pharaoh
from seqpar.testing.ranks import ranks
from tests.models.examples import small_transformer
from tests.recipes.plain_scores import log_probability
from tests.recipes.random_translator import subwords_in, translator_of
from tests.recipes.tiny import tiny
from tests.recipes.trained_elsewhere import OUR_IDS, trained_elsewhere


@pytest.mark.parametrize(("alpha", "norm"), [(0.0, "gnmt"), (0.6, "gnmt"), (1.0, "length")])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_n_best_of_a_search_score_as_the_model_says(
    alpha: float, norm: LengthNorm, dtype: torch.dtype, tolerance: float
) -> None:
    model = small_transformer(7, spread=2.0).to(dtype)
    with torch.no_grad():
        model.generator.bias[EOS] += 4
    sources = [[5, 6, 7, 8], [9, 4], [10, 10, 4, 5]]
    src = torch.tensor([[*ids, EOS, *[0] * (4 - len(ids))] for ids in sources])
    found = beam_search(
        model, src, bos=BOS, eos=EOS, beam=5, n_best=5, length_penalty=alpha, length_norm=norm, max_length=12
    )
    compared = 0
    for source, hypotheses in zip(sources, found, strict=True):
        for hypothesis in hypotheses:
            finished = len(hypothesis.tokens) < 12
            ids = hypothesis.tokens
            if finished:  # the log-probability of an unfinished one has no end symbol
                ids = [*ids, EOS]
            found_here = log_probability(model.eval(), source, ids)
            assert found_here == pytest.approx(hypothesis.log_probability, rel=tolerance)
            score = found_here / length_normaliser(len(ids), alpha, norm)
            assert score == pytest.approx(hypothesis.score, rel=tolerance)
            compared += finished
    assert compared >= 4


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    """Random weights, in float64."""
    folder = tmp_path_factory.mktemp("random")
    config = tiny(folder / "run", {"training.precision": "float64", "decoding.batch_sentences": 3})
    subwords = subwords_in(folder, config)
    made = translator_of(config, subwords, subwords)
    made.model.double()
    return made


TEXTS = [(pair.source, pair.target) for pair in pairs(7, 5, "test")] + [("", "Ein Wort"), ("A word", "")]


def test_a_target_that_is_not_unicode_is_refused(translator: Translator) -> None:
    broken = b"caf\xe9".decode("utf-8", "surrogateescape")
    with pytest.raises(DataError, match=r"^sentence 1 is not UTF-8 text"):
        align(translator, ["A"], [broken])


def divided(rank: int, world: int, folder: Path) -> list[list[tuple[int, int]]]:
    """The alignments that each rank returns."""
    with join_ranks(60) as group:
        assert group.world == world
        sides = [source for source, _ in TEXTS], [target for _, target in TEXTS]
        return align(load_translator(folder), *sides, group)


def test_every_rank_returns_the_alignments_of_all(translator: Translator, tmp_path: Path) -> None:
    save_model(tmp_path / "best", translator, {"step": 1})
    expected = divided(0, 1, tmp_path / "best")
    assert sum(map(bool, expected)) == len(TEXTS) - 2
    for found in ranks(2, divided, tmp_path / "best"):
        assert found == expected


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_words_are_linked_if_any_of_their_subwords_are(sources: int, targets: int, data: st.DataObject) -> None:
    shares = st.lists(st.floats(0, 1), min_size=sources + 2, max_size=sources + 2)
    weights = torch.tensor(data.draw(st.lists(shares, min_size=targets + 1, max_size=targets + 1)))
    some = st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True)
    source_words = data.draw(st.lists(some, min_size=sources, max_size=sources))
    target_words = data.draw(st.lists(some, min_size=targets, max_size=targets))
    expected = set()
    for t in range(targets):  # the end symbol and padding, the two last positions of the source, are never linked
        row = weights[t, :sources].tolist()
        expected |= set(product(source_words[row.index(max(row))], target_words[t]))
    assert links(weights, source_words, target_words) == sorted(expected)


def test_pharaohs_format_is_source_target() -> None:
    assert pharaoh([(0, 2), (1, 0)]) == "0-2 1-0"
    assert pharaoh([]) == ""


def test_the_words_of_a_pair_are_those_between_spaces(translator: Translator) -> None:
    sources = [pair.source for pair in pairs(7, 5, "test")]
    targets = [pair.target for pair in pairs(7, 5, "test")]
    found = align(translator.with_decoding(replace(translator.config.decoding, batch_sentences=3)), sources, targets)
    source_pieces, target_pieces = translator.source.pieces(), translator.target.pieces()
    for source, target, linked in zip(sources, targets, found, strict=True):
        assert {word for _, word in linked} == set(range(len(target.split())))
        assert all(0 <= word < len(source.split()) for word, _ in linked)
        ids, said = translator.source.encode([source])[0], translator.target.encode([target])[0]
        weights = attention_weights(translator.model, torch.tensor([[*ids, EOS]]), torch.tensor([[BOS, *said[:-1]]]))[0]
        starts = [source_pieces[piece].startswith("▁") for piece in ids]
        begins = [target_pieces[piece].startswith("▁") for piece in said]
        words = [sum(starts[: at + 1]) - 1 for at in range(len(ids))]
        others = [sum(begins[: at + 1]) - 1 for at in range(len(said))]
        expected = {(words[int(weights[t, : len(ids)].argmax())], others[t]) for t in range(len(said))}
        assert linked == sorted(expected)


USUAL = {"vocab_size": 280, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
OF_THE, TAG = "\u2581of\u2581the", "\u2581>>fra<<"
APART = [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("options", "sentence", "expected"),
    [
        ({}, "a\xa0man of\u2009the\u3000!", [(word, word) for word in range(5)]),
        ({}, " \xa0", []),
        ({}, "a \xa0", [(0, 0)]),
        ({"byte_fallback": False, "vocab_size": 30}, "\u0436\xa0\u0436 a", [*APART, (0, 1), (1, 0), (2, 2)]),
        ({"normalization_rule_name": "nmt_nfkc"}, "a \x01 \u338f", [(0, 0), (2, 2)]),
        ({"add_dummy_prefix": False}, " man  town", APART),
        ({"user_defined_symbols": [OF_THE]}, "a man of the town", [*APART, *product((2, 3), (2, 3)), (4, 4)]),
        ({"user_defined_symbols": [TAG]}, ">>fra<<a man", APART),
    ],
)
def test_alignments_are_of_the_subwords_that_the_translation_reads_and_of_words_that_white_space_divides(
    options: dict[str, Any],
    sentence: str,
    expected: list[tuple[int, int]],
    translator: Translator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sentences = ["a man of the town", "one of the men", "none of the towns!"]
    model = trained_elsewhere(sentences, **{**USUAL, **OUR_IDS, **options})
    subwords = Subwords(sentencepiece.SentencePieceProcessor(model_proto=model))
    (ids,) = subwords.encode([sentence])

    def to_itself(_: object, src_BS: Tensor, tgt_BT: Tensor) -> Tensor:
        assert src_BS.tolist() == [[*ids, EOS]]
        assert tgt_BT.tolist() == [[BOS, *ids[:-1]]]
        return torch.eye(tgt_BT.size(1), src_BS.size(1))[None]

    monkeypatch.setattr(alignments, "attention_weights", to_itself)
    found = align(replace(translator, source=subwords, target=subwords), [sentence], [sentence])
    assert found == [sorted(expected)]


@pytest.mark.parametrize("pair", [("", "Ein Wort"), ("A word", ""), ("  ", " ")])
def test_an_empty_side_has_no_links(translator: Translator, pair: tuple[str, str]) -> None:
    assert align(translator, [pair[0], "six"], [pair[1], "sechs"]) == [[], [(0, 0)]]

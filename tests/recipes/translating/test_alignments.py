"""Alignments link words by the subword that the model attends to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.alignment import attention_weights
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.subwords import BOS, EOS
from recipes.translation.translating.alignments import align, links, pharaoh


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_words_are_linked_if_any_of_their_subwords_are(sources: int, targets: int, data: st.DataObject) -> None:
    shares = st.lists(st.floats(0, 1), min_size=sources + 2, max_size=sources + 2)
    weights = torch.tensor(data.draw(st.lists(shares, min_size=targets + 1, max_size=targets + 1)))
    source_words = sorted(data.draw(st.lists(st.integers(0, 3), min_size=sources, max_size=sources)))
    target_words = sorted(data.draw(st.lists(st.integers(0, 3), min_size=targets, max_size=targets)))
    expected = set()
    for t in range(targets):  # the end symbol and padding, the two last positions of the source, are never linked
        row = weights[t, :sources].tolist()
        expected.add((source_words[row.index(max(row))], target_words[t]))
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


@pytest.mark.parametrize("pair", [("", "Ein Wort"), ("A word", ""), ("  ", " ")])
def test_an_empty_side_has_no_links(translator: Translator, pair: tuple[str, str]) -> None:
    assert align(translator, [pair[0], "six"], [pair[1], "sechs"]) == [[], [(0, 0)]]

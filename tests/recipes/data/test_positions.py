"""The longest sentence of a model whose positions are learned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models import PRESETS, TransformerConfig
from recipes.translation.data.positions import most_subwords
from recipes.translation.text.subwords import Symbols


@pytest.mark.parametrize(
    ("symbols", "most"),
    [
        (Symbols(), 9),  # the end of a source; the start of what the decoder reads
        (Symbols(prefix=(7,)), 8),
        (Symbols(suffix=(), start=(2, 7, 8)), 7),
    ],
)
def test_a_sentence_has_the_positions_that_its_symbols_leave_on_the_longer_side(symbols: Symbols, most: int) -> None:
    sizes = PRESETS["mbart"]
    assert isinstance(sizes, TransformerConfig)
    assert most_subwords(replace(sizes, max_positions=10), symbols) == most
    assert most_subwords(PRESETS["tiny"], symbols) is None

"""However many processes translate, each sentence gets the samples and the n-best list that one process gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.processes.ranks import joined
from recipes.translation.run_folder.checkpoint import load_translator, save_model
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.translating.search_options import Sampling, SearchOptions
from recipes.translation.translating.translate import Translation, alternatives
from seqpar.testing.ranks import ranks
from tests.recipes.random_translator import random_translator

pytestmark = pytest.mark.launched

SENTENCES = ["", *(pair.source for pair in pairs(6, 5, "test"))]
WORDS = [[], ["six"], ["two", "Vienna"], [], ["it"], [], ["the train"]]


def translated(rank: int, world: int, folder: Path, options: SearchOptions) -> list[list[Translation]]:
    with joined(30) as every:
        decoding = DecodingConfig(beam=6, max_length=20, batch_sentences=2)
        return alternatives(load_translator(folder), SENTENCES, decoding, options, every)


@pytest.mark.parametrize(
    "options",
    [
        SearchOptions(sampling=Sampling(3, temperature=1.5, seed=4)),
        SearchOptions(n_best=2, prefixes=["", "It", "", "A", "", "", "B"], constraints=WORDS),
    ],
    ids=["samples", "demands"],
)
def test_every_rank_returns_what_one_process_finds(options: SearchOptions, tmp_path: Path) -> None:
    save_model(tmp_path / "best", random_translator(tmp_path), {"step": 1})
    alone = translated(0, 1, tmp_path / "best", options)
    for found in ranks(2, translated, tmp_path / "best", options):
        assert [[one.text for one in row] for row in found] == [[one.text for one in row] for row in alone]
        for mine, theirs in zip(found, alone, strict=True):
            assert [one.score for one in mine] == pytest.approx([one.score for one in theirs], abs=1e-4)

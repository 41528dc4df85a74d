"""However many processes translate, each sentence gets the samples and the n-best list that one process gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.translation.data.batches import Batch
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.processes.ranks import joined
from recipes.translation.run_folder.checkpoint import load_translator, save_model
from recipes.translation.run_folder.translator import Translator, build_model, model_sizes, tensors_of
from recipes.translation.settings.config import DecodingConfig, load_config
from recipes.translation.training.layout import Layout
from recipes.translation.translating.search_options import Sampling, SearchOptions
from recipes.translation.translating.translate import Translation, alternatives
from seqpar.testing.ranks import ranks
from tests.recipes.processes.layouts import LAYOUTS
from tests.recipes.random_translator import random_translator

pytestmark = pytest.mark.launched

SENTENCES = ["", *(pair.source for pair in pairs(6, 5, "test"))]
WORDS = [[], ["six"], ["two", "Vienna"], [], ["it"], [], ["the train"]]
OPTIONS = {
    "samples": SearchOptions(sampling=Sampling(3, temperature=1.5, seed=4)),
    "demands": SearchOptions(n_best=2, prefixes=["", "It", "", "A", "", "", "B"], constraints=WORDS),
    "beam": SearchOptions(n_best=4),
}
DECODING = DecodingConfig(beam=6, max_length=20, batch_sentences=2)


def translated(rank: int, world: int, folder: Path, options: SearchOptions) -> list[list[Translation]]:
    with joined(30) as every:
        return alternatives(load_translator(folder).with_decoding(DECODING), SENTENCES, options, every)


@pytest.mark.parametrize("options", ["samples", "demands"])
def test_every_rank_returns_what_one_process_finds(options: str, tmp_path: Path) -> None:
    save_model(tmp_path / "best", random_translator(tmp_path), {"step": 1})
    alone = translated(0, 1, tmp_path / "best", OPTIONS[options])
    for found in ranks(2, translated, tmp_path / "best", OPTIONS[options]):
        assert_same(found, alone, 1e-4)


def assert_same(found: list[list[Translation]], expected: list[list[Translation]], apart: float) -> None:
    assert [[one.text for one in row] for row in found] == [[one.text for one in row] for row in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert [one.score for one in mine] == pytest.approx([one.score for one in theirs], abs=apart)


def translated_in_parts(
    rank: int, world: int, whole: Translator, changes: dict[str, Any]
) -> dict[str, list[list[Translation]]]:
    """Search as a validation does, after a step, by the model of which each rank has a part."""
    config = load_config(None, {"training.precision": "float64", **changes})
    with torch.device("meta"):
        model = build_model(model_sizes(whole.config.model), whole.source, whole.target).double()
    with joined(30) as every:
        weights = tensors_of(whole.model).items()
        layout = Layout(model, weights, config.training, config.layout, [torch.device("cpu")], every)
        ids = torch.full((4, 4), 7)
        layout.loss_of(Batch(ids, ids, ids))
        translator = Translator(whole.config, model, whole.source, whole.target)
        with layout.independent() as searching:
            return {
                name: alternatives(translator.with_decoding(DECODING), SENTENCES, options, searching)
                for name, options in OPTIONS.items()
            }


@pytest.mark.parametrize("layout", ["shard 2", "data 2 x shard 2", "vocab 2", "shard 2 x vocab 2"])
def test_a_model_in_parts_finds_what_the_whole_one_does(layout: str, tmp_path: Path) -> None:
    whole = random_translator(tmp_path)
    whole.model.double()
    expected = {
        name: alternatives(whole.with_decoding(DECODING), SENTENCES, options) for name, options in OPTIONS.items()
    }
    assert len({one.score for row in expected["beam"] for one in row}) > 20
    world, changes = LAYOUTS[layout]
    for found in ranks(world, translated_in_parts, whole, changes):
        for name in OPTIONS:
            assert_same(found[name], expected[name], 1e-10)

"""However many processes translate, with whole models or parts, each sentence gets what one process gives it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.translation.commands import main
from recipes.translation.data.batches import Batch
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.demo import demo
from recipes.translation.files.lines import read_lines
from recipes.translation.processes.ranks import join_ranks
from recipes.translation.run_folder.checkpoint import load_saved, load_translator, save_model
from recipes.translation.run_folder.translator import Translator, build_model, model_sizes, tensors_of
from recipes.translation.settings.config import DecodingConfig, LayoutConfig, RunConfig, load_config
from recipes.translation.training.layout import Layout
from recipes.translation.training.loaded_models import loaded_models
from recipes.translation.training.parts import layers_of, local_of
from recipes.translation.training.student_data import FOLDER, translations_of
from recipes.translation.translating.translate import Sampling, SearchOptions, Translation, alternatives
from seqpar.testing.ranks import ranks
from tests.recipes.processes.layouts import LAYOUTS
from tests.recipes.random_translator import random_translator
from tests.recipes.tiny import tiny

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
    with join_ranks(30) as every:
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
    with join_ranks(30) as every:
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `sharded`, `split` and `whole`, each with a model and the layout that trained it."""
    folder = tmp_path_factory.mktemp("runs")
    layouts = {"sharded": LayoutConfig(shard=4), "split": LayoutConfig(vocab=2), "whole": LayoutConfig()}
    for seed, (name, layout) in enumerate(layouts.items()):
        translator = random_translator(folder / f"made-{name}", seed)
        config = replace(translator.config, layout=layout)
        save_model(folder / name / "best", replace(translator, config=config), {"step": 1})
    (folder / "sentences").write_text("".join(f"{sentence}\n" for sentence in SENTENCES))
    return folder


def said(rank: int, world: int, *commands: list[str]) -> list[str]:
    """What each command prints."""
    found = []
    for words in commands:
        with redirect_stdout(io.StringIO()) as output:
            assert main(words) == 0
        found.append(output.getvalue())
    return found


def commands(runs: Path, results: str) -> list[list[str]]:
    """Those that translate; the alignments and scores that they write have names that begin with `results`."""
    sharded, split, whole = (str(runs / name) for name in ("sharded", "split", "whole"))
    file = ["--file", str(runs / "sentences")]
    return [
        ["translate", "--run", sharded, *file, "--beam", "5", "--n-best", "3"],
        ["translate", "--run", sharded, *file, "--alignments", str(runs / results)],
        ["translate", "--run", sharded, *file, "--sample", "3"],
        ["translate", "--run", whole, "--ensemble", sharded, "--ensemble", split, *file, "--beam", "3"],
        ["evaluate", "--run", sharded, "--beam", "4"],
        ["evaluate", "--run", split],
    ]


@pytest.mark.parametrize("world", [2, 3])
def test_every_command_says_what_it_says_in_one_process(world: int, runs: Path) -> None:
    expected = said(0, 1, *commands(runs, "one"))
    scores = [json.loads((runs / name / "test.scores.json").read_text()) for name in ("sharded", "split")]
    found, *others = ranks(world, said, *commands(runs, "several"))
    assert found == expected
    assert not any("".join(other) for other in others)
    assert (runs / "several").read_text() == (runs / "one").read_text()
    assert scores == [json.loads((runs / name / "test.scores.json").read_text()) for name in ("sharded", "split")]


def held(rank: int, world: int, folder: Path) -> tuple[int, int]:
    """How many numbers of the layers are in this rank's memory, and how many in the model."""
    with join_ranks(30) as every, loaded_models([partial(load_saved, folder)], every) as ((translator,), _):
        weights = [weight for layer in layers_of(translator.model) for weight in layer.parameters()]
        return sum(local_of(weight).numel() for weight in weights), sum(weight.numel() for weight in weights)


def test_each_rank_has_a_share_of_the_layers_of_a_model_that_was_trained_in_parts(runs: Path) -> None:
    for name in ("sharded", "split"):
        (some, whole), (rest, _) = ranks(2, held, runs / name / "best")
        assert some + rest == whole
        assert abs(some - rest) < whole / 20
    for own, whole in [*ranks(2, held, runs / "whole" / "best"), held(0, 1, runs / "sharded" / "best")]:
        assert own == whole


def taught(rank: int, world: int, config: RunConfig) -> None:
    with join_ranks(60) as every:
        translations_of(Corpora(config), every)


@pytest.mark.parametrize("teacher", ["sharded", "split"])
def test_a_teacher_in_parts_translates_as_in_one_process(teacher: str, runs: Path, tmp_path: Path) -> None:
    for name, world in (("one", 1), ("three", 3)):
        ranks(world, taught, tiny(tmp_path / name, {"training.teacher": str(runs / teacher)}))
    one, three = (read_lines(tmp_path / name / FOLDER / "1.target.txt") for name in ("one", "three"))
    assert one == three
    assert len(set(one)) > 2


def demonstrated(rank: int, world: int, config: RunConfig) -> None:
    with join_ranks(60) as every:
        demo(config, every)


def test_the_demo_of_a_model_in_parts_ends_with_the_scores_of_one_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks(2, demonstrated, tiny(run, {"layout.shard": 2, "training.devices": "auto", "decoding.beam": 2}))
    files = [run / "test.translations.txt", run / "test.scores.json"]
    found = [file.read_text() for file in files]
    assert main(["evaluate", "--run", str(run)]) == 0
    assert found == [file.read_text() for file in files]

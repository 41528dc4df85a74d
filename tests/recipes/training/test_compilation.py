"""Compiled layers: the same step to rounding in every layout, the same bits after a resume, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph

from models.transformer import Layer
from recipes.translation.data.batches import padded_batch
from recipes.translation.data.corpus import Corpus, load_corpus
from recipes.translation.processes.ranks import ALONE
from recipes.translation.text.subwords import UNK
from recipes.translation.train import train
from recipes.translation.training.beginning import first_model
from recipes.translation.training.layout import Layout
from seqpar.testing.precision import TWICE, error
from seqpar.testing.ranks import RankError, ranks
from tests.recipes.plain_scores import plain_loss
from tests.recipes.processes.layouts import EXACT, LAYOUTS, assert_same_weights
from tests.recipes.processes.started import forked
from tests.recipes.saved import assert_same_run
from tests.recipes.tiny import options, tiny

COMPILED = {"training.compile": True}
CPU = torch.device("cpu")
FEW: dict[str, Any] = {**EXACT, "training.steps": 4, "training.validate_bleu": 0}


@contextmanager
def calls_of_compiled_code() -> Iterator[list[CompiledFxGraph]]:
    """Within the block, collect the compiled code of each call."""
    called: list[CompiledFxGraph] = []
    call = CompiledFxGraph.__call__

    def noted(graph: CompiledFxGraph, given: Any) -> Any:
        called.append(graph)
        return call(graph, given)

    with patch.object(CompiledFxGraph, "__call__", noted):
        yield called


def trained(rank: int, world: int, run: Path, changes: dict[str, Any]) -> int:
    """How many calls of compiled code a training makes."""
    with calls_of_compiled_code() as called:
        train(tiny(run, changes))
    return len(called)


def trained_by_graphs(rank: int, world: int, run: Path, changes: dict[str, Any]) -> int:
    """How many calls of compiled layers a training makes; of graphs whose kernels are torch's, which compile sooner.

    Generated code has the plain gradient to 1e-12 below, for shapes of every kind.
    """
    called: list[None] = []
    forward = torch.compile(Layer.forward, dynamic=True, backend="aot_eager")

    def noted(*given: Any) -> Any:
        called.append(None)
        return forward(*given)

    with patch("models.compiled._compiled_forward", lambda: noted):
        train(tiny(run, changes))
    return len(called)


def layout_of(run: Path, changes: dict[str, Any]) -> tuple[Layout, Corpus]:
    """The layout of a tiny run without dropout, on one CPU, and its data."""
    config = tiny(run, {"model.dropout": 0.0, **changes})
    corpus = load_corpus(config)
    return Layout(*first_model(config, corpus, None, ALONE), config.training, config.layout, [CPU], ALONE), corpus


@pytest.mark.launched
def test_a_training_with_compiled_layers_is_the_one_without_to_rounding(tmp_path: Path) -> None:
    given = {**FEW, "training.devices": "[cpu, cpu]"}
    assert trained(0, 1, tmp_path / "plain", given) == 0
    calls = trained_by_graphs(0, 1, tmp_path / "run", {**given, **COMPILED})
    # The encoder's layer and the decoder's, to settle and in two micro-batches of four steps, on each device
    assert calls == 2 * (1 + 2 * 4) * 2
    assert_same_weights(tmp_path / "run", tmp_path / "plain", 1e-10)


@pytest.mark.launched
@pytest.mark.parametrize("layout", ["data 2", "shard 2"])
def test_every_layout_with_compiled_layers_is_one_process_without(layout: str, tmp_path: Path) -> None:
    world, changes = LAYOUTS[layout]
    calls = ranks(world, trained_by_graphs, tmp_path / "run", {**FEW, **COMPILED, **changes})
    assert calls == [2 * (1 + 4)] * world  # encoder and decoder layer, to settle and in each step
    train(tiny(tmp_path / "plain", FEW))
    assert_same_weights(tmp_path / "run", tmp_path / "plain", 1e-10)


@pytest.mark.launched
def test_a_layout_whose_layers_communicate_is_refused_in_a_line(tmp_path: Path) -> None:
    world, changes = LAYOUTS["vocab 2"]
    with pytest.raises(RankError, match=r"training\.compile is true, but with layout\.vocab 2 the parts of a layer"):
        ranks(world, trained, tmp_path / "run", {**FEW, **COMPILED, **changes})


def test_without_a_compiler_one_line_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.translation", "train", *options(tmp_path / "run", COMPILED)]
    nothing = {**os.environ, "CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, env=nothing, capture_output=True, text=True, check=False)
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert "training.compile is true, but torch.compile fails for cpu (" in last
    assert last.endswith("install a C++ compiler and, for a GPU, Triton, or leave training.compile out")


@pytest.mark.launched
def test_a_run_with_dropout_and_compiled_layers_is_resumed_bit_for_bit_by_another_process(tmp_path: Path) -> None:
    dropout = {**COMPILED, "training.accumulate": 2, "training.steps": 4, "training.validate_every": 2}
    other = forked(train, tiny(tmp_path / "run", {**dropout, "training.steps": 2}))
    other.join()
    train(tiny(tmp_path / "run", dropout))
    train(tiny(tmp_path / "through", dropout))
    assert_same_run(tmp_path / "run", tmp_path / "through")


@pytest.mark.launched
@pytest.mark.parametrize(("sentences", "subwords", "calls"), [(2, 3, 4), (1, 3, 0), (3, 0, 0), (2, 150, 0)])
def test_shapes_that_the_code_is_not_for_are_computed_without_it(
    sentences: int, subwords: int, calls: int, tmp_path: Path
) -> None:
    """One sentence, one time step, and more keys than a CPU takes by products."""
    given = {"training.precision": "float64"}
    (ours, _), (plain, _) = (
        layout_of(tmp_path / "run", {**given, "training.compile": wanted}) for wanted in (True, False)
    )
    ids = [[UNK] * (subwords - i // 2 if subwords else 0) for i in range(sentences)]
    batch = padded_batch(ids, ids)
    with calls_of_compiled_code() as called:
        found = ours.accumulate([batch]).mean
    assert len(called) == calls
    assert error(found, plain.accumulate([batch]).mean) <= 1e-12
    for (name, mine), theirs in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        if not name.endswith("key_value.bias"):
            assert error(mine.grad, theirs.grad) <= 1e-12, name


@pytest.mark.launched
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_gradient_of_each_matrix_is_as_close_to_float64_as_without_compiled_layers(
    precision: str, tmp_path: Path
) -> None:
    """Those of biases and norms are sums over all tokens, which Inductor adds up in another order."""
    (ours, corpus), (plain, _), (third, _) = (
        layout_of(tmp_path / "run", {"training.precision": precision, "training.compile": wanted})
        for wanted in (True, False, False)
    )
    right = third.model.double()
    batch = corpus.train.batch(corpus.train.epoch(0)[0])
    found, plainly = ours.accumulate([batch]).mean, plain.accumulate([batch]).mean
    truth = plain_loss(right, batch)
    truth.backward()
    assert error(found.double(), truth.detach()) <= max(TWICE * error(plainly.double(), truth.detach()), 1e-6)
    for (name, exact), mine, theirs in zip(
        right.named_parameters(), ours.model.parameters(), plain.model.parameters(), strict=True
    ):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert exact.grad is not None
        if exact.dim() > 1:
            assert error(mine.grad.double(), exact.grad) <= TWICE * error(theirs.grad.double(), exact.grad), name

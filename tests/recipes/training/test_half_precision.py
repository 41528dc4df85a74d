"""float16: the loss scale is GradScaler's, an overflow is skipped, and the gradient is that of plain float16."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import seqpar
from models.attention import added_scores
from recipes.translation.data.batches import Batch
from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import ConfigError, TrainingError
from recipes.translation.processes.ranks import ALONE
from recipes.translation.run_folder.checkpoint import TrainingState, load_translator
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.settings.config import RunConfig, TrainingConfig
from recipes.translation.train import train
from recipes.translation.training import beginning
from recipes.translation.training.beginning import first_model
from recipes.translation.training.half_precision import GROWTH_INTERVAL, SMALLEST_SCALE, check_autocast, skips
from recipes.translation.training.layout import Layout
from seqpar.testing.precision import TWICE, error
from seqpar.testing.ranks import ranks
from tests.recipes.plain_scores import plain_loss
from tests.recipes.processes.layouts import LAYOUTS, weights
from tests.recipes.saved import assert_same_run
from tests.recipes.tiny import tiny

FP16 = TrainingConfig(precision="fp16")
TOO_LARGE = partial(TrainingState, loss_scale=2.0**26)
"""A state that begins with so large a scale that the first gradients overflow."""
OVERFLOWS: dict[str, Any] = {
    "training.precision": "fp16",
    "training.devices": "[cpu, cpu]",
    "training.accumulate": 2,
    "training.steps": 12,
    "training.validate_every": 1,
    "training.ema": 0.9,
    "model.dropout": 0.2,
}


@example(scale=127, steps=GROWTH_INTERVAL - 1, finite=[True, False])
@given(
    scale=st.integers(-1, 127),  # twelve halvings end at the smallest
    steps=st.sampled_from([0, 1, GROWTH_INTERVAL - 2, GROWTH_INTERVAL - 1]),
    finite=st.lists(st.sampled_from([True, True, False]), max_size=12),
)
def test_the_loss_scale_and_the_skipped_steps_are_those_of_a_grad_scaler(
    scale: int, steps: int, finite: list[bool]
) -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**scale)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": steps})
    scaler.scale(torch.zeros(1))  # by which it makes its tensors
    state = TrainingState(loss_scale=2.0**scale, steps_of_scale=steps)
    for each in finite:
        weight.grad = torch.ones(1) if each else torch.full((1,), math.inf)
        before = float(weight.detach())
        scaler.step(optimizer)
        scaler.update()
        skipped = skips(FP16, state, 1.0 if each else math.inf)
        assert skipped == (float(weight.detach()) == before) == (not each)
        theirs = scaler.state_dict()
        assert (state.loss_scale, state.steps_of_scale) == (theirs["scale"], theirs["_growth_tracker"])
    assert state.skipped == finite.count(False)


def test_no_other_precision_skips_a_step_or_changes_the_scale() -> None:
    for precision in ("float32", "bf16", "float64"):
        state = TrainingState()
        assert not skips(TrainingConfig(precision=precision), state, math.nan)
        assert state == TrainingState()


@pytest.mark.parametrize("devices", [1, 3])
def test_loss_and_gradient_are_as_close_to_float64_as_those_of_plain_float16_with_a_grad_scaler(
    devices: int, tmp_path: Path
) -> None:
    config = tiny(tmp_path / "run", {"training.precision": "fp16", "model.dropout": 0.0, "training.chunk_tokens": 50})
    corpus = load_corpus(config)
    batch = corpus.train.batch(corpus.train.epoch(0)[0])

    def model() -> Any:
        made, weights = first_model(config, corpus, None, ALONE)
        return Layout(made, weights, config.training, config.layout, [torch.device("cpu")] * devices, ALONE)

    layout, theirs, right = model(), model().model, model().model.double()
    scale = TrainingState().loss_scale
    loss = layout.accumulate([batch], scale=scale)
    norm = layout.clip(0.01, scale)

    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(theirs.parameters())
    with torch.autocast("cpu", torch.float16):
        their_loss = plain_loss(theirs, batch)
    scaler.scale(their_loss).backward()
    scaler.unscale_(optimizer)
    plain_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)

    truth = plain_loss(right, batch)
    truth.backward()
    true_norm = torch.nn.utils.clip_grad_norm_(right.parameters(), 0.01)
    assert error(loss.mean.double(), truth.detach()) <= max(TWICE * error(their_loss.detach(), truth.detach()), 1e-6)
    assert error(norm.double(), true_norm) <= max(TWICE * error(plain_norm.double(), true_norm), 1e-4)
    for (name, ours), plainly, exact in zip(
        layout.model.named_parameters(), theirs.parameters(), right.parameters(), strict=True
    ):
        assert ours.grad is not None
        assert plainly.grad is not None
        assert exact.grad is not None
        if name.endswith("key_value.bias"):  # of which a half is zero but for rounding
            continue
        assert error(ours.grad.double(), exact.grad) <= TWICE * error(plainly.grad.double(), exact.grad), name


def test_steps_that_overflow_change_nothing_and_are_counted_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beginning, "TrainingState", TOO_LARGE)
    summary = train(tiny(tmp_path / "run", {**OVERFLOWS, "training.steps": 1, "training.validate_every": 1}))
    assert summary.state.skipped == 1
    assert (summary.state.loss_scale, summary.state.steps_of_scale, summary.state.tokens) == (2.0**25, 0, 0)
    record, _ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert record == {"step": 1, "loss_scale": 2.0**25, "skipped": 1}
    said = capsys.readouterr().out
    assert (
        "step 1: the gradient overflowed in float16: update skipped, loss scale reduced to 3.35544e+07 (1 ski" in said
    )
    assert "1 of these steps made no update: their gradient overflowed in float16" in str(summary)
    saved = load_translator(tmp_path / "run" / "last").model.state_dict()
    monkeypatch.undo()
    train(tiny(tmp_path / "still", {**OVERFLOWS, "training.steps": 1, "training.learning_rate": 0}))
    before = load_translator(tmp_path / "still" / "last").model.state_dict()
    assert all(torch.equal(weight, before[name]) for name, weight in saved.items())


def test_a_run_that_skips_steps_is_stopped_and_resumed_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beginning, "TrainingState", TOO_LARGE)
    through = train(tiny(tmp_path / "through", OVERFLOWS))
    assert 2 < through.state.skipped < 10
    for steps in (2, 7, 12):  # the first time between two overflows
        train(tiny(tmp_path / "run", {**OVERFLOWS, "training.steps": steps}))
    assert_same_run(tmp_path / "run", tmp_path / "through")


def trained_where_rank_1_overflows(rank: int, world: int, config: RunConfig) -> tuple[int, int, float]:
    """Train with one step whose gradient overflows on rank 1 alone, before ranks add theirs up."""
    loss_of = Layout.loss_of
    calls = itertools.count()

    def planted(layout: Layout, batch: Batch) -> seqpar.TokenLoss:
        found = loss_of(layout, batch)
        if rank != 1 or next(calls) != 3:
            return found
        if layout.axes.vocab == 1:
            return found._replace(total=found.total * math.inf)
        # In the rows of this rank only
        layout.model.generator.weight.register_hook(lambda grad: grad + (math.inf if next(calls) == 4 else 0.0))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layout, "loss_of", planted)
        state = train(config).state
    return state.step, state.skipped, state.loss_scale


@pytest.mark.launched
@pytest.mark.parametrize("layout", ["data 2", "shard 2", "vocab 2"])
def test_an_overflow_on_one_rank_is_skipped_on_all_in_every_layout(layout: str, tmp_path: Path) -> None:
    world, changes = LAYOUTS[layout]
    given = {"training.precision": "fp16", "training.devices": "auto", "training.steps": 5, "model.tie": "none"}
    found = ranks(world, trained_where_rank_1_overflows, tiny(tmp_path / "run", {**given, **changes}))
    assert found == [(5, 1, 2.0**15)] * world
    updates = {int(each) for name, each in weights(tmp_path / "run").items() if name.endswith("/step")}
    assert updates == {4}


def test_a_gradient_that_overflows_with_the_smallest_scale_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beginning, "TrainingState", partial(TrainingState, loss_scale=2 * SMALLEST_SCALE))
    accumulate = Layout.accumulate
    monkeypatch.setattr(
        Layout, "accumulate", lambda layout, batches, place, scale: accumulate(layout, batches, place, math.inf)
    )
    with pytest.raises(TrainingError, match=r"step 2: the loss is .* but its gradient is (nan|inf): try a smaller"):
        train(tiny(tmp_path / "run", OVERFLOWS))


def test_a_mask_of_float16_leaves_a_row_without_a_key_finite() -> None:
    mask = torch.zeros(1, 1, 1, 3, dtype=torch.bool)
    with torch.autocast("cpu", torch.float16):
        added = added_scores(mask, torch.zeros(1))
    assert added is not None
    assert torch.equal((added.half() - 30_000).softmax(-1), torch.full((1, 1, 1, 3), 1 / 3, dtype=torch.float16))


def test_a_device_that_does_not_compute_in_the_dtype_is_refused_in_a_line() -> None:
    check_autocast("fp16", [torch.device("cpu")])
    check_autocast("float32", [torch.device("meta")])
    with pytest.raises(
        ConfigError, match=r"^training.precision is fp16, but meta does not compute in torch.float16 \("
    ):
        check_autocast("fp16", [torch.device("cpu"), torch.device("meta")])

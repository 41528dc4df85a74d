"""The translation recipe over real ranks: the same training whatever the layout, and from one layout to another."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import OtherRankError, TrainingError
from recipes.translation.processes.ranks import join_ranks
from recipes.translation.run_folder import saving
from recipes.translation.run_folder.saving import Saver
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.run_folder.translator import build_model, model_sizes
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.subwords import PAD
from recipes.translation.train import train
from recipes.translation.training import training
from recipes.translation.training.optimizer import update
from recipes.translation.training.parts import Parts, local_of
from seqpar.rows.conventions import CONVENTIONS
from seqpar.testing.ranks import ranks
from tests.recipes.processes.layouts import EXACT, LAYOUTS, assert_same_weights, records, train_in, trained, weights
from tests.recipes.saved import assert_same_last, state_in, trained_run
from tests.recipes.tiny import OF_FILES, tiny, write_pairs
from tests.seqpar.published import Smoothing

pytestmark = pytest.mark.launched


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps on one device, each of two batches one after the other, across the end of an epoch."""
    return trained_run(tmp_path_factory, {**EXACT, "training.devices": "[cpu]"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twelve_steps_in_any_layout_give_the_weights_of_one_device(
    layout: str, one_process: Path, tmp_path: Path
) -> None:
    world, changes = LAYOUTS[layout]
    assert ranks(world, trained, tiny(tmp_path / "run", {**EXACT, **changes})) == [12] * world
    assert_same_weights(tmp_path / "run", one_process, 1e-10)
    for kind in ("loss", "gradient_norm", "tokens", "valid_loss", "valid_accuracy", "valid_bleu"):
        assert records(tmp_path / "run", kind) == pytest.approx(records(one_process, kind), rel=1e-10), kind


@pytest.mark.parametrize("devices", [2, 3])
def test_twelve_steps_over_the_devices_of_one_process_give_the_same_weights(
    devices: int, one_process: Path, tmp_path: Path
) -> None:
    train(tiny(tmp_path / "run", {**EXACT, "training.devices": f"[{', '.join(['cpu'] * devices)}]"}))
    assert_same_weights(tmp_path / "run", one_process, 1e-10)


@pytest.mark.parametrize("layout", ["one", "data 2", "vocab 2"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_the_loss_is_smoothed_by_the_convention_that_is_asked_for(convention: str, layout: str, tmp_path: Path) -> None:
    """Against the published equation, on the weights that a run begins with."""
    smoothing = {"training.label_smoothing": 0.3, "training.smoothing_convention": convention}
    one_step = {"training.steps": 1, "training.accumulate": 1, "training.validate_bleu": 0}
    settings = {**EXACT, **smoothing, **one_step}
    train_in(layout, tmp_path / "run", settings)
    config = tiny(tmp_path / "run", settings)
    corpus = load_corpus(config)
    torch.manual_seed(config.training.seed)
    model = build_model(model_sizes(config.model), corpus.source, corpus.target).double()
    batch = corpus.train.batch(corpus.train.epoch(0)[0])
    logits = model.generator(model(batch.src, batch.tgt_in)).flatten(0, 1)
    total = Smoothing(0.3, convention, PAD)(logits.detach(), batch.tgt_out.flatten())
    assert records(tmp_path / "run", "loss") == pytest.approx([total.item() / batch.tokens], rel=1e-10)


def test_a_batch_of_fewer_sentences_than_ranks_leaves_none_waiting(tmp_path: Path) -> None:
    """Batches of two or three sentences over four ranks."""
    changes = {**EXACT, "training.batch_tokens": 90, "training.accumulate": 1}
    changes.update({"training.steps": 4, "training.validate_bleu": 0})
    train(tiny(tmp_path / "one", {**changes, "training.devices": "[cpu]"}))
    for name, layout in (("ddp", {}), ("hsdp", {"layout.shard": 2}), ("tensor", {"layout.vocab": 2})):
        ranks(4, trained, tiny(tmp_path / name, {**changes, **layout}))
        assert_same_weights(tmp_path / name, tmp_path / "one", 1e-10)


@pytest.mark.parametrize(
    "layouts",
    [
        ("data 2", "shard 2", "one", "data 2 x vocab 2"),
        ("shard 2 x vocab 2", "vocab 2", "data 2 x shard 2", "data 3"),
    ],
    ids=" then ".join,
)
def test_a_run_goes_on_in_other_layouts_as_if_it_had_not_changed(
    layouts: tuple[str, ...], one_process: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for layout, steps in zip(layouts, (3, 6, 11, 12), strict=True):
        train_in(layout, run, {**EXACT, "training.steps": steps})
    assert_same_weights(run, one_process, 1e-10)
    assert records(run, "loss") == pytest.approx(records(one_process, "loss"), rel=1e-10)


@pytest.mark.parametrize("layout", ["data 2", "data 2 x shard 2", "shard 2", "vocab 2"])
def test_a_resumed_run_in_the_same_layout_is_the_uninterrupted_one_bit_for_bit(layout: str, tmp_path: Path) -> None:
    world, changes = LAYOUTS[layout]
    dropout = {**changes, "training.devices": "auto", "model.dropout": 0.2, "training.accumulate": 3}
    for run, ends in (("through", [6]), ("resumed", [2, 6])):
        for steps in ends:
            ranks(world, trained, tiny(tmp_path / run, {**dropout, "training.steps": steps}))
    assert_same_last(tmp_path / "through", tmp_path / "resumed")
    assert records(tmp_path / "through", "loss") == records(tmp_path / "resumed", "loss")


def random_state(rank: int, world: int, config: RunConfig) -> int:
    """Where a rank's random numbers started in its last step."""
    train(config)
    return torch.initial_seed()


def test_ranks_drop_different_values_unless_they_compute_the_same_tokens(tmp_path: Path) -> None:
    dropout = {"training.devices": "auto", "model.dropout": 0.5, "training.precision": "float64"}
    train(tiny(tmp_path / "one", {**dropout, "training.devices": "[cpu]"}))
    seeds = {}
    for layout in ("vocab 2", "data 2", "data 2 x vocab 2"):
        world, changes = LAYOUTS[layout]
        seeds[layout] = ranks(world, random_state, tiny(tmp_path / layout, {**dropout, **changes}))
    assert seeds["vocab 2"][0] == seeds["vocab 2"][1]
    assert len(set(seeds["data 2"])) == 2
    first, second, third, fourth = seeds["data 2 x vocab 2"]
    assert first == second != third == fourth
    # The values dropped are those of one device
    assert records(tmp_path / "vocab 2", "loss") == pytest.approx(records(tmp_path / "one", "loss"), rel=1e-10)


def refused(rank: int, world: int, config: RunConfig, changes: dict[int, Any]) -> tuple[str, str]:
    """What a rank says whose own settings are changed."""
    import dataclasses

    change = changes.get(rank, {})
    config = dataclasses.replace(
        config,
        **{name: dataclasses.replace(getattr(config, name), **inner) for name, inner in change.items()},
    )
    try:
        train(config)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training": {"seed": 2}}, "ranks disagree on training.seed: 1 on ranks [0, 2]; 2 on ranks [1]"),
        ({"training": {"steps": 5}}, "ranks disagree on training.steps: 4 on ranks [0, 2]; 5 on ranks [1]"),
        ({"data": {"builtin_pairs": 99}}, "ranks disagree on data.builtin_pairs: 250 on ranks [0, 2]; 99 on ranks [1]"),
        ({"layout": {"vocab": 3}}, "ranks disagree on layout.vocab: 1 on ranks [0, 2]; 3 on ranks [1]"),
    ],
)
def test_ranks_that_disagree_are_named_at_start(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    said = ranks(3, refused, tiny(tmp_path / "run", {"training.devices": "auto"}), {1: change})
    assert said[0][0] == "ConfigError"
    assert message in said[0][1]
    assert [kind for kind, _ in said[1:]] == [OtherRankError.__name__] * 2
    assert not (tmp_path / "run").exists()


def failing(rank: int, world: int, message: str) -> tuple[str, str]:
    """Return the error that `join_ranks` raises where rank 0 fails, and rank 1 waits for it in a collective."""
    try:
        with join_ranks(1.0) as every:
            if rank == 0:
                dist.recv(torch.empty(1), 1, group=every.step_group)  # the connection of this step has work to do
                raise RuntimeError(message)
            dist.send(torch.ones(1), 0, group=every.step_group)
            every.stop_signal(None)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def test_an_error_of_a_rank_is_its_own_whatever_words_it_has() -> None:
    """The words are those of gloo, and every connection is open."""
    message = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer. This is typical"
    first, second = ranks(2, failing, message)
    assert first == ("RuntimeError", message)
    assert second[0] == OtherRankError.__name__
    assert message in second[1]


def waiting_in_vain(rank: int, world: int, message: str) -> tuple[str, str]:
    """Return the error that `join_ranks` raises where rank 0 waits too long for rank 1, and says so in other words."""
    said = ("", "no error")
    try:
        with join_ranks(1.0) as every:
            if rank == 0:
                try:
                    every.stop_signal(None)
                except RuntimeError as error:
                    raise RuntimeError(message) from error
    except Exception as error:
        said = (type(error).__name__, str(error))
    dist.barrier()  # the default group, which still works: rank 1 lives, but never came
    return said


def test_a_rank_that_does_not_come_is_lost_whatever_words_the_error_has() -> None:
    (kind, text), _ = ranks(2, waiting_in_vain, "no words")
    assert kind == OtherRankError.__name__
    assert text == "rank 0 lost contact with another process, which ended or never joined: no words"


def test_other_data_on_a_rank_is_named(tmp_path: Path) -> None:
    for folder, first in (("a", 0), ("b", 60)):
        write_pairs(tmp_path / folder, {"train": (first, first + 60), "valid": (first, first + 5)})
    own = {**OF_FILES, "training.devices": "auto", "data.path": str(tmp_path / "a")}
    config = tiny(tmp_path / "run", own)
    (kind, text), _ = ranks(2, refused, config, {1: {"data": {"path": str(tmp_path / "b")}}})
    assert (kind, "ranks disagree on the training and validation data" in text) == ("ConfigError", True), text
    said = ranks(2, refused, config, {1: {"data": {"path": str(tmp_path / "none")}}})
    assert said[0][0] == "DataError"
    assert said[0][1].startswith("rank 1: there is no file")


def test_a_layout_that_does_not_fit_is_named_before_anything_is_made(tmp_path: Path) -> None:
    for changes, message in (
        ({"layout.vocab": 2}, "layout data 1 x shard 1 x vocab 2 needs 2 processes, but 3 were started"),
        ({"layout.vocab": 3}, "layout.vocab 3: encoder.layers.0.self_attention has 2 heads"),
    ):
        config = tiny(tmp_path / "run", {"training.devices": "auto", **changes})
        said = ranks(3, refused, config, {})
        assert said[0][0] == "ConfigError"
        assert all(message in text for _, text in said), said


def seen_of(rank: int, world: int, config: RunConfig) -> tuple[str, str]:
    """What a rank wrote to the terminal."""
    import contextlib
    import io

    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        train(config)
    return output.getvalue(), errors.getvalue()


def test_only_rank_0_prints_and_only_once(tmp_path: Path) -> None:
    (first, _), *others = ranks(2, seen_of, tiny(tmp_path / "run", {"training.devices": "auto"}))
    assert first.count("2 processes (data 2), here cpu") == 1
    assert first.count("[valid] step") == 1
    assert others == [("", "")]
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 4]
    assert state_in(tmp_path / "run")["step"] == 4
    assert os.environ.get("RANK") is None


def most_whole_at_once(rank: int, world: int, config: RunConfig) -> tuple[int, int, int]:
    """Return how many whole tensors a rank has seen, how many of them at once, and the bytes that it has copied."""
    seen: list[weakref.ref[torch.Tensor]] = []
    most = 0
    copied = 0
    fill, gathered, copy = Parts.fill, Parts._gather, Parts.copy_parts

    def see(whole: torch.Tensor) -> None:
        nonlocal most
        if whole.dim() and not whole.is_meta:  # a number of steps is no copy
            seen.append(weakref.ref(whole))
        most = max(most, sum(each() is not None for each in seen))

    def filled(self: Parts, name: str, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        see(whole)
        fill(self, name, tensor, whole)

    def joined(self: Parts, *arguments: Any) -> torch.Tensor:
        whole = gathered(self, *arguments)
        see(whole)
        return whole

    def counted(self: Parts, tensors: dict[str, torch.Tensor]) -> Any:
        nonlocal copied
        tracked = TrackedCopies()
        with tracked:
            found = copy(self, tensors)
        copied += tracked.bytes
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "fill", filled)
        patch.setattr(Parts, "_gather", joined)
        patch.setattr(Parts, "copy_parts", counted)
        train(config)
    return len(seen), most, copied


class TrackedCopies(TorchFunctionMode):
    """Counts the bytes that are copied to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function.__name__ == "to":
            self.bytes += found.nbytes
        return found


@pytest.mark.parametrize("layout", ["data 2", "shard 2", "vocab 2"])
def test_no_rank_holds_more_whole_tensors_than_one_nor_copies_more_than_its_part(layout: str, tmp_path: Path) -> None:
    """When a run begins, is resumed, and is saved."""
    world, changes = LAYOUTS[layout]
    for steps in (1, 2):
        config = tiny(tmp_path / "run", {**EXACT, **changes, "training.steps": steps, "training.validate_bleu": 0})
        (first, most, copied), (others, other_most, other_copied) = ranks(world, most_whole_at_once, config)
        assert others > 10
        assert first > others  # rank 0 has also gathered some
        assert max(most, other_most) <= 2  # the one at hand, and the one that it replaces
        size = sum(tensor.nbytes for tensor in weights(tmp_path / "run").values())
        if layout == "data 2":
            assert (copied, other_copied) == (size, 0)
        else:
            assert copied + other_copied == size
            assert max(copied, other_copied) < 0.6 * size


def said_where_rank_1_is_spoiled(rank: int, world: int, config: RunConfig) -> str:
    """The error of a training in which rank 1 has an infinite number in its own part of a moment."""

    def spoiling(optimizer: torch.optim.Optimizer, rate: float) -> None:
        update(optimizer, rate)
        if rank == 1:
            local_of(next(iter(optimizer.state.values()))["exp_avg_sq"]).view(-1)[0] = torch.inf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "update", spoiling)
        # The second one may hear of the first one's before it raises its own
        with pytest.raises((TrainingError, OtherRankError)) as error:
            train(config)
    return str(error.value)


@pytest.mark.parametrize("layout", ["shard 2", "vocab 2"])
def test_a_part_that_is_not_finite_on_one_rank_ends_all_before_it_is_saved(layout: str, tmp_path: Path) -> None:
    world, changes = LAYOUTS[layout]
    config = tiny(tmp_path / "run", {**EXACT, **changes, "training.steps": 1, "training.validate_bleu": 0})
    for said in ranks(world, said_where_rank_1_is_spoiled, config):
        assert "step 1: the optimizer's moments are no longer finite: try " in said
    assert not (tmp_path / "run" / "last").exists()


def steps_saved_by_another_clock(rank: int, world: int, config: RunConfig) -> list[int]:
    """Return after which steps a rank saves, where the clock of rank 1 runs a minute a step ahead."""
    saved: list[int] = []
    save = Saver.save

    def noted(saver: Saver, *arguments: Any, **named: Any) -> None:
        saved.append(arguments[-1].step)
        save(saver, *arguments, **named)

    ahead = itertools.count(step=60 * rank)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(ahead))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "time", clock)
        patch.setattr(Saver, "save", noted)
        train(config)
    return saved


def test_ranks_whose_clocks_differ_save_the_same_steps(tmp_path: Path) -> None:
    minutes = {**EXACT, "training.steps": 4, "training.validate_bleu": 0, "training.save_every": "1min"}
    saved, *others = ranks(2, steps_saved_by_another_clock, tiny(tmp_path / "run", minutes))
    assert others == [saved]
    assert set(saved) == {4}


def groups_made(rank: int, world: int, config: RunConfig) -> int:
    """Return how many times a training makes process groups."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("new_group", "new_subgroups_by_enumeration"):
            function = getattr(dist, name)
            patch.setattr(dist, name, lambda *a, f=function, **k: made.append(f) or f(*a, **k))
        train(config)
    return len(made)


@pytest.mark.parametrize(("layout", "expected"), [("data 2", 2), ("vocab 2", 2), ("data 2 x vocab 2", 4)])
def test_a_group_of_all_ranks_is_not_made_again_for_the_layout(layout: str, expected: int, tmp_path: Path) -> None:
    world, changes = LAYOUTS[layout]
    config = tiny(tmp_path / "run", {**EXACT, **changes, "training.steps": 1, "training.validate_bleu": 0})
    assert ranks(world, groups_made, config) == [expected] * world

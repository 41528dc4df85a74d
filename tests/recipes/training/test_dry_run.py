"""A dry run: what a training will cost, without a step of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.translation.commands import main
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.train import train
from recipes.translation.training.summary import update_of
from tests.recipes.run_folder.made import contents
from tests.recipes.tiny import options, tiny

STARTED = {"training.accumulate": 2, "training.steps": 5}


def test_a_dry_run_says_what_it_will_cost_and_leaves_only_data_and_subwords(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *options(run, {**STARTED, "model.d_model": 256}), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"data\.train: .*: 250 pairs, [1-9][\d,]+ and [1-9][\d,]+ subwords\n", told)
    parameters = float(re.search(r"([\d.]+) M parameters", told)[1])  # type: ignore[index]
    found = re.search(r"MB: weights ([\d.]+), gradients ([\d.]+), Adam's moments ([\d.]+), the loss", told)
    assert found
    weights, gradients, moments = map(float, found.groups())
    assert gradients == pytest.approx(4 * parameters, abs=0.25)
    assert moments == pytest.approx(2 * gradients, abs=0.15)
    assert weights >= gradients
    loss = re.search(r"\(seqpar\.memory_plan\) ([\d.]+), in all, measured with a forward and backward ([\d.,]+)", told)
    assert loss
    assert 0 < float(loss[1]) < float(loss[2].replace(",", ""))
    assert re.search(r"took [\d.]+ s for [1-9][\d,]* target tokens", told)
    assert "[dry-run] 5 steps will take about" in told
    assert sorted(path.name for path in run.iterdir()) == ["data", "subwords", "train.log"]
    assert "[dry-run] 5 steps" in (run / "train.log").read_text()


def test_the_training_after_a_dry_run_is_the_one_without_it_and_finds_its_subwords(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(tmp_path / "plain", STARTED))
    train(tiny(tmp_path / "run", STARTED), dry_run=True)
    capsys.readouterr()
    train(tiny(tmp_path / "run", STARTED))
    assert re.search(r"subword models of .* reused", capsys.readouterr().out)
    dry, plain = (contents(tmp_path / name) for name in ("run", "plain"))
    models = [name for name in plain if name.endswith(".safetensors")]
    assert models
    assert all(dry[name] == plain[name] for name in models)


def test_a_dry_run_of_a_run_that_has_begun_counts_the_steps_that_are_left_and_changes_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(tiny(run, {**STARTED, "training.steps": 2}))
    before = contents(run)
    capsys.readouterr()
    train(tiny(run, {**STARTED, "training.steps": 9}), dry_run=True)
    assert contents(run) == before
    told = capsys.readouterr().out
    assert (
        "an update has training.accumulate 2 x training.batch_tokens 900 on any number of processes, as before\n"
        in told
    )
    assert "7 steps will take" in (run / "train.log").read_text()


def test_a_dry_run_that_would_remove_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", *options(tmp_path / "run"), "--dry-run", "--fresh"])
    assert "--fresh: not allowed with argument --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("accumulate", "size", "ranks", "ending"),
    [
        (4, 1000, 4, "processes: whole batches for each of these 4"),
        (6, 1000, 3, "processes: whole batches for each of these 3"),
        (1, 4096, 4, "training.accumulate 4 and training.batch_tokens 1,024 give each whole batches"),
        (5, 1000, 2, "training.accumulate 6 and training.batch_tokens 833 give each whole batches"),
    ],
)
def test_the_settings_that_are_offered_keep_the_tokens_of_an_update_in_whole_batches(
    accumulate: int, size: int, ranks: int, ending: str
) -> None:
    settings = replace(TrainingConfig(), accumulate=accumulate, batch_tokens=size)
    line = update_of(settings, ranks, resumed=False)
    assert line.startswith(f"an update has training.accumulate {accumulate} x training.batch_tokens {size:,} on any")
    assert line.endswith(ending)
    assert "give each" not in update_of(settings, ranks, resumed=True), "batch_tokens cannot change in a run"

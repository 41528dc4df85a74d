"""A new metric of validations is one entry of the table."""

from __future__ import annotations

from html import unescape
from pathlib import Path

import pytest

from recipes.translation.report.draw import report
from recipes.translation.report.records import read_run
from recipes.translation.run_folder.checkpoint import load_facts
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.settings.config import RunConfig
from recipes.translation.settings.metrics import METRICS, Metric
from recipes.translation.settings.schema import Schema
from recipes.translation.train import train
from tests.recipes.tiny import tiny

WORDS = Metric(
    "wordCount",
    2,
    "Words of a translation.",
    of_translations=lambda said: sum(len(text.split()) for text in said.translations) / len(said.translations),
    unit="words",
)
CHANGES = {"training.steps": 2, "training.validate_every": 1, "training.validate_bleu": 3, "training.patience": 9}


def test_everything_that_names_a_metric_follows_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(METRICS, "words", WORDS)
    run = tmp_path / "run"
    train(tiny(run, CHANGES))
    records = [record for record in read_metrics(run / "metrics.jsonl") if "valid_loss" in record]
    assert [set(record) for record in records] == [{"step", *(f"valid_{name}" for name in METRICS)}] * 2
    assert load_facts(run / "last") == records[-1]
    said = capsys.readouterr().out
    assert all(WORDS.said(record["valid_words"]) in said for record in records)
    page = report(read_run(run))
    for metric in METRICS.values():
        assert f"best {metric.heading}" in page
        assert f"<title>{metric.title}</title>" in page
        if metric.title != "Loss":  # whose chart has a caption of its own
            assert metric.caption in unescape(page)


def test_the_best_model_can_be_chosen_by_any_metric() -> None:
    assert Schema(RunConfig).settings["training.best_by"].choices == tuple(METRICS)

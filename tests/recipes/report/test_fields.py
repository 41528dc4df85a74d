"""A field of a run's records that is not what it must be: one line with file, line, field and value, by the command."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.commands import main
from recipes.translation.report.draw import report
from recipes.translation.report.records import read_run
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.made_from import weights_digest
from tests.recipes.command_line import refusal
from tests.recipes.random_translator import random_translator
from tests.recipes.report.made import SENTENCES, make_run

WRONG: list[tuple[str, int, str, Any, str]] = [
    ("metrics.jsonl", 2, "loss", "high", 'loss is "high", but must be a number'),
    ("metrics.jsonl", 2, "tokens", [7], "tokens is [7], but must be a number"),
    ("metrics.jsonl", 2, "step", -1, "step is -1, but must be a whole number from 0 to 10^15"),
    ("metrics.jsonl", 2, "gradient_norm", 10**400, "gradient_norm is 1000000000"),
    ("metrics.jsonl", 41, "valid_bleu", True, "valid_bleu is true, but must be a number"),
    ("metrics.jsonl", 41, "valid_loss.news", {}, "valid_loss.news is {}, but must be a number"),
    ("resources.jsonl", 1, "began", [], "began is [], but must be an object"),
    ("resources.jsonl", 1, "began/settings", "none", 'began.settings is "none", but must be an object'),
    ("resources.jsonl", 2, "seconds", "0.5", 'seconds is "0.5", but must be a number'),
    ("resources.jsonl", 42, "memory/cpu", "1 GB", 'memory.cpu is "1 GB", but must be a number'),
    ("samples.jsonl", 4, "samples/0", "a dog", 'samples[0] is "a dog", but must be an object'),
    ("samples.jsonl", 4, "samples/1/source", None, "samples[1].source is null, but must be text"),
    ("validation.json", 0, "sources/2", 5, "sources[2] is 5, but must be text"),
    ("validation.json", 0, "references", ["ein Hund"], "but must be as many references and translations as it has so"),
    ("test.scores.json", 0, "bleu", "30", 'bleu is "30", but must be a number'),
    ("test.scores.json", 0, "sentences", 1.5, "sentences is 1.5, but must be a whole number"),
    ("test.scores.json", 0, "intervals/bleu", ["a", "b"], 'intervals.bleu is ["a", "b"], but must be two numbers'),
    ("test.scores.json", 0, "weights", "0a", 'weights is "0a", but must be a list'),
]
"""File, number of the line (0 for a file of one record), field, value and error."""


def put(record: Any, path: str, value: object) -> Any:
    """The record with another value at a path."""
    record = copy.deepcopy(record)
    *folders, name = (int(word) if word.isdecimal() else word for word in path.split("/"))
    inner = record
    for word in folders:
        inner = inner[word]
    inner[name] = value
    return record


def damage(path: Path, line: int, field: str, value: object) -> None:
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    rows[max(0, line - 1)] = put(rows[max(0, line - 1)], field, value)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("file", "line", "field", "value", "error"), WRONG)
def test_a_field_that_is_not_what_it_must_be_is_one_line(
    file: str, line: int, field: str, value: object, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    damage(run / file, line, field, value)
    told = refusal(capsys, "report", str(run))
    where = f"error: {run / file}"
    if line:
        where += f", line {line}"
    assert told.startswith(f"{where}: ")
    assert error in told
    assert told.endswith("; restore the file from a copy, or remove what is wrong")


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000])
def test_scores_that_cannot_be_read_are_not_taken_for_none(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    (run / "test.scores.json").write_text(content)
    told = refusal(capsys, "report", str(run))
    assert told.startswith(
        f"error: {run / 'test.scores.json'} is not a JSON object with scores: make it again with evalua"
    )


def test_what_a_record_may_lack_is_no_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "test.scores.json").write_text(json.dumps({"bleu": 30.0, "chrf": None, "intervals": {}, "new": [{}]}))
    damage(run / "resources.jsonl", 42, "memory", {})
    damage(run / "samples.jsonl", 4, "samples", [])
    damage(run / "metrics.jsonl", 41, "valid_bleu", None)
    assert "30.00" in report(read_run(run))


def test_numbers_beyond_what_can_be_drawn_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", settings={"training.steps": 10**400})
    damage(run / "metrics.jsonl", 3, "loss", 1e308)
    damage(run / "metrics.jsonl", 42, "valid_perplexity", 1e300)
    assert [record["step"] for record in read_run(run).steps][:3] == [1, 2, 4]
    assert "<svg" in report(read_run(run))  # without a warning of an overflow


def test_a_report_says_whose_the_scores_are(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    digests = []
    for seed, name in enumerate(("best", "averaged", "last"), start=1):
        save_model(run / name, random_translator(tmp_path / name, seed), {"step": 1})
        digests.append(weights_digest(run / name))
    record = json.loads((run / "test.scores.json").read_text())
    for weights, said in (
        ([digests[0]], "run (best)"),
        ([digests[1]], "run (averaged)"),
        ([digests[2]], "run (last)"),
        ([digests[1], "0a", "0b"], "run (averaged, with 2 other models)"),
        (["0a"], "run (an earlier model)"),
        ([], "run (model not recorded)"),
    ):
        (run / "test.scores.json").write_text(json.dumps({**record, "weights": weights}))
        page = report(read_run(run))
        assert f">{said}<" in page
        assert ("A later model has replaced the earlier one: evaluate it again." in page) == ("earlier" in said)


def test_the_command_names_the_model_that_evaluate_used(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for seed, name in enumerate(("best", "averaged"), start=1):
        save_model(run / name, random_translator(tmp_path / name, seed), {"step": 1})
    files = []
    for name, texts in zip(("sources", "references"), list(zip(*SENTENCES, strict=True))[:2], strict=True):
        files += [f"--{name}", str(tmp_path / name)]
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    for words, said in (
        (["--checkpoint", "averaged"], "run (averaged)"),
        (["--ensemble", str(run / "averaged")], "run (best, with 1 other model)"),
    ):
        assert main(["evaluate", "--run", str(run), *files, *words]) == 0
        assert f">{said}<" in report(read_run(run))

"""What training writes: `metrics.jsonl`, whatever stands in it, the samples, the machine's numbers, and the report."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.translation.commands import main
from recipes.translation.report.draw import report, write_report
from recipes.translation.report.records import read_run
from recipes.translation.run_folder import saving
from recipes.translation.run_folder.checkpoint import load_facts
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.train import train
from recipes.translation.training import journal, machine, training
from recipes.translation.training.journal import sample_rows
from recipes.translation.training.progress import Metrics
from tests.recipes.files.watching import Event, watched
from tests.recipes.processes.started import forked
from tests.recipes.tiny import options, tiny, tiny_decoder_only

CHANGES: dict[str, Any] = {
    "training.report": True,
    "training.steps": 4,
    "training.validate_every": 2,
    "training.validate_bleu": 7,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after two steps and went on to four."""
    run = tmp_path_factory.mktemp("journal") / "run"
    train(tiny(run, {**CHANGES, "training.steps": 2}))
    with (run / "resources.jsonl").open("a") as file:  # as a process leaves it that is killed in the third step
        file.write('{"step": 3, "seconds": 77.0}\n')
    train(tiny(run, CHANGES))
    return run


def test_training_draws_the_report_of_all_its_steps(run: Path, tmp_path: Path) -> None:
    assert write_report(run, tmp_path / "again.html") > 0
    without_time = [
        path.read_text().partition("</header>")[2] for path in (run / "report.html", tmp_path / "again.html")
    ]
    assert without_time[0] == without_time[1]


def test_the_seconds_of_every_step_are_kept_once_and_every_start_is_told(run: Path) -> None:
    records = read_metrics(run / "resources.jsonl")
    timed = [record for record in records if "seconds" in record]
    assert [record["step"] for record in timed] == [1, 2, 3, 4]
    assert all(0 < record["seconds"] < 60 for record in timed)
    began = [record for record in records if "began" in record]
    assert [record["step"] for record in began] == [0, 2]
    assert began[0]["began"]["settings"]["training.steps"] == 2
    assert began[0]["began"]["software"]["torch"] == torch.__version__
    memory = [record["memory"] for record in records if "memory" in record]
    assert [set(each) for each in memory] == [{"cpu"}, {"cpu"}]
    assert 2**27 < memory[0]["cpu"] <= memory[1]["cpu"] < 2**36


def test_every_validation_keeps_the_same_sentences_and_the_newest_keeps_all(run: Path) -> None:
    records = read_metrics(run / "samples.jsonl")
    assert [record["step"] for record in records] == [2, 4]
    newest = json.loads((run / "validation.json").read_text())
    assert newest["step"] == 4
    assert len(newest["translations"]) == 7
    kept = [newest["sources"][row] for row in sample_rows(7)]
    assert [[sample["source"] for sample in record["samples"]] for record in records] == [kept, kept]
    translations = [newest["translations"][row] for row in sample_rows(7)]
    assert [sample["translation"] for sample in records[1]["samples"]] == translations


SIX = {**CHANGES, "training.steps": 6, "training.report": False}


def killed_in_training(run: Path, when: str) -> None:
    """Train, and die just before or after the state of the fourth step is the last one."""
    point_at = saving.point_at

    def deadly(run: Path, step: int, **how: Any) -> None:
        if step == 4 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        point_at(run, step, **how)
        if step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    saving.point_at = deadly
    train(tiny(run, SIX))


@pytest.mark.faults
def test_a_kill_around_the_saving_of_a_state_loses_no_validation_and_doubles_none(tmp_path: Path) -> None:
    train(tiny(tmp_path / "whole", SIX))
    for when, step in (("before", 2), ("after", 4)):
        run = tmp_path / when
        killed = forked(killed_in_training, run, when)
        killed.join()
        assert killed.exitcode == -signal.SIGKILL
        assert load_facts(run / "last")["step"] == step
        train(tiny(run, SIX))
        for name in ("samples.jsonl", "validation.json", "metrics.jsonl"):
            assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        assert [record["step"] for record in read_metrics(run / "samples.jsonl")] == [2, 4, 6]


def test_kept_rows_are_spread_over_the_sentences_and_distinct() -> None:
    assert [sample_rows(sentences) for sentences in (0, 1, 3)] == [[], [0], [0, 1, 2]]
    assert sample_rows(600) == [0, 100, 200, 300, 400, 500]


def test_a_decoder_only_model_has_samples_and_a_page(tmp_path: Path) -> None:
    train(tiny_decoder_only(tmp_path / "run", {**CHANGES, "training.steps": 1, "training.validate_every": 1}))
    assert "The worst sentences" in report(read_run(tmp_path / "run"))
    (record,) = read_metrics(tmp_path / "run" / "samples.jsonl")
    assert len(record["samples"]) == 6


def test_a_report_that_cannot_be_drawn_is_one_line_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no\nfonts")

    monkeypatch.setattr("recipes.translation.report.draw.write_report", fail)
    summary = train(tiny(tmp_path / "run", {**CHANGES, "training.steps": 3}))
    assert summary.state.step == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if "report.html" in line]
    assert set(lines) == {f"[train] {tmp_path / 'run' / 'report.html'} could not be drawn: RuntimeError: no fonts"}


def test_drawing_takes_at_most_a_hundredth_of_the_time_between_two_drawings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation takes 100 seconds, and a drawing two: the next may begin 200 seconds after it."""
    now = [0.0]
    drawn = []

    def two_seconds(*_: object) -> None:
        drawn.append(now[0])
        now[0] += 2

    def hundred_seconds(*given: Any) -> Any:
        now[0] += 100
        return validate(*given)

    validate = training.validate
    monkeypatch.setattr(training, "validate", hundred_seconds)
    monkeypatch.setattr(journal, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]}))
    monkeypatch.setattr("recipes.translation.report.draw.write_report", two_seconds)
    changes = {"training.report": True, "training.validate_every": 1}
    train(tiny(tmp_path / "run", {**changes, "training.steps": 4}))
    # After the first and the third validation, and at the end, as there was a step since
    assert drawn == [100, 100 + 2 + 200, 100 + 2 + 200 + 2 + 100]
    drawn.clear()
    now[0] = 0
    train(tiny(tmp_path / "another", {**changes, "training.steps": 3}))
    assert drawn == [100, 302], "and not again at the end, where there was none"


def test_a_new_run_in_the_folder_keeps_nothing_of_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "resources.jsonl").write_text('{"step": 0, "began": {}}\n{"step": 1, "seconds": 1}\n')
    (run / "samples.jsonl").write_text('{"step": 0, "samples": []}\n')
    (run / "validation.json").write_text("{}")
    train(tiny(run, {**CHANGES, "training.steps": 1, "training.validate_bleu": 0, "training.report": False}))
    assert sum("began" in record for record in read_metrics(run / "resources.jsonl")) == 1
    assert read_metrics(run / "samples.jsonl") == []
    assert not (run / "validation.json").exists()


def test_peak_memory_of_a_cuda_device_is_that_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 + device.index)
    devices = [torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")]
    found = machine.peak_memory(devices)
    assert (found["cuda:0"], found["cuda:1"]) == (100, 101)
    assert set(found) == {"cpu", "cuda:0", "cuda:1"}


ODD = [b"not JSON", b'"text"', b"[1]", b"3", b"null", b"{}", b'{"step": "4"}', b'{"step": null}', b'{"step": NaN}']
ODD += [b'{"step": 1.5}', b"\xff\xfe", b"[" * 100_000, b'{"step": ' + b"9" * 5_000 + b"}", b'{"step": true}']


def lines(*steps: int) -> bytes:
    return b"".join(json.dumps({"step": step, "loss": step / 8}).encode() + b"\n" for step in steps)


@pytest.mark.parametrize("odd", ODD)
def test_a_line_that_is_no_record_moves_aside_and_takes_no_other_with_it(
    odd: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2) + odd + b"\n" + lines(3, 4))
    with Metrics(path, after_step=3) as metrics:
        metrics.write(step=4, loss=0.5)
    assert path.read_bytes() == lines(1, 2, 3, 4)
    assert (tmp_path / "metrics.odd.txt").read_bytes() == odd + b"\n"
    assert (
        f"1 lines that are not records of steps were moved to {tmp_path / 'metrics.odd.txt'}" in capsys.readouterr().out
    )


@pytest.mark.parametrize("cut", [b'{"step": 4, "lo', b'{"step": 4, "loss": 0.5}', b"\xe2\x82"])
def test_what_a_kill_has_cut_off_is_dropped(cut: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2) + b"\n" + lines(3) + cut)
    assert [record["step"] for record in read_metrics(path)][:3] == [1, 2, 3]
    Metrics(path, after_step=3).__exit__(None)
    assert path.read_bytes() == lines(1, 2, 3)
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_record_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2).rstrip())
    with Metrics(path, after_step=2) as metrics:
        metrics.write(step=3, loss=0.375)
    assert path.read_bytes() == lines(1, 2, 3)


def test_metrics_are_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2, 3))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for name in ("replace", "rename"):
            patch.setattr(Path, name, killed)
            patch.setattr(os, name, killed)
        with pytest.raises(KeyboardInterrupt):
            Metrics(path, after_step=2)
    assert path.read_bytes() == lines(1, 2, 3)
    Metrics(path, after_step=2).__exit__(None)
    assert path.read_bytes() == lines(1, 2)


def test_metrics_that_need_no_change_are_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2))
    before = path.stat().st_ino
    Metrics(path, after_step=2).__exit__(None)
    assert path.stat().st_ino == before


def test_a_disk_that_is_full_of_metrics_is_one_line_with_their_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files stands in for the disk."""
    run = tmp_path / "run"
    assert main(["train", *options(run, {"training.steps": 1})]) == 0
    filler = lines(1).replace(b"0.125", b'"' + b"1" * 1_000_000 + b'"')
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(filler)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    for room, path in ((len(filler) + 10, metrics), (0, run / ".lock")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            assert main(["train", *options(run, {"training.steps": 2})]) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert capsys.readouterr().err == f"error: {path}: cannot be written: File too large\n"
    assert main(["train", *options(run, {"training.steps": 2})]) == 0


def test_records_are_on_the_disk_once_they_are_flushed(tmp_path: Path) -> None:
    with watched() as events, Metrics(tmp_path / "metrics.jsonl", after_step=0) as metrics:
        metrics.write(step=1)
        assert not [event for event in events if event.what == "flushed"]
        metrics.flush()
        assert events[-1] == Event("flushed", tmp_path / "metrics.jsonl")

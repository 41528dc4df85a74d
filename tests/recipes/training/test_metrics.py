"""`metrics.jsonl`: what a resumed run keeps of it, and that nothing in it stops a run or is lost in silence."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.commands import main
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.training.progress import Metrics
from tests.recipes.files.watching import Event, watched
from tests.recipes.tiny import options

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

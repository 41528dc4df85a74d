"""Trackers: each gets the numbers of `metrics.jsonl`, read back by its own package, also of a resumed run."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.commands import main
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.resume import flat
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.settings.config import RunConfig
from recipes.translation.training import trackers
from recipes.translation.training.progress import Metrics
from recipes.translation.training.trackers import Tracker, check_installed, open_trackers
from tests.recipes.tiny import options, tiny

Curves = dict[str, list[tuple[int, float]]]


def trackers_of(config: RunConfig, resumed_at: int | None) -> list[Tracker]:
    """The trackers of a run, as training begins them."""
    return open_trackers(Path(config.run), config.training.trackers, flat(config), resumed_at)


def expected(run: Path) -> Curves:
    """The numbers of `metrics.jsonl` by name."""
    found: Curves = {}
    for record in read_metrics(run / "metrics.jsonl"):
        for name, value in record.items():
            if name != "step" and value is not None:
                found.setdefault(name, []).append((record["step"], value))
    return found


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step, "tokens": 100 + step, **changes}


def logged_twice(run: Path, names: tuple[str, ...]) -> None:
    """Four steps, of which two are saved before the process is killed, and which another process does again to six."""
    config = tiny(run, {"training.trackers": names})
    run.mkdir(parents=True)
    for resumed_at, steps in ((None, range(1, 5)), (2, range(3, 7))):
        opened = trackers_of(config, resumed_at)
        with Metrics(run / "metrics.jsonl", after_step=resumed_at or 0, trackers=opened) as metrics:
            for step in steps:
                metrics.write(**record(step))
                if step in (2, 4, 6):
                    metrics.write(step=step, valid_loss=step / 7, valid_bleu=None)


def assert_same(found: Mapping[str, list[tuple[int, float]]], run: Path, rel: float = 1e-12) -> None:
    wanted = expected(run)
    assert {name: [step for step, _ in points] for name, points in found.items()} == {
        name: [step for step, _ in points] for name, points in wanted.items()
    }
    for name, points in wanted.items():
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=rel)


def assert_same_but_repeated(found: Curves, run: Path) -> None:
    """Steps 3 and 4, which the killed process had sent, are there a second time."""
    assert sorted(step for step, _ in found["loss"]) == [1, 2, 3, 3, 4, 4, 5, 6]
    assert_same({name: sorted(set(points)) for name, points in found.items()}, run)


def test_tensorboard_reads_every_number_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged_twice(tmp_path / "run", ("tensorboard",))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert_same(found, tmp_path / "run", rel=1e-6)  # its values are float32


def test_tensorboard_forgets_an_earlier_run_of_the_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    logged_twice(run, ("tensorboard",))
    (run / "metrics.jsonl").unlink()  # as --fresh does
    time.sleep(1.1)  # files of events are read in the order of their names, which begin with the second
    opened = trackers_of(tiny(run, {"training.trackers": ("tensorboard",)}), None)
    with Metrics(run / "metrics.jsonl", after_step=0, trackers=opened) as metrics:
        for step in (1, 2):
            metrics.write(**record(step))
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert_same({name: points for name, points in found.items() if points}, run, rel=1e-6)


class Counted:
    """A run of a tracker that notes what it is sent."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.steps.append((step, "valid_loss" in values))

    def finish(self) -> None:
        pass


def test_a_tracker_is_sent_the_steps_from_where_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    wandb, trackio = Counted(), Counted()
    monkeypatch.setattr("wandb.init", lambda **_: wandb)
    monkeypatch.setattr("trackio.init", lambda **_: trackio)
    # Saved after step 2 and killed after step 4
    for names, resumed_at, last in ((["wandb"], None, 4), (["trackio"], 2, 6), (["wandb"], 6, 7)):
        opened = trackers_of(tiny(run, {"training.trackers": names}), resumed_at)
        with Metrics(run / "metrics.jsonl", after_step=resumed_at or 0, trackers=opened) as metrics:
            for step in range((resumed_at or 0) + 1, last + 1):
                metrics.write(**record(step))
    assert wandb.steps == [(step, False) for step in (1, 2, 3, 4, 7)]
    assert trackio.steps == [(step, False) for step in (3, 4, 5, 6)]


def test_another_run_in_the_folder_is_another_run_of_its_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it began without any."""
    begun: list[str] = []
    monkeypatch.setattr("wandb.init", lambda *, id, **_: begun.append(id) or Counted())
    (tmp_path / "run").mkdir()
    wandb = tiny(tmp_path / "run", {"training.trackers": ["wandb"]})
    trackers_of(wandb, None)
    trackers_of(tiny(tmp_path / "run"), None)  # --fresh
    for _ in range(2):
        trackers_of(wandb, 3)
    assert len(set(begun[1:])) == 1
    assert begun[0] != begun[1]


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "nan;", "[" * 100_000, "[]", "3", "{}", '{"begun": []}'),
    ],
)
def test_where_the_record_of_trackers_is_damaged_they_start_over(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr("wandb.init", lambda *, id, **_: begun.append(id) or Counted())
    config = tiny(tmp_path / "run", {"training.trackers": ("wandb",)})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trackers.json").write_text(content)
    for _ in range(2):
        assert trackers_of(config, 3)
    assert json.loads((tmp_path / "run" / "trackers.json").read_text()) == {"id": begun[0]}
    assert begun[0] == begun[1]


def in_a_process(run: Path, name: str, **environment: str) -> None:
    """Log in a process of its own: these packages leave threads and settings behind."""
    code = "import sys, pathlib; from tests.recipes.training.test_trackers import logged_twice as log; "
    code += "log(pathlib.Path(sys.argv[1]), (sys.argv[2],))"
    command = [sys.executable, "-c", code, str(run), name]
    subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **environment})


def messages(path: Path) -> Iterator[bytes]:
    """The messages of a .wandb file: LevelDB's log format (doc/log_format.md) after a header of seven bytes."""
    content = path.read_bytes()
    place = 7
    message = b""
    while place + 7 <= len(content):
        left = 32_768 - place % 32_768
        if left < 7:  # the rest of a block is too small for another record
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        message += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole message, or the last part of one
            yield message
            message = b""


def test_wandb_has_every_number_when_it_is_offline(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    run = tmp_path / "run"
    in_a_process(run, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    found: Curves = {}
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    for path in files:
        for message in messages(path):
            row = wandb_internal_pb2.Record()
            row.ParseFromString(message)
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.history.item}
            for name, value in items.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append((items["_step"], value))
    assert len(files) == 2
    assert len({path.stem for path in files}) == 1  # the same run
    assert_same_but_repeated(found, run)


def test_trackio_has_every_number_in_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    in_a_process(run, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; (name,) = S.get_runs('seqpar'); "
        "print(json.dumps(S.get_logs('seqpar', name if isinstance(name, str) else name['name'])))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    read = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    found: Curves = {}
    for row in sorted(json.loads(read.stdout.splitlines()[-1]), key=lambda row: row["step"]):
        for name, value in row.items():
            if name not in ("step", "timestamp"):
                found.setdefault(name, []).append((row["step"], value))
    assert_same_but_repeated(found, run)


def test_only_numbers_are_sent() -> None:
    values = {"step": 3, "loss": 0.5, "tokens": 7, "words": ["loss"], "valid_bleu": None, "odd": True}
    sent: list[tuple[Any, int]] = []
    Tracker("x", lambda numbers, step: sent.append((numbers, step)), list).log(values)
    assert sent == [({"loss": 0.5, "tokens": 7}, 3)]


def test_a_tracker_that_is_not_installed_is_one_line_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert main(["train", *options(tmp_path / "run", {"training.trackers": "wandb"})]) == 2
    assert capsys.readouterr().err == "error: training.trackers: wandb is not installed: pip install wandb\n"
    assert not (tmp_path / "run" / "subwords").exists()


def test_a_tracker_that_cannot_begin_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise OSError("no key")

    monkeypatch.setattr("wandb.init", fail)
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"training\.trackers: wandb cannot start: OSError: no key"):
        trackers_of(tiny(tmp_path / "run", {"training.trackers": ["wandb"]}), None)


def test_a_tracker_that_fails_later_is_one_line_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Lost:
        logged = 0
        closed = 0

        def log(self, values: object, step: int) -> None:
            self.logged += 1
            if step == 2:
                raise ConnectionError("no network")

        def finish(self) -> None:
            self.closed += 1
            raise OSError("disk full")

    lost, full = Lost(), Lost()
    monkeypatch.setattr("wandb.init", lambda **_: lost)
    monkeypatch.setattr("trackio.init", lambda **_: full)
    monkeypatch.setattr(full, "log", lambda values, step: None)
    (tmp_path / "run").mkdir()
    opened = trackers_of(tiny(tmp_path / "run", {"training.trackers": ["wandb", "trackio"]}), None)
    with Metrics(tmp_path / "run" / "metrics.jsonl", after_step=0, trackers=opened) as metrics:
        for step in (1, 2, 3):
            metrics.write(**record(step))
    assert capsys.readouterr().out.splitlines() == [
        "[train] wandb gets no more numbers (ConnectionError: no network); metrics.jsonl has them all",
        "[train] trackio gets no more numbers (OSError: disk full); metrics.jsonl has them all",
    ]
    assert (lost.logged, lost.closed, full.closed) == (2, 0, 1)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


def test_nothing_is_tracked_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert tiny(tmp_path).training.trackers == ()
    assert trackers_of(tiny(tmp_path), None) == []
    assert list(tmp_path.iterdir()) == []
    check_installed(())


def test_a_name_that_is_no_tracker_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *options(tmp_path / "run", {"training.trackers": "tensorbord"})]) == 2
    assert "a list, each one of tensorboard, wandb, trackio" in capsys.readouterr().err

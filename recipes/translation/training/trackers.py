"""Trackers: TensorBoard, Weights & Biases and trackio, which get every number that `metrics.jsonl` gets.

None is used unless `training.trackers` names it. A run is one run of a tracker, however often it is stopped and
resumed, and with which trackers: `tracker_record.py` keeps account of what each of them has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from recipes.translation.errors import ConfigError
from recipes.translation.files.writing import check_no_link
from recipes.translation.run_folder.resume import flat
from recipes.translation.settings.config import RunConfig
from recipes.translation.training.tracker_record import Mark, TrackerRecord, mark_of

PROJECT = "seqpar"
"""The project of wandb and trackio, where WANDB_PROJECT or TRACKIO_PROJECT does not name another one."""


class Tracker(Protocol):
    """Where numbers go."""

    def log(self, values: Mapping[str, object]) -> None:
        """Send a record of `metrics.jsonl`."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoard:
    """Event files in `<run>/tensorboard`."""

    def __init__(self, run: Path, first: int) -> None:
        """Begin with a step: what is there of it and of later ones no longer counts."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(run / "tensorboard", purge_step=first)

    def log(self, values: Mapping[str, object]) -> None:
        step = values["step"]
        for name, number in numbers(values).items():
            self.writer.add_scalar(name, number, step)

    def close(self) -> None:
        self.writer.close()


class Logged:
    """A run of wandb or trackio, whose objects are alike."""

    def __init__(self, run: Any, sent: Container[Mark]) -> None:
        """Log to `run`, except what an earlier process of the same run has `sent`."""
        self.run = run
        self.sent = sent

    def log(self, values: Mapping[str, object]) -> None:
        if mark_of(values) not in self.sent:
            self.run.log(numbers(values), step=values["step"])

    def close(self) -> None:
        self.run.finish()


class Forgiving:
    """A tracker that is left out after its first error, so that a lost network or a full disk ends no training."""

    def __init__(self, name: str, tracker: Tracker, record: TrackerRecord) -> None:
        self.name = name
        self.tracker: Tracker | None = tracker
        self.record = record

    def log(self, values: Mapping[str, object]) -> None:
        if self._try(lambda tracker: tracker.log(values)):
            return
        with suppress(OSError):  # a full disk, which the next record of the run's own reports
            self.record.stop(self.name, mark_of(values))

    def close(self) -> None:
        self._try(lambda tracker: tracker.close())

    def _try(self, call: Callable[[Tracker], None]) -> bool:
        """Return False for the first error."""
        if self.tracker is None:
            return True
        try:
            call(self.tracker)
        except Exception as error:  # each package has errors of its own
            self.tracker = None
            what = f"{type(error).__name__}: {error}"
            print(f"[train] {self.name} gets no more numbers ({what}); metrics.jsonl has them all", flush=True)
            return False
        return True


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError unless the packages of these trackers are installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"training.trackers: {name} is not installed: pip install {name}")


def open_trackers(config: RunConfig, resumed_at: int | None) -> list[Tracker]:
    """Begin the trackers of `training.trackers`, or go on with those of the run that resumes after a step.

    Each is sent what it lacks of the records up to there. It must be called before `metrics.jsonl` is cut at that step.
    Raises ConfigError for a tracker that cannot begin, as wandb without a key.
    """
    names = list(dict.fromkeys(config.training.trackers))
    record = TrackerRecord(Path(config.run), resumed_at)
    if not names and not record.path.exists():
        return []
    for name in names:
        check_no_link(Path(config.run) / name)
    missing = {name: record.missing(name) for name in names}
    found: list[Tracker] = []
    for name in names:
        try:
            if name == "tensorboard":
                first = min((one["step"] for one in missing[name]), default=record.resumed_at + 1)
                missing[name] = [one for one in record.kept if one["step"] >= first]
                record.forget(name, first)
                tracker: Tracker = TensorBoard(Path(config.run), first)
            elif name == "wandb":
                tracker = Logged(_wandb_run(config, record.id), record.sent.get(name, ()))
            else:
                tracker = Logged(_trackio_run(config, record.id), record.sent.get(name, ()))
        except Exception as error:  # each package has errors of its own
            raise ConfigError(f"training.trackers: {name} does not begin: {type(error).__name__}: {error}") from error
        found.append(Forgiving(name, tracker, record))
    record.begin(names)
    for name, one in zip(names, found, strict=True):
        for values in missing[name]:
            one.log(values)
    record.write()
    return found


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a record, without its step."""
    return {
        name: value
        for name, value in values.items()
        if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _wandb_run(config: RunConfig, name: str) -> Any:
    import wandb

    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=name,
        name=Path(config.run).name,
        dir=config.run,
        config=flat(config),
        resume="allow",
    )


def _trackio_run(config: RunConfig, name: str) -> Any:
    import trackio

    return trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        # Found again by its name, which therefore must not be that of another folder's run
        name=f"{Path(config.run).name}-{name}",
        config=flat(config),
        resume="allow",
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )

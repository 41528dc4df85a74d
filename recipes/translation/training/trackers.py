"""Trackers: TensorBoard, Weights & Biases and trackio, which get every number that `metrics.jsonl` gets.

None is used unless `training.trackers` names it. A run is one run of a tracker, however often it is stopped and
resumed: `trackers.json` keeps the name by which it is found again, and what it must not be sent once more.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from recipes.translation.atomic_folder import beside, writing_to
from recipes.translation.json_fields import WrongFieldError
from recipes.translation.run_folder.fields import TRACKERS
from recipes.translation.run_folder.resume import flat
from recipes.translation.settings.config import ConfigError, RunConfig
from recipes.translation.training.progress import read_metrics

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

    def __init__(self, run: Path, resumed_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What a killed process wrote of later steps does not count, nor what an earlier run left in the folder
        purge = 0
        if resumed_at is not None:
            purge = resumed_at + 1
        self.writer = SummaryWriter(run / "tensorboard", purge_step=purge)

    def log(self, values: Mapping[str, object]) -> None:
        step = values["step"]
        for name, number in numbers(values).items():
            self.writer.add_scalar(name, number, step)

    def close(self) -> None:
        self.writer.close()


class Logged:
    """A run of wandb or trackio, whose objects are alike."""

    def __init__(self, run: Any, sent: set[tuple[int, bool]]) -> None:
        """Log to `run`, except what an earlier process of the same run has `sent`."""
        self.run = run
        self.sent = sent

    def log(self, values: Mapping[str, object]) -> None:
        if _mark(values) not in self.sent:
            self.run.log(numbers(values), step=values["step"])

    def close(self) -> None:
        self.run.finish()


class Forgiving:
    """A tracker that is left out after its first error, so that a lost network or a full disk ends no training."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.tracker: Tracker | None = tracker

    def log(self, values: Mapping[str, object]) -> None:
        self._try(lambda tracker: tracker.log(values))

    def close(self) -> None:
        self._try(lambda tracker: tracker.close())

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self.tracker is None:
            return
        try:
            call(self.tracker)
        except Exception as error:  # each package has errors of its own
            self.tracker = None
            what = f"{type(error).__name__}: {error}"
            print(f"[train] {self.name} gets no more numbers ({what}); metrics.jsonl has them all", flush=True)


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError unless the packages of these trackers are installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"training.trackers: {name} is not installed: pip install {name}")


def open_trackers(config: RunConfig, resumed_at: int | None) -> list[Tracker]:
    """Begin the trackers of `training.trackers`, or go on with those of the run that resumes after a step.

    It must be called before `metrics.jsonl` is cut at that step. Raises ConfigError for a tracker that cannot begin, as
    wandb without a key.
    """
    names = list(dict.fromkeys(config.training.trackers))
    if not names:
        return []
    run = Path(config.run)
    path = run / "trackers.json"
    known = _known(path, resumed_at)
    sent = known["sent"]
    found: list[Tracker] = []
    for name in names:
        tracker: Tracker
        try:
            if name == "tensorboard":
                tracker = TensorBoard(run, resumed_at)
            elif name == "wandb":
                tracker = Logged(_wandb_run(config, known["id"]), sent.get(name, set()))
            else:
                tracker = Logged(_trackio_run(config, known["id"]), sent.get(name, set()))
        except Exception as error:  # each package has errors of its own
            raise ConfigError(f"training.trackers: {name} does not begin: {type(error).__name__}: {error}") from error
        found.append(Forgiving(name, tracker))
    begun = sorted({*known["begun"], *names})
    marks = {name: sorted(map(list, some)) for name, some in sent.items()}
    new = beside(path, "new")
    with writing_to(path):
        new.write_text(json.dumps({"id": known["id"], "begun": begun, "sent": marks}) + "\n", encoding="utf-8")
        os.replace(new, path)
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


def _known(path: Path, resumed_at: int | None) -> dict[str, Any]:
    """Return what `trackers.json` says: the run's id, its trackers, and the marks of records that each has.

    These are of steps after `resumed_at`, which killed processes have sent and which will be made again: those that the
    last one has written to `metrics.jsonl`, and those of processes before it, whose records were cut off there.

    Raises ConfigError for a file that is damaged.
    """
    if resumed_at is None or not path.exists():
        return {"id": uuid.uuid4().hex[:12], "begun": [], "sent": {}}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        TRACKERS(known, "")
    except (ValueError, RecursionError, WrongFieldError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it, and the trackers begin anew") from None
    written: list[dict[str, Any]] = []
    metrics = path.with_name("metrics.jsonl")
    if metrics.exists():
        written = read_metrics(metrics)
    now = {_mark(record) for record in written}
    earlier = known.get("sent") or {}
    sent = {name: now.union(map(tuple, earlier.get(name, ()))) for name in known["begun"]}
    return {**known, "sent": {name: {mark for mark in marks if mark[0] > resumed_at} for name, marks in sent.items()}}


def _mark(values: Mapping[str, Any]) -> tuple[int, bool]:
    """Return what tells a record from the others: its step, and whether it is of a validation."""
    return values["step"], "valid_loss" in values

"""Trackers: TensorBoard, Weights & Biases and trackio, which get every number that `metrics.jsonl` gets.

None is used unless `training.trackers` names it. However often a run is stopped and resumed, it is one run in a
tracker, identified by `trackers.json`. A tracker is sent records from where the run begins or resumes, not earlier
ones.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from recipes.translation.errors import ConfigError
from recipes.translation.files.json_fields import field_in
from recipes.translation.files.writing import check_regular, replace_file


@dataclass
class Tracker:
    """A destination for numbers, until its first error: a lost network or a full disk must not end a training."""

    name: str
    send: Callable[..., object]
    """`send(numbers, step=step)`."""
    end: Callable[[], object]
    failed: bool = False

    def log(self, values: Mapping[str, object]) -> None:
        """Send the numbers of a record of `metrics.jsonl`."""
        numbers = {
            name: value
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        step = numbers.pop("step")
        self._try(lambda: self.send(numbers, step=step))

    def close(self) -> None:
        """Send what is left."""
        self._try(self.end)

    def _try(self, call: Callable[[], object]) -> None:
        if self.failed:
            return
        try:
            call()
        except Exception as error:  # each package has errors of its own
            self.failed = True
            what = f"{type(error).__name__}: {error}"
            print(f"[train] {self.name} gets no more numbers ({what}); metrics.jsonl has them all", flush=True)


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError unless the packages of these trackers are installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"training.trackers: {name} is not installed: pip install {name}")


def open_trackers(
    run: Path, names: Iterable[str], settings: Mapping[str, object], resumed_at: int | None
) -> list[Tracker]:
    """Start the trackers with these names, or continue those of a run that resumes after the step `resumed_at`.

    Raises ConfigError for a tracker that cannot start, such as wandb without a key.
    """
    note = run / "trackers.json"
    if resumed_at is None:  # an earlier run in the folder remains a run of its own in the trackers
        note.unlink(missing_ok=True)
    found: list[Tracker] = []
    for name in dict.fromkeys(names):
        check_regular(run / name)
        id_there = field_in(note, "id") or uuid.uuid4().hex[:12]
        replace_file(note, (json.dumps({"id": id_there}) + "\n").encode())
        try:
            found.append(_begin_tracker(run, name, settings, id_there, (resumed_at or 0) + 1))
        except Exception as error:  # each package has errors of its own
            raise ConfigError(f"training.trackers: {name} cannot start: {type(error).__name__}: {error}") from error
    return found


def _begin_tracker(run: Path, name: str, settings: Mapping[str, object], id_there: str, first: int) -> Tracker:
    """Start a tracker at step `first`, or continue its run with the id `id_there`."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        # What it already has from this step on no longer counts
        writer = SummaryWriter(run / "tensorboard", purge_step=first)

        def add(values: Mapping[str, float], step: int) -> None:
            for number, value in values.items():
                writer.add_scalar(number, value, step)

        return Tracker(name, add, writer.close)
    own: dict[str, Any] = {"name": run.name, "id": id_there, "dir": str(run)}
    if name == "trackio":
        # trackio finds a run by its name, which must therefore differ from those of runs in other folders
        own = {"name": f"{run.name}-{id_there}", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    project = os.environ.get({"wandb": "WANDB_PROJECT", "trackio": "TRACKIO_PROJECT"}[name], "seqpar")
    opened = import_module(name).init(project=project, config=dict(settings), resume="allow", **own)
    return Tracker(name, opened.log, opened.finish)

"""`trackers.json`: the name by which the trackers find a run again, and which of its records each has been sent.

A record of `metrics.jsonl` is known by its step, and whether it is of a validation.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from recipes.translation.errors import ConfigError
from recipes.translation.files.json_fields import WrongFieldError
from recipes.translation.files.writing import replace_file
from recipes.translation.run_folder.fields import TRACKERS
from recipes.translation.training.progress import read_metrics

Mark = tuple[int, bool]


def mark_of(record: Mapping[str, Any]) -> Mark:
    """Return what tells a record of `metrics.jsonl` from the others."""
    return record["step"], "valid_loss" in record


class TrackerRecord:
    """What each tracker has: every record before that at which it stopped, if it did, and those in `sent`.

    `sent` has records that killed processes have sent and that will be made again, with the same numbers.
    """

    def __init__(self, run: Path, resumed_at: int | None) -> None:
        """Read what is known of a run that resumes after a step; nothing is of a new one.

        Raises ConfigError for a file that is damaged.
        """
        self.path = run / "trackers.json"
        self.resumed_at = resumed_at or 0
        self.id = uuid.uuid4().hex[:12]
        self.sent: dict[str, set[Mark]] = {}
        self.stopped: dict[str, Mark] = {}
        self.kept: list[dict[str, Any]] = []
        """The records up to the step after which the run resumes."""
        if resumed_at is None:
            return
        written: list[dict[str, Any]] = []
        if (run / "metrics.jsonl").exists():
            written = read_metrics(run / "metrics.jsonl")
        self.kept = [record for record in written if record["step"] <= resumed_at]
        if self.path.exists():
            self._read({mark_of(record) for record in written})

    def _read(self, written: set[Mark]) -> None:
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
            TRACKERS(known, "")
        except (ValueError, RecursionError, WrongFieldError) as error:
            raise ConfigError(f"{self.path} is damaged ({error}): remove it, and the trackers begin anew") from None
        self.id = known["id"]
        sent, stopped = (known.get(name) or {} for name in ("sent", "stopped"))
        for name in known["begun"]:
            had = written
            if name in stopped:
                had = {mark for mark in written if mark < tuple(stopped[name])}
            self.sent[name] = had.union(map(tuple, sent.get(name, ())))

    def missing(self, name: str) -> list[dict[str, Any]]:
        """Return the records that a tracker does not have: all, if it is new."""
        return [record for record in self.kept if mark_of(record) not in self.sent.get(name, ())]

    def begin(self, names: Collection[str]) -> None:
        """Note that these trackers get every record from now on, and the others none."""
        after = {"step": self.resumed_at + 1}
        for name in names:
            self.sent.setdefault(name, set())
        self.stopped = {name: mark_of([*self.missing(name), after][0]) for name in self.sent.keys() - set(names)}

    def stop(self, name: str, mark: Mark) -> None:
        """Note the first record that a tracker did not get."""
        self.stopped[name] = mark
        self.write()

    def forget(self, name: str, step: int) -> None:
        """Note that a tracker no longer has the records of this step and of later ones."""
        self.sent[name] = {mark for mark in self.sent.get(name, ()) if mark[0] < step}

    def write(self) -> None:
        """Write the file; what every tracker without a stop has is in `metrics.jsonl`."""
        marks = {name: sorted(filter(self._is_told_by(name), some)) for name, some in self.sent.items()}
        content = {"id": self.id, "begun": sorted(self.sent), "sent": marks, "stopped": self.stopped}
        replace_file(self.path, (json.dumps(content) + "\n").encode())

    def _is_told_by(self, name: str) -> Callable[[Mark], bool]:
        """Return the test whether a mark says more than that the tracker has what is kept before its stop."""
        stopped = self.stopped.get(name, (self.resumed_at + 1, False))
        return lambda mark: mark >= stopped or mark[0] > self.resumed_at

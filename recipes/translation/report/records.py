"""Everything that a run's folder says about the run, as far as it exists.

The run may have only just begun, or be writing to the folder at this moment; whatever is missing, or a line that is cut
off, is None or empty, and the page says so. A field that is not what it must be is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.translation.errors import DataError
from recipes.translation.files.json_fields import (
    OBJECT,
    TEXT,
    TEXTS,
    Check,
    WrongFieldError,
    each,
    field_in,
    fields,
    is_whole,
    maybe,
    value,
)
from recipes.translation.run_folder.made_from import model_with
from recipes.translation.run_folder.step_records import record_of
from recipes.translation.scores.scores import TITLES
from recipes.translation.settings.metrics import METRICS as VALIDATION_METRICS

Record = Mapping[str, Any]


def _is_number(found: object) -> bool:
    # A larger int does not fit into float64, in which charts are drawn
    return isinstance(found, float) or (isinstance(found, int) and is_whole(found) and abs(found) < 2**1000)


NUMBER = value("a number", _is_number)
STEP = value("a whole number from 0 to 10^15", lambda found: is_whole(found) and 0 <= found <= 10**15)
SAMPLE = fields(dict.fromkeys(("source", "reference", "translation"), TEXT))
METRICS = fields(
    {"step": STEP, **dict.fromkeys(("loss", "learning_rate", "gradient_norm", "tokens", "valid_*"), maybe(NUMBER))}
)
"""A line of `metrics.jsonl`."""
BEGAN = fields({"steps": maybe(STEP), **dict.fromkeys(("settings", "hardware", "software"), maybe(OBJECT))})
RESOURCES = fields(
    {"step": STEP, "seconds": maybe(NUMBER), "memory": maybe(fields({"*": maybe(NUMBER)})), "began": maybe(BEGAN)}
)
"""A line of `resources.jsonl`."""
SAMPLES = fields({"step": STEP, "samples": maybe(each(SAMPLE))})
"""A line of `samples.jsonl`."""
SENTENCES = fields(
    {"step": STEP, "sources": TEXTS, "references": TEXTS, "translations": TEXTS},
    lambda found: len({len(found[name]) for name in ("sources", "references", "translations")}) == 1,
    "as many references and translations as it has sources",
)
"""`validation.json`."""
INTERVAL = value(
    "two numbers", lambda found: isinstance(found, list) and [_is_number(one) for one in found] == [True] * 2
)
SCORES = fields(
    {
        **dict.fromkeys(TITLES, maybe(NUMBER)),
        "bleu": NUMBER,
        "sentences": maybe(STEP),
        "*_signature": maybe(TEXT),
        "intervals": maybe(fields({"*": INTERVAL})),
        "weights": maybe(TEXTS),
    }
)
"""A `*.scores.json`."""


@dataclass(frozen=True)
class RunRecords:
    """A run, as its files describe it."""

    name: str
    steps: Sequence[Record]
    """Records in `metrics.jsonl`, one for each step."""
    validations: Sequence[Record]
    """Records in the same file, one for each validation."""
    machine: Sequence[Record]
    samples: Sequence[Record]
    newest: Record | None
    """All translations of the newest validation, as in `validation.json`."""
    scores: Mapping[str, Record]
    """What `evaluate` wrote, by the name of the test set."""
    scored: Mapping[str, str] = field(default_factory=dict)
    """Which model (`best`, ...) has the scores, by test set; empty if a later model has replaced it."""

    @property
    def last_step(self) -> int:
        """Return the last step that was recorded."""
        return max((record["step"] for record in (*self.steps, *self.validations)), default=0)

    @property
    def planned_steps(self) -> int:
        """Return the steps after which training ends; 0 if they are not recorded."""
        return self.newest_start.get("steps") or 0

    @property
    def parts(self) -> list[str]:
        """Return the names of the corpora that have validation data, if several have some."""
        names = (name for record in self.validations for name in record if name.startswith("valid_loss."))
        return [name.removeprefix("valid_loss.") for name in dict.fromkeys(names)]

    @property
    def newest_start(self) -> Record:
        """Return what the newest start of training recorded about itself; empty if there is no record."""
        return next((each["began"] for each in reversed(self.machine) if each.get("began") is not None), {})

    @property
    def settings(self) -> Mapping[str, object]:
        """Return the settings by dotted name; empty if they are not recorded."""
        return self.newest_start.get("settings") or {}

    def best(self, metric: str) -> Record | None:
        """Return the validation that is best by a metric; None if there is none."""
        name = f"valid_{metric}"
        sign = 1 if VALIDATION_METRICS[metric].smaller_is_better else -1
        found = [each for each in self.validations if is_number(each.get(name))]
        return min(found, key=lambda each: sign * float(each[name]), default=None)


def read_run(folder: Path) -> RunRecords:
    """Read a run; raise DataError if the folder is not that of a run that has begun."""
    metrics = _lines(folder / "metrics.jsonl", METRICS)
    machine = _lines(folder / "resources.jsonl", RESOURCES)
    if not metrics and not machine:
        raise DataError(f"{folder} has no records of training (metrics.jsonl): name the folder of a run")
    scores = _scores(folder)
    return RunRecords(
        name=folder.resolve().name,
        steps=[record for record in metrics if is_number(record.get("loss"))],
        validations=[record for record in metrics if is_number(record.get("valid_loss"))],
        machine=machine,
        samples=[record for record in _lines(folder / "samples.jsonl", SAMPLES) if record.get("samples") is not None],
        newest=_newest(folder / "validation.json"),
        scores=scores,
        scored={name: model_with(folder, one["weights"][0]) for name, one in scores.items() if one.get("weights")},
    )


def begun_settings(folder: Path) -> dict[str, object]:
    """Return the settings of the newest start of training, for `load_config`; empty if none are recorded."""
    starts = [record["began"] for record in _lines(folder / "resources.jsonl", RESOURCES) if record.get("began")]
    settings = (starts[-1].get("settings") if starts else None) or {}
    # Recorded as corpora.news, ...; the section is one setting
    corpora = {name.removeprefix("corpora."): one for name, one in settings.items() if name.startswith("corpora.")}
    found = {name: one for name, one in settings.items() if not name.startswith("corpora.")}
    return found | ({"corpora": corpora} if corpora else {})


def is_number(value: object) -> bool:
    """Return whether a value in a record can be drawn: a finite number that float64 can sum and scale."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e280


def check_record(record: object, check: Check, where: str) -> None:
    """Raise DataError, naming the file and the line of the record, unless it is what it must be."""
    try:
        check(record, "")
    except WrongFieldError as error:
        raise DataError(f"{where}: {error}; restore the file from a copy, or remove what is wrong") from None


def _lines(path: Path, check: Check) -> list[dict[str, Any]]:
    """Read a file with one record per line; raise DataError for a field that is not what it must be."""
    found: list[dict[str, Any]] = []
    if not path.is_file():
        return found
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if (record := record_of(line)) is not None:
            check_record(record, check, f"{path}, line {number:,}")
            found.append(record)
    return found


def _newest(path: Path) -> Record | None:
    found: Record | None = field_in(path)
    if found is not None:
        check_record(found, SENTENCES, str(path))
    return found


def _scores(folder: Path) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for path in sorted(folder.glob("*.scores.json")):
        record = field_in(path)
        if not isinstance(record, dict):
            raise DataError(f"{path} is not a JSON object with scores: make it again with evaluate, or remove it")
        check_record(record, SCORES, str(path))
        found[path.name.removesuffix(".scores.json")] = record
    return found

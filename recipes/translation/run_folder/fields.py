"""What the fields of a run's records must be."""

from __future__ import annotations

from typing import Any

from recipes.translation.errors import DataError
from recipes.translation.files.json_fields import (
    OBJECT,
    TEXT,
    TEXTS,
    Check,
    WrongFieldError,
    each,
    fields,
    is_whole,
    maybe,
    value,
)


def check_record(record: object, check: Check, where: str) -> None:
    """Raise DataError, with the file and the line where a record is, unless it is what it must be."""
    try:
        check(record, "")
    except WrongFieldError as error:
        raise DataError(f"{where}: {error}; restore the file from a copy, or remove what is wrong") from None


def _is_number(found: object) -> bool:
    # A larger int is none of float64's numbers, with which charts are drawn
    return isinstance(found, float) or (isinstance(found, int) and is_whole(found) and abs(found) < 2**1000)


NUMBER = value("a number", _is_number)
WEIGHT = value("a number from 0 to 1", lambda found: _is_number(found) and 0 <= found <= 1)
STEP = value("a whole number from 0 to 10^15", lambda found: is_whole(found) and 0 <= found <= 10**15)


def _fits_map(found: Any) -> bool:
    source = len(found["source"])
    rows = [len(row) for row in found["weights"]]
    return source > 0 and rows == [source] * max(1, len(found["target"]))


ATTENTION = fields(
    {"source": TEXTS, "target": TEXTS, "weights": each(each(WEIGHT)), "read": TEXT},
    _fits_map,
    "as many rows of weights as it has target subwords, each of as many as source subwords",
)
SAMPLE = fields({"source": TEXT, "reference": TEXT, "translation": TEXT, "attention": maybe(ATTENTION)})
METRICS = fields(
    {
        "step": STEP,
        **dict.fromkeys(("loss", "learning_rate", "gradient_norm", "tokens", "valid_*"), maybe(NUMBER)),
        "outliers": maybe(TEXTS),
    }
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
        "bleu": NUMBER,
        **dict.fromkeys(
            ("bleu_lowercase", "multi_bleu_lowercase", "chrf", "ter", "comet", "exact_match"), maybe(NUMBER)
        ),
        "sentences": maybe(STEP),
        "*_signature": maybe(TEXT),
        "intervals": maybe(fields({"*": INTERVAL})),
        "weights": maybe(TEXTS),
        **dict.fromkeys(("sources", "references"), maybe(fields({"file": maybe(TEXT), "sha256": TEXT}))),
    }
)
"""A `*.scores.json`."""
SECONDS = value("a number of seconds, 0 or more", lambda found: _is_number(found) and 0 <= found < float("inf"))
FINITE = value("a number that is not nan or infinite", lambda found: _is_number(found) and abs(found) < float("inf"))
STATE = fields(
    {
        **dict.fromkeys(("step", "epoch", "batch", "tokens", "best_step", "stale"), STEP),
        **dict.fromkeys(("train_seconds", "seconds"), SECONDS),
        **dict.fromkeys(("best_loss", "best_score"), maybe(FINITE)),
        **dict.fromkeys(("data", "teacher"), TEXT),
    }
)
"""`training.json`, without the hashes."""
FACTS = fields({"step": STEP, "valid_*": maybe(NUMBER), "averaged_steps": maybe(each(STEP))})
"""`model.json`, likewise."""

"""The records of a run's steps, one JSON object per line, as in `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.translation.files.json_fields import parse_json


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all records in a `metrics.jsonl`."""
    return [record for line in path.read_bytes().splitlines() if (record := record_of(line)) is not None]


def record_of(line: bytes) -> dict[str, Any] | None:
    """Parse a line; return None if it is not a record."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:  # bool is a subclass of int
        return None
    return record

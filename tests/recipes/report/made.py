"""The folders of runs, made without training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.translation.settings.metrics import METRICS

SENTENCES = [
    ("a dog runs", "ein Hund rennt", "ein Hund rennt"),
    ("the <b>house</b> & $x$", "das <b>Haus</b> & $x$", "<script>alert(1)</script>"),
    ("כלב רץ", "犬が走る", "犬が走る"),
    ("a girl sings loudly", "ein Mädchen singt laut", "ein Mann singt"),
]
"""Sources, references and translations: with markup, from right to left, and without spaces."""


def step(number: int, **changes: Any) -> dict[str, Any]:
    record = {
        "loss": 2 + 6 / number,
        "learning_rate": 1e-3 * number,
        "gradient_norm": 1 / number,
        "tokens": 100 + number,
    }
    return {"step": number, **record, **changes}


def validation(number: int, **changes: Any) -> dict[str, Any]:
    loss = 2.5 + 5 / number
    values = dict.fromkeys(METRICS, 40.0)
    values |= {"loss": loss, "perplexity": math.exp(loss), "accuracy": 50.0 + number, "bleu": 20.0}
    return {"step": number, **{f"valid_{name}": value for name, value in values.items()}, **changes}


def samples(number: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = [
        {"source": source, "reference": reference, "translation": f"{translation} {number}"}
        for source, reference, translation in SENTENCES
    ]
    return {"step": number, "samples": found}


def scores(bleu: float) -> dict[str, Any]:
    return {"sentences": 4, "bleu": bleu, "bleu_signature": "nrefs:1", "intervals": {"bleu": [bleu - 1, bleu + 1]}}


def make_run(folder: Path, steps: int = 40, *, settings: Mapping[str, object] | None = None) -> Path:
    """Make a run with every record, whose validations are every ten steps."""
    folder.mkdir(parents=True)
    at = range(10, steps + 1, 10)
    lines(folder / "metrics.jsonl", [step(number) for number in range(1, steps + 1)] + [validation(one) for one in at])
    began = {
        "command": "python -m recipes.translation train",
        "time": "2026-01-01 00:00:00 UTC",
        "hardware": {"cores": 2},
        "software": {"torch": "2.11"},
        "steps": steps + 10,
        "settings": {"training.steps": steps, **(settings or {})},
    }
    resources: list[dict[str, Any]] = [{"step": 0, "began": began}]
    resources += [{"step": number, "seconds": 0.5} for number in range(1, steps + 1)]
    resources += [{"step": one, "memory": {"cpu": 2**30 + 2**20 * one}} for one in at]
    lines(folder / "resources.jsonl", resources)
    lines(folder / "samples.jsonl", [samples(one) for one in at])
    sources, references, translations = zip(*SENTENCES, strict=True)
    newest = {"step": steps, "sources": sources, "references": references, "translations": translations}
    (folder / "validation.json").write_text(json.dumps(newest))
    (folder / "test.scores.json").write_text(json.dumps(scores(30.0)))
    return folder


def lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))

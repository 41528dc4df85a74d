"""Settings with which an imported model is trained on."""

from __future__ import annotations

from pathlib import Path

PAIRS = [("Two trains leave.", "Zwei fahren."), ("A small dog!", "Ein Hund."), ("one abcdefg", "eins zwei drei")]


def files(folder: Path, pairs: list[tuple[str, str]]) -> tuple[str, str]:
    names = (str(folder / "text.en"), str(folder / "text.de"))
    for side, name in enumerate(names):
        Path(name).write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    return names


def tuning(run: Path, folder: Path, **changes: object) -> dict[str, object]:
    text = files(folder, PAIRS)
    return {
        "run": str(folder / "tuned"),
        "training.start_from": str(run),
        "data.train": text,
        "data.valid": text,
        "training.devices": "[cpu]",
        "training.steps": 1,
        "training.validate_bleu": 0,
        "training.label_smoothing": 0.0,
        "training.learning_rate": 0.0,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
